"""``adapt=True``: a request chooses among points online, losslessly, the same way every time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autotune.documents.condition import Condition, Range
from autotune.documents.decoding_profile import OperatingPoint
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.host_rounds import HostRound
from autotune.runtime.load import decoder_for
from autotune.runtime.points import LoadedPoint, as_draft
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import parse_policy
from autotune.trees.priced import MAX_MATCH, identity_curves
from tests.drafters.test_feature_draft import STAR_FOR_BOTH, agreeing_draft
from tests.runtime.conftest import TREES
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 60
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4})
FREE = RoundPrice(round_steps=0.2, level_steps=0.01, node_steps=0.001)  # its rounds always pay
UNKNOWN = {
    "draft": "",
    "draft_sha256": "",
    "workload_sha256": "",
    "log_loss": 0.1,
    "raw_log_loss": 0.1,
    "num_tokens": 1,
}
DEAR = RoundPrice(round_steps=0.9, level_steps=0.01, node_steps=0.001)


def two_points(draft: Any, labelled: str = "chain", others: str = "sage", **options: Any) -> list[LoadedPoint]:
    """The point of other requests costs more than that of the workload ``a``."""
    return [
        LoadedPoint(draft, tree=TREES[labelled], fallback=FREE, when=Condition(workload="a"), **options),
        LoadedPoint(draft, tree=TREES[others], fallback=DEAR, **options),
    ]


@pytest.mark.parametrize("kind", ["independent", "lookup", *STAR_FOR_BOTH])
def test_choosing_changes_no_token(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    """Greedy and sampled, pruned or not. The labelled point is chosen without a label, the same way every time."""
    target = Target(pair.target)
    plain, draft = Decoder(target), as_draft(pair.draft)
    if kind != "independent":
        draft = RetrievalDraft() if kind == "lookup" else agreeing_draft(kind, target, injection_layer=4)
    num_switched = 0
    for (name, keep), settings in itertools.product((("image", 0.5), ("text", 1.0)), SETTINGS):
        inputs = {**prompts[name], "max_new_tokens": NEW_TOKENS, **settings}
        expected = plain.generate(**inputs)
        for trees in (("chain", "sage"), ("eagle2-tight", "wetap"), ("static", "sage-wide")):
            decoder = Decoder(target, points=two_points(draft, *trees, visual_keep=keep), adapt=True)
            first = decoder.generate(**inputs)
            assert torch.equal(first.sequences, expected.sequences), trees
            assert first.stats.point == 1 and sum(first.stats.rounds_by_point) == first.stats.rounds
            num_switched += min(first.stats.rounds_by_point) > 0
        again = Decoder(target, points=decoder.points, adapt=True).generate(**inputs)
        assert again.stats.accepted_lengths == first.stats.accepted_lengths
        assert again.stats.rounds_by_point == first.stats.rounds_by_point
    assert num_switched >= 6


def test_trees_with_a_second_source_are_chosen_too(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that draft nothing included: their tokens have no proposals of the draft."""
    target, draft, levels = Target(pair.target), as_draft(pair.draft), list[int]()
    run = HostRound.run
    monkeypatch.setattr(HostRound, "run", lambda *args: (found := run(*args), levels.append(found.draft_forwards))[0])
    calibration = {"retrieved": [[0.9] * MAX_MATCH] * 2, "curves": identity_curves().tolist(), **UNKNOWN}
    tree = {"policy": "priced", "retrieval": True, "skip_draft_above": 0.8, "calibration": calibration}
    points = [
        LoadedPoint(draft, tree=tree, fallback=FREE, when=Condition(workload="a")),
        LoadedPoint(draft, tree=TREES["sage"], fallback=DEAR),
    ]
    plain, num_switched = Decoder(target), 0
    for name in ("image", "text", "long"):
        for settings in SETTINGS:
            inputs = {**prompts[name], "max_new_tokens": NEW_TOKENS, **settings}
            first, again = (Decoder(target, points=points, adapt=True).generate(**inputs) for _ in range(2))
            assert torch.equal(first.sequences, plain.generate(**inputs).sequences)
            assert again.stats.rounds_by_point == first.stats.rounds_by_point
            num_switched += min(first.stats.rounds_by_point) > 0
    assert num_switched >= 3 and 0 in levels


def test_it_is_off_by_default_and_a_label_chooses_the_first_point(pair: Pair, prompts: dict[str, Inputs]) -> None:
    points = two_points(as_draft(pair.draft))
    inputs = {**prompts["image"], "max_new_tokens": NEW_TOKENS}
    assert Decoder(pair.target, points=points).generate(**inputs).stats.rounds_by_point[0] == 0
    labelled = Decoder(pair.target, points=points, adapt=True).generate(**inputs, workload="a").stats
    assert labelled.point == 0 and labelled.rounds_by_point == [labelled.rounds, 0], "it is the cheaper one"


def test_conditions_other_than_the_workload_hold(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """A point of other prompts is never chosen, one of other contexts only there, and plain decoding stays plain."""
    draft, inputs = as_draft(pair.draft), {**prompts["image"], "max_new_tokens": NEW_TOKENS}
    begin = int(inputs["input_ids"].shape[1])
    late = Condition(workload="a", context_tokens=Range(min=begin + 30))
    points = [
        LoadedPoint(draft, tree=TREES["chain"], fallback=FREE, when=Condition(has_image=False)),
        LoadedPoint(draft, tree=TREES["eagle2"], fallback=FREE, when=late),
        LoadedPoint(draft, tree=TREES["sage"], fallback=DEAR, when=Condition(workload="a")),
        LoadedPoint(None, when=Condition(context_tokens=Range(max=begin + 9))),
        LoadedPoint(draft, tree=TREES["sage"], fallback=DEAR),
    ]
    early = Decoder(pair.target, points=[*points[:3], points[4]], adapt=True).generate(**inputs).stats
    emitted, before = 1, 0
    for accepted in early.accepted_lengths:
        before += emitted - 1 < 30
        emitted += accepted + 1
    assert early.rounds_by_point[0] == early.rounds_by_point[2] == 0 and early.rounds_by_point[3] >= before
    assert early.rounds_by_point[1] > 0
    plain = Decoder(pair.target, points=points, adapt=True).generate(**inputs).stats
    assert plain.rounds_by_point[:4] == [0, 0, 0, 10] and plain.plain_steps == 10


def test_streams_and_batches_choose_as_single_requests_do(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Each row begins anew."""
    row = prompts["text"]["input_ids"]
    decoder = Decoder(pair.target, points=two_points(as_draft(pair.draft)), adapt=True)
    single = decoder.generate(input_ids=row, max_new_tokens=NEW_TOKENS)
    batch = decoder.generate(input_ids=row.repeat(2, 1), max_new_tokens=NEW_TOKENS)
    assert [stats.rounds_by_point for stats in batch.row_stats] == [single.stats.rounds_by_point] * 2
    assert (
        list(decoder.stream(input_ids=row, max_new_tokens=NEW_TOKENS)) == single.sequences[0, row.shape[1] :].tolist()
    )


def test_a_loaded_profile_adapts(pair: Pair, prompts: dict[str, Inputs]) -> None:
    profile = decoding_profile()
    only = profile.points[-1].model_copy(update={"tree": parse_policy(TREES["sage"]), "fallback": DEAR})
    other: OperatingPoint = only.model_copy(
        update={"tree": parse_policy(TREES["chain"]), "fallback": FREE, "when": Condition(workload="a")}
    )
    profile = profile.model_copy(update={"points": [other, only], "mode": "eager", "capture_sizes": ()})
    draft = as_draft(pair.draft)
    decoder = decoder_for(profile, pair.target, lambda choice: draft, is_tuned_here=False, adapt=True)
    stats = decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS).stats
    assert stats.point == 1 and stats.rounds_by_point[0] > 0


def test_points_that_cannot_be_chosen_online_are_refused(pair: Pair) -> None:
    target = Target(pair.target)
    draft, other = as_draft(pair.draft), as_draft(pair.target)
    good = LoadedPoint(draft, fallback=FREE)
    first = Condition(workload="a")
    cases = [
        (LoadedPoint(other, fallback=FREE, when=first), "share one draft and its visual tokens; these have 2 of them"),
        (LoadedPoint(draft, fallback=FREE, visual_keep=0.5, when=first), "these have 2 of them; leave adapt out"),
        (LoadedPoint(draft, when=first), "point 0 has no fallback; leave adapt out, or run autotune search"),
        (
            LoadedPoint(draft, fallback=FREE, verification={"kind": "wetap"}, when=first),
            "lossless .* point 0 has wetap",
        ),
    ]
    for point, message in cases:
        with pytest.raises(UserError, match=message) as raised:
            Decoder(target, points=[point, good], adapt=True)
        assert "\n" not in str(raised.value)
        Decoder(target, points=[point, good])
