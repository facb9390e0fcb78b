"""Answers by the target's logits: their perplexity, their agreement with plain decoding, and the first token at which
two decodings of one prompt diverge in reduced precision, and whether rounding explains it (``modeling/near_ties.py``).
In float32 on the CPU they must not diverge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.documents.decoded import Decoded
from autotune.documents.execution import EAGER
from autotune.modeling.near_ties import Divergence, largest_difference
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.runtime.ownership import Ownership
from autotune.runtime.token_sampler import TokenSampler, not_finite
from autotune.trees.limits import MAX_STEP
from autotune.workloads.prompt import WorkloadPrompt


@torch.inference_mode()
def answer_logits(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's logits at each token of an answer, [tokens, vocabulary], computed in forwards of many tokens.

    Raises:
        UserError: they are not finite.
    """
    with Ownership(target):
        (prompt,) = target.encode(inputs).prompts
        target.reserve(len(prompt) + len(tokens))
        target.use_mode(EAGER)  # these sizes are not captured
        logits = [target.prefill(prompt).logits[None]]
        for begin in range(0, len(tokens) - 1, MAX_STEP):
            part = np.array(tokens[begin : min(begin + MAX_STEP, len(tokens) - 1)])
            logits.append(target.forward(Step.causal(part, target.mask_value)))
            target.cache.advance(len(part))
    rows = torch.cat(logits)
    if (is_bad := ~rows.amax(-1).isfinite()).any():
        raise not_finite(len(prompt) + int(is_bad.byte().argmax()), rows.dtype)
    return rows


class Quality(NamedTuple):
    """An answer as the target sees it."""

    perplexity: float
    """exp of the mean negative log-probability of its tokens (WETAP, eq. 11)."""
    agreement: float | None
    """Share of its tokens that plain decoding emits after the tokens before them; None if it must decide them one by
    one.
    """


def quality(target: Target, inputs: dict[str, Any], tokens: list[int], sampler: TokenSampler | None = None) -> Quality:
    """Perplexity and agreement of an answer to a request with this ``sampler``, by default greedy."""
    logits = answer_logits(target, inputs, tokens)
    logprobs = logits.float().log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    perplexity = float((-logprobs.mean()).exp())
    sampler = sampler or TokenSampler(device=target.device)
    if sampler.one_by_one:
        return Quality(perplexity, None)
    paths = None
    if sampler.reads_prefix:
        is_before = torch.tensor(np.tri(len(tokens), k=-1, dtype=np.bool_), device=target.device)
        paths = torch.where(is_before, torch.tensor(tokens, device=target.device), logits.shape[-1])
    (prompt,) = target.encode(inputs).prompts
    expected = sampler.tokens(logits, len(prompt) + np.arange(len(tokens)), paths)
    return Quality(perplexity, float((expected == np.array(tokens)).mean()))


@torch.inference_mode()
def first_divergence(
    target: Target,
    inputs: dict[str, Any],
    tokens: list[int],
    other: list[int],
    sampler: TokenSampler | None = None,
    *,
    mode: str = EAGER,
) -> Divergence | None:
    """The first divergence of two answers to a prompt, with the target's margin there; None if they are equal.

    Args:
        sampler: chose the tokens, by default greedily. It is the prompt's own: its prefix is extended.
        mode: of the decoding, in which the single steps run. The one forward is eager, so that the noise includes what
            captured steps round otherwise.

    Raises:
        ValueError: one answer continues where the other ends.
    """
    if tokens == other:
        return None
    pairs = list(zip(tokens, other, strict=False))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        raise ValueError("one answer continues where the other ends; decode both with the same max_new_tokens")
    together = answer_logits(target, inputs, tokens[: index + 1])
    (prompt,) = target.encode(inputs).prompts
    _, steps = target.single_steps(prompt, index + 1, mode=mode, tokens=tokens)
    a, b = pairs[index]
    last_place = float(steps[-1][[a, b]].float().abs().max()) * torch.finfo(target.dtype).eps
    sampler = sampler or TokenSampler(device=target.device)
    sampler.append(torch.tensor(tokens[:index], dtype=torch.long, device=sampler.prefix.device))
    (scores,) = sampler.scores(steps[-1][None], np.array([len(prompt) + index])).float()
    noise = max(largest_difference(steps.float(), together.float()), last_place)
    return Divergence(
        index=index,
        tokens=(a, b),
        margin=float((scores[a] - scores[b]).abs()),
        noise=noise / (sampler.temperature or 1.0),
    )


def divergences_from_plain(
    arm: Any,
    prompts: Sequence[WorkloadPrompt],
    runs: Sequence[Decoded],
    plain: Sequence[Decoded],
    deadline: float = math.inf,
) -> dict[str, Divergence]:
    """First divergences of an arm from plain decoding by prompt; none of an arm whose verification is lossy.

    Args:
        arm: a ``DecoderArm``.
        prompts: without later turns that are not answered.
        runs: of the arm on the first prompts.
        plain: runs of plain decoding on the same prompts.
        deadline: of ``time.monotonic``, after which no further prompt is begun.
    """
    divergences: dict[str, Divergence] = {}
    if not arm.decoder.point.verification.is_lossless:
        return divergences
    target = arm.decoder.target
    for prompt, run, plain_run in zip(prompts, runs, plain, strict=False):
        if run.tokens_sha256 == plain_run.tokens_sha256:
            continue
        if time.monotonic() > deadline:
            break
        settings, inputs = prompt.settings, prompt.inputs(arm.arms.processor, target.device)
        sampler = arm.decoder.sampler(**inputs, **settings.generation)
        divergence = first_divergence(target, inputs, plain_run.tokens, run.tokens, sampler, mode=arm.decoder.mode)
        if divergence is not None:
            divergences[prompt.name] = divergence
    return divergences
