"""Times prefills, and the overhead outside the models in real decoding.

As in ``autotune.measuring.sampling``, a plain step is timed before and after every request, and times are multiples of
the plain steps next to them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autotune.drafters.checkpoint import LoadedDraft
from autotune.machine.device import usable_threads
from autotune.measuring.settings import CostSettings
from autotune.modeling.host import limited_threads, now_ms
from autotune.modeling.prompt import num_patches
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.trees.tree import MAX_STEP
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

PREFILL_REPEATS = 3
PREFILL_THREAD_REPEATS = 8
LEAST_PREFILLS = 3  # even after the time limit: as many as coefficients with images of one size
# In between, two prompts of every task.
MIN_PREFILL_PROMPTS = 6
MAX_PREFILL_PROMPTS = 12
OVERHEAD_PROMPTS = 4
OVERHEAD_TOKENS = 24  # new tokens of a run
FEW_OVERHEAD_TOKENS = 8  # where there is little time
CUT_PROMPT_TOKENS = 16  # where there is little time
# Chains have one node per level. A wide tree distinguishes the cost of a node from the cost of a level; one tree has
# retrieval.
TREES: tuple[dict[str, Any], ...] = (
    {"policy": "chain", "depth": 1},
    {"policy": "chain", "depth": 8},
    {"policy": "sage", "n_max": 31},
    {"policy": "priced", "retrieval": True},
)
PlainStep = Callable[[], float]
"""Times a plain step, in milliseconds."""
PrefillSamples = list[tuple[int, int, int, float]]
"""(tokens, 1 with images, patches, duration in plain steps)."""
OverheadRuns = list[tuple[int, int, int, int, float]]
"""(rounds, draft forwards, verified nodes, rounds with retrieval, time outside the models in plain steps)."""


class PrefillTimer:
    """Times prefills of a target and its drafts over prompts of a workload, drafts also over shares of visual tokens,
    with a number of CPU ``threads`` (None: torch's).
    """

    def __init__(
        self,
        target: Target,
        drafts: Sequence[LoadedDraft],
        processor: Any,
        workload: Workload,
        plain_step: PlainStep,
        threads: int | None = None,
    ) -> None:
        self.threads = threads
        self.target, self.drafts, self.processor, self.plain_step = target, drafts, processor, plain_step
        count = min(max(MIN_PREFILL_PROMPTS, 2 * len(workload.tasks)), MAX_PREFILL_PROMPTS)
        # A prompt with an image and one without come first: time may end after a few.
        prompts = workload.prompts[:count]
        first_of_kind = {bool(prompt.pixels): number for number, prompt in reversed(list(enumerate(prompts)))}
        order = sorted(range(len(prompts)), key=lambda number: (number not in first_of_kind.values(), number))
        self.prompts = [prompts[number] for number in order]
        self.target_samples: PrefillSamples = []
        self.draft_samples: list[PrefillSamples] = [[] for _ in drafts]
        self._is_slow = False

    def run(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure every prompt ``PREFILL_REPEATS`` times, and ``LEAST_PREFILLS`` prompts even if that exceeds the
        limit.
        """
        started = clock()
        visual_keeps = [draft.visual_keep for draft in self.drafts]
        with torch.inference_mode():
            for number, prompt in enumerate(self.prompts):  # warm-ups
                self._time(prompt)
                is_late = clock() - started > limit_s / 4
                self._is_slow = is_late and number == 0
                if not self._is_slow:  # kept if it takes so long that preparing kernels does not matter
                    for samples in (self.target_samples, *self.draft_samples):
                        samples.clear()
                if is_late:
                    break
            for _ in range(PREFILL_REPEATS):
                for prompt in self.prompts:
                    if len(self.target_samples) >= LEAST_PREFILLS and clock() - started > limit_s:
                        break
                    self._time(prompt)
        for draft, visual_keep in zip(self.drafts, visual_keeps, strict=True):
            draft.visual_keep = visual_keep

    def _time(self, prompt: WorkloadPrompt) -> None:
        """Prefill the target, then every draft with each share of visual tokens."""
        inputs = prompt.inputs(self.processor, self.target.device)
        patches = num_patches(self.target.model.config, inputs)
        before = self.plain_step()
        with limited_threads(self.threads):
            times = self._times_ms(inputs)
        reference_ms = math.sqrt(before * self.plain_step())
        for samples, num_tokens, ms in times:
            samples.append((num_tokens, int(patches > 0), patches, ms / reference_ms))

    def _times_ms(self, inputs: dict[str, Any]) -> list[tuple[PrefillSamples, int, float]]:
        """Milliseconds of every prefill, with the samples that it is one of and its number of tokens."""
        target, device, length = self.target, self.target.device, inputs["input_ids"].shape[1]
        target.reserve(length)
        target.output_layers = tuple(sorted({layer for draft in self.drafts for layer in draft.aux_layers}))
        started = now_ms(device)
        encoded = target.encode(inputs).prompts
        scores = target.prefill(encoded[0], visual_rankings=["text_after_image"]).visual_scores
        has_image, hidden = encoded[0].num_visual_tokens > 0, target.hidden
        times = [(self.target_samples, length, now_ms(device) - started)]
        for draft, samples in zip(self.drafts, self.draft_samples, strict=True):
            if self._is_slow and len(samples) >= LEAST_PREFILLS:  # several shares of one prompt's visual tokens
                continue
            for draft.visual_keep in (1.0, 0.5, 0.1) if has_image else (1.0,):
                # evicts the draft's weights from the processor's caches, as the target's prefill does
                self.plain_step()
                target.hidden = hidden
                started = now_ms(device)
                draft_prompt: Any
                (draft_prompt,) = draft.prompts(inputs, encoded)
                draft.prefill(draft_prompt, scores.get("text_after_image"), capacity=length + MAX_STEP)
                times.append((samples, draft.length, now_ms(device) - started))
        return times


def choose_prefill_threads(
    target: Target,
    processor: Any,
    workload: Workload,
    *,
    until: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> int | None:
    """The number of CPU threads for prefills: 1 where torch's default takes longer in the mean; None for torch's
    default.

    Several threads wait for each other at every operation. Beside another busy process that may take ten times as long
    as one thread, so means count, not medians.

    Args:
        until: the time of ``clock`` after which no repetition begins, apart from the warm-up and the first.
    """
    available = usable_threads()
    if target.device.type != "cpu" or available == 1:
        return None
    prompt = next((prompt for prompt in workload.prompts if prompt.pixels), workload.prompts[0])
    inputs = prompt.inputs(processor, target.device)
    times: list[tuple[float, float]] = []  # with one thread, and with all
    while len(times) <= PREFILL_THREAD_REPEATS and (len(times) < 2 or clock() < until):
        pair = []
        for threads in (1, available):
            with limited_threads(threads), torch.inference_mode():
                started = now_ms(target.device)
                target.reserve(inputs["input_ids"].shape[1])
                target.prefill(target.encode(inputs).prompts[0])
                pair.append(now_ms(target.device) - started)
        times.append((pair[0], pair[1]))
    one_thread, all_threads = (sum(column) for column in zip(*times[1:], strict=True))  # the first is a warm-up
    return 1 if one_thread < all_threads else None


def overhead_runs(
    target: Target,
    draft: LoadedDraft,
    processor: Any,
    workload: Workload,
    plain_step: PlainStep,
    settings: CostSettings,
    *,
    threads: int | None = None,
    limit_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> OverheadRuns:
    """Decode with shallow, deep and wide trees.

    Every tree decodes at least once. If time is short, prompts without images are cut to their last
    ``CUT_PROMPT_TOKENS`` tokens and answers have ``FEW_OVERHEAD_TOKENS``: overhead does not depend on the prompt.
    """
    has_states = target.has_states or draft.has_states
    decoders = [
        Decoder(target, draft, tree=tree, capture_sizes=settings.capture_sizes, mode=settings.mode, threads=threads)
        for tree in TREES
        if not has_states or parse_policy(tree).is_chain
    ]
    prompts = workload.prompts[:OVERHEAD_PROMPTS]
    inputs = [prompt.settings.generation | prompt.inputs(processor, target.device) for prompt in prompts]
    runs: OverheadRuns = []
    num_tokens = OVERHEAD_TOKENS
    longest = max(of_prompt["input_ids"].shape[1] for of_prompt in inputs) + OVERHEAD_TOKENS
    with limited_threads(threads):  # prefills too: their time does not count here
        for decoder in decoders:
            decoder.prepare(longest)
        started = clock()
        for decoder in decoders:  # warm-ups
            warmed = clock()
            decoder.generate(**inputs[0] | {"max_new_tokens": 2})
            run_s = clock() - warmed + OVERHEAD_TOKENS * plain_step() / 1e3
            if num_tokens == OVERHEAD_TOKENS and clock() - started + 2 * len(decoders) * run_s > limit_s:
                inputs, num_tokens = [_cut(of_prompt) for of_prompt in inputs], FEW_OVERHEAD_TOKENS
        for of_prompt in inputs:
            if runs and clock() - started > limit_s:
                break
            for decoder in decoders:
                before = plain_step()
                stats = decoder.generate(**of_prompt | {"max_new_tokens": num_tokens}).stats
                reference_ms = math.sqrt(before * plain_step())
                if stats.rounds > 0:
                    num_retrieving = stats.rounds if decoder.point.policy.uses_retrieval else 0
                    counts = stats.rounds, stats.draft_forwards, sum(stats.verified_nodes), num_retrieving
                    runs.append((*counts, stats.overhead_ms / reference_ms))
    return runs


def _cut(inputs: dict[str, Any]) -> dict[str, Any]:
    """The end of a prompt of text; all of a prompt with an image, whose tokens must stay together."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if tensors.keys() - {"input_ids", "attention_mask"}:
        return inputs
    return inputs | {name: value[:, -CUT_PROMPT_TOKENS:] for name, value in tensors.items()}
