"""Exports of hand-made studies, from profile to files, and every error message."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import main
from autotune.cost.request_costs import PrefillCost
from autotune.documents.condition import Condition
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint
from autotune.documents.provenance import ModelReference
from autotune.export.document import EXPORT, Export
from autotune.export.search_documents import priced_chains
from autotune.export.vllm import VERSION
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, RETRIEVAL
from autotune.prediction.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from tests.export.studies import (
    PRUNED,
    cheap_table,
    point_of,
    profile_of,
    trace_of,
    write_pair,
    write_search,
    write_study,
)
from tests.imports import ROOT
from tests.sample_documents import DRAFT, TARGET, cost_table, surface

OTHER = ModelReference(id="tests/other", sha256="f" * 64)


def export(profile: Path, *options: object) -> Result:
    """Run ``autotune export`` into a folder next to the profile."""
    output = profile.parent / "out"
    words = [profile, "-o", output, *options]
    return CliRunner().invoke(main, ["export", *map(str, words)])


def exported(profile: Path, *options: object) -> Export:
    """The document of an export that succeeds."""
    result = export(profile, *options)
    assert result.exit_code == 0, result.output
    path = profile.parent / "out" / EXPORT
    return Export.load(path)


def assert_refused(profile: Path, *options: object, messages: tuple[str, ...]) -> None:
    """The export fails with exit code 2 and one line that holds ``messages``."""
    result = export(profile, *options)
    assert result.exit_code == 2, (options, result.output)
    for message in messages:
        assert message in result.stderr, options


def table_of(*drafts: ModelReference, **fields: Any) -> Any:
    """A cost table with equal prices for all drafts."""
    (costs,) = cost_table().drafts
    return cost_table(drafts=[costs.model_copy(update={"draft": draft}) for draft in drafts], **fields)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of an independent draft with its study; tests that change it make their own."""
    return write_pair(tmp_path_factory.mktemp("pair"), table=cheap_table())


# -------- output


def test_every_engine_writes_files_and_predictions(pair: Path) -> None:
    point = DecodingProfile.load(pair).point
    assert point.predicted is not None
    found = exported(pair)
    assert found.tuned.speedup == pytest.approx(point.predicted.speedup)
    assert (found.engine, found.engine_version) == ("vllm", VERSION)
    assert (found.target, found.draft, found.kind) == (TARGET, DRAFT, "independent")
    file = pair.parent / "out" / found.file
    assert json.loads(file.read_text()) == found.settings
    assert found.slowdown == pytest.approx(found.predicted.ms_per_token / found.tuned.ms_per_token - 1)
    assert TARGET.id in found.command and found.predicted.estimated is False and found.predicted.speedup > 1
    assert "--dtype float32" in found.command, "an engine left to itself runs models in float32 in 16 bits"


def test_the_chain_of_the_least_time_is_exported(pair: Path) -> None:
    times = {depth: one.ms_per_token for depth, one in priced_chains(trace_of(), cheap_table()).items()}
    found = exported(pair)
    assert found.predicted.ms_per_token == min(times.values()) == times[found.tree.depth] < max(times.values())


def test_a_chain_of_a_given_length_is_exported_however_fast_it_is(pair: Path) -> None:
    """Even where a slower draft makes it slower than plain decoding."""
    assert exported(pair, "--draft-tokens", 3).tree == ChainPolicy(depth=3)
    slow = write_pair(pair.parent / "slow", table=cost_table(decode=surface(lambda n, m: 0.01, tokens=(1,))))
    assert_refused(slow, messages=("export a chain all the same with --draft-tokens",))
    found = exported(slow, "--draft-tokens", 2)
    assert found.predicted.speedup < 1 and found.settings["num_speculative_tokens"] == 2
    message = "the trace of tests/draft and the cost table hold chains of 1 to 4 tokens; give one of them"
    assert_refused(pair, "--draft-tokens", 9, messages=(f"--draft-tokens 9: {message}",))


def test_eagle3_heads(tmp_path: Path) -> None:
    """vLLM runs chains of them."""
    profile = write_pair(tmp_path, kind="eagle3", aux_layers=(1, 2, 3))
    assert exported(profile).settings["method"] == "eagle3"


def test_vllm_command_contains_the_settings_file(pair: Path) -> None:
    found = exported(pair)
    words = shlex.split(found.command)
    assert words[:3] == ["vllm", "serve", TARGET.id]
    assert json.loads(words[-1]) == json.loads((pair.parent / "out" / "speculative-config.json").read_text())


def test_the_command_or_the_document_is_printed(pair: Path) -> None:
    path = pair.parent / "out" / EXPORT
    assert export(pair, "--json").stdout == path.read_text()
    result = export(pair)
    assert result.stdout.splitlines() == [json.loads(path.read_text())["command"]]
    for word in ("lossless: ", "draft_sample_method greedy", "written to", "time per token", "An abacus"):
        assert word in result.stderr, result.stderr


def test_bundled_models_are_exported_as_folders(tmp_path: Path) -> None:
    target, draft = (ModelReference(id=name, sha256="9" * 64) for name in (BUNDLED_TARGET, BUNDLED_DRAFT))
    profile = write_pair(tmp_path, draft=draft, target=target, table=table_of(draft, target=target))
    found = exported(profile)
    folder = tmp_path / "out"
    assert shlex.split(found.command)[2] == str(folder / "target")
    assert found.settings["model"] == str(folder / "draft")
    for part, change in (("target", "weights named vision_tower.vision_model.*"), ("draft", "the text part of ")):
        assert (folder / part / "model.safetensors").exists()
        assert any(note.startswith(f"{folder / part} holds ") and change in note for note in found.notes)


def test_a_gguf_target_is_exported_with_a_note(tmp_path: Path) -> None:
    target = ModelReference(id="models/tiny.gguf", sha256="9" * 64)
    found = exported(write_pair(tmp_path, target=target, table=table_of(DRAFT, target=target)))
    assert any(note.startswith("models/tiny.gguf: predictions are of its dequantized weights") for note in found.notes)


# -------- drafts and subnets


def test_another_recorded_draft_can_be_exported(tmp_path: Path) -> None:
    """Its predictions are compared with the profile's point."""
    star, full = trace_of(aux_layers=(3,)), trace_of(OTHER, seed=5)
    table = table_of(DRAFT, OTHER)
    profile = write_search(tmp_path, table, star, full, points=[point_of(star, table, kind="star")])
    message = "vllm cannot serve tests/draft, a draft of kind star; export a recorded one: --draft tests/other"
    assert_refused(profile, messages=(message,))
    assert not (tmp_path / "out").exists()
    found = exported(profile, "--draft", OTHER.id)
    point = DecodingProfile.load(profile).point
    assert point.predicted and found.tuned.speedup == pytest.approx(point.predicted.speedup)
    assert found.draft == OTHER and found.kind == "independent"


def test_without_the_points_trace_the_profiles_prediction_is_used(tmp_path: Path) -> None:
    full, point = trace_of(OTHER, seed=5), point_of(trace_of(aux_layers=(3,)), table_of(DRAFT), kind="star")
    profile = write_search(tmp_path, table_of(DRAFT, OTHER), full, points=[point])
    assert exported(profile, "--draft", OTHER.id).tuned == point.predicted
    profile_of(point.model_copy(update={"predicted": None}), trace=full).save(profile)
    message = "has no trace of tests/draft, and the profile has no prediction of its point"
    assert_refused(profile, "--draft", OTHER.id, messages=(message,))


def test_engines_run_the_full_draft(tmp_path: Path) -> None:
    """An engine's configuration is replayed along the trace of the full draft, whatever the profile's share of visual
    tokens.
    """
    half = trace_of(subnet=PRUNED, seed=1, images=True)
    full = trace_of(seed=2, images=True, visual_input="placeholders")
    table = table_of(DRAFT)
    found = exported(write_search(tmp_path, table, half, full))
    configuration = configuration_of(point_of(full, table, tree=found.tree.model_dump()))
    assert configuration is not None
    assert found.predicted.speedup == pytest.approx(Evaluator([full], table).evaluate(configuration).speedup)
    assert any("keeps 0.5 of the visual tokens; engines do not prune them" in note for note in found.notes)


def test_pruned_draft_is_refused_unless_prompts_have_no_images(tmp_path: Path) -> None:
    profile = write_pair(tmp_path / "images", subnet=PRUNED, images=True, kind="eagle3", aux_layers=(1, 2, 3))
    messages = (
        "vllm runs the full draft with every visual token; ",
        "autotune record --target tests/target --draft tests/draft --visual-keep 1 --workload by hand --prompts 4 -o ",
    )
    assert_refused(profile, messages=messages)
    profile = write_pair(tmp_path, subnet=PRUNED)
    assert not any("keeps 0.5" in note for note in exported(profile).notes)


# -------- images


def test_engines_that_show_placeholders_need_a_trace_recorded_so(tmp_path: Path) -> None:
    """vLLM shows an independent draft the ids of the placeholders alone, so the trace of the search, in which
    it sees the image, does not predict them.
    """
    profile = write_pair(tmp_path, images=True)
    messages = (
        "vllm runs the full draft and shows it image placeholders as text; ",
        "record it: autotune record --target tests/target --draft tests/draft --visual-keep 1 --visual-input placeholders ",
    )
    assert_refused(profile, messages=messages)
    document = DecodingProfile.load(profile)
    shorter = document.workload.model_copy(update={"max_new_tokens": 31, "temperature": 0.5})
    document.model_copy(update={"workload": shorter}).save(profile)
    message = "placeholders --max-new-tokens 31 --temperature 0.5 --workload by hand "
    assert_refused(profile, messages=(message,))
    document.save(profile)
    seen, read = trace_of(images=True), trace_of(images=True, seed=5, visual_input="placeholders")
    write_study(tmp_path / ".autotune" / "pair", cost_table(), read)
    found = exported(profile)
    for trace, is_replayed in ((read, True), (seen, False)):
        predicted = priced_chains(trace, cost_table())[found.tree.depth]
        assert (predicted == found.predicted) == is_replayed
    assert found.tuned == DecodingProfile.load(profile).point.predicted, "the runtime shows the image"


def test_images_are_not_encoded_for_a_draft_that_reads_placeholders() -> None:
    prefill = PrefillCost(intercept_ms=0.1, per_token_ms=0.001, image_ms=5.0, samples=[])
    costs = cost_table().drafts[0].model_copy(update={"prefill": prefill})
    table = cost_table(drafts=[costs])
    traces = [trace_of(images=True, visual_input=shown) for shown in ("features", "placeholders")]
    seen, read = (priced_chains(trace, table)[2].ms_per_token for trace in traces)
    assert seen - read == pytest.approx(2 * 5.0 / traces[0].num_tokens), "two of the four prompts have an image"


def test_a_floor_is_not_exported_and_a_note_says_so(tmp_path: Path) -> None:
    trace, table = trace_of(), cost_table()
    point = point_of(trace, table, tree={"policy": "chain", "depth": 3, "p_min": 0.3})
    profile = write_search(tmp_path, table, trace, points=[point])
    found = exported(profile)
    (note,) = (note for note in found.notes if "floor" in note)
    assert "chain(depth=3, p_min=0.30) has a floor" in note and "no such setting" in note
    assert not found.tree.changed.keys() & {"p_min", "n_min"}


# -------- points


def test_last_point_serves_all_requests(tmp_path: Path) -> None:
    trace, table = trace_of(tasks=["sum", "sum", "read", "sum"]), cost_table()
    first = point_of(trace, table, tree={"policy": "chain", "depth": 4}, when=Condition(workload="sum"))
    last = point_of(trace, table, tree={"policy": "chain", "depth": 1})
    found = exported(write_search(tmp_path, table, trace, points=[first, last]))
    assert last.predicted is not None and found.tuned.speedup == pytest.approx(last.predicted.speedup)
    note = "the profile has 2 points and an engine runs one: this is the last, replayed on all tuning prompts"
    assert note in found.notes


# -------- studies


def test_study_that_reproduces_the_profile_is_used(tmp_path: Path) -> None:
    """Newer studies of the same documents that predict something else are not."""
    profile = write_pair(tmp_path)
    slower = table_of(DRAFT, decode=surface(lambda n, m: 2.0 + 0.001 * m, tokens=(1,)))
    for name in ("another", "zzz"):
        write_study(tmp_path / ".autotune" / name, slower, trace_of())
    assert exported(profile).study.endswith("/pair")
    point = DecodingProfile.load(profile).point
    found = exported(profile, "--study", tmp_path / ".autotune" / "another")
    assert point.predicted and found.tuned.speedup > 1.5 * point.predicted.speedup
    assert any("but the profile says" in note for note in found.notes)


def test_studies_are_found_beside_the_profile_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = write_pair(tmp_path / "there")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert exported(profile).study.endswith("there/.autotune/pair")
    moved = tmp_path / "here" / "profile.json"
    moved.write_bytes(profile.read_bytes())
    assert export(moved).exit_code == 2
    (tmp_path / "there" / ".autotune").rename(tmp_path / "here" / ".autotune")
    assert export(profile).exit_code == 0


def test_documents_of_other_searches_are_ignored(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    document = DecodingProfile.load(profile)
    draft = document.point.draft
    assert draft is not None
    other_draft = draft.model_copy(update={"id": OTHER.id, "sha256": OTHER.sha256})
    missing = (
        "holds no cost table and traces of its target, device and tuning prompts",
        "give the study's folder with --study, or run autotune search again",
    )
    changes: tuple[dict[str, Any], ...] = (
        {"target": OTHER},
        {"workload": document.workload.model_copy(update={"tune_sha256": "0" * 64})},
        {"hardware": document.hardware.model_copy(update={"model": "Two abacuses"})},
        {"precision": "bfloat16"},
    )
    for changed in changes:
        document.model_copy(update=changed).save(profile)
        assert_refused(profile, messages=missing)
    document.model_copy(update={"points": [document.point.model_copy(update={"draft": other_draft})]}).save(profile)
    assert_refused(profile, messages=("has no such trace of tests/other; record it: autotune record",))
    document.save(profile)
    retrained = DRAFT.model_copy(update={"sha256": "1" * 64})  # traces of other weights under the same name
    write_study(tmp_path / ".autotune" / "pair", table_of(retrained), trace_of(retrained))
    assert_refused(profile, messages=missing[:1])


def test_unreadable_study_is_ignored_unless_given(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    old = tmp_path / ".autotune" / "old-study"
    old.mkdir()
    (old / "pair.cost.json").write_text('{"schema": "autotune.cost-table/2"}')
    assert exported(profile).study.endswith("/pair")
    message = "this program reads schema 'autotune.cost-table/1'; got 'autotune.cost-table/2'"
    assert_refused(profile, "--study", old, messages=(message,))


# -------- errors


def test_wrong_options_are_refused(pair: Path) -> None:
    for option, value, message in (
        ("--study", "gone", "no such folder; give the study folder that autotune search named"),
        ("--draft", "tests/gone", "has traces of tests/draft; export a recorded one"),
    ):
        assert_refused(pair, option, value, messages=(f"{option} {value}: ", message))


def test_draft_kinds_that_engines_do_not_serve_are_refused(tmp_path: Path) -> None:
    advice = "search again with a kind that it serves"
    for kind in ("star", "dream", "specvlm", "dflash", "retrieval"):
        profile = write_pair(tmp_path / kind, kind=kind)
        message = f"vllm cannot serve tests/draft, a draft of kind {kind}; {advice}"
        assert_refused(profile, messages=(message,))


def test_a_recorded_draft_is_of_the_kind_that_its_trace_names(tmp_path: Path) -> None:
    """A dflash draft reads several of the target's layers, as EAGLE-3 heads do; a retrieval draft is no model."""
    for name, kind, aux_layers in (("tests/blocks", "dflash", (2, 4)), (RETRIEVAL, RETRIEVAL, ())):
        draft = ModelReference(id=name, sha256="")
        trace = trace_of(draft, draft_kind=kind, aux_layers=aux_layers)
        points = [point_of(trace_of(), table_of(DRAFT))]
        profile = write_search(tmp_path / kind, table_of(draft), trace, trace_of(), points=points)
        message = f"vllm cannot serve {name}, a draft of kind {kind}"
        assert_refused(profile, "--draft", name, messages=(message,))


def test_pair_that_the_engine_refuses(tmp_path: Path) -> None:
    """By the models' configs, where they are on this machine."""
    references = []
    for name, size in (("target", 8), ("draft", 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
        references.append(ModelReference(id=str(tmp_path / name), sha256="3" * 64))
    target, draft = references
    profile = write_pair(tmp_path, draft=draft, target=target, table=table_of(draft, target=target))
    reason = "the draft's vocabulary has 9 tokens and the target's has 8; choose a draft with the target's vocabulary"
    message = f"vllm 0.32.0 refuses {draft.id} as a draft of {target.id}: {reason}"
    assert_refused(profile, messages=(message,))
    assert not (tmp_path / "out").exists()


def test_sampled_prompts_are_noted(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    document = DecodingProfile.load(profile)
    assert not any("couple" in note for note in exported(profile).notes)
    sampled = document.workload.model_copy(update={"temperature": 0.7})
    document.model_copy(update={"workload": sampled}).save(profile)
    (note,) = (note for note in exported(profile).notes if "do not couple" in note)
    assert "sampled at temperature 0.7" in note


def test_plain_decoding_is_not_exported_without_a_draft(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    plain = OperatingPoint(draft=None, tree=None, predicted=None, measured=None)
    DecodingProfile.load(profile).model_copy(update={"points": [plain]}).save(profile)
    message = "decodes without a draft, so there is nothing to export"
    assert_refused(profile, messages=(message,))
    assert exported(profile, "--draft", DRAFT.id).tuned.speedup == 1.0


def test_configuration_slower_than_plain_decoding_is_refused(tmp_path: Path) -> None:
    """Here a draft level costs more than a target step."""
    slow = surface(lambda n, m: 3.0)
    costs = cost_table().drafts[0].model_copy(update={"draft_first": slow, "draft_level": slow})
    profile = write_pair(tmp_path, table=cost_table(drafts=[costs]))
    best = "vllm: its best configuration with tests/draft is predicted at 0."
    assert_refused(profile, messages=(best, "serve the target alone"))
    assert not (tmp_path / "out").exists()


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    (tmp_path / "out").write_text("a file instead of the folder")
    assert_refused(profile, messages=("cannot be written",))


# -------- torch


def test_exporting_loads_no_torch(pair: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from autotune.cli.main import main
main(["export", {str(pair)!r}, "-o", {str(tmp_path / "out")!r}], standalone_mode=False)
heavy = {{"torch", "transformers", "optuna", "pandas"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
