"""Examines a target on its device: attention, trees and verification against single steps, and times of forward
passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autotune.console import Console
from autotune.doctor.diagnosis import AttentionUse, NearTies, StepTimes, TargetFound, TreeCheck
from autotune.documents.execution import AUTO, CUDA_GRAPH, EAGER, capture_sizes_for
from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import load_draft
from autotune.evaluation.divergence import answer_logits
from autotune.machine.device import multiplies_bfloat16
from autotune.measuring.jobs import plain_steps_ms
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.host import now_ms
from autotune.modeling.loading import RETRIEVAL
from autotune.modeling.near_ties import flips, largest_difference
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.self_check import allowed_difference, compare_tree_decoding
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.modeling.tree_attention import why_no_triton
from autotune.runtime.preparation import decoding_mode
from autotune.workloads.workload import Workload

VERIFIED_TOKENS = (2, 4, 8, 16, 32, 64)
REPEATS = 9
TIME_LIMIT_MS = 20_000.0  # no repetition begins after it, except the first
ATTENTION_TOKENS = 32  # of the verification whose attention is observed


@torch.inference_mode()
def examine_target(
    target: Target, reference: ModelReference, workload: Workload, processor: Any, console: Console, *, num_tokens: int
) -> TargetFound:
    """Examine a loaded target.

    Args:
        workload: prompts that are answered.
        num_tokens: length of the plain answers whose logits are compared.
    """
    mode = decoding_mode(AUTO, target, ())
    modes = (EAGER,) if target.captured_steps is None else (EAGER, CUDA_GRAPH)
    difference, noise = compare_tree_decoding(target)
    allowed = allowed_difference(target, noise)
    inputs = [prompt.inputs(processor, target.device) for prompt in workload.prompts]
    (prompt,) = target.encode(inputs[0]).prompts
    shape = target.shape
    with console.stage("attention and forward passes"):
        return TargetFound(
            model=reference,
            model_type=target.text.config.model_type,
            is_tested=target.text.is_tested,
            precision=target.text.precision,
            has_native_precision=target.dtype != torch.bfloat16 or multiplies_bfloat16(target.device),
            weight_bytes=round(shape.text_parameters * shape.bytes_per_parameter),
            kv_bytes_per_token=shape.kv_bytes_per_token,
            attention=attention_uses(target, prompt, ATTENTION_TOKENS),
            tree_check=TreeCheck(difference=difference, allowed=allowed),
            near_ties=audit_near_ties(target, inputs, num_tokens, allowed=allowed),
            mode=mode,
            captured_steps=target.captured_steps,
            why_masks=None if target.captured_steps is None else why_masks(target),
            steps=tuple(time_steps(target, mode, len(prompt) + num_tokens) for mode in modes),
        )


def why_masks(target: Target) -> str | None:
    """The reason for which attention of captured steps has masks; None: Triton kernels run it."""
    if not target.text.takes_packed_masks:
        return "the model's layers do not call an attention function by its name"
    return "there is no kernel for float32" if target.dtype == torch.float32 else why_no_triton(target.device)


@torch.inference_mode()
def audit_near_ties(target: Target, inputs: Sequence[dict[str, Any]], num_tokens: int, *, allowed: float) -> NearTies:
    """Compare the logits of single steps with the logits of one verification, at the tokens of plain greedy answers.

    Args:
        allowed: noise that rounding explains, in standard deviations of the logits.
    """
    audits = []
    for prompt in inputs:
        (encoded,) = target.encode(prompt).prompts
        tokens, alone = target.single_steps(encoded, num_tokens)
        # The first row of both is of the prefill, which is no verification.
        audits.append((alone[1:].float(), answer_logits(target, prompt, tokens)[1:].float()))
    alone, together = (torch.cat(logits) for logits in zip(*audits, strict=True))
    flipped = flips(alone, together, allowed * float(alone.std()))
    return NearTies(
        num_tokens=len(alone),
        num_flips=len(flipped),
        num_unexplained=sum(not flip.is_near_tie for flip in flipped),
        noise=largest_difference(alone, together),
        example=str(min(flipped, key=lambda flip: flip.is_near_tie)) if flipped else "",
    )


@torch.inference_mode()
def time_steps(target: Target, mode: str, kv_length: int) -> StepTimes:
    """Time plain steps and verifications in turns. Every mode but eager prepares all sizes first, which is
    timed too.
    """
    settings = CostSettings(kv_lengths=(kv_length,), capture_sizes=capture_sizes_for(mode, ()), mode=mode)
    memory = graph_memory(target.device)
    before, started = memory.memory_bytes, now_ms(target.device)
    bench = StepBench(target, load_draft(RETRIEVAL, target), settings)
    bench.decode_ms(kv_length)
    for tokens in VERIFIED_TOKENS:
        bench.verify_ms(tokens, kv_length)
    prepared_s = (now_ms(target.device) - started) / 1e3
    started = now_ms(target.device)
    plain: list[float] = []
    verify: dict[int, list[float]] = {tokens: [] for tokens in VERIFIED_TOKENS}
    for number in range(REPEATS):
        if number and now_ms(target.device) - started > TIME_LIMIT_MS:
            break
        for tokens, times in verify.items():
            plain.append(float(np.median(plain_steps_ms(bench, kv_length))))
            times.append(bench.verify_ms(tokens, kv_length))
    graphs = target.graph_runner
    target.use_mode(EAGER)
    target.output_layers = ()
    return StepTimes(
        mode=mode,
        kv_length=kv_length,
        plain_ms=float(np.median(plain)),
        verify_ms={tokens: float(np.median(times)) for tokens, times in verify.items()},
        prepare_s=None if graphs is None else prepared_s,
        prepared_bytes=max(0, memory.memory_bytes - before),
        why_eager=None if graphs is None else graphs.why_eager,
    )


class _Observer(TorchFunctionMode):
    """Counts calls of scaled dot-product attention in one kind of forward pass, and lets them run."""

    def __init__(self, forward: str) -> None:
        super().__init__()
        self.forward = forward
        self.uses: Counter[AttentionUse] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            backend = SDPBackend(torch._fused_sdp_choice(*args, **kwargs)).name.lower()
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            use = AttentionUse(
                forward=self.forward,
                backend=backend,
                query=tuple(args[0].shape),
                key=tuple(args[1].shape),
                has_mask=mask is not None,
                num_layers=1,
            )
            self.uses[use] += 1
        return func(*args, **kwargs)


@torch.inference_mode()
def attention_uses(target: Target, prompt: EncodedPrompt, num_tokens: int) -> tuple[AttentionUse, ...]:
    """The kernels of a prefill, a plain step, and a verification of ``num_tokens`` tokens; empty if the model attends
    by code of its own.
    """
    target.reserve(len(prompt) + 1 + num_tokens)
    tokens = np.resize(prompt.tokens.cpu().numpy(), num_tokens)
    forwards: dict[str, Callable[[], Any]] = {
        "prefill": lambda: target.prefill(prompt),
        "plain step": lambda: target.step(int(tokens[0])),
        "verification": lambda: target.forward(Step.causal(tokens, target.mask_value)),
    }
    uses: list[AttentionUse] = []
    for name, run in forwards.items():
        with _Observer(name) as observer:
            run()
        uses += [use.model_copy(update={"num_layers": count}) for use, count in observer.uses.items()]
    return tuple(uses)
