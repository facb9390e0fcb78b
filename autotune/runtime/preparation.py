"""Chooses how forward passes run, and prepares them ahead of requests, so that no request and no measurement captures
anything.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from autotune.documents.execution import AUTO, CUDA_GRAPH, EAGER, round_up
from autotune.drafters.cached_draft import PENDING_PIECE, CachedDraft, as_cached
from autotune.drafters.draft import Draft
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.graph_runner import check_mode
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.self_check import compare_captured_steps
from autotune.modeling.step import Draw, Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.ownership import Ownership
from autotune.runtime.points import LoadedPoint
from autotune.runtime.rounds import Round
from autotune.trees.limits import MAX_LEVEL_STEP, MAX_STEP

TREE_SLOTS = CachedDraft.least_columns + MAX_STEP
"""KV slots of the largest trees that are usual, all published defaults among them."""
Report = Callable[[int, int], None]
"""Called as report(done, total)."""
Job = Callable[[], object]


def decoding_mode(mode: str, target: Target, drafts: Iterable[Draft | None]) -> str:
    """The mode of all forward passes after the prefill: that of the target, unless a draft keeps states (see
    ``check_mode``).

    Where ``auto`` would capture, captured steps of the target are compared with eager ones first, once for each loaded
    target (``compare_captured_steps``); its open session is closed. If they differ by more than rounding explains, it
    is ``eager``.
    """
    has_states = target.has_states or any(draft is not None and draft.has_states for draft in drafts)
    chosen = check_mode(mode, target.device, target.num_devices, has_states=has_states)
    if mode != AUTO or chosen != CUDA_GRAPH:
        return chosen
    if target.ranks is not None:
        warnings.warn(
            f"steps run eagerly, because captured steps of {target.ranks.size} processes were not measured",
            stacklevel=2,
        )
        return EAGER
    if target.captured_steps is None:
        with Ownership(target):
            target.captured_steps = compare_captured_steps(target)
    return chosen if target.captured_steps.why_eager is None else EAGER


class Preparation(NamedTuple):
    """Result of a preparation."""

    num_captures: int
    memory_bytes: int
    """Memory of all captures of the device, those of earlier preparations and of other decoders included."""


@torch.inference_mode()
def prepare(
    target: Target, point: LoadedPoint, rounds: Round, capacity: int, sampled: Sequence[bool], report: Report
) -> Preparation:
    """Run every forward pass that requests of a decoder can need, on caches of arbitrary contents.

    Args:
        rounds: mode and capture sizes.
        capacity: KV cache length to reserve, at least what requests can reach with their trees.
        sampled: as in ``Decoder.prepare``.
    """
    memory = graph_memory(target.device)
    before = memory.num_kept
    models: list[CachedModel] = [target]
    if (cached := as_cached(point.draft)) is not None:
        cached.capture_sizes = tuple(rounds.capture_sizes)
        models.append(cached)
    with Ownership(*models), ExitStack() as cleanup:
        for model in models:
            cleanup.callback(model.use_mode, model.mode)
            cleanup.callback(model.reserve, 1)
            model.use_mode(rounds.mode)
            model.reserve(capacity)
            if isinstance(model, TreeModel):  # allocates the cache, which no capture may do
                token = torch.zeros(1, dtype=torch.long, device=model.device)
                model.prefill_prompt(EncodedPrompt(token, token.bool()))
        cleanup.callback(setattr, target, "output_layers", target.output_layers)
        jobs = list(_jobs(target, point, rounds.capture_sizes, sampled))
        for number, job in enumerate(jobs):
            job()
            report(number + 1, len(jobs))
    return Preparation(memory.num_kept - before, memory.memory_bytes)


def _jobs(target: Target, point: LoadedPoint, capture_sizes: Sequence[int], sampled: Sequence[bool]) -> Iterator[Job]:
    """The forward passes of requests that a point decodes."""
    draft, policy = point.draft, point.policy
    draft_layers = () if draft is None else draft.aux_layers
    if draft is None or point.fallback.price is not None:
        for layers in {(), draft_layers}:  # where the fallback leaves out the draft, a request needs no features
            yield partial(_target_step, target, layers, 1)
    if draft is None:
        return
    for size in _sizes(policy.size.nodes + 1, capture_sizes):
        yield partial(_target_step, target, draft_layers, size)
    if (cached := as_cached(draft)) is None:
        return
    levels = _sizes(min(policy.size.width, MAX_LEVEL_STEP), capture_sizes)
    draws: list[Draw | None] = [None] if False in sampled or not point.is_coupled else []
    if True in sampled and point.is_coupled:
        draws.append(Draw(target.noise, 0, temperature=1.0, top_k=target.vocab_size, top_p=1.0))
    for num_pruned, draw in itertools.product(cached.numbers_pruned(point.visual_keep), draws):
        pending = sorted({cached.pending_size(count) for count in range(1, PENDING_PIECE + 1)})
        for size, is_pending in (*((size, True) for size in pending), *((size, False) for size in levels)):
            yield partial(_draft_step, cached, size, policy.size.proposals, draw, num_pruned, is_pending)


def _sizes(largest: int, capture_sizes: Sequence[int]) -> list[int]:
    """Capture sizes of steps of 1 to ``largest`` tokens."""
    return sorted({round_up(size, capture_sizes) for size in range(1, largest + 1)})


def _target_step(target: Target, layers: tuple[int, ...], num_tokens: int) -> None:
    target.output_layers = layers
    target.set_length(1)
    target.forward(Step.causal(np.zeros(num_tokens, np.int64), target.mask_value))


def _draft_step(
    draft: CachedDraft, num_tokens: int, num_proposals: int, draw: Draw | None, num_pruned: int, is_pending: bool
) -> None:
    draft.prepare_step(1, num_pending=1, num_pruned=num_pruned)
    draft.num_proposals, draft.draw = num_proposals, draw
    if is_pending:
        draft.read_pending(num_tokens)
    else:
        draft.forward(Step.causal(np.zeros(num_tokens, np.int64), draft.mask_value), np.full(num_tokens, -1))
