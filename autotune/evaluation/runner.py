"""Compares arms by real runs: prompt by prompt, all arms one after the other in random order.

Every prompt's runs are lines of a ledger as soon as all arms have decoded it, and an interrupted comparison continues
from there. Another comparison measures all of its arms again: a machine's speed changes from hour to hour, so arms are
only compared by runs of the same prompt that are seconds apart.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.decoding_profile import AR
from autotune.documents.execution import CAPTURED
from autotune.documents.published_defaults import PROMPT_LOOKUP
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import errors_about
from autotune.evaluation.arms import Arm, DecoderArm
from autotune.evaluation.perplexity import quality
from autotune.files import append_line, content_key, read_lines
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.answer_keys import AnswerKeys
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import LoadedPoint
from autotune.workloads.conversations import Conversations
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

Report = Callable[[int, int], None]
# A run is measured again if its prefill took this many times the median over the arms...
SLOW_PREFILL = 3.0
# ...or its mean forward took this many times the shortest of the arms: the largest tree does not.
SLOW_FORWARD = 8.0
MAX_REPEATS = 3
LEAST_PROMPTS = 2  # of a comparison, for which its variance is known
SHAPE_TOKENS = 64  # prompts of up to so many tokens have one shape, those of up to twice as many the next one
# Prompt lookup decoding (Saxena, 2023) is the baseline that needs no draft model. Its chain is as long as the published
# one.
PROMPT_LOOKUP_CHAIN = Configuration(tree={"policy": "chain", "depth": 5})
PROMPT_LOOKUP_MATCH = 3  # tokens; ``max_ngram_size`` of its code


class ArmRunner:
    """Makes arms for one loaded target, and compares them.

    Args:
        decoder: gives the target, and mode, capture sizes and threads of all arms.
        ledger: file of the runs; None keeps none.
        context: names models and device in the ledger: runs of others are ignored.
        with_perplexity: also compute perplexity and agreement of every answer.
        draft_of: finds the draft of a configuration; left out, the decoder's own draft serves all.
        keys: of the decoder's target and the processor; None: its own.
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
        keys: AnswerKeys | None = None,
    ) -> None:
        self.decoder = decoder
        self.processor = processor
        self.ledger = ledger
        self.context = context
        self.with_perplexity = with_perplexity
        self.draft_of = draft_of
        self.keys = keys or AnswerKeys(decoder.target, processor)
        self.limit = math.inf
        """A value of ``time.monotonic``: ``min_prompts`` of a comparison may end past its deadline, and all but two
        until then.
        """
        self.num_repeated = 0
        """Runs that were measured again because the machine was busy or something was captured."""
        plain = Decoder(
            decoder.target, mode=decoder.mode, threads=decoder.threads, prefill_threads=decoder.prefill_threads
        )
        self.plain = DecoderArm(AR, plain)
        """Plain decoding."""
        self.conversations = Conversations(processor, self._plain_answers)
        self._decoders: dict[str, Decoder] = {}
        self.answers: dict[tuple[str, str], list[int]] = {}
        """Tokens of the last run of an arm on a prompt, by arm key and prompt hash; those of runs in the ledger are not
        known.
        """
        self._warm: set[tuple[Any, ...]] = set()
        self._run_s: defaultdict[str, list[float]] = defaultdict(list)  # durations with warm-ups, by arm key
        self._reserved: dict[str, int] = {}  # tokens of a prompt and its answer, by the prompt's hash

    def arm(self, name: str, configuration: Configuration) -> DecoderArm:
        """Decodes by a configuration. Arms of equal configurations share a decoder."""
        key = configuration.key
        if key not in self._decoders:
            draft = self.draft_of(configuration) if self.draft_of else self.decoder.draft
            self._decoders[key] = self._decoder([_loaded(configuration, draft)])
        return DecoderArm(name, self._decoders[key], key=key)

    def prompt_lookup_arm(self) -> DecoderArm:
        """Drafts by n-grams of the prompt and the answer."""
        draft = RetrievalDraft(max_match=PROMPT_LOOKUP_MATCH)
        decoder = self._decoder([_loaded(PROMPT_LOOKUP_CHAIN, draft)])
        return DecoderArm(PROMPT_LOOKUP, decoder, key=f"{PROMPT_LOOKUP}-{PROMPT_LOOKUP_CHAIN.key}")

    def _decoder(self, points: Sequence[LoadedPoint]) -> Decoder:
        """A decoder like the runner's own, with other points."""
        return Decoder(
            self.decoder.target,
            points=points,
            capture_sizes=self.decoder.capture_sizes,
            mode=self.decoder.mode,
            threads=self.decoder.threads,
            prefill_threads=self.decoder.prefill_threads,
        )

    def reserve(self, workload: Workload) -> None:
        """Prepare arms for the longest of these prompts and answers from the first one on: caches that grow later drop
        the captures of all arms.
        """
        if self.decoder.mode not in CAPTURED:
            return
        for prompt in (prompt for prompt in workload.prompts if prompt.sha256 not in self._reserved):
            self._reserved[prompt.sha256] = prompt.most_tokens(self.processor)

    def compare(
        self,
        arms: Sequence[Arm],
        workload: Workload,
        *,
        seed: int = 0,
        deadline: float | None = None,
        min_prompts: int = 8,
        repeat: int = 0,
        report: Report | None = None,
    ) -> dict[str, list[Decoded]]:
        """Run every arm on the same prompts; returns the runs by arm name.

        Args:
            arms: of equal names the last one counts.
            seed: of the order in which arms take turns.
            deadline: of ``time.monotonic``. After ``min_prompts``, no prompt is begun that is expected to end later
                (see ``limit``).
            repeat: distinguishes comparisons of the same arms in the ledger.
        """
        order = random.Random(seed)
        arms = list({arm.name: arm for arm in arms}.values())
        runs: dict[str, list[Decoded]] = {arm.name: [] for arm in arms}
        comparison = content_key([self.context, sorted(arm.key for arm in arms), *([repeat] if repeat else [])])
        known = self._known_runs(comparison)
        self.reserve(workload)
        if report is not None:
            report(0, len(workload.prompts))
        for number, prompt in enumerate(workload.prompts):
            key = self.answer_key(prompt)
            prompt_runs = {arm.name: known[arm.key, key] for arm in arms if (arm.key, key) in known}
            if len(prompt_runs) < len(arms):  # all arms of an interrupted prompt are measured again
                until = self.limit if number < min_prompts else math.inf if deadline is None else deadline
                if number >= min(LEAST_PROMPTS, min_prompts) and time.monotonic() + self.prompt_s(arms) > until:
                    break
                prompt_runs = self._run_prompt(arms, prompt, order)
                if self.ledger is not None:
                    lines = ({"comparison": comparison, **run.model_dump()} for run in prompt_runs.values())
                    append_line(self.ledger, *lines)
            for name, run in prompt_runs.items():
                runs[name].append(run)
            if report is not None:
                report(number + 1, len(workload.prompts))
        return runs

    def answer_key(self, prompt: WorkloadPrompt) -> str:
        """The key of plain decoding's answer to a prompt, whose earlier answers follow from the rest."""
        return self.keys.of(replace(prompt, answers=()) if prompt.answers else prompt)

    def prompt_s(self, arms: Sequence[Arm]) -> float:
        """Expected duration of runs of these arms on a prompt, in seconds; of unknown arms, that of the known ones."""
        known = {key: sum(seconds) / len(seconds) for key, seconds in self._run_s.items()}
        usual_s = sum(known.values()) / max(1, len(known))
        return sum(known.get(arm.key, usual_s) for arm in arms)

    def _run_prompt(self, arms: Sequence[Arm], prompt: WorkloadPrompt, order: random.Random) -> dict[str, Decoded]:
        """Run all arms on one prompt, in random order, and repeat the runs that something else slowed down.

        The target's prefill is the same work in every arm and not part of what is compared. A run whose prefill took
        several times as long as in the other arms was slowed down by something else on the machine, and so was a run
        whose forwards took far longer, or in which forward passes were captured.
        """
        runs: dict[str, Decoded] = {}
        for arm in order.sample(list(arms), len(arms)):
            began = time.monotonic()
            runs[arm.name] = self.run(arm, prompt)
            self._run_s[arm.key].append(time.monotonic() - began)
        for _ in range(MAX_REPEATS):
            usual_ms = float(np.median([run.target_prefill_ms for run in runs.values()]))
            forward_ms = min((run.forward_ms for run in runs.values() if run.forward_ms > 0), default=0.0)
            slowed = [
                arm
                for arm in arms
                if runs[arm.name].captures > 0
                or runs[arm.name].target_prefill_ms > SLOW_PREFILL * usual_ms
                or runs[arm.name].forward_ms > SLOW_FORWARD * forward_ms
            ]
            for arm in slowed:
                self.num_repeated += 1
                runs[arm.name] = self.run(arm, prompt)
            if not slowed:
                break
        return runs

    def run(self, arm: Arm, prompt: WorkloadPrompt) -> Decoded:
        """Run one arm on one prompt, after a warm-up on the first prompt of a shape. Later turns follow plain
        decoding's answers.
        """
        with errors_about(prompt.name):
            prompt, target = self.conversations.follow(prompt), self.decoder.target
            inputs = prompt.inputs(self.processor, target.device)
            length = inputs["input_ids"].shape[1]
            longest = max([length + prompt.settings.max_new_tokens, *self._reserved.values()])
            arm.prepare(longest, is_sampled=prompt.settings.temperature > 0)
            num_doublings = ((length - 1) // SHAPE_TOKENS).bit_length()
            shape = (arm.key, arm.point_for(inputs, prompt.settings), bool(prompt.pixels), num_doublings)
            if shape not in self._warm:
                arm.warm_up(inputs, prompt.settings)
                self._warm.add(shape)
            memory = graph_memory(target.device)
            num_before = memory.num_kept
            tokens, stats = arm.decode(inputs, prompt.settings)
            num_captures = memory.num_kept - num_before
            self.answers[arm.key, prompt.sha256] = tokens
            if arm is self.plain:
                self.conversations.add(prompt, tokens)
            scores = {}
            if self.with_perplexity:
                sampler = self.decoder.sampler(**inputs, **prompt.settings.generation)
                scores = quality(self.decoder.target, inputs, tokens, sampler)._asdict()
        values = {name: getattr(stats, name) for name in Decoded.model_fields if hasattr(stats, name)}
        values |= {"acceptance_counts": stats.acceptance_counts.to_json(), "verified_nodes": sum(stats.verified_nodes)}
        return Decoded(
            arm=arm.key,
            prompt=prompt.name,
            prompt_sha256=prompt.sha256,
            answer_key=self.answer_key(prompt),
            task=prompt.settings.task,
            tokens_sha256=tokens_key(tokens),
            captures=num_captures,
            **scores,
            **values,
        )

    def _plain_answers(self, prompts: Sequence[WorkloadPrompt]) -> list[list[int]]:
        device = self.decoder.target.device
        return [self.plain.decode(prompt.inputs(self.processor, device), prompt.settings)[0] for prompt in prompts]

    def _known_runs(self, comparison: str) -> dict[tuple[str, str], Decoded]:
        """Runs of a comparison in the ledger, by the keys of arm and answer; the last one counts."""
        known: dict[tuple[str, str], Decoded] = {}
        for record in read_lines(self.ledger) if self.ledger is not None else []:
            if record.pop("comparison", None) == comparison:
                try:
                    run = Decoded.model_validate(record)
                except ValidationError:
                    continue  # written by another version: measured again
                known[run.arm, run.answer_key] = run
        return known


def _loaded(configuration: Configuration, draft: Any) -> LoadedPoint:
    """The operating point of a configuration."""
    return LoadedPoint(
        draft,
        tree=configuration.tree,
        visual_keep=configuration.visual_keep,
        visual_ranking=configuration.subnet.visual_ranking,
        verification=configuration.verification,
        fallback=configuration.fallback,
    )
