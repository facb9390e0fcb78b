"""Real runs: arms decode the same prompts, prompt by prompt in random order, and are compared pairwise.

Every prompt's runs are lines of a ledger as soon as all arms have decoded it. An interrupted comparison goes on where it
stood; another comparison measures all its arms anew, because a machine is not the same from hour to hour: what is
compared was measured on the same prompt within seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from autotune.decoding_profile import AR as AR  # for those who run it
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.prompt_lookup import PromptLookupDraft
from autotune.errors import UserError
from autotune.files import Document, append_line, content_key, read_lines
from autotune.runtime.decoder import Decoder
from autotune.runtime.hf_generate import hf_generate
from autotune.runtime.perplexity import perplexity
from autotune.runtime.stats import DecodingStats
from autotune.search.bootstrap import bootstrap_ratio
from autotune.search.space import Configuration
from autotune.workload import WARM_UP_TOKENS, Workload, WorkloadPrompt

Report = Callable[[int, int], None]
HF, HF_ASSISTED, PROMPT_LOOKUP = "hf", "hf-assisted", "prompt_lookup"
DISTURBED = 3.0  # times the usual prefill of the same prompt...
STALLED = 8.0  # ...or times the shortest forward of the target: no tree is as large as that
MAX_REPEATS = 3
SHAPE_TOKENS = 64  # prompts whose lengths round up to the same multiple are of one shape


class Run(Document):
    """One arm on one prompt. Times in milliseconds; ``decode_ms`` runs from the first token to the last, the draft's
    prefill included; ``vision_ms`` is part of ``target_prefill_ms``. Inside Hugging Face's generate ``draft_ms`` and
    ``verify_ms`` are not measured, and 0.
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
    vision_ms: float
    draft_prefill_ms: float
    draft_ms: float
    verify_ms: float
    decode_ms: float
    health: dict[str, Any]
    """Which proposals were taken (``DraftHealth``)."""
    perplexity: float | None = None
    """Of the answer, under the target, where it was asked for."""
    point: int = 0
    """Of a profile: which of its points decoded."""
    plain_steps: int | None = None
    """This and the next are null in runs of earlier versions."""
    verified_nodes: int | None = None

    @property
    def forward_ms(self) -> float:
        """Mean of the target's forwards behind the prefill; 0 where they are not measured, or there is none."""
        return self.verify_ms / max(1, self.target_forwards)


@dataclass(frozen=True)
class Arm:
    """A way to decode, under a name: a configuration, or None for ``ar`` (our plain decoding), ``hf`` and
    ``hf-assisted`` (Hugging Face's generate, alone and with the draft).
    """

    name: str
    configuration: Configuration | None = None
    drafter: str | None = None
    """Who drafts: ``prompt_lookup``, or None for the runner's own draft."""

    @property
    def key(self) -> str:
        if self.configuration is None:
            return self.name
        return self.configuration.key if self.drafter is None else f"{self.drafter}-{self.configuration.key}"


# The free baseline: no model drafts. As many tokens at once as the other published chain.
PROMPT_LOOKUP_ARM = Arm(PROMPT_LOOKUP, Configuration(tree={"policy": "chain", "depth": 5}), drafter=PROMPT_LOOKUP)


class Runner:
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
        learnt = {arm.name: [way.fallback.memory for way in self.decoder_of(arm).ways] for arm in arms}
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
                for way, memory in zip(self.decoder_of(arm).ways, learnt[arm.name], strict=True):
                    way.fallback.memory = memory
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
            health=stats.health.to_json(),
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
        learnt = [way.fallback.memory for way in decoder.ways]
        stream = decoder.stream(**inputs, **self.settings_of(arm, prompt))
        for _ in itertools.islice(stream, WARM_UP_TOKENS):
            pass
        for way, memory in zip(decoder.ways, learnt, strict=True):
            way.fallback.memory = memory

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
                made = Decoder(target, runner=self.decoder.runner, threads=self.decoder.threads)
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
                    buckets=self.decoder.buckets,
                    runner=self.decoder.runner,
                    threads=self.decoder.threads,
                )
            self._decoders[arm.key] = made
        return self._decoders[arm.key]

    @property
    def assistant(self) -> Any | None:
        """The draft as Hugging Face's generate takes it: a whole model, or None where the draft is none."""
        return self.decoder.draft.model if isinstance(self.decoder.draft, IndependentDraft) else None


# ---------------------------------------------------------------------------------------------------------- elimination

BLOCK = 8  # prompts between two looks
MAX_PASSES = 4  # over the prompts
RISK = 0.05  # that any arm leaves by chance, over all looks and arms


@dataclass(frozen=True)
class Elimination:
    """Finalists after they ran against each other."""

    runs: dict[str, list[Run]]
    """By arm; an eliminated one has fewer. Plain decoding ran on all."""
    standing: list[str]
    """Arms that are not surely slower than the fastest; that one first."""


def eliminate(
    runner: Runner,
    arms: Sequence[Arm],
    workload: Workload,
    *,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> Elimination:
    """Arms decode the prompts block by block, beside plain decoding and each other; after each block those leave that are
    surely slower than the fastest. It ends when one is left, the prompts were read ``MAX_PASSES`` times, or where another
    block would not be over by the deadline.
    """
    standing = [arm.name for arm in arms]
    runs: dict[str, list[Run]] = {name: [] for name in (AR, *standing)}
    blocks = [workload.prompts[begin : begin + BLOCK] for begin in range(0, len(workload.prompts), BLOCK)]
    total = len(workload.prompts) * MAX_PASSES
    began = time.monotonic()
    for number in range(MAX_PASSES * len(blocks)):
        prompts = blocks[number % len(blocks)]
        now = time.monotonic()
        is_late = deadline is not None and number > 0 and now + (now - began) / number > deadline
        if number > 0 and (len(standing) == 1 or is_late):
            break
        found = runner.compare(
            [Arm(AR), *(arm for arm in arms if arm.name in standing)],
            Workload(workload.name, workload.split, prompts),
            seed=seed + number,
            min_prompts=len(prompts),
            repeat=number // len(blocks),
            goes_on=number > 0,
        )
        for name, block_runs in found.items():
            runs[name] += block_runs
        if report is not None:
            report(min(total, len(runs[AR])), total)
        times = {name: np.array([run.decode_ms for run in runs[name]]) for name in standing}
        standing.sort(key=lambda name: float(times[name].sum()))
        fastest = times[standing[0]]
        num_tests = MAX_PASSES * len(blocks) * len(arms) * max(1, len(arms) - 1)  # any may look fastest by chance
        standing = [
            name
            for name in standing
            if name == standing[0] or not surely_slower(times[name], fastest, risk=RISK / num_tests)
        ]
    return Elimination(runs, standing)


def surely_slower(ms: NDArray[np.float64], than: NDArray[np.float64], *, risk: float) -> bool:
    """Whether an arm takes longer than another on the same prompts: a paired one-sided t-test of the logarithms of their
    ratios, which keeps its ``risk`` with as few prompts as one look has (resampling so few does not).
    """
    from scipy.stats import t

    ratios = np.log(ms / than)
    spread = float(ratios.std(ddof=1)) / len(ratios) ** 0.5
    return float(ratios.mean()) > spread * float(t.ppf(1 - risk, len(ratios) - 1))


# ---------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Summary:
    """An arm against plain decoding on the same prompts. Speedups are of decoding time per token. Pooled: times and
    tokens are summed over prompts before they are divided. Times are medians over prompts.
    """

    name: str
    speedup: float
    """Pooled."""
    ci95: tuple[float, float]
    median_speedup: float
    """Of the prompts' own speedups."""
    tokens_per_second: float
    tokens_per_round: float | None
    prefill_ms: float
    """Of the target's text model: without vision."""
    vision_ms: float
    draft_prefill_ms: float
    decode_ms: float
    """From the first token to the last, the draft's prefill included."""
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    outside_share: float | None
    """Share of decoding time outside the two models; None where their parts are not measured."""
    outside_us_per_round: float | None
    perplexity: float | None
    """Of all answers' tokens under the target, pooled; None where it was not asked for."""


def summarise(
    name: str, runs: Sequence[Run], baseline: Sequence[Run], *, num_resamples: int = 2000, seed: int = 0
) -> Summary:
    """``runs`` against ``baseline``, prompt for prompt the same, with a paired bootstrap interval over prompts."""
    pairs = decoded_pairs(runs, baseline)
    if not pairs:
        raise UserError("every answer has one token, so nothing was decoded that could be timed; raise max_new_tokens")
    ms, tokens, baseline_ms, baseline_tokens = _columns(pairs)
    total_ms = sum(run.decode_ms for run in runs)
    num_tokens = sum(run.new_tokens - 1 for run in runs)
    rounds = sum(run.rounds for run in runs)
    outside_ms = sum(run.decode_ms - run.draft_prefill_ms - run.draft_ms - run.verify_ms for run in runs)
    is_measured = any(run.verify_ms > 0 for run in runs)
    return Summary(
        name=name,
        speedup=speedup(runs, baseline),
        ci95=bootstrap_ratio(
            baseline_ms,
            ms,
            above_units=baseline_tokens,
            below_units=tokens,
            num_resamples=num_resamples,
            seed=seed,
        ),
        median_speedup=float(np.median((baseline_ms / baseline_tokens) / (ms / tokens))),
        tokens_per_second=1e3 * num_tokens / total_ms,
        tokens_per_round=num_tokens / rounds if rounds else None,
        prefill_ms=float(np.median([run.target_prefill_ms - run.vision_ms for run in runs])),
        vision_ms=float(np.median([run.vision_ms for run in runs])),
        draft_prefill_ms=float(np.median([run.draft_prefill_ms for run in runs])),
        decode_ms=float(np.median([run.decode_ms for run in runs])),
        num_prompts=len(runs),
        num_tokens=num_tokens,
        identical_outputs=sum(
            run.tokens_sha256 == other.tokens_sha256 for run, other in zip(runs, baseline, strict=True)
        ),
        outside_share=outside_ms / total_ms if is_measured else None,
        outside_us_per_round=1e3 * outside_ms / rounds if is_measured and rounds else None,
        perplexity=_pooled_perplexity(runs),
    )


def _pooled_perplexity(runs: Sequence[Run]) -> float | None:
    if any(run.perplexity is None for run in runs):
        return None
    total = sum(run.new_tokens * math.log(run.perplexity or 1.0) for run in runs)
    return math.exp(total / sum(run.new_tokens for run in runs))


def decoded_pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs with their baseline, where both decoded: an answer that ends with its first token is all prefill."""
    return [(a, b) for a, b in zip(runs, baseline, strict=True) if a.new_tokens > 1 and b.new_tokens > 1]


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Pooled decoding time per token of the baseline over that of ``runs``. Of equal tokens it is the ratio of times; a
    lossy arm gains nothing by answering at another length. NaN where nothing was decoded.
    """
    pairs = decoded_pairs(runs, baseline)
    if not pairs:
        return float("nan")
    ms, tokens, baseline_ms, baseline_tokens = (column.sum() for column in _columns(pairs))
    return float((baseline_ms / baseline_tokens) / (ms / tokens))


def _columns(pairs: Sequence[tuple[Run, Run]]) -> NDArray[np.float64]:
    """Decoding times and decoded tokens of the runs, and of their baseline: [4, pairs]."""
    rows = [(a.decode_ms, a.new_tokens - 1, b.decode_ms, b.new_tokens - 1) for a, b in pairs]
    return np.array(rows, np.float64).T
