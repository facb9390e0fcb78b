"""Measures a cost table through the very code that decodes: ``Decoder`` steps and draft proposals, at chosen sizes.

Sizes are visited in random order, over and over, draft and target taking turns as they do in a round, so that neither a
warm cache nor a drifting clock favours one size. The overhead outside the models is what real decoding showed beyond
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autotune.cost.device import fingerprint
from autotune.cost.table import TOKENS, CostTable, DraftCosts, Overhead, Point, PrefillCost, Surface, fit_prefill
from autotune.drafters.checkpoint import LoadedDraft
from autotune.errors import UserError
from autotune.provenance import ModelReference, stamp
from autotune.runtime.decoder import Decoder
from autotune.runtime.prompt import Prompt
from autotune.runtime.request import Request
from autotune.runtime.target import Target
from autotune.runtime.threads import limited_threads
from autotune.runtime.token_rule import TokenRule
from autotune.trees.tree import CHILD, MAX_STEP, ROOT, Tree, add_child, new_tree, plant
from autotune.workload import Workload

Report = Callable[[int, int], None]
Samples = dict[tuple[int, int], list[float]]
"""Milliseconds by (tokens, KV length)."""

HELD_OUT_TOKENS = (5, 11, 20, 40)
WARM_UPS = 3
THREAD_REPEATS = 15


@dataclass(frozen=True)
class ProfileSettings:
    """How much to measure."""

    repeats: int = 12
    """Samples of every size."""
    kv_lengths: tuple[int, ...] = (160, 256, 400)
    held_out_kv_length: int = 208
    buckets: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to: where there are any, they are the sizes measured."""
    seed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sizes of the steps measured."""
        return self.buckets or TOKENS

    @property
    def held_out_tokens(self) -> tuple[int, ...]:
        """Sizes between those that test the interpolation; prepared sizes need none."""
        return () if self.buckets else HELD_OUT_TOKENS


def kv_lengths_for(shortest: int, longest: int) -> tuple[tuple[int, ...], int]:
    """Three KV lengths that span a workload, and one between them for testing."""
    first = max(16, shortest)
    last = max(32, longest, first + 8)
    lengths = (first, (first + last) // 2, last)
    return lengths, (lengths[0] + lengths[1]) // 2


def profile(
    target: Target,
    target_reference: ModelReference,
    drafts: list[tuple[LoadedDraft, ModelReference]],
    processor: Any,
    workload: Workload,
    *,
    settings: ProfileSettings | None = None,
    report: Report | None = None,
) -> CostTable:
    """Measure target and drafts on the device where they are. ``workload`` gives prompts for prefills and the overhead.

    Raises:
        UserError: no draft was given.
    """
    if not drafts:
        raise UserError("a cost table needs a draft; name one with --draft")
    settings = settings or ProfileSettings()
    steps = settings.repeats * len(drafts) + 4 * len(drafts)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(min(done, steps), steps)

    verify: Samples = {}
    decode: Samples = {}
    benches = [_Bench(target, draft, settings) for draft, _ in drafts]
    threads = choose_threads(benches)
    commits: list[Samples] = [{} for _ in drafts]
    proposes: list[Samples] = [{} for _ in drafts]
    for _ in range(settings.repeats):
        for bench, commit, propose in zip(
            benches, commits, proposes, strict=True
        ):  # drafts are compared: they take turns
            with limited_threads(threads):
                bench.sweep(commit, propose, verify, decode)
            advance()
    costs = []
    prefill = None
    for (draft, draft_reference), commit, propose in zip(drafts, commits, proposes, strict=True):
        target_prefill, draft_prefill = measure_prefills(target, draft, processor, workload)
        prefill = prefill or target_prefill
        advance()
        costs.append(
            DraftCosts(
                draft=draft_reference,
                heads=draft.subnet.heads,
                num_parameters=draft.num_parameters,
                cache_bytes_per_token=draft.cache_bytes_per_token,
                commit=_surface(commit, settings),
                propose=_surface(propose, settings),
                prefill=draft_prefill,
                overhead=measure_overhead(target, draft, processor, workload, threads=threads),
            )
        )
        for _ in range(3):
            advance()
    assert prefill is not None
    return CostTable(
        provenance=stamp(),
        device=fingerprint(str(target.device)),
        precision=str(target.dtype).removeprefix("torch."),
        buckets=settings.buckets,
        threads=threads,
        target=target_reference,
        decode=_surface(decode, settings),
        verify=_surface(verify, settings),
        prefill=prefill,
        drafts=costs,
    )


def _surface(samples: Samples, settings: ProfileSettings) -> Surface:
    points = [Point(tokens=n, kv_length=m, samples_ms=ms) for (n, m), ms in sorted(samples.items())]
    return Surface(
        points=[point for point in points if point.kv_length in settings.kv_lengths],
        held_out=[point for point in points if point.kv_length not in settings.kv_lengths],
    )


class _Bench:
    """Times single steps of a decoder whose caches hold whatever numbers: latency does not depend on them."""

    def __init__(self, target: Target, draft: LoadedDraft, settings: ProfileSettings) -> None:
        capacity = max(settings.kv_lengths) + 2 * MAX_STEP
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.rule = TokenRule(device=target.device)
        with torch.inference_mode():
            target.reserve(capacity)
            draft.reserve(capacity)
            self.draft = draft
            self.decoder = Decoder(target, draft, buckets=settings.buckets)
            draft.buckets = settings.buckets
            self.tree = self.decoder._grower.tree = new_tree(MAX_STEP)
            for _ in range(WARM_UPS):
                self.sweep({}, {}, {}, {})

    def _request(self) -> Request:
        """Of nobody: the caches hold no prompt."""
        tokens = torch.zeros(1, dtype=torch.long)
        return Request(self.rule, Prompt(tokens, tokens.bool()), tokens[None], 1, frozenset())

    def _points(self) -> Iterator[tuple[int, int]]:
        """All sizes of a sweep in random order, the held-out ones among them."""
        points = [(n, m) for n in self.settings.tokens for m in self.settings.kv_lengths]
        points += [(n, self.settings.held_out_kv_length) for n in self.settings.held_out_tokens]
        self.random.shuffle(points)
        return iter(points)

    @torch.inference_mode()
    def sweep(
        self,
        commit: Samples,
        propose: Samples,
        verify: Samples,
        decode: Samples,
    ) -> None:
        """Samples of every size, in the order of rounds: a verification, the draft's first forward behind it, two draft
        levels behind that; then plain steps in a row, as in plain decoding.
        """
        target = self.decoder.target
        target.watched = self.draft.reads
        for verified, first, *levels in zip(*(self._points() for _ in range(4)), strict=True):
            verify.setdefault(verified, []).append(self._time_verify(*verified))
            commit.setdefault(first, []).append(self._time_propose(*first))
            for level in levels:
                propose.setdefault(level, []).append(self._time_propose(*level))
        target.watched = ()  # plain decoding needs nobody's features
        for m in (*self.settings.kv_lengths, self.settings.held_out_kv_length):
            samples = [self._time_decode(m + i) for i in range(4)]
            decode.setdefault((1, m), []).extend(samples[1:])

    def plain_ms(self) -> float:
        """Of a plain step."""
        self.decoder.target.watched = ()
        return self._time_decode(self.settings.kv_lengths[0])

    def round_ms(self) -> float:
        """Of a round of usual size: a chain and a small tree."""
        self.decoder.target.watched = self.draft.reads
        m = self.settings.kv_lengths[0]
        levels = sum(self._time_propose(n, m) for n in (1, 1, 1, 4, 4))
        return levels + self._time_verify(6, m) + self._time_verify(12, m)

    def _time_propose(self, n: int, m: int) -> float:
        draft, tree = self.draft, self.tree
        draft.cache.length = m
        _plant_star(tree, n)
        frontier = np.arange(1, n + 1)
        draft.begin_round()
        clock = self.decoder._clock
        started = clock()
        draft.propose(tree, frontier, 10)
        return clock() - started

    def _time_verify(self, n: int, m: int) -> float:
        self.decoder.target.cache.length = m
        _plant_star(self.tree, n - 1)
        request = self._request()
        self.decoder._verify(request)
        return request.stats.verify_ms

    def _time_decode(self, m: int) -> float:
        self.decoder.target.cache.length = m
        request = self._request()
        self.decoder._plain_step(1, None, request)
        return request.stats.verify_ms


def choose_threads(benches: list[_Bench]) -> int | None:
    """The number of CPU threads with which steps are fastest: of those whose plain step is within 3 % of the fastest, so that
    the baseline of every speedup is at its best, the one with the fastest rounds. None where there is no choice.
    """
    available = torch.get_num_threads()
    if benches[0].decoder.target.device.type != "cpu" or available == 1:
        return None
    choices = sorted({1, max(1, available // 2), available})
    plain: dict[int, list[float]] = {number: [] for number in choices}
    rounds: dict[int, list[float]] = {number: [] for number in choices}
    for _ in range(THREAD_REPEATS):
        for number in choices:
            for bench in benches:
                with limited_threads(number), torch.inference_mode():
                    plain[number].append(bench.plain_ms())
                    rounds[number].append(bench.round_ms())
    steps = {number: float(np.median(plain[number])) for number in choices}
    fast = [number for number in choices if steps[number] <= 1.03 * min(steps.values())]
    return min(fast, key=lambda number: float(np.median(rounds[number])))


def _plant_star(tree: Tree, num_children: int) -> None:
    """A root with children: the shape of a tree does not matter to its latency, its size does."""
    plant(tree, 1, 0)
    proposals = np.zeros((1, max(1, num_children)), CHILD)
    for rank in range(num_children):
        add_child(tree, ROOT, rank, proposals)


def measure_prefills(
    target: Target, draft: LoadedDraft, processor: Any, workload: Workload
) -> tuple[PrefillCost, PrefillCost]:
    """Prefill latencies of target and draft over the workload's shortest and longest prompts and some visual keep
    ratios.
    """
    clock = Decoder(target)._clock
    of_target: list[tuple[int, int, float]] = []
    of_draft: list[tuple[int, int, float]] = []
    kept = draft.visual_keep
    target.watched = draft.reads
    with torch.inference_mode():
        for attempt in range(3):
            for prompt in workload.prompts[: 2 * len(workload.tasks)]:
                inputs = prompt.inputs(processor, target.device)
                length = inputs["input_ids"].shape[1]
                target.reserve(length)
                started = clock()
                read = target.encode(inputs).prompts
                scores = target.prefill(read[0], rank_visual_tokens=True).visual_scores
                sees = read[0].num_visual_tokens > 0
                of_target.append((length, int(sees), clock() - started))
                for draft.visual_keep in (1.0, 0.5, 0.1) if sees else (1.0,):
                    started = clock()
                    (read_by_draft,) = draft.prompts(inputs, read)
                    draft.prefill(read_by_draft, scores, capacity=length + MAX_STEP)
                    of_draft.append((draft.length, int(sees), clock() - started))
            if attempt == 0:  # warm-up
                of_target.clear()
                of_draft.clear()
    draft.visual_keep = kept
    return fit_prefill(of_target), fit_prefill(of_draft)


def measure_overhead(
    target: Target, draft: LoadedDraft, processor: Any, workload: Workload, *, threads: int | None = None
) -> Overhead:
    """Real decoding with shallow and deep trees: time outside the models, as so much a round and so much a draft level."""
    from scipy.optimize import nnls

    rows, outside = [], []
    for tree in ({"policy": "chain", "depth": 1}, {"policy": "chain", "depth": 8}, {"policy": "sage"}):
        decoder = Decoder(target, draft, tree=tree, threads=threads)
        for number, prompt in enumerate((*workload.prompts[:1], *workload.prompts[:4])):  # the first twice: warm-up
            inputs = prompt.inputs(processor, target.device)
            stats = decoder.generate(**inputs, max_new_tokens=32).stats
            if number > 0 and stats.rounds > 0:
                rows.append((stats.rounds, stats.draft_forwards))
                outside.append(stats.overhead_ms)
    per_round, per_level = nnls(np.array(rows, np.float64), np.array(outside))[0]
    return Overhead(round_ms=float(per_round), level_ms=float(per_level))
