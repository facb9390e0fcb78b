"""The first token at which two decodings of one prompt diverge in reduced precision, and whether rounding explains it
(``modeling/near_ties.py``). In float32 on the CPU they must not diverge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from autotune.documents.decoded import Decoded
from autotune.documents.execution import EAGER
from autotune.evaluation.perplexity import answer_logits
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.modeling.near_ties import Divergence, largest_difference
from autotune.modeling.target import Target
from autotune.runtime.token_sampler import TokenSampler
from autotune.workloads.prompt import WorkloadPrompt


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
    arm: DecoderArm,
    prompts: Sequence[WorkloadPrompt],
    runs: Sequence[Decoded],
    plain: Sequence[Decoded],
    deadline: float = math.inf,
) -> dict[str, Divergence]:
    """First divergences of an arm from plain decoding by prompt; none of an arm whose verification is lossy.

    Args:
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
