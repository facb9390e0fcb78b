"""Prepares forward passes ahead of requests, so that no request and no measurement captures anything."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from autotune.drafters.cached_draft import CachedDraft, as_cached
from autotune.execution import round_up
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.points import LoadedPoint
from autotune.runtime.rounds import Round
from autotune.runtime.session import close_session
from autotune.trees.limits import MAX_LEVEL_STEP

Report = Callable[[int, int], None]
"""Called as report(done, total)."""
Job = Callable[[], object]


class Preparation(NamedTuple):
    """Result of a preparation."""

    num_captures: int
    memory_bytes: int
    """Memory of all captures of the device, those of earlier preparations and of other decoders included."""
    seconds: float


class Preparer:
    """Runs every forward pass that requests of a decoder can need, on caches of arbitrary contents.

    Args:
        points: operating points.
        rounds: mode and capture sizes.
        capacity: KV cache length that requests can reach, trees included.
    """

    def __init__(self, target: Target, points: Sequence[LoadedPoint], rounds: Round, capacity: int) -> None:
        self.target, self.points, self.mode, self.capacity = target, points, rounds.mode, capacity
        self.capture_sizes = tuple(rounds.capture_sizes)

    @torch.inference_mode()
    def run(self, report: Report) -> Preparation:
        memory, started = graph_memory(self.target.device), time.perf_counter()
        before = memory.num_kept
        models: list[CachedModel] = [self.target]
        for draft in {point.draft for point in self.points}:
            if (cached := as_cached(draft)) is not None:
                models.append(cached)
        for model in models:
            close_session(model)
        with ExitStack() as cleanup:
            for model in models:
                cleanup.callback(model.use_mode, model.mode)
                cleanup.callback(model.reserve, 1)
                model.use_mode(self.mode)
                model.reserve(self.capacity)
                if isinstance(model, TreeModel):  # allocates the cache, which no capture may do
                    token = torch.zeros(1, dtype=torch.long, device=model.device)
                    model.prefill_prompt(EncodedPrompt(token, token.bool()))
            cleanup.callback(setattr, self.target, "output_layers", self.target.output_layers)
            jobs = list(itertools.chain(*map(self._jobs, self.points)))
            for number, job in enumerate(jobs):
                job()
                report(number + 1, len(jobs))
        return Preparation(memory.num_kept - before, memory.memory_bytes, time.perf_counter() - started)

    def _jobs(self, point: LoadedPoint) -> Iterator[Job]:
        draft, target = point.draft, self.target
        layers = () if draft is None else draft.aux_layers
        lengths = self._lengths(target)
        if draft is None or point.fallback.price is not None:
            yield from (self._target_step(layers, 1, length) for length in lengths)
        if draft is None:
            return
        sizes = self._sizes(point.policy.max_nodes + 1)
        yield from (self._target_step(layers, n, length) for n in sizes for length in lengths)
        if (cached := as_cached(draft)) is not None:
            yield from self._draft_jobs(cached, point)

    def _draft_jobs(self, draft: CachedDraft, point: LoadedPoint) -> Iterator[Job]:
        policy = point.policy
        pending = self._sizes(draft.num_pending_after(policy.max_depth + 1))  # accepted nodes and the next root
        levels = [] if draft.drafts_blocks else self._sizes(min(policy.max_width, MAX_LEVEL_STEP))
        sizes = sorted({*pending, *levels})
        for length in self._lengths(draft):
            kinds = itertools.product(sizes, draft.pruned_lengths(point.visual_keep, length), draft.position_axes)
            yield from (self._draft_step(draft, n, length, num_pruned, axes) for n, num_pruned, axes in kinds)

    def _lengths(self, model: CachedModel) -> list[int]:
        """Padded KV lengths that requests reach."""
        num_tokens = self.capacity + model.num_block_tokens
        return [length for length in model.padded_lengths if length <= model.padded_length(num_tokens)]

    def _sizes(self, largest: int) -> list[int]:
        """Capture sizes of steps of 1 to ``largest`` tokens."""
        return sorted({round_up(size, self.capture_sizes) for size in range(1, largest + 1)})

    def _target_step(self, layers: tuple[int, ...], num_tokens: int, length: int) -> Job:
        def run() -> None:
            target = self.target
            target.output_layers = layers
            for axes in target.position_axes:
                target.set_length(length - num_tokens, axes=axes)
                target.forward(Step.causal(np.zeros(num_tokens, np.int64), target.mask_value))

        return run

    def _draft_step(self, draft: CachedDraft, num_tokens: int, length: int, num_pruned: int, axes: int) -> Job:
        def run() -> None:
            draft.capture_sizes = self.capture_sizes
            # One token short of the padded length, so that one pruned token still fits.
            before = length - 1 - num_tokens - draft.num_block_tokens
            draft.prepare_step(before, num_pending=num_tokens, num_pruned=num_pruned, axes=axes)
            draft.read_pending()

        return run
