"""Decodes prompts with drafts as a search does, in every mode of the device, and compares times, rounds and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.console import Console
from autotune.doctor.diagnosis import DecodingTrial
from autotune.documents.decoding_profile import AR
from autotune.documents.execution import EAGER
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.drafters.checkpoint import LoadedDraft
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import Workload

TREE, CHAIN = PUBLISHED_DEFAULTS["eagle2"], PUBLISHED_DEFAULTS["chain"]  # models with states decode chains


def try_drafts(
    target: Target,
    drafts: Mapping[str, LoadedDraft],
    processor: Any,
    workload: Workload,
    modes: Sequence[str],
    console: Console,
) -> tuple[DecodingTrial, ...]:
    """Decode the prompts of a workload plainly and with each draft, in each mode, prompt by prompt and in random order.

    Args:
        drafts: by id.
        modes: the first is ``eager``.
    """
    has_states = target.has_states or any(draft.has_states for draft in drafts.values())
    tree = CHAIN if has_states else TREE
    decoded: dict[Any, Any] = {None: None, **drafts}
    options: dict[str, Any] = {"tree": tree.tree, "processor": processor}
    runtime = RuntimeArms(Decoder(target, **options))
    arms = {
        (name, mode): DecoderArm(f"{name or AR} {mode}", Decoder(target, draft, mode=mode, **options), runtime)
        for name, draft in decoded.items()
        for mode in modes
    }
    lengths = [prompt.inputs(processor)["input_ids"].shape[1] for prompt in workload.prompts]
    context = max(lengths) + max(prompt.settings.max_new_tokens for prompt in workload.prompts)
    captures = {key: _capture(arms[key].decoder, context) for key in reversed(arms)}  # the largest trees first
    with console.stage("decoding with drafts", len(workload.prompts)) as update:
        runs = race(runtime.runner(), [*arms.values()], workload.prompts, Everyone(), report=update).runs
    trials = []
    plain_name = arms[None, EAGER].name
    for (name, mode), arm in arms.items():
        own, eager = runs[arm.name], runs[arms[name, EAGER].name]
        summary = summarize(arm.name, own, runs[arms[None, mode].name])
        same = [(a.rounds, b.rounds) for a, b in zip(own, eager, strict=True) if a.tokens_sha256 == b.tokens_sha256]
        rounds, eager_rounds = np.sum(same, axis=0) if same else (0, 0)
        differing = divergences_from_plain(arm, workload.prompts, own, runs[plain_name])
        unexplained = tuple(f"{prompt}, {found}" for prompt, found in differing.items() if not found.is_near_tie)
        trials.append(
            DecodingTrial(
                draft=name,
                tree=None if name is None else tree.tree_label,
                mode=mode,
                tokens_per_round=summary.tokens_per_round,
                ms_per_token=1e3 / summary.tokens_per_second,
                speedup=summary.speedup,
                rounds_over_eager=float(rounds / eager_rounds) if eager_rounds else None,
                num_answers=len(own),
                num_near_ties=len(differing) - len(unexplained),
                unexplained=unexplained,
                **captures[name, mode],
            )
        )
    return tuple(trials)


def _capture(decoder: Decoder, context_tokens: int) -> dict[str, Any]:
    """Capture what a decoder needs; returns the fields of its trial about that."""
    before = graph_memory(decoder.target.device).memory_bytes
    done = decoder.prepare(context_tokens)
    models: tuple[Any, ...] = (decoder.draft or decoder.target, decoder.target)
    why_eager = None
    for model in models:
        model.use_mode(decoder.mode)
        why_eager = why_eager or (model.graph_runner and model.graph_runner.why_eager)
        model.use_mode(EAGER)
    return {
        "num_captures": done.num_captures,
        "capture_s": done.seconds,
        "capture_bytes": max(0, done.memory_bytes - before),
        "why_eager": why_eager,
    }
