"""Requests that are switched between points while their context grows: the same tokens, and the rounds that replay predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.documents.condition import Condition, Range
from autotune.drafters import cached_draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import LoadedPoint, as_draft
from autotune.runtime.stats import DecodingStats
from tests.drafters.test_feature_draft import STAR_FOR_BOTH, agreeing_draft
from tests.runtime.conftest import TREES
from tests.runtime.test_control import COSTLY, useless_draft
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 40
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4})


def up_to(context_tokens: int, **others: Any) -> Condition:
    return Condition(context_tokens=Range(max=context_tokens), **others)


def length_of(inputs: Inputs) -> int:
    return int(inputs["input_ids"].shape[1])


def three_points(draft: Any, first: str, last: str, begin: int, **options: Any) -> list[LoadedPoint]:
    """Trees for 8 tokens after a prompt of ``begin`` tokens, plain steps for 9 more, then other trees."""
    return [
        LoadedPoint(draft, tree=TREES[first], when=up_to(begin + 7), **options),
        LoadedPoint(None, when=up_to(begin + 16)),
        LoadedPoint(draft, tree=TREES[last], **options),
    ]


def new_draft(kind: str, pair: Pair, target: Target) -> Any:
    if kind == "independent":
        return as_draft(pair.draft)
    return RetrievalDraft() if kind == "lookup" else agreeing_draft(kind, target, injection_layer=4)


@pytest.mark.parametrize("kind", ["independent", "lookup", "specvlm", *STAR_FOR_BOTH])
def test_switches_change_no_token(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    """Greedy and sampled, with and without image, pruned or not. Every round counts for the point of its context."""
    target = Target(pair.target)
    plain, draft = Decoder(target), new_draft(kind, pair, target)
    for name, keep in (("image", 0.5), ("text", 1.0)):
        inputs, begin = prompts[name], length_of(prompts[name])
        for first, last in (("sage", "eagle2"), ("static", "sage-wide")):
            decoder = Decoder(target, points=three_points(draft, first, last, begin, visual_keep=keep))
            for settings in SETTINGS:
                expected = plain.generate(**inputs, max_new_tokens=NEW_TOKENS, **settings)
                out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS, **settings)
                assert torch.equal(out.sequences, expected.sequences), (first, settings)
                assert out.stats.point == 0 and decoder.point is decoder.points[0]
                assert out.stats.rounds_by_point == rounds_by_context(out.stats, begin)
                assert min(out.stats.rounds_by_point) > 0


def rounds_by_context(stats: DecodingStats, begin: int) -> list[int]:
    """Rounds of ``three_points``, by the context at which they started."""
    counts, context = [0, 0, 0], stats.prompt_tokens
    for accepted, nodes in zip(stats.accepted_lengths, stats.verified_nodes, strict=True):
        number = (context > begin + 7) + (context > begin + 16)
        counts[number] += 1
        assert nodes == 0 or number != 1
        context += accepted + 1
    return counts


@pytest.mark.parametrize("kind", ["independent", "star"])
def test_steps_over_static_buffers_are_switched_alike(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    target = Target(pair.target)
    draft = new_draft(kind, pair, target)
    for trees in (("chain", "eagle2"), ("eagle2-tight", "sage"), ("sage", "static")):
        for settings, name in zip(SETTINGS, ("image", "text"), strict=True):
            inputs = prompts[name]
            options: dict[str, Any] = {
                "points": three_points(draft, *trees, length_of(inputs), visual_keep=0.5),
                "capture_sizes": (1, 4, 16, 64),
            }
            modes = [Decoder(target, mode=mode, **options) for mode in ("eager", "fixed")]
            expected, found = (one.generate(**inputs, max_new_tokens=NEW_TOKENS, **settings) for one in modes)
            assert torch.equal(found.sequences, expected.sequences)
            for field in ("accepted_lengths", "verified_nodes", "rounds_by_point", "plain_steps"):
                assert getattr(found.stats, field) == getattr(expected.stats, field), (trees, field)
            assert min(found.stats.rounds_by_point) > 0


def test_streams_batches_and_hooks_switch_as_generate_does(pair: Pair, prompts: dict[str, Inputs]) -> None:
    inputs, begin = prompts["image"], length_of(prompts["image"])
    decoder = Decoder(pair.target, points=three_points(as_draft(pair.draft), "sage", "eagle2", begin))
    expected = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert list(decoder.stream(**inputs, max_new_tokens=NEW_TOKENS)) == expected.sequences[0, begin:].tolist()
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    hooked = pair.target.generate(**inputs, **settings, custom_generate=decoder)
    assert torch.equal(hooked, pair.target.generate(**inputs, **settings))
    assert decoder.last_stats.rounds_by_point == expected.stats.rounds_by_point
    row = prompts["text"]["input_ids"][0]
    batch = {
        "input_ids": torch.stack([torch.nn.functional.pad(row, (4, 0)), torch.cat([row[:4], row])]),
        "attention_mask": torch.tensor([[0] * 4 + [1] * len(row), [1] * (4 + len(row))]),
    }
    points = three_points(as_draft(pair.draft), "sage", "eagle2", len(row))
    out = Decoder(pair.target, points=points).generate(**batch, max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, Decoder(pair.target).generate(**batch, max_new_tokens=NEW_TOKENS).sequences)
    for stats in out.row_stats:
        assert stats.rounds_by_point == rounds_by_context(stats, len(row)), "contexts have no padding"


def test_the_rest_of_the_condition_chooses_the_group(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """By image and tag; then the context chooses within the group."""
    draft, begin = as_draft(pair.draft), length_of(prompts["image"])
    points = [
        LoadedPoint(draft, tree=TREES["chain"], when=up_to(begin + 9, has_image=True)),
        LoadedPoint(None, when=Condition(has_image=True)),
        LoadedPoint(draft, tree=TREES["eagle2"], when=Condition(workload="read")),
        LoadedPoint(None, when=up_to(length_of(prompts["text"]) + 5)),
        LoadedPoint(draft, tree=TREES["sage"]),
    ]
    decoder = Decoder(pair.target, points=points)
    for name, tag, expected in (("image", "read", {0, 1}), ("text", "read", {2}), ("text", None, {3, 4})):
        stats = decoder.generate(**prompts[name], max_new_tokens=NEW_TOKENS, workload=tag).stats
        assert {number for number, rounds in enumerate(stats.rounds_by_point) if rounds} == expected
        assert stats.point == min(expected)


# ---------------------------------------------------------------------------------------------------- what a switch costs


@pytest.mark.parametrize("kind", ["independent", "star"])
def test_a_draft_reads_a_long_plain_stretch_in_several_forwards(
    pair: Pair, prompts: dict[str, Inputs], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later trees are the same. A forward pass has a largest size, so that it cannot read any stretch at once."""
    target = Target(pair.target)
    draft, inputs = new_draft(kind, pair, target), prompts["image"]
    points = [LoadedPoint(None, when=up_to(length_of(inputs) + 24)), LoadedPoint(draft, tree=TREES["eagle2"])]
    decoder, pending = Decoder(target, points=points), []
    expected = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).stats
    monkeypatch.setattr(cached_draft, "MAX_STEP", 7)
    read = type(draft).read_pending
    monkeypatch.setattr(type(draft), "read_pending", lambda self: pending.append(len(self._pending)) or read(self))
    found = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).stats
    assert found.plain_steps == 25 and pending[:4] == [7, 7, 7, 5]
    assert found.accepted_lengths == expected.accepted_lengths and found.verified_nodes == expected.verified_nodes


def test_a_plain_stretch_longer_than_any_forward(text_pair: Pair) -> None:
    inputs = {"input_ids": torch.arange(20)[None] % 40 + 5}
    for kind in ("independent", "star"):
        target = Target(text_pair.target)
        draft = as_draft(text_pair.draft) if kind == "independent" else agreeing_draft(kind, target, injection_layer=2)
        points = [LoadedPoint(None, when=up_to(400)), LoadedPoint(draft, tree=TREES["eagle2"])]
        out = Decoder(target, points=points).generate(**inputs, max_new_tokens=420)
        assert out.stats.plain_steps == 381 and out.stats.draft_forwards > 0
        assert torch.equal(out.sequences, Decoder(target).generate(**inputs, max_new_tokens=420).sequences)


def test_a_draft_that_no_round_can_use_is_left_alone(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """It is not prefilled for a point past the longest answer, and reads nothing after the last point that drafts."""
    inputs, begin = prompts["text"], length_of(prompts["text"])
    draft = as_draft(pair.draft)
    late = [LoadedPoint(None, when=up_to(begin + 30)), LoadedPoint(draft)]
    for num_tokens, is_used in ((31, False), (32, False), (33, True)):
        stats = Decoder(pair.target, points=late).generate(**inputs, max_new_tokens=num_tokens).stats
        assert (stats.draft_prefill_ms > 0.0) == is_used, "the draft's prefill takes time"
    early = [LoadedPoint(draft, when=up_to(begin + 5)), LoadedPoint(None)]
    stats = Decoder(pair.target, points=early).generate(**inputs, max_new_tokens=NEW_TOKENS).stats
    assert stats.plain_steps > 20 > 3 >= len(draft._pending)


def test_each_point_of_a_request_remembers_its_own_rounds(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """A request counts for the points that it reached. One that is paused leaves its part to plain steps."""
    inputs, begin = prompts["image"], length_of(prompts["image"])
    draft = as_draft(useless_draft())
    first = LoadedPoint(draft, tree={"policy": "chain", "depth": 1}, when=up_to(begin + 9))
    costly = LoadedPoint(draft, fallback=COSTLY)
    decoder = Decoder(pair.target, points=[first, costly])
    decoder.generate(**inputs, max_new_tokens=8)
    assert costly.fallback.history.num_failed == 0 and costly.fallback.history.saved == 0.0
    drafted = []
    for _ in range(4):
        stats = decoder.generate(**inputs, max_new_tokens=60).stats
        num_first = stats.rounds_by_point[0]
        assert min(stats.verified_nodes[:num_first]) > 0, "this point has no price, so it always drafts"
        drafted.append(sum(nodes > 0 for nodes in stats.verified_nodes[num_first:]))
    assert drafted[0] > 0 < drafted[1] and drafted[2:] == [0, 0]
    assert first.fallback.history.num_failed == 0 and costly.fallback.history.num_failed == 2
    pause = costly.fallback.history.pause
    decoder.generate(**inputs, max_new_tokens=8)
    assert costly.fallback.history.pause == pause


# ---------------------------------------------------------------------------------------------------------------- errors


def test_points_that_cannot_be_switched_are_refused(pair: Pair) -> None:
    target = Target(pair.target)
    draft, other = as_draft(pair.draft), as_draft(pair.target)
    build: Callable[..., Decoder] = lambda *points: Decoder(target, points=list(points))  # noqa: E731
    apart = "points: points 0 to 1 differ only in context_tokens, .* must share one draft and subnet"
    for point in (LoadedPoint(other), LoadedPoint(draft, visual_keep=0.5), LoadedPoint(draft, visual_ranking="even")):
        with pytest.raises(UserError, match=apart):
            build(LoadedPoint(draft, when=up_to(50)), point)
    with pytest.raises(UserError, match="points: point 0 has context_tokens, so the next point must have the same"):
        build(LoadedPoint(draft, when=up_to(50, workload="read")), LoadedPoint(draft))


def test_settings_that_a_later_point_cannot_honour_are_refused_if_it_can_be_reached(
    pair: Pair, prompts: dict[str, Inputs]
) -> None:
    inputs, begin = prompts["text"], length_of(prompts["text"])
    draft = as_draft(pair.draft)
    lossy = LoadedPoint(draft, verification={"kind": "wetap"})
    decoder = Decoder(pair.target, points=[LoadedPoint(draft, when=up_to(begin + 10)), lossy])
    settings = {**inputs, "repetition_penalty": 1.3}
    decoder.generate(**settings, max_new_tokens=12)
    with pytest.raises(UserError, match="wetap verification supports no logits processors"):
        decoder.generate(**settings, max_new_tokens=13)
