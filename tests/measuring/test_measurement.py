"""A measurement covers all parts of a table, and does not change the models."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from autotune.cost.roofline import estimate_table
from autotune.cost.surface import Surface
from autotune.cost.table import EVERY_ROW, TOKENS, CostTable
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.star import StarNetwork
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.measuring import request_timing
from autotune.measuring.measurement import kv_lengths_for, measure_costs
from autotune.measuring.request_timing import choose_prefill_threads, overhead_runs
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling.graph_runner import GraphRunner
from autotune.modeling.loading import RETRIEVAL, load_processor, reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_image, write_workload
from tests.tiny_models import NUM_VISUAL_TOKENS, Pair

SETTINGS = CostSettings(kv_lengths=(32, 64, 128), max_samples=2, time_limit_s=60)
FEW_LENGTHS = CostSettings(kv_lengths=(32, 128), max_samples=1, time_limit_s=60)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("measured")
    images = [write_image(folder / "0.png", 0)]
    lines = [
        {"prompt": text, "images": images[: number % 2], "split": "tune", "max_new_tokens": 8}
        for number, text in enumerate(
            ["Count.", "Read the digits row by row.", "Go on, please.", "Describe the picture."]
        )
    ]
    return load_workload(str(write_workload(folder, lines)), "tune")


@pytest.fixture(scope="module")
def decoders(pair: Pair) -> tuple[Decoder, Decoder]:
    """Decoders that are made before the measurement: SAGE, and plain decoding."""
    target = Target(pair.target)
    return Decoder(target, IndependentDraft(pair.draft), tree={"policy": "sage"}, visual_keep=0.5), Decoder(target)


def test_prefills_use_one_thread_where_several_wait_for_each_other(
    pair: Pair, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the mean of interleaved prefills: one long wait in four counts."""
    target, processor = Target(pair.target), load_processor(str(pair.target_folder))
    calls = {1: 0, 2: 0}
    now = [0.0]

    def prefill(ms_of: Callable[[int, int], float]) -> Callable[..., None]:
        def timed(*_: Any, **__: Any) -> None:
            threads = torch.get_num_threads()
            calls[threads] += 1
            now[0] += ms_of(threads, calls[threads])

        return timed

    monkeypatch.setattr(request_timing, "now_ms", lambda device: now[0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for ms_of, expected in (
            (lambda threads, call: 30 / threads, None),
            (lambda threads, call: 30 / threads if threads == 1 or call % 4 else 300, 1),
        ):
            monkeypatch.setattr(target, "prefill", prefill(ms_of))
            assert choose_prefill_threads(target, processor, workload) == expected
            assert calls[1] == calls[2] and torch.get_num_threads() == 2
        made = calls[1]
        assert choose_prefill_threads(target, processor, workload, until=time.monotonic() - 1) in (None, 1)
        assert calls[1] == made + 2, "a warm-up and one repetition, even past the deadline"
        torch.set_num_threads(1)
        assert choose_prefill_threads(target, processor, workload) is None
    finally:
        torch.set_num_threads(before)


def tokens_of(decoder: Decoder, workload: Workload, processor: Any) -> list[list[int]]:
    return [
        decoder.generate(**p.inputs(processor), **p.settings.generation).sequences[0].tolist() for p in workload.prompts
    ]


@pytest.fixture(scope="module")
def before(decoders: tuple[Decoder, Decoder], workload: Workload, processor: Any) -> list[list[int]]:
    return tokens_of(decoders[1], workload, processor)


@pytest.fixture(scope="module")
def table(
    pair: Pair, decoders: tuple[Decoder, Decoder], workload: Workload, processor: Any, before: list[list[int]]
) -> CostTable:
    decoder = decoders[0]
    assert decoder.draft is not None
    references = reference(str(pair.target_folder)), reference(str(pair.draft_folder))
    return measure_costs(
        decoder.target, references[0], [(decoder.draft, references[1])], processor, workload, settings=SETTINGS
    )


def sizes(surface: Surface) -> set[tuple[int, int]]:
    return {(point.tokens, point.kv_length) for point in surface.points}


def test_every_part_is_measured_and_named(table: CostTable, pair: Pair) -> None:
    """Every surface has a price at every size, and every part its samples and errors."""
    coarse = {(n, m) for n in SETTINGS.coarse_tokens for m in (32, 128)}
    (draft,) = table.drafts
    finest = ((table.verify, {*TOKENS, *EVERY_ROW}), (draft.draft_first, TOKENS), (draft.draft_level, TOKENS))
    for surface, tokens in finest:
        assert sizes(surface) == {(n, m) for n in tokens for m in SETTINGS.kv_lengths}
        assert coarse <= {(point.tokens, point.kv_length) for point in surface.measured}
    assert sizes(table.decode) == {(1, m) for m in SETTINGS.kv_lengths}
    of_draft = [f"{pair.draft_folder}: {part}" for part in ("draft_first", "draft_level", "prefill", "overhead")]
    assert list(table.parts) == ["decode", "verify", "prefill", *of_draft]
    for part in table.parts.values():
        assert part.held_out_error is not None and part.uncertainty is not None and part.uncertainty > 0
    assert len(draft.overhead.samples) == 4 * 4, "four kinds of trees, four prompts"
    for prefill in (table.prefill, draft.prefill):
        assert {tuple(counts) for _, *counts, _ in prefill.samples} == {(0, 0), (1, NUM_VISUAL_TOKENS)}
    assert table.device.key == fingerprint("cpu").key and not table.estimated and table.precision == "float32"
    assert (table.target, draft.draft) == (reference(str(pair.target_folder)), reference(str(pair.draft_folder)))
    assert table.target_shape is not None and draft.shape is not None
    assert table.target_shape.num_layers > draft.shape.num_layers and table.target_shape.vision_layers == 1


def test_models_decode_as_before(
    table: CostTable, decoders: tuple[Decoder, Decoder], before: list[list[int]], workload: Workload, processor: Any
) -> None:
    """Measuring leaves arbitrary numbers in the KV caches."""
    for decoder in decoders:
        assert tokens_of(decoder, workload, processor) == before


def test_slow_models_keep_the_time_limit(
    pair: Pair, workload: Workload, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every forward pass takes a twentieth of a second more on the clock, with which the limit is compared."""
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    skipped_s = 0.0

    def slow(model: Any, name: str) -> None:
        original = getattr(model, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal skipped_s
            skipped_s += 0.05
            return original(*arguments, **options)

        monkeypatch.setattr(model, name, call)

    for model in (target, draft):
        for name in ("evaluate_step", "prefill"):
            slow(model, name)

    def clock() -> float:
        """Seconds; the work beside the models takes 0.1 ms between two readings."""
        nonlocal skipped_s
        skipped_s += 1e-4
        return skipped_s

    def clock_ms(device: object) -> float:
        return 1e3 * clock()

    for module in ("step_bench", "request_timing"):
        monkeypatch.setattr(f"autotune.measuring.{module}.now_ms", clock_ms)
    monkeypatch.setattr("autotune.runtime.rounds.host_ms", lambda: 1e3 * clock())
    ids = [reference(str(path)) for path in (pair.target_folder, pair.draft_folder)]
    said: list[str] = []
    settings = replace(SETTINGS, time_limit_s=25.0, max_samples=30)
    models = target, ids[0], [(draft, ids[1])], processor, workload
    measure = partial(measure_costs, *models, say=said.append, clock=clock)
    table = measure(settings=settings)
    assert clock() < 1.1 * 25.0 and not said
    assert {n for n, _ in sizes(table.verify)} >= set(SETTINGS.coarse_tokens)
    assert len(table.prefill.samples) >= 3 and table.drafts[0].overhead.samples
    skipped_s = 0.0
    measure(settings=replace(settings, time_limit_s=2.0))
    (text,) = said
    assert re.match(r"the cost table took \d+ s, more than its limit of 2 s: the least, a sample of a few sizes", text)


def test_table_needs_a_draft(pair: Pair, workload: Workload, processor: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a cost table needs a draft; name one with --draft"):
        measure_costs(Target(pair.target), reference(str(pair.target_folder)), [], processor, workload)


def test_overhead_of_a_single_prompt(pair: Pair, processor: Any, workload: Workload) -> None:
    single = Workload(workload.name, workload.split, workload.prompts[:1])
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    runs = overhead_runs(target, draft, processor, single, lambda: 2.0, SETTINGS)
    assert all(rounds <= levels <= nodes and ms > 0 for rounds, levels, nodes, _, ms in runs)
    assert [run[3] / run[0] for run in runs] == [0, 0, 0, 1], "the last tree has retrieval"
    counts = np.array([run[:4] for run in runs], float) / [[run[0]] for run in runs]
    assert np.linalg.cond(counts / np.linalg.norm(counts, axis=0)) < 8, (
        "costs of rounds, levels, nodes and retrieval can be separated"
    )


def test_steps_and_rounds_are_timed_with_the_requests_own_settings(
    pair: Pair, processor: Any, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workload's, and the penalty of the model's generation config."""
    monkeypatch.setattr(pair.target.generation_config, "repetition_penalty", 1.3)
    sampled = Workload(workload.name, workload.split, workload.prompts[:1]).sampled(0.7)
    target, draft, calls = Target(pair.target), IndependentDraft(pair.draft), []

    def noting(owner: type, name: str, note: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(note(*a, **k)), original(*a, **k))[1])

    noting(RepetitionPenaltyLogitsProcessor, "__call__", lambda self, ids, scores: ("penalty", len(scores)))
    noting(TokenSampler, "proposal_scores", lambda self, logits, positions: ("coupled", len(logits)))
    noting(Decoder, "generate", lambda self, temperature, **_: temperature)
    overhead_runs(target, draft, processor, sampled, lambda: 2.0, SETTINGS)
    assert {0.7, ("penalty", 1)} < set(calls)
    benches: list[StepBench] = []
    monkeypatch.setattr(
        "autotune.measuring.measurement._choose_threads", lambda found, *_: benches.extend(found) or 1 / 0
    )
    ids = [reference(str(path)) for path in (pair.target_folder, pair.draft_folder)]
    with pytest.raises(ZeroDivisionError):
        measure_costs(target, ids[0], [(draft, ids[1])], processor, sampled, settings=SETTINGS)
    calls.clear()
    benches[0].decoder.rounds.decides_at_once = True
    with torch.inference_mode():
        benches[0].decode_ms(32), benches[0].verify_ms(6, 32), benches[0].draft_level_ms(3, 32)
    assert calls == [("penalty", 1), ("penalty", 6), ("coupled", 3)]


def test_kv_lengths_span_a_workload() -> None:
    for shortest, longest in ((5, 29), (20, 420), (150, 400), (1000, 5000), (100, 101), (31, 32)):
        lengths = kv_lengths_for(shortest, longest)
        assert lengths[0] <= max(16, shortest) and lengths[-1] >= longest
        assert lengths[0] < lengths[1] < lengths[2]


def test_captured_steps_have_capture_sizes_and_one_capture_for_all_kv_lengths(
    pair: Pair, workload: Workload, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, prepared = set(), GraphRunner.prepared
    monkeypatch.setattr(GraphRunner, "prepared", lambda *args: (keys.add(args[1]), prepared(*args))[1])
    monkeypatch.setattr("autotune.measuring.measurement.overhead_runs", lambda *_, **__: [])
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    settings = replace(SETTINGS, capture_sizes=(4, 128), kv_lengths=(257, 400, 600), mode="fixed")
    ids = [reference(str(path)) for path in (pair.target_folder, pair.draft_folder)]
    table = measure_costs(target, ids[0], [(draft, ids[1])], processor, workload, settings=settings)
    assert table.capture_sizes == (4, 128)
    assert {key.layout.num_tokens for key in keys} == {1, 4, 128}, "1 is a plain step"
    assert len(keys) == 3 + 3, "the target's, levels of the draft, and its pending tokens, of which it pads many to 128"
    for surface in (table.verify, table.drafts[0].draft_first, table.drafts[0].draft_level):
        assert sizes(surface) == {(n, m) for n in (4, 128) for m in (257, 400, 600)}


def test_a_draft_without_a_model_is_timed_like_others(pair: Pair, workload: Workload, processor: Any) -> None:
    """Lookups at every size, by KV length, and the building of the index; on other devices they cost nothing."""
    target, named = Target(pair.target), reference(RETRIEVAL)
    draft = load_draft(RETRIEVAL, target)
    table = measure_costs(
        target, reference(str(pair.target_folder)), [(draft, named)], processor, workload, settings=FEW_LENGTHS
    )
    (costs,) = table.drafts
    assert costs.draft == named
    assert {(1, 32), (129, 128)} <= sizes(costs.draft_first) & sizes(costs.draft_level)
    assert costs.prefill.samples and costs.overhead.samples
    assert costs.shape is not None and not costs.shape.has_forward_pass
    estimated = estimate_table(
        "h100",
        target=table.target,
        target_shape=target.shape,
        drafts=[(named, Subnet(), costs.shape)],
        precision="float32",
        measured=[table.model_copy(update={"device": table.device.model_copy(update={"name": "h100"})})],
    )
    assert estimated.num_anchors == 1
    assert {point.latency_ms for point in estimated.drafts[0].draft_level.points} == {0.0}


def test_subnets_have_costs_of_their_own(pair: Pair, workload: Workload, processor: Any, tmp_path: Path) -> None:
    """Half of the heads: fewer parameters and half of the KV cache. A tenth of the visual tokens: a shorter KV
    cache.
    """
    target = Target(pair.target)
    StarNetwork.new({"num_heads": 4, "head_size": 8, "mlp_size": 32}, target, source="test").save(tmp_path)
    whole, half = (load_draft(str(tmp_path), target, Subnet(heads=heads)) for heads in (None, 0.5))
    references = reference(str(pair.target_folder)), reference(str(tmp_path))
    drafts = [(draft, references[1]) for draft in (whole, half)]
    table = measure_costs(target, references[0], drafts, processor, workload, settings=FEW_LENGTHS)
    rows = [table.costs_of(references[1], subnet) for subnet in (Subnet(), Subnet(heads=0.5))]
    assert [row.subnet.heads for row in rows] == [None, 0.5]
    assert [row.shape.crossing_share for row in rows if row.shape is not None] == [1 / 3, 1 / 3]
    # Three blocks of 4 or 2 heads of 8 numbers, keys and values, 4 bytes each.
    shapes = [row.shape for row in rows if row.shape is not None]
    assert [shape.kv_bytes_per_token for shape in shapes] == [3 * 2 * 4 * 8 * 4, 3 * 2 * 2 * 8 * 4]
    assert shapes[0].text_parameters - shapes[1].text_parameters == 3 * 4 * 2 * 8 * 32
    assert all((129, 128) in sizes(row.draft_level) for row in rows)
    seen = next(prompt for prompt in workload.prompts if prompt.pixels).inputs(processor)
    lengths = []
    for keep in (1.0, 0.1):
        Decoder(target, whole, tree={"policy": "chain", "depth": 1}, visual_keep=keep).generate(
            **seen, max_new_tokens=2
        )
        lengths.append(whole.length)
    assert lengths[0] - lengths[1] == NUM_VISUAL_TOKENS - 2
