"""Prepares forward passes ahead of requests, so that no request and no measurement captures anything."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
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


@torch.inference_mode()
def prepare(target: Target, points: Sequence[LoadedPoint], rounds: Round, capacity: int, report: Report) -> Preparation:
    """Run every forward pass that requests of a decoder can need, on caches of arbitrary contents.

    Args:
        rounds: mode and capture sizes.
        capacity: KV cache length that requests can reach, trees included.
    """
    memory, started = graph_memory(target.device), time.perf_counter()
    before = memory.num_kept
    models: list[CachedModel] = [target]
    for draft in {point.draft for point in points}:
        if (cached := as_cached(draft)) is not None:
            models.append(cached)
    for model in models:
        close_session(model)
    with ExitStack() as cleanup:
        for model in models:
            cleanup.callback(model.use_mode, model.mode)
            cleanup.callback(model.reserve, 1)
            model.use_mode(rounds.mode)
            model.reserve(capacity)
            if isinstance(model, TreeModel):  # allocates the cache, which no capture may do
                token = torch.zeros(1, dtype=torch.long, device=model.device)
                model.prefill_prompt(EncodedPrompt(token, token.bool()))
        cleanup.callback(setattr, target, "output_layers", target.output_layers)
        jobs = [job for point in points for job in _jobs(target, point, rounds.capture_sizes, capacity)]
        for number, job in enumerate(jobs):
            job()
            report(number + 1, len(jobs))
    return Preparation(memory.num_kept - before, memory.memory_bytes, time.perf_counter() - started)


def _jobs(target: Target, point: LoadedPoint, capture_sizes: Sequence[int], capacity: int) -> Iterator[Job]:
    """The forward passes of requests that one point decodes."""
    draft, policy = point.draft, point.policy
    step = partial(_target_step, target, () if draft is None else draft.aux_layers)
    lengths = _lengths(target, capacity)
    if draft is None or point.fallback.price is not None:
        yield from (partial(step, 1, length) for length in lengths)
    if draft is None:
        return
    sizes = _sizes(policy.max_nodes + 1, capture_sizes)
    yield from (partial(step, size, length) for size in sizes for length in lengths)
    if (cached := as_cached(draft)) is None:
        return
    # Accepted nodes and the next root, then the levels.
    pending = _sizes(policy.max_depth + 1, capture_sizes)
    levels = [] if cached.drafts_blocks else _sizes(min(policy.max_width, MAX_LEVEL_STEP), capture_sizes)
    for length in _lengths(cached, capacity + cached.num_block_tokens):
        pruned = cached.pruned_lengths(point.visual_keep, length)
        for kind in itertools.product(sorted({*pending, *levels}), pruned, cached.position_axes):
            yield partial(_draft_step, cached, capture_sizes, length, *kind)


def _lengths(model: CachedModel, num_tokens: int) -> list[int]:
    """Padded KV lengths that requests reach."""
    return [length for length in model.padded_lengths if length <= model.padded_length(num_tokens)]


def _sizes(largest: int, capture_sizes: Sequence[int]) -> list[int]:
    """Capture sizes of steps of 1 to ``largest`` tokens."""
    return sorted({round_up(size, capture_sizes) for size in range(1, largest + 1)})


def _target_step(target: Target, layers: tuple[int, ...], num_tokens: int, length: int) -> None:
    target.output_layers = layers
    for axes in target.position_axes:
        target.set_length(length - num_tokens, axes=axes)
        target.forward(Step.causal(np.zeros(num_tokens, np.int64), target.mask_value))


def _draft_step(
    draft: CachedDraft, capture_sizes: Sequence[int], length: int, num_tokens: int, num_pruned: int, axes: int
) -> None:
    draft.capture_sizes = tuple(capture_sizes)
    # One token short of the padded length, so that one pruned token still fits.
    before = length - 1 - num_tokens - draft.num_block_tokens
    draft.prepare_step(before, num_pending=num_tokens, num_pruned=num_pruned, axes=axes)
    draft.read_pending()
