"""Exports of hand-made studies, from profile to files, and every line that says why not."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import EXPORT_ENGINES, main
from autotune.cost.table import DraftCosts
from autotune.documents.condition import Condition, Range
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import OperatingPoint, load_profile, save_profile
from autotune.documents.provenance import ModelReference
from autotune.export.document import EXPORT, Export
from autotune.export.engine import read_settings
from autotune.export.job import ENGINES
from autotune.export.sglang import SglangSettings
from autotune.files import parse, read_json
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_models
from autotune.search.evaluator import Evaluator
from tests.export.studies import PRUNED, point_of, profile_of, trace_of, write_pair, write_study
from tests.sample_documents import DRAFT, TARGET, cost_table, surface

OTHER = ModelReference(id="tests/other", sha256="f" * 64)
REPOSITORY = Path(__file__).parents[2]


def export(profile: Path, engine: str, *options: object) -> Result:
    """``autotune export``, files in a folder beside the profile."""
    output = profile.parent / "out" / engine
    words = [profile, "--to", engine, "-o", output, *options]
    return CliRunner().invoke(main, ["export", *map(str, words)])


def exported(profile: Path, engine: str, *options: object) -> Export:
    result = export(profile, engine, *options)
    assert result.exit_code == 0, result.output
    path = profile.parent / "out" / engine / EXPORT
    return parse(Export, "export", read_json(path), source=path)


def table_of(*drafts: ModelReference, **fields: Any) -> Any:
    """The abacus prices all of them alike."""
    (costs,) = cost_table().drafts
    return cost_table(drafts=[costs.model_copy(update={"draft": draft}) for draft in drafts], **fields)


# ----------------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("engine", EXPORT_ENGINES)
def test_files_are_written_and_predicted(engine: str, tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    found = exported(profile, engine)
    point = load_profile(profile).point
    assert point.predicted is not None
    assert found.tuned.speedup == pytest.approx(point.predicted.speedup)
    assert (found.target, found.draft, found.kind, found.point) == (TARGET, DRAFT, "independent", 0)
    assert [variant.name for variant in found.variants if engine != "sglang"] in (["chain"], [])
    speedups = [variant.predicted.speedup for variant in found.variants]
    assert speedups == sorted(speedups, reverse=True) and speedups[-1] > 1
    for variant in found.variants:
        settings = read_settings(ENGINES[engine].settings_kind, tmp_path / "out" / engine / variant.file)
        assert json.loads(json.dumps(settings.model_dump(exclude_none=True))) == variant.settings
        assert variant.slowdown == pytest.approx(variant.predicted.ms_per_token / found.tuned.ms_per_token - 1)
        assert TARGET.id in variant.command and variant.predicted.estimated is False


def test_sglang_gets_the_best_tree_and_the_best_chain(tmp_path: Path) -> None:
    found = exported(write_pair(tmp_path), "sglang")
    assert {variant.name for variant in found.variants} == {"tree", "chain"}
    for variant in found.variants:
        words = shlex.split(variant.command)
        assert words[:4] == ["python", "-m", "sglang.launch_server", "--model-path"]
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert flags["--speculative-draft-model-path"] == DRAFT.id
        settings = SglangSettings.model_validate(variant.settings)
        assert int(flags["--speculative-num-draft-tokens"]) == settings.speculative_num_draft_tokens
        assert (settings.speculative_eagle_topk == 1) == (variant.name == "chain")


def test_eagle3_heads_grow_dynamic_trees_in_tensorrt_llm(tmp_path: Path) -> None:
    found = exported(write_pair(tmp_path, kind="eagle3", reads=(1, 2, 3)), "tensorrt-llm")
    by_name = {variant.name: variant.settings["speculative_config"] for variant in found.variants}
    assert by_name["tree"]["use_dynamic_tree"] and by_name["tree"]["decoding_type"] == "Eagle3"
    assert by_name["chain"]["draft_len_schedule"][str(min(map(int, by_name["chain"]["draft_len_schedule"])))]
    assert exported(tmp_path / "profile.json", "vllm").variants[0].settings["method"] == "eagle3"


def test_the_command_of_vllm_holds_the_file(tmp_path: Path) -> None:
    """And beyond one request its speedups are marked."""
    found = exported(write_pair(tmp_path), "vllm")
    (variant,) = found.variants
    words = shlex.split(variant.command)
    assert words[:3] == ["vllm", "serve", TARGET.id]
    assert json.loads(words[-1]) == json.loads((tmp_path / "out" / "vllm" / "speculative-config.json").read_text())
    ranges = variant.by_batch
    assert [[one.start, one.end, one.draft_tokens] for one in ranges] == variant.settings[
        "num_speculative_tokens_per_batch_size"
    ]
    assert all(one.estimated == (one.end > 1) for one in ranges) and ranges[-1].end > 8


def test_json_is_the_document_and_nothing_else(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "vllm", "--json")
    assert result.stdout == (tmp_path / "out" / "vllm" / EXPORT).read_text()


def test_without_json_the_commands_are_printed(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "sglang")
    document = json.loads((tmp_path / "out" / "sglang" / EXPORT).read_text())
    assert result.stdout.splitlines() == [variant["command"] for variant in document["variants"]]
    for word in ("lossless: ", "eagle_topk 1 only", "written to", "time a token", "An abacus"):
        assert word in result.stderr, result.stderr


def test_bundled_models_are_named_by_their_folders(tmp_path: Path) -> None:
    """Others as the profile names them: an engine knows no bundled names."""
    target, draft = (ModelReference(id=name, sha256="9" * 64) for name in (BUNDLED_TARGET, BUNDLED_DRAFT))
    trace, table = trace_of(draft, target=target), table_of(draft, target=target)
    write_study(tmp_path / ".autotune" / "pair", table, trace)
    profile = profile_of(point_of(trace, table), trace=trace).model_copy(update={"target": target})
    save_profile(tmp_path / "profile.json", profile)
    (variant,) = exported(tmp_path / "profile.json", "vllm").variants
    assert str(bundled_models()[BUNDLED_TARGET]) in variant.command
    assert variant.settings["model"] == str(bundled_models()[BUNDLED_DRAFT])


# -------------------------------------------------------------------------------------------------- drafts and subnets


def test_another_draft_of_the_study_stands_in(tmp_path: Path) -> None:
    """Compared with the point all the same."""
    star, whole = trace_of(reads=(3,)), trace_of(OTHER, seed=5)
    table = table_of(DRAFT, OTHER)
    write_study(tmp_path / ".autotune" / "pair", table, star, whole)
    save_profile(tmp_path / "profile.json", profile_of(point_of(star, table, kind="star"), trace=star))
    result = export(tmp_path / "profile.json", "vllm")
    assert result.exit_code == 2
    assert (
        "vllm cannot serve the kind of draft that tests/draft is, star; export one that was recorded: --draft tests/other"
        in result.stderr
    )
    assert not (tmp_path / "out").exists()
    found = exported(tmp_path / "profile.json", "vllm", "--draft", OTHER.id)
    point = load_profile(tmp_path / "profile.json").point
    assert point.predicted and found.tuned.speedup == pytest.approx(point.predicted.speedup)
    assert found.draft == OTHER and found.kind == "independent"


def test_a_point_whose_trace_is_gone_is_what_the_search_said(tmp_path: Path) -> None:
    star, whole = trace_of(reads=(3,)), trace_of(OTHER, seed=5)
    point = point_of(star, table_of(DRAFT), kind="star")
    write_study(tmp_path / ".autotune" / "pair", table_of(DRAFT, OTHER), whole)
    save_profile(tmp_path / "profile.json", profile_of(point, trace=star))
    assert exported(tmp_path / "profile.json", "vllm", "--draft", OTHER.id).tuned == point.predicted
    silent = point.model_copy(update={"predicted": None})
    save_profile(tmp_path / "profile.json", profile_of(silent, trace=star))
    result = export(tmp_path / "profile.json", "vllm", "--draft", OTHER.id)
    assert result.exit_code == 2
    assert "has no trace of tests/draft keep=1, and the profile predicts nothing of its point" in result.stderr


def test_engines_run_all_of_a_draft(tmp_path: Path) -> None:
    """The profile's share of visual tokens was chosen for our runtime: what an engine runs is replayed by the trace of the
    whole draft.
    """
    half, whole = trace_of(subnet=PRUNED, seed=1), trace_of(seed=2)
    table = table_of(DRAFT)
    write_study(tmp_path / ".autotune" / "pair", table, half, whole)
    save_profile(tmp_path / "profile.json", profile_of(point_of(half, table), trace=half))
    found = exported(tmp_path / "profile.json", "vllm")
    (variant,) = found.variants
    configuration = configuration_of(point_of(whole, table, tree=variant.tree.model_dump()))
    assert configuration is not None
    assert variant.predicted.speedup == pytest.approx(Evaluator([whole], table).evaluate(configuration).speedup)
    assert any("point keeps 0.5 of the visual tokens; engines show a draft all of them" in note for note in found.notes)


def test_a_draft_that_was_recorded_in_part_is_refused(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path, subnet=PRUNED), "vllm")
    assert result.exit_code == 2
    assert "vllm runs all of a draft, and shows it every visual token" in result.stderr
    assert (
        "autotune record --target tests/target --draft tests/draft --visual-keep 1 --workload by hand --prompts 4 -o "
        in result.stderr
    )


def test_without_visual_tokens_there_is_nothing_to_keep(tmp_path: Path) -> None:
    trace = dataclasses.replace(trace_of(subnet=PRUNED), num_visual_tokens=np.zeros(4, np.int64))
    table = cost_table()
    write_study(tmp_path / ".autotune" / "pair", table, trace)
    save_profile(tmp_path / "profile.json", profile_of(point_of(trace, table), trace=trace))
    assert not any("visual" in note for note in exported(tmp_path / "profile.json", "transformers").notes)


# ---------------------------------------------------------------------------------------------------------------- points


def pair_of_points(folder: Path, condition: Condition) -> tuple[Path, OperatingPoint, OperatingPoint]:
    trace, table = trace_of(tasks=["sum", "sum", "read", "sum"]), cost_table()
    own = point_of(trace, table, tree={"policy": "chain", "depth": 4}, when=condition)
    last = point_of(trace, table, tree={"policy": "chain", "depth": 1})
    write_study(folder / ".autotune" / "pair", table, trace)
    save_profile(folder / "profile.json", profile_of(own, last, trace=trace))
    return folder / "profile.json", own, last


def test_the_last_point_serves_all_requests(tmp_path: Path) -> None:
    """And what the others would have gained is said: their rounds are replayed on the prompts that get them."""
    profile, own, last = pair_of_points(tmp_path, Condition(workload="sum"))
    found = exported(profile, "vllm")
    assert last.predicted is not None
    assert found.point == 1 and found.tuned.speedup == pytest.approx(last.predicted.speedup)
    evaluator = Evaluator([trace_of(tasks=["sum", "sum", "read", "sum"])], cost_table())
    configurations = [configuration_of(point) for point in (own, last)]
    ms = evaluator.prompt_ms([one for one in configurations if one is not None])
    together = evaluator.ar_ms_per_token * evaluator.replay_many([configurations[0]])[0].tokens.sum()  # type: ignore[list-item]
    together /= ms[0][[0, 1, 3]].sum() + ms[1][2]
    (note,) = (note for note in found.notes if "points" in note)
    assert (
        f"this is point 1, for any request, replayed on all tuning prompts; together they are predicted at {together:.2f}x"
        in note
    )


def test_a_point_serves_its_own_requests(tmp_path: Path) -> None:
    profile, own, _ = pair_of_points(tmp_path, Condition(workload="read"))
    found = exported(profile, "vllm", "--point", 0)
    assert found.point == 0
    evaluator = Evaluator([trace_of(tasks=["sum", "sum", "read", "sum"])], cost_table())
    configuration = configuration_of(own)
    assert configuration is not None
    replayed = evaluator.replay(configuration)
    assert found.tuned.ms_per_token == pytest.approx(replayed.decode_ms[2] / replayed.tokens[2])
    assert any("point 0, for workload read, replayed on the tuning prompts that get it" in note for note in found.notes)


def test_a_point_that_no_tuning_prompt_gets_is_refused(tmp_path: Path) -> None:
    profile, *_ = pair_of_points(tmp_path, Condition(temperature=Range(min=0.5)))
    result = export(profile, "vllm", "--point", 0)
    assert result.exit_code == 2
    assert "--point 0: no tuning prompt meets its condition, temperature" in result.stderr


# --------------------------------------------------------------------------------------------------------------- studies


def test_the_study_that_made_the_profile_is_found_among_others(tmp_path: Path) -> None:
    """Whichever is newer: by what it predicts."""
    profile = write_pair(tmp_path)
    slower = table_of(DRAFT, decode=surface(lambda n, m: 2.0 + 0.001 * m, tokens=(1,)))
    for name in ("another", "zzz"):
        write_study(tmp_path / ".autotune" / name, slower, trace_of())
    assert exported(profile, "vllm").study.endswith("/pair")
    point = load_profile(profile).point
    found = exported(profile, "vllm", "--study", tmp_path / ".autotune" / "another")
    assert point.predicted and found.tuned.speedup > 1.5 * point.predicted.speedup
    assert any("other than the profile says" in note for note in found.notes)


def test_studies_are_looked_for_beside_the_profile_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = write_pair(tmp_path / "there")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert exported(profile, "vllm").study.endswith("there/.autotune/pair")
    moved = tmp_path / "here" / "profile.json"
    moved.write_bytes(profile.read_bytes())
    assert export(moved, "vllm").exit_code == 2
    (tmp_path / "there" / ".autotune").rename(tmp_path / "here" / ".autotune")
    assert export(profile, "vllm").exit_code == 0


@pytest.mark.parametrize("field", ["target", "workload", "device", "precision", "draft"])
def test_documents_of_something_else_are_passed_over(field: str, tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    document = load_profile(profile)
    changed: dict[str, Any] = {
        "target": {"target": OTHER},
        "workload": {"workload": document.workload.model_copy(update={"tune_sha256": "0" * 64})},
        "device": {"hardware": document.hardware.model_copy(update={"model": "Two abacuses"})},
        "precision": {"precision": "bfloat16"},
    }
    if field == "draft":
        point = document.point
        assert point.draft is not None
        draft = point.draft.model_copy(update={"id": OTHER.id, "sha256": OTHER.sha256})
        changed["draft"] = {"points": [point.model_copy(update={"draft": draft})]}
    save_profile(profile, document.model_copy(update=changed[field]))
    result = export(profile, "vllm")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    if field == "draft":
        assert "has no such trace of tests/other; record it: autotune record" in result.stderr
    else:
        assert "holds no cost table and traces of its target, device and tuning prompts" in result.stderr
        assert "name the study's folder with --study, or run autotune search again" in result.stderr


def test_a_draft_that_was_trained_since_is_another(tmp_path: Path) -> None:
    """Its traces are not those of the profile's draft, whatever its name."""
    profile = write_pair(tmp_path)
    trained = DRAFT.model_copy(update={"sha256": "1" * 64})
    write_study(tmp_path / ".autotune" / "pair", table_of(trained), trace_of(trained))
    result = export(profile, "vllm")
    assert result.exit_code == 2 and "holds no cost table and traces of" in result.stderr


def test_an_old_study_is_in_nobodys_way(tmp_path: Path) -> None:
    """Unless it is the one that was named."""
    profile = write_pair(tmp_path)
    old = tmp_path / ".autotune" / "a-study-of-long-ago"
    old.mkdir()
    (old / "pair.cost.json").write_text('{"schema": "autotune.cost-table/1"}')
    assert exported(profile, "vllm").study.endswith("/pair")
    result = export(profile, "vllm", "--study", old)
    assert result.exit_code == 2 and "schema 'autotune.cost-table/1' is of an earlier autotune" in result.stderr


# -------------------------------------------------------------------------------------------------------------- mistakes


def test_a_missing_study_folder_is_named(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "vllm", "--study", tmp_path / "gone")
    assert result.exit_code == 2 and "gone: no such folder; name the one that autotune search" in result.stderr


@pytest.mark.parametrize("point", [-1, 1])
def test_a_point_that_is_not_there_is_named(point: int, tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "vllm", "--point", point)
    assert result.exit_code == 2
    assert f"--point {point}: {tmp_path / 'profile.json'} has points 0 to 0; name one of them" in result.stderr


def test_a_draft_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "vllm", "--draft", "tests/gone")
    assert result.exit_code == 2
    assert "--draft tests/gone: " in result.stderr and "has traces of tests/draft; export one that" in result.stderr


@pytest.mark.parametrize("kind", ["star", "dream", "specvlm", "prompt_lookup"])
@pytest.mark.parametrize("engine", EXPORT_ENGINES)
def test_kinds_that_no_engine_serves_are_refused(engine: str, kind: str, tmp_path: Path) -> None:
    result = export(write_pair(tmp_path, kind=kind), engine)
    assert result.exit_code == 2
    assert (
        f"{engine} cannot serve the kind of draft that tests/draft is, {kind}; search again with one of a kind that it"
        in result.stderr
    )


def test_transformers_serves_no_eagle3(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path, kind="eagle3", reads=(1, 2, 3)), "transformers")
    assert (
        result.exit_code == 2
        and "transformers cannot serve the kind of draft that tests/draft is, eagle3" in result.stderr
    )


def test_plain_decoding_needs_no_export(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    plain = OperatingPoint(draft=None, tree=None, predicted=None, measured=None)
    save_profile(profile, load_profile(profile).model_copy(update={"points": [plain]}))
    result = export(profile, "vllm")
    assert result.exit_code == 2 and "point 0 decodes without a draft; there is nothing to export" in result.stderr
    assert exported(profile, "vllm", "--draft", DRAFT.id).tuned.speedup == 1.0


def test_what_would_be_slower_than_plain_decoding_is_refused(tmp_path: Path) -> None:
    """A draft level costs more than a target step."""
    costs: DraftCosts = cost_table().drafts[0]
    slow = surface(lambda n, m: 3.0)
    table = cost_table(drafts=[costs.model_copy(update={"commit": slow, "propose": slow})])
    result = export(write_pair(tmp_path, table=table), "vllm")
    assert result.exit_code == 2
    assert "vllm: the best that it can run with tests/draft is predicted at 0." in result.stderr
    assert "serve the target plainly" in result.stderr and not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_named_first(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    (tmp_path / "out").write_text("in the way")
    result = export(profile, "vllm")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_an_unknown_engine_is_named(tmp_path: Path) -> None:
    result = export(write_pair(tmp_path), "tgi")
    assert result.exit_code == 2 and "'tgi' is not one of 'vllm', 'sglang'" in result.stderr


# ----------------------------------------------------------------------------------------------------------------- torch


def test_exporting_loads_no_torch(tmp_path: Path) -> None:
    profile = write_pair(tmp_path)
    program = f"""
import sys
from autotune.cli.main import main
main(["export", {str(profile)!r}, "--to", "sglang", "-o", {str(tmp_path / "out")!r}], standalone_mode=False)
heavy = {{"torch", "transformers", "optuna"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
