"""Real runs: arms decode the same prompts, prompt by prompt in random order, and are compared pairwise.

Every run is a line of a ledger as soon as it ends; a run that the ledger holds is not repeated.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from autotune.errors import UserError
from autotune.files import Document, append_line, content_key, read_lines
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.search.space import Configuration
from autotune.workload import Workload, WorkloadPrompt

Report = Callable[[int, int], None]
AR, HF = "ar", "hf"


class Run(Document):
    """One arm on one prompt. Times in milliseconds; ``decode_ms`` runs from the first token to the last, the draft's
    prefill included.
    """

    arm: str
    prompt: str
    prompt_sha256: str
    tokens_sha256: str
    new_tokens: int
    rounds: int
    accepted_lengths: list[int]
    target_forwards: int
    draft_forwards: int
    target_prefill_ms: float
    draft_prefill_ms: float
    draft_ms: float
    verify_ms: float
    decode_ms: float


@dataclass(frozen=True)
class Arm:
    """A way to decode, under a name: a configuration, or None for ``ar`` (our plain decoding) and ``hf`` (Hugging
    Face's generate).
    """

    name: str
    configuration: Configuration | None = None

    @property
    def key(self) -> str:
        return self.name if self.configuration is None else self.configuration.key


class Runner:
    """Runs arms on prompts with one loaded target and draft."""

    def __init__(self, decoder: Decoder, processor: Any, ledger: Path | None = None, *, context: object = None) -> None:
        self.decoder = decoder
        self.plain = Decoder(decoder.target)
        self.processor = processor
        self.ledger = ledger
        self.context = content_key(context)  # models and device: runs of other ones do not count
        self._warm: set[str] = set()
        self._known: dict[tuple[str, str], Run] = {}
        for record in read_lines(ledger) if ledger is not None else []:
            if record.pop("context", None) == self.context:
                try:
                    run = Run.model_validate(record)
                except ValidationError:
                    continue  # written by another version: measured again
                self._known[run.arm, run.prompt_sha256] = run

    def compare(
        self,
        arms: Sequence[Arm],
        workload: Workload,
        *,
        seed: int = 0,
        deadline: float | None = None,
        min_prompts: int = 8,
        report: Report | None = None,
    ) -> dict[str, list[Run]]:
        """Every arm on the same prompts, by arm name. Past the deadline it ends after a whole prompt, once
        ``min_prompts`` are done.
        """
        order = random.Random(seed)
        arms = list({arm.name: arm for arm in arms}.values())
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for number, prompt in enumerate(workload.prompts):
            if number >= min_prompts and deadline is not None and time.monotonic() > deadline:
                break
            for arm in order.sample(list(arms), len(arms)):
                runs[arm.name].append(self.run(arm, prompt))
            if report is not None:
                report(number + 1, len(workload.prompts))
        return runs

    def run(self, arm: Arm, prompt: WorkloadPrompt) -> Run:
        """One arm on one prompt; an arm's very first run is repeated, the first one being its warm-up."""
        known = self._known.get((arm.key, prompt.sha256))
        if known is not None:
            return known
        inputs = prompt.inputs(self.processor, self.decoder.target.device)
        if arm.key not in self._warm:
            self._decode(arm, inputs, prompt)
            self._warm.add(arm.key)
        tokens, stats = self._decode(arm, inputs, prompt)
        run = Run(
            arm=arm.key,
            prompt=prompt.name,
            prompt_sha256=prompt.sha256,
            tokens_sha256=hashlib.sha256(repr(tokens).encode()).hexdigest()[:16],
            new_tokens=stats.new_tokens,
            rounds=stats.rounds,
            accepted_lengths=stats.accepted_lengths,
            target_forwards=stats.target_forwards,
            draft_forwards=stats.draft_forwards,
            target_prefill_ms=stats.target_prefill_ms,
            draft_prefill_ms=stats.draft_prefill_ms,
            draft_ms=stats.draft_ms,
            verify_ms=stats.verify_ms,
            decode_ms=stats.decode_ms,
        )
        self._known[arm.key, prompt.sha256] = run
        if self.ledger is not None:
            append_line(self.ledger, {"context": self.context, **run.model_dump()})
        return run

    def _decode(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[list[int], DecodingStats]:
        if arm.name == HF:
            return hf_generate(self.decoder.target_model, inputs, prompt)
        decoder = self.plain
        if arm.configuration is not None:
            decoder = self.decoder
            decoder.configure(arm.configuration.tree, visual_keep=arm.configuration.visual_keep)
        output = decoder.generate(**inputs, **prompt.settings.generation)
        return output.sequences[0, output.stats.prompt_tokens :].tolist(), output.stats


class _FirstTokenClock:
    """A streamer that notes when the prefill's token was there. generate puts the prompt first, then token by token."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter() * 1e3)

    def end(self) -> None:
        pass


def hf_generate(model: Any, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[list[int], DecodingStats]:
    """Hugging Face's own ``generate``, timed like the others: decoding from its first token to its last."""
    settings = prompt.settings
    clock = _FirstTokenClock(model.device)
    sampling = (
        {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        if settings.temperature > 0
        else {"do_sample": False}
    )
    torch.manual_seed(settings.seed)
    started = time.perf_counter() * 1e3
    with torch.inference_mode():
        sequences = model.generate(**inputs, max_new_tokens=settings.max_new_tokens, streamer=clock, **sampling)
    length = inputs["input_ids"].shape[1]
    tokens = sequences[0, length:].tolist()
    steps = len(tokens) - 1
    stats = DecodingStats(
        prompt_tokens=length,
        new_tokens=len(tokens),
        accepted_lengths=[0] * steps,
        verified_nodes=[0] * steps,
        target_forwards=steps,
        target_prefill_ms=clock.times[1] - started,
        verify_ms=clock.times[-1] - clock.times[1],
        decode_ms=clock.times[-1] - clock.times[1],
    )
    return tokens, stats


# ---------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Summary:
    """An arm against plain decoding on the same prompts. Pooled: times and tokens are summed over prompts before they
    are divided.
    """

    name: str
    speedup: float
    ci95: tuple[float, float]
    tokens_per_second: float
    tokens_per_round: float | None
    median_ms: float
    """Of decoding a prompt."""
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    outside_share: float
    """Share of decoding time outside the two models; 0 where it is not known."""


def summarise(
    name: str, runs: Sequence[Run], baseline: Sequence[Run], *, num_resamples: int = 2000, seed: int = 0
) -> Summary:
    """Speedup of ``runs`` over ``baseline``, prompt for prompt the same, with a paired bootstrap interval over prompts."""
    ms = np.array([run.decode_ms for run in runs])
    baseline_ms = np.array([run.decode_ms for run in baseline])
    tokens = sum(run.new_tokens - 1 for run in runs)
    if tokens == 0:
        raise UserError("every answer has one token, so nothing was decoded that could be timed; raise max_new_tokens")
    rounds = sum(run.rounds for run in runs)
    outside = sum(run.decode_ms - run.draft_prefill_ms - run.draft_ms - run.verify_ms for run in runs)
    return Summary(
        name=name,
        speedup=float(baseline_ms.sum() / ms.sum()),
        ci95=bootstrap_ratio(baseline_ms, ms, num_resamples=num_resamples, seed=seed),
        tokens_per_second=1e3 * tokens / float(ms.sum()),
        tokens_per_round=tokens / rounds if rounds else None,
        median_ms=float(np.median(ms)),
        num_prompts=len(runs),
        num_tokens=tokens,
        identical_outputs=sum(
            run.tokens_sha256 == other.tokens_sha256 for run, other in zip(runs, baseline, strict=True)
        ),
        outside_share=float(outside / ms.sum()),
    )


def bootstrap_ratio(
    above: NDArray[np.float64], below: NDArray[np.float64], *, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of ``sum(above) / sum(below)``, resampling the pairs."""
    draws = np.random.default_rng(seed).integers(len(above), size=(num_resamples, len(above)))
    ratios = above[draws].sum(1) / below[draws].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
