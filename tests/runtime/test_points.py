"""Several operating points: the first whose condition a request meets decodes it, losslessly, and switching creates
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.documents.condition import Condition, first_match
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice, OperatingPoint
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.drafters.feature_draft import FeatureDraft
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import decoder_for, load
from autotune.runtime.points import LoadedPoint
from autotune.runtime.stats import DecodingOutput
from autotune.trees import policy as policies
from autotune.trees.policy import TreeGrower, parse_policy
from autotune.trees.verification import WetapVerification
from tests.drafters.test_feature_draft import agreeing_draft
from tests.runtime.conftest import TREES
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 14
READ, SHORT, SAMPLED, HALF, OTHERS = range(5)
# Workload tag, temperature, prompt, and the expected point.
REQUESTS: list[tuple[str | None, float, str, int]] = [
    ("read", 0.0, "image", READ),
    ("read", 1.0, "text", READ),
    (None, 0.0, "text", SHORT),
    ("count", 0.7, "text", SHORT),
    ("count", 0.7, "image", SAMPLED),
    ("half", 0.0, "long", HALF),
    (None, 0.0, "image", OTHERS),
    ("raed", 0.2, "long", OTHERS),
]


@pytest.fixture(scope="module")
def star(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> ModelReference:
    folder = tmp_path_factory.mktemp("star")
    agreeing_draft("star", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return reference(str(folder))


def point(when: dict[str, Any], draft: ModelReference | None, tree: Any = None, **subnet: Any) -> OperatingPoint:
    choice = None
    if draft is not None:
        choice = DraftChoice(kind="?", id=draft.id, sha256=draft.sha256, subnet=Subnet(**subnet))
    return OperatingPoint(
        when=Condition.model_validate(when),
        draft=choice,
        tree=None if tree is None else parse_policy(tree),
        predicted=None,
        measured=None,
    )


@pytest.fixture(scope="module")
def profile(pair: Pair, star: ModelReference, prompts: dict[str, Inputs]) -> DecodingProfile:
    """Points that differ in every field."""
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    shortest = prompts["text"]["input_ids"].shape[1]
    points = [
        point({"workload": "read"}, draft, TREES["sage"], visual_keep=0.5),
        point({"prompt_tokens": {"max": shortest}}, draft, TREES["chain"]),
        point({"temperature": {"min": 0.5}}, star, TREES["eagle2"], visual_keep=0.3, injection_layer=2),
        point({"workload": "half"}, star, TREES["wetap"], heads=0.5),
        point({}, None),
    ]
    return decoding_profile(target, draft, hardware=fingerprint("cpu")).model_copy(update={"points": points})


@pytest.fixture(scope="module")
def decoder(profile: DecodingProfile, pair: Pair) -> Decoder:
    return load(profile, target=pair.target)  # type: ignore[no-any-return]


def settings_of(request: tuple[str | None, float, str, int], prompts: dict[str, Inputs]) -> dict[str, Any]:
    _, temperature, prompt, number = request
    return {**prompts[prompt], "temperature": temperature, "seed": number, "max_new_tokens": NEW_TOKENS}


def plainly(pair: Pair, settings: dict[str, Any]) -> Tensor:
    return Decoder(pair.target).generate(**settings).sequences


# -------- picking


def test_every_request_gets_its_point_and_the_target_s_own_tokens(
    decoder: Decoder, profile: DecodingProfile, pair: Pair, prompts: dict[str, Inputs]
) -> None:
    """In two orders, so that each follows others: as a decoder of that point alone decodes it, round by round."""
    assert {expected for *_, expected in REQUESTS} == {*range(5)}
    alone: dict[int, DecodingOutput] = {}
    for number in [*range(len(REQUESTS)), *reversed(range(len(REQUESTS)))]:
        tag, temperature, _, expected = REQUESTS[number]
        settings, point = settings_of(REQUESTS[number], prompts), profile.points[expected]
        out = decoder.generate(**settings, workload=tag)
        assert out.stats.point == out.stats.to_json()["point"] == expected
        has_image = "pixel_values" in settings
        prompt_tokens = out.stats.prompt_tokens
        request = {"temperature": temperature, "prompt_tokens": prompt_tokens, "has_image": has_image, "workload": tag}
        assert first_match((p.when for p in profile.points), **request) == expected  # type: ignore[arg-type]
        if number not in alone:
            assert torch.equal(out.sequences, plainly(pair, settings))
            lone = profile.model_copy(update={"points": [point.model_copy(update={"when": Condition()})]})
            alone[number] = load(lone, target=pair.target).generate(**settings)
        assert torch.equal(out.sequences, alone[number].sequences) and alone[number].stats.point == 0
        assert out.stats.accepted_lengths == alone[number].stats.accepted_lengths
        assert out.stats.verified_nodes == alone[number].stats.verified_nodes
        assert (out.stats.draft_forwards > 0) == (point.draft is not None)


def test_the_points_differ_in_what_they_do(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """Otherwise the test above would pass with five equal points."""
    counts = {
        expected: decoder.generate(**prompts["image"], max_new_tokens=60, **chosen).stats.verified_nodes[:5]
        for expected, chosen in ((READ, {"workload": "read"}), (SAMPLED, {"temperature": 1.0}), (OTHERS, {}))
    }
    assert counts[OTHERS] == [0] * 5 and counts[READ] != counts[SAMPLED] and min(counts[READ] + counts[SAMPLED]) > 0


def test_custom_generate_picks_the_same_point(decoder: Decoder, pair: Pair, prompts: dict[str, Inputs]) -> None:
    """The temperature is the generation config's; the tag is an argument of ``generate``."""
    generate, settings = pair.target.generate, {"max_new_tokens": NEW_TOKENS, "custom_generate": decoder}
    for given, expected in (
        ({"do_sample": False}, OTHERS),
        ({"do_sample": False, "workload": "read"}, READ),
        ({"do_sample": True, "temperature": 0.7}, SAMPLED),
        ({"do_sample": True, "temperature": 0.3}, OTHERS),
        ({"do_sample": True}, SAMPLED),
        ({"do_sample": False, "temperature": 1.0}, OTHERS),
    ):
        found = generate(**prompts["image"], **given, **settings)
        assert decoder.last_output.stats.point == expected, given
        if not given["do_sample"]:
            assert torch.equal(found, generate(**prompts["image"], max_new_tokens=NEW_TOKENS, do_sample=False))


def test_each_row_of_a_batch_picks_its_point(decoder: Decoder, pair: Pair, prompts: dict[str, Inputs]) -> None:
    """By their lengths without padding."""
    rows = [prompts["text"]["input_ids"][0], torch.cat([prompts["text"]["input_ids"][0]] * 2)]
    longest = max(len(row) for row in rows)
    batch = {
        "input_ids": torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }
    out = decoder.generate(**batch, max_new_tokens=NEW_TOKENS)
    assert [stats.point for stats in out.row_stats] == [SHORT, OTHERS]
    sampled = decoder.generate(**batch, max_new_tokens=NEW_TOKENS, temperature=0.9, seed=4)
    assert [stats.point for stats in sampled.row_stats] == [SHORT, SAMPLED]
    assert torch.equal(out.sequences, plainly(pair, {**batch, "max_new_tokens": NEW_TOKENS}))
    expected = plainly(pair, {**batch, "max_new_tokens": NEW_TOKENS, "temperature": 0.9, "seed": 4})
    assert torch.equal(sampled.sequences, expected)


def test_a_misspelt_tag_argument_is_named(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    with pytest.raises(UserError, match=r"generate refuses the call: .* are not used by the model: \['worklaod'\]"):
        decoder.generate(**prompts["text"], worklaod="read")


def test_settings_that_a_point_cannot_honour_are_refused_where_it_is_chosen(
    pair: Pair, prompts: dict[str, Inputs]
) -> None:
    """A lossy point among lossless ones, and a logits processor."""
    lossy = LoadedPoint(pair.draft, verification=WetapVerification(), when=Condition(workload="fast"))
    decoder = Decoder(pair.target, points=[lossy, LoadedPoint(pair.draft)])
    settings = {**prompts["text"], "max_new_tokens": 5, "no_repeat_ngram_size": 2}
    with pytest.raises(
        UserError,
        match="supports no logits processors that read the order of the prefix; drop NoRepeatNGramLogitsProcessor",
    ):
        decoder.generate(**settings, workload="fast")
    assert torch.equal(decoder.generate(**settings).sequences, plainly(pair, settings))


# -------- switching


def buffers_of(decoder: Decoder) -> list[int]:
    """Identities of caches, masks, trees and drafts."""
    found: list[Any] = [decoder.target, decoder.rounds._tree_mask]
    for model in (decoder.target, *(point.draft for point in decoder.points if point.draft is not None)):
        assert isinstance(model, CachedModel)
        slabs = model.cache.blocks if isinstance(model, FeatureDraft) else list(model.cache._slabs.values())
        found += [model, model.cache, model._masks, *slabs]
    for point in decoder.points:
        found += [point, point.draft, point.grower, point.grower.tree, *point.grower.tree, point.fallback]
    return [id(one) for one in found]


def test_switching_creates_nothing(
    decoder: Decoder, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is loaded, no cache or tree is allocated, nothing is compiled."""

    def decode_all() -> None:
        for request in REQUESTS:
            decoder.generate(**settings_of(request, prompts), workload=request[0])

    decode_all()
    before, compiled = buffers_of(decoder), [len(f.signatures) for f in (policies.grow, policies.prune)]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("created again")

    for model in (TreeModel, FeatureDraft):
        monkeypatch.setattr(model, "_allocate", refuse)
    for owner, name in ((TreeGrower, "__init__"), (LoadedPoint, "__init__")):
        monkeypatch.setattr(owner, name, refuse)
    for name in ("load_draft", "load_model", "LoadedPoint"):
        monkeypatch.setattr(f"autotune.runtime.load.{name}", refuse)
    for _ in range(2):
        decode_all()
    assert buffers_of(decoder) == before
    assert [len(f.signatures) for f in (policies.grow, policies.prune)] == compiled


def test_caches_are_reserved_for_the_largest_trees_of_all(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request by small trees leaves room for one of the same length by large ones."""
    small, large = ({"policy": "chain", "depth": 1}, TREES["sage-wide"])
    draft = LoadedPoint(pair.draft).draft
    decoder = Decoder(
        pair.target,
        points=[LoadedPoint(draft, tree=large, when=Condition(workload="large")), LoadedPoint(draft, tree=small)],
    )
    inputs = {"input_ids": torch.randint(4, 300, (1, 1010), generator=torch.Generator().manual_seed(0))}
    room = decoder.target.cache.capacity - 1010 - 8
    assert parse_policy(small).max_grown < room < parse_policy(large).max_grown, "both would fit, or neither"
    decoder.generate(**inputs, max_new_tokens=8)
    cache = decoder.target.cache
    decoder.generate(**inputs, max_new_tokens=8, workload="large")
    assert decoder.target.cache is cache and decoder.point is decoder.points[0]


# -------- loading


def test_a_profile_of_captured_forward_passes_runs_eagerly_without_a_gpu(profile: DecodingProfile, pair: Pair) -> None:
    captured = profile.model_copy(update={"mode": "cuda-graph", "capture_sizes": (4, 8)})
    decoder = decoder_for(captured, Target(pair.target), lambda choice: pair.draft, is_tuned_here=False)
    assert (decoder.mode, decoder.capture_sizes) == ("eager", ())


def test_points_rank_visual_tokens_as_their_subnets_say(
    profile: DecodingProfile, pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points that share a draft may rank differently."""
    point = profile.points[READ]
    assert point.draft is not None and point.draft.subnet.visual_keep < 1.0
    last = point.draft.subnet.model_copy(update={"visual_ranking": "last_query"})
    points = [
        point,
        profile.points[OTHERS].model_copy(update={"draft": point.draft.model_copy(update={"subnet": last})}),
    ]
    points[1] = points[1].model_copy(update={"tree": point.tree})
    decoder = load(profile.model_copy(update={"points": points}), target=pair.target)
    assert decoder.points[0].draft is decoder.points[1].draft
    asked: list[Any] = []
    prefill = Target.prefill

    def observed(self: Target, prompt: Any, *, visual_rankings: Any = ()) -> Any:
        asked.append(list(visual_rankings))
        return prefill(self, prompt, visual_rankings=visual_rankings)

    monkeypatch.setattr(Target, "prefill", observed)
    decoder.generate(**prompts["image"], max_new_tokens=4, workload="read")
    decoder.generate(**prompts["image"], max_new_tokens=4)
    assert asked == [["text_after_image"], ["last_query"]]


def test_a_given_draft_serves_points_that_name_one_draft(profile: DecodingProfile, pair: Pair) -> None:
    with pytest.raises(UserError, match=r"its points name 3 drafts, which are loaded by name; leave draft= out"):
        load(profile, target=pair.target, draft=pair.draft)
    same = profile.model_copy(update={"points": [profile.points[n] for n in (READ, SHORT, OTHERS)]})
    decoder = load(same, target=pair.target, draft=pair.draft)
    assert decoder.points[0].draft is decoder.points[1].draft and decoder.draft.model is pair.draft


def test_the_weights_of_every_point_are_checked(profile: DecodingProfile, pair: Pair) -> None:
    found = profile.points[HALF].draft
    assert found is not None
    changed = found.model_copy(update={"sha256": "0" * 64})
    points = [p if p.draft is not found else p.model_copy(update={"draft": changed}) for p in profile.points]
    with pytest.raises(UserError, match="has other weights than the profile's"):
        load(profile.model_copy(update={"points": points}), target=pair.target)


def test_a_decoder_may_be_given_another_tree_for_all_requests(decoder: Decoder, pair: Pair) -> None:
    points = [LoadedPoint(pair.draft, when=Condition(workload="read")), LoadedPoint(None)]
    made = Decoder(pair.target, points=points)
    made.configure(TREES["sage"], visual_keep=0.5)
    assert len(made.points) == 1 and made.draft is points[0].draft and made.point.policy == parse_policy(TREES["sage"])


def test_points_of_a_profile_on_disk(profile: DecodingProfile, tmp_path: Path, pair: Pair) -> None:
    profile.save(tmp_path / "profile.json")
    read = DecodingProfile.load(tmp_path / "profile.json")
    assert read == profile and read.point is read.points[OTHERS]
    assert load(tmp_path / "profile.json", target=pair.target).profile == profile
