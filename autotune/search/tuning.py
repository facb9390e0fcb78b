"""Everything that a stage of a search is given: models, prompts, space, ledger, clock, and the study's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.cost.table import TOKENS
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import AUTO, EAGER
from autotune.documents.search_space import SearchSpace
from autotune.files import content_key
from autotune.machine.device import choose_device
from autotune.modeling.loading import RETRIEVAL
from autotune.replay.trace import ForestBounds
from autotune.runtime.model_pool import ModelPool, load_pool, variants_of
from autotune.search.thresholds import STAGES
from autotune.study.ledger import Ledger, Record
from autotune.study.search_settings import SearchSettings, device_for
from autotune.study.spaces import bounds_of, load_space
from autotune.study.storage import LEDGER, study_folder
from autotune.workloads.workload import Workload, shipped_files

UNTIMED_STAGES = ("screening", "traces", "tree search")
"""The stages of a search for another device, whose cost table exists and where nothing is run."""


class StageClock:
    """Deadlines of the stages of a search in their order, of ``time.monotonic``.

    Args:
        budget_s: time in which all stages end.
        is_timed: whether the device is this machine's, so that all stages take time.

    Attributes:
        kept_s: seconds that earlier stages leave to a stage.
    """

    def __init__(self, budget_s: float, *, is_timed: bool = True) -> None:
        self.budget_s = budget_s
        self.weights = {stage: STAGES[stage] for stage in (STAGES if is_timed else UNTIMED_STAGES)}
        self.kept_s: Mapping[str, float] = {}
        self.start()

    def start(self) -> None:
        """The budget begins now."""
        self.deadline = time.monotonic() + self.budget_s

    @property
    def spent_s(self) -> float:
        return self.budget_s - (self.deadline - time.monotonic())

    def set_share(self, stage: str, share: float) -> None:
        """Give a stage another share of the budget, at the cost of all others equally."""
        others = sum(weight for name, weight in self.weights.items() if name != stage)
        self.weights[stage] = others * share / (1 - share)

    def deadline_of(self, stage: str) -> float:
        """The end of a stage that begins now: the time kept for it, and its share of the time that is left for it and
        the later stages and not reserved.
        """
        reserved = self._kept_from(stage)
        now, weights = time.monotonic(), [self.weights[name] for name in reserved]
        free_s = max(0.0, self.deadline - now - sum(reserved.values()))
        return now + reserved[stage] + free_s * weights[0] / sum(weights)

    def limit_of(self, stage: str) -> float:
        """The end of the time that is not kept for later stages: the least of a stage may go on until then."""
        reserved = self._kept_from(stage)
        return self.deadline - (sum(reserved.values()) - reserved[stage])

    def _kept_from(self, stage: str) -> dict[str, float]:
        """The time kept for this stage and every later one, less where not so much is left."""
        stages = list(self.weights)
        reserved = {name: self.kept_s.get(name, 0.0) for name in stages[stages.index(stage) :]}
        share = min(1.0, max(0.0, self.deadline - time.monotonic()) / max(sum(reserved.values()), 1e-9))
        return {name: share * seconds for name, seconds in reserved.items()}


@dataclass
class Tuning:
    """One search, as its stages see it."""

    settings: SearchSettings
    pool: ModelPool
    space: SearchSpace
    bounds: ForestBounds
    """Limits of the forests that the trees of the space need."""
    variants: list[DraftVariant]
    """All draft variants of the space."""
    tune: Workload
    held_out: Workload
    device: str | None
    """The local device that is tuned for; None where another card is, for which nothing is timed."""
    console: Console
    clock: StageClock

    @classmethod
    def load(cls, settings: SearchSettings, console: Console, *, sizes_alone: bool = False) -> Tuning:
        """Load what the settings name; the clock of the stages is not running yet.

        Args:
            sizes_alone: as in ``ModelPool``.

        Raises:
            UserError: the models, prompts or space of the settings cannot be searched.
        """
        tune = settings.load_prompts("tune", settings.num_tune_prompts)
        held_out = settings.load_prompts("evaluate", settings.num_evaluate_prompts)
        if shipped_files(settings.workload):
            console.say(f"prompts: {settings.workload}, shipped with autotune; give your own with --workload FILE")
        if settings.has_default_drafts and settings.drafts == (RETRIEVAL,):
            console.say(
                f"drafts: {RETRIEVAL} alone, because no head of this target is here; name one with --draft, or train one"
            )
        space = load_space(settings.space, settings.changes)
        if not any(prompt.pixels for prompt in (*tune.prompts, *held_out.prompts)):
            space = space.without_images()
        most_tokens = max(settings.capture_sizes, default=TOKENS[-1])
        bounds = bounds_of(space, most_tokens)
        device = device_for(settings.gpu, settings.device)
        local = device or ("cpu" if settings.device == AUTO else choose_device(settings.device))
        mode = None if device and not sizes_alone else EAGER
        pool = load_pool(settings, local, console, mode=mode, sizes_alone=sizes_alone)
        if pool.has_states:
            space = space.chains()
            bounds = bounds_of(space, most_tokens)
            console.say("recurrent or convolution states follow one path: only chains are searched, no trees")
        fit = pool.processor, pool.target.max_context, console.say
        return cls(
            settings=settings,
            pool=pool,
            space=space,
            bounds=bounds,
            variants=variants_of(pool, space),
            tune=tune.fitting(*fit),
            held_out=held_out.fitting(*fit),
            device=device,
            console=console,
            clock=StageClock(settings.budget_s, is_timed=device is not None),
        )

    @cached_property
    def folder(self) -> Path:
        """The study's folder."""
        named = f"{self.settings.target.replace('/', '-')}-{self.pool.key}"
        return study_folder(self.settings.study or named, self.settings.folder)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.settings.storage or self.folder / LEDGER)

    @cached_property
    def key(self) -> str:
        """Part of the names of the files of this search alone."""
        return content_key([self.settings.key, self.pool.key])

    @property
    def tune_key(self) -> object:
        """Hashes of the tuning prompts, as the target's answers depend on them."""
        return self.pool.answer_keys.of_workload(self.tune)

    @property
    def num_processes(self) -> int:
        """Processes that record and screen."""
        return 1 + self.pool.worker_limits(self.settings.jobs)[0]

    @contextmanager
    def turn(self, stage: str, *, is_timed: bool = False) -> Iterator[None]:
        """The turn of a stage among the workers of this host. The clock stands still until it has come."""
        arrived = time.monotonic()
        with self.ledger.turn(stage, self.console.say, is_timed=is_timed):
            self.clock.deadline += time.monotonic() - arrived
            yield

    def timed(self, stage: str, key: str, measure: Callable[[], Record]) -> Record:
        """A record that one worker measures for all, alone on its host."""
        if self.settings.storage is not None and self.ledger.missing([key]):
            self.console.say(f"{stage}: one worker measures it for all that share the storage")
        return self.ledger.work(stage, {key: self.turn(stage, is_timed=True)(measure)})[key]

    def decided(self, what: str, documents: object, decide: Callable[[], Any]) -> Any:
        """A decision that depends on how much was done in time. It is a record: workers that share a ledger agree on
        it, and the same command continues with it.
        """
        key = content_key([what, self.pool.key, self.settings.budget_s, documents])
        return self.ledger.work("decisions", {key: lambda: {what: decide()}})[key][what]
