"""Real runs: arms decode the same prompts, prompt by prompt in random order, and are compared pairwise.

Every prompt's runs are lines of a ledger as soon as all arms have decoded it. An interrupted comparison goes on where it
stood; another comparison measures all its arms anew, because a machine is not the same from hour to hour: what is
compared was measured on the same prompt within seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR as AR  # for those who run it
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.prompt_lookup import PromptLookupDraft
from autotune.evaluation.arms import HF, HF_ASSISTED, PROMPT_LOOKUP, Arm, Run
from autotune.evaluation.hf_generate import hf_generate
from autotune.evaluation.perplexity import perplexity
from autotune.files import append_line, content_key, read_lines
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.workloads.workload import WARM_UP_TOKENS, Workload, WorkloadPrompt

Report = Callable[[int, int], None]
DISTURBED = 3.0  # times the usual prefill of the same prompt...
STALLED = 8.0  # ...or times the shortest forward of the target: no tree is as large as that
MAX_REPEATS = 3
SHAPE_TOKENS = 64  # prompts whose lengths round up to the same multiple are of one shape


class ArmRunner:
    """Runs arms on prompts with one loaded target. ``draft_of`` finds the drafts of configurations; without it the
    decoder's own decodes all of them.
    """

    def __init__(
        self,
        decoder: Decoder,
        processor: Any,
        ledger: Path | None = None,
        *,
        context: object = None,
        with_perplexity: bool = False,
        draft_of: Callable[[Configuration], LoadedDraft] | None = None,
    ) -> None:
        self.decoder = decoder
        self.draft_of = draft_of
        self.with_perplexity = with_perplexity
        self.num_disturbed = 0
        """Runs measured again because the machine was busy with something else."""
        self._decoders: dict[str, Decoder] = {}
        self.processor = processor
        self.ledger = ledger
        self.context = context
        """Models and device: runs of other ones do not count."""
        self._warm: set[tuple[Any, ...]] = set()

    def compare(
        self,
        arms: Sequence[Arm],
        workload: Workload,
        *,
        seed: int = 0,
        deadline: float | None = None,
        min_prompts: int = 8,
        repeat: int = 0,
        goes_on: bool = False,
        report: Report | None = None,
    ) -> dict[str, list[Run]]:
        """Every arm on the same prompts, by arm name. It ends where another prompt would not be over by the deadline, once
        ``min_prompts`` are done. ``repeat`` tells apart comparisons of the same arms; one that ``goes_on`` remembers what
        earlier ones have taught.
        """
        order = random.Random(seed)
        arms = list({arm.name: arm for arm in arms}.values())
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        comparison = content_key([self.context, sorted(arm.key for arm in arms), *([repeat] if repeat else [])])
        known = self._known_runs(comparison)
        for arm in arms if not goes_on else ():  # what an earlier comparison has taught would depend on its prompts
            self.decoder_of(arm).fallback.forget()
        began = time.monotonic()
        for number, prompt in enumerate(workload.prompts):
            now = time.monotonic()
            is_late = deadline is not None and now + (now - began) / max(1, number) > deadline
            if number >= min_prompts and is_late:
                break
            found = {arm.name: known[arm.key, prompt.sha256] for arm in arms if (arm.key, prompt.sha256) in known}
            if len(found) < len(arms):  # a prompt that was interrupted is measured as a whole
                found = self._run_prompt(arms, prompt, order)
                self._write(comparison, found.values())
            for arm in arms:
                runs[arm.name].append(found[arm.name])
            if report is not None:
                report(number + 1, len(workload.prompts))
        return runs

    def _run_prompt(self, arms: Sequence[Arm], prompt: WorkloadPrompt, order: random.Random) -> dict[str, Run]:
        """All arms on one prompt, in random order. What a stranger on the machine disturbed is measured again: the
        target's prefill is the same work in every arm, and no part of what is compared, so a run in which it took several
        times as long as in the others says nothing, and teaches no fallback; nor does one in which the machine stood still.
        """
        learnt = {arm.name: [point.fallback.memory for point in self.decoder_of(arm).points] for arm in arms}
        runs = {arm.name: self.run(arm, prompt) for arm in order.sample(list(arms), len(arms))}
        for _ in range(MAX_REPEATS):
            usual_ms = float(np.median([run.target_prefill_ms for run in runs.values()]))
            forward_ms = min((run.forward_ms for run in runs.values() if run.forward_ms > 0), default=0.0)
            disturbed = [
                arm
                for arm in arms
                if runs[arm.name].target_prefill_ms > DISTURBED * usual_ms
                or runs[arm.name].forward_ms > STALLED * forward_ms
            ]
            for arm in disturbed:
                self.num_disturbed += 1
                for point, memory in zip(self.decoder_of(arm).points, learnt[arm.name], strict=True):
                    point.fallback.memory = memory
                runs[arm.name] = self.run(arm, prompt)
            if not disturbed:
                break
        return runs

    def _known_runs(self, comparison: str) -> dict[tuple[str, str], Run]:
        """What the ledger holds of a comparison, by arm and prompt."""
        known: dict[tuple[str, str], Run] = {}
        for record in read_lines(self.ledger) if self.ledger is not None else []:
            if record.pop("comparison", None) == comparison:
                try:
                    run = Run.model_validate(record)
                except ValidationError:
                    continue  # written by another version: measured again
                known[run.arm, run.prompt_sha256] = run
        return known

    def _write(self, comparison: str, runs: Iterable[Run]) -> None:
        if self.ledger is not None:
            append_line(self.ledger, *({"comparison": comparison, **run.model_dump()} for run in runs))

    def run(self, arm: Arm, prompt: WorkloadPrompt) -> Run:
        """One arm on one prompt. The beginning of the arm's first prompt of a shape is decoded twice, the first time being
        its warm-up: buffers grow and kernels are chosen once per shape.
        """
        inputs = prompt.inputs(self.processor, self.decoder.target.device)
        shape = self.shape_of(arm, inputs, prompt)
        if shape not in self._warm:
            self._warm_up(arm, inputs, prompt)
            self._warm.add(shape)
        tokens, stats = self.decode(arm, inputs, prompt)
        return Run(
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
            vision_ms=stats.vision_ms,
            draft_prefill_ms=stats.draft_prefill_ms,
            draft_ms=stats.draft_ms,
            verify_ms=stats.verify_ms,
            decode_ms=stats.decode_ms,
            acceptance_counts=stats.acceptance_counts.to_json(),
            perplexity=perplexity(self.decoder.target, inputs, tokens) if self.with_perplexity else None,
            point=stats.point,
            plain_steps=stats.plain_steps,
            verified_nodes=sum(stats.verified_nodes),
        )

    def shape_of(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[Any, ...]:
        """What an arm is warmed up for: it runs the same kernels in the same buffers on all prompts of a shape."""
        return arm.key, bool(prompt.pixels), -(-inputs["input_ids"].shape[1] // SHAPE_TOKENS)

    def settings_of(self, arm: Arm, prompt: WorkloadPrompt) -> dict[str, Any]:
        """What the arm is told beside a prompt."""
        return prompt.settings.generation

    def _warm_up(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> None:
        """Some rounds, of which nothing is learnt."""
        if arm.name in (HF, HF_ASSISTED):
            self.decode(arm, inputs, prompt)
            return
        decoder = self.decoder_of(arm)
        learnt = [point.fallback.memory for point in decoder.points]
        stream = decoder.stream(**inputs, **self.settings_of(arm, prompt))
        for _ in itertools.islice(stream, WARM_UP_TOKENS):
            pass
        for point, memory in zip(decoder.points, learnt, strict=True):
            point.fallback.memory = memory

    def decode(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[list[int], DecodingStats]:
        """The arm's new tokens for a prompt, and what it did."""
        settings = self.settings_of(arm, prompt)
        if arm.name in (HF, HF_ASSISTED):
            assistant = self.assistant if arm.name == HF_ASSISTED else None
            return hf_generate(self.decoder.target_model, inputs, assistant=assistant, **settings)
        output = self.decoder_of(arm).generate(**inputs, **settings)
        return output.sequences[0, output.stats.prompt_tokens :].tolist(), output.stats

    def decoder_of(self, arm: Arm) -> Decoder:
        """An arm's own decoder, of the runner's models: what its fallback has learnt of requests is its own."""
        if arm.key not in self._decoders:
            target, c = self.decoder.target, arm.configuration
            if c is None:
                made = Decoder(target, mode=self.decoder.mode, threads=self.decoder.threads)
            else:
                draft = self.decoder.draft
                if arm.drafter == PROMPT_LOOKUP:
                    draft = PromptLookupDraft(target.vocab_size)
                elif self.draft_of is not None:
                    draft = self.draft_of(c)
                made = Decoder(
                    target,
                    draft,
                    tree=c.tree,
                    visual_keep=c.visual_keep,
                    verification=c.verification,
                    fallback=c.fallback,
                    capture_sizes=self.decoder.capture_sizes,
                    mode=self.decoder.mode,
                    threads=self.decoder.threads,
                )
            self._decoders[arm.key] = made
        return self._decoders[arm.key]

    @property
    def assistant(self) -> Any | None:
        """The draft as Hugging Face's generate takes it: a whole model, or None where the draft is none."""
        return self.decoder.draft.model if isinstance(self.decoder.draft, IndependentDraft) else None


# ---------------------------------------------------------------------------------------------------------- elimination


# ---------------------------------------------------------------------------------------------------------- statistics
