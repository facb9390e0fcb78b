"""Captured steps decode the trees and tokens of eager ones, and the host sends and awaits little."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.documents.execution import DEFAULT_CAPTURE_SIZES, KV_LENGTH_STEP
from autotune.drafters.cached_draft import CachedDraft
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling.compiled_layers import UncompiledNotice
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from autotune.runtime.rounds import Round
from autotune.runtime.stats import DecodingStats
from autotune.trees.fallback import RoundPrice
from tests.drafters.test_eagle3 import write_head
from tests.drafters.test_feature_draft import KINDS, agreeing_draft
from tests.drafters.test_mtp import random_draft as random_mtp
from tests.rehearsal import Counts, Rehearsal
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair, inputs_on, on_device

STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "depth": 4},
    "static": {"policy": "static", "paths": STATIC},
    "eagle2": {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10},
    "sage": {"policy": "sage", "n_max": 10, "d_max": 4},
    "priced": {"policy": "priced", "depth": 4, "budget": 10},
}
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4})
PENALTIES = {"repetition_penalty": 1.05, "min_new_tokens": 4}
FEW_SIZES = {"capture_sizes": (1, 8, 16)}


def make_draft(kind: str, pair: Pair, target: Target, folder: Path) -> Any:
    if kind == "independent":
        return as_draft(pair.draft)
    if kind == "eagle3":
        return load_draft(str(write_head(folder / "head", "speculators/qwen3-8b")), target)
    if kind == "mtp":
        return random_mtp(target)
    if kind == "retrieval":
        return RetrievalDraft()
    return agreeing_draft(kind, target, injection_layer=2 if kind == "star" else 4)


def two_decoders(target: Target, draft: Any, tree: dict[str, Any], **options: Any) -> tuple[Decoder, Decoder]:
    """One with eager steps and one with steps over static buffers, with the same target and draft."""
    options = {"tree": tree, **options}
    return Decoder(target, draft, mode="eager", **options), Decoder(target, draft, mode="fixed", **options)


def assert_same(eager: Decoder, other: Decoder, inputs: Inputs, **settings: Any) -> DecodingStats:
    """Both decoders emit the same tokens and counts."""
    expected = eager.generate(**inputs, **settings)
    found = other.generate(**inputs, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("accepted_lengths", "verified_nodes", "target_forwards", "draft_forwards", "plain_steps"):
        assert getattr(found.stats, name) == getattr(expected.stats, name), name
    assert found.stats.acceptance_counts.to_json() == expected.stats.acceptance_counts.to_json()
    return found.stats


@pytest.mark.parametrize("kind", ["independent", "eagle3", "mtp", *KINDS])
def test_steps_over_static_buffers_are_those_of_eager_mode(
    pair: Pair, prompts: dict[str, Inputs], kind: str, tmp_path: Path
) -> None:
    """With cross-attention blocks, which have KV slots and a mask of their own where visual tokens are pruned."""
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    num_accepted = 0
    for number, tree in enumerate(TREES.values(), start=len(kind)):  # greedy and sampled in turn
        eager, fixed = two_decoders(target, draft, tree, capture_sizes=(1, 3, 8, 16, 64), visual_keep=0.5)
        settings, name = SETTINGS[number % 2], ("image", "text")[number % 2]
        num_accepted += sum(assert_same(eager, fixed, prompts[name], max_new_tokens=14, **settings).accepted_lengths)
    assert num_accepted > 5 or kind in ("eagle3", "mtp"), "random heads are hardly ever right; the others must be"


def test_a_round_that_evaluates_more_nodes_than_usual_has_a_wider_mask(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CachedDraft, "least_columns", 0)
    eager, fixed = two_decoders(
        Target(pair.target), pair.draft, {"policy": "eagle2", "depth": 6, "k": 16, "budget": 120}
    )
    assert_same(eager, fixed, prompts["text"], max_new_tokens=8)
    keys: Any = fixed.draft._graph_runners["fixed"]._captured  # type: ignore[union-attr]
    assert {key.layout.num_columns for key in keys} >= {64, 128}


def test_one_capture_serves_every_length_until_the_capacity_grows(text_pair: Pair) -> None:
    target, capacities = Target(text_pair.target), set()
    draft = agreeing_draft("star", target, injection_layer=2)
    eager, fixed = two_decoders(target, draft, TREES["eagle2"])
    for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (1010, 40)):
        assert_same(eager, fixed, {"input_ids": torch.arange(length)[None] % 40 + 5}, max_new_tokens=num_tokens)
        capacities.add(target.cache.capacity)
        keys: Any = target._graph_runners["fixed"]._captured
        sizes = [key.layout.num_tokens for key in keys]
        assert len(sizes) == len(set(sizes)) and {*sizes} <= {*DEFAULT_CAPTURE_SIZES}
    assert len(capacities) > 1


def test_the_context_to_the_last_token(text_pair: Pair) -> None:
    inputs = {"input_ids": torch.from_numpy(np.random.default_rng(1).integers(4, VOCABULARY_SIZE, (1, 2040)))}
    assert_same(*two_decoders(Target(text_pair.target), text_pair.draft, TREES["static"]), inputs, max_new_tokens=8)


def test_plain_steps_between_rounds(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """After a plain step the draft has more pending tokens than after a round."""
    target = Target(pair.target)
    price = RoundPrice(round_steps=4.5, level_steps=0.0, node_steps=0.0)
    options = {"fallback": price, "capture_sizes": (1, 4, 16)}
    for kind in ("independent", "dream"):
        decoders = two_decoders(target, make_draft(kind, pair, target, tmp_path), TREES["eagle2"], **options)
        stats = assert_same(*decoders, prompts["text"], max_new_tokens=60)
        assert 0 < stats.plain_steps < stats.target_forwards


# -------- on a device


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize(
    "kind",
    ["independent", "mtp", "dream", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("eagle3", "specvlm"))],
)
def test_captured_steps_depend_on_their_buffers_alone(
    gpu: str, pair: Pair, prompts: dict[str, Inputs], kind: str, tmp_path: Path
) -> None:
    """The same captures decode requests of different lengths and settings as eager steps do."""
    pair = on_device(pair, gpu)
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    options = {**FEW_SIZES, "visual_keep": 0.5}
    tree = TREES["static" if kind in ("independent", "dream") else "eagle2"]
    eager = Decoder(target, draft, tree=tree, mode="eager", **options)
    captured = Decoder(target, draft, tree=tree, **options)
    assert captured.mode == "cuda-graph", "the default on a GPU"
    inputs = {name: inputs_on(one, gpu) for name, one in prompts.items()}
    for name, settings in (
        ("text", {}),
        ("image", {"temperature": 1.0, "seed": 1}),
        ("text", {"temperature": 0.7, "top_k": 7, "seed": 2}),
        ("image", {"repetition_penalty": 1.3, "min_new_tokens": 5}),
    ):
        assert_same(eager, captured, inputs[name], max_new_tokens=7, **settings)
    before = graph_memory(target.device).num_kept
    captured.generate(**inputs["text"], max_new_tokens=9)
    assert graph_memory(target.device).num_kept == before


def test_a_capture_is_of_the_target_s_device(rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs]) -> None:
    """``--device cuda:1``, while ``cuda:0`` is current."""
    eager = Decoder(pair.target, pair.draft, tree=TREES["chain"], mode="eager")
    expected = eager.generate(**prompts["image"], max_new_tokens=12)
    pair, inputs = on_device(pair, "cuda:1"), inputs_on(prompts["image"], "cuda:1")
    found = Decoder(pair.target, pair.draft, tree=TREES["chain"], **FEW_SIZES).generate(**inputs, max_new_tokens=12)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    assert rehearsal.counts.captures > 0


@contextlib.contextmanager
def counted_parts(rehearsal: Rehearsal) -> Iterator[dict[str, list[Counts]]]:
    """Counts of every draft level, of every round beside its levels, and of what a request does between its rounds."""
    counts: dict[str, list[Counts]] = {"level": [], "verification": []}
    propose, run = CachedDraft.propose, Round.run

    def counted_propose(*given: Any) -> Any:
        with rehearsal.counted() as found:
            proposals = propose(*given)
        counts["level"].append(found)
        return proposals

    def counted_run(*given: Any) -> Any:
        num_levels = len(counts["level"])
        with rehearsal.counted() as found:
            result = run(*given)
        for level in counts["level"][num_levels:]:
            found = found - level
        counts["verification"].append(found)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedDraft, "propose", counted_propose)
        patch.setattr(Round, "run", counted_run)
        yield counts


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *itertools.product(("independent", "star", "eagle3"), ({}, {"temperature": 1.0, "seed": 3})),
        *((kind, {}) for kind in ("mtp", "dream", "specvlm")),
        ("eagle3", {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "seed": 3}),
        *(("star", {**PENALTIES, **more}) for more in ({}, {"temperature": 1.0, "top_p": 0.9})),
    ],
)
def test_uploads_waits_and_replays_of_a_round(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs], kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A level is one copy in, one out, one replay and one wait, and dispatches no operation; so are the verification
    and all commits, or two copies in where they sample.
    """
    pair, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["image"], "cuda:0")
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    names = ("chain", "eagle2", "sage", "priced")
    if kind in ("independent", "star", "eagle3"):  # which have several settings
        names = names[len(settings) // 2 % 2 :: 2]
    for name in names:
        decoder = Decoder(target, draft, tree=TREES[name], visual_keep=0.5, **FEW_SIZES)
        decoder.generate(**inputs, max_new_tokens=8, **settings)  # captures
        with counted_parts(rehearsal) as counts, rehearsal.counted() as whole:
            stats = decoder.generate(**inputs, max_new_tokens=8, **settings).stats
        assert whole.captures == 0
        assert len(counts["level"]) == stats.draft_forwards and len(counts["verification"]) == stats.rounds > 0
        for level in counts["level"]:
            assert (level.to_device, level.to_host, level.waits, level.replays) == (1, 1, 1, 1), name
            assert level.operations == 0, name
        for verification in counts["verification"]:
            assert (verification.waits, verification.replays) == (1, 1), name
            assert verification.to_device == (2 if "temperature" in settings else 1), name


def test_a_request_waits_for_its_levels_rounds_and_prefills_alone(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs], processor: Any
) -> None:
    """Clocks, penalties and stop strings included. A plain step is one copy to the device."""
    pair, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["text"], "cuda:0")
    target, draft = Target(pair.target), as_draft(pair.draft)
    more = {**PENALTIES, "stop_strings": "never"}
    for mode, given, settings in (("eager", draft, {}), ("cuda-graph", draft, more), ("cuda-graph", None, more)):
        decoder = Decoder(target, given, tree=TREES["chain"], mode=mode, processor=processor, **FEW_SIZES)
        extra = []
        for number in (6, 11):
            decoder.generate(**inputs, max_new_tokens=number)
            with rehearsal.counted() as counts:
                stats = decoder.generate(**inputs, max_new_tokens=number, **settings).stats
            uploads = counts.to_device - stats.rounds if given is None else 0
            extra.append((counts.waits - stats.rounds - stats.draft_forwards, uploads))
        assert extra[0] == extra[1], "a request's own, whatever its length"


def test_steps_that_cannot_be_compiled_are_captured_as_they_are(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs]
) -> None:
    """A rehearsed device cannot be traced. The reason is said once for the target and once for the draft."""
    pair, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["text"], "cuda:0")
    target, draft = Target(pair.target), agreeing_draft("dream", Target(pair.target), injection_layer=4)
    eager = Decoder(target, draft, tree=TREES["chain"], mode="eager", **FEW_SIZES)
    with pytest.warns(UncompiledNotice, match="are not compiled .* captured as in mode cuda-graph") as caught:
        compiled = Decoder(target, draft, tree=TREES["chain"], mode="compiled", **FEW_SIZES)
        assert compiled.prepare(200).num_captures > 0
        captures = rehearsal.counts.captures
        assert_same(eager, compiled, inputs, max_new_tokens=10)
    assert len([one for one in caught if one.category is UncompiledNotice]) == 2
    assert compiled.mode == "compiled" and rehearsal.counts.captures == captures
