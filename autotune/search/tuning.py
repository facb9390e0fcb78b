"""What every stage of a search is given: models, prompts, space, ledger, clock, and the study's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from autotune.console import Console
from autotune.cost.table import TOKENS
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import AUTO, EAGER
from autotune.documents.search_space import SearchSpace
from autotune.documents.table import Table
from autotune.files import content_key
from autotune.machine.device import choose_device
from autotune.modeling.loading import RETRIEVAL
from autotune.replay.trace import ForestBounds
from autotune.runtime.draft_variants import variants_of
from autotune.runtime.model_pool import ModelPool, load_pool
from autotune.search.clock import StageClock
from autotune.study.ledger import Ledger
from autotune.study.search_settings import SearchSettings, device_for
from autotune.study.spaces import bounds_of, load_space
from autotune.study.storage import LEDGER, study_folder
from autotune.workloads.workload import Workload, shipped_files


class HasTables(Protocol):
    """The result of a stage that people read."""

    def tables(self) -> list[Table]: ...


@dataclass
class Tuning:
    """One search, as its stages see it."""

    settings: SearchSettings
    settings_key: str
    """That of the settings as the user gave them; ``settings`` name the drafts that fit the target."""
    pool: ModelPool
    space: SearchSpace
    bounds: ForestBounds
    """Of the forests that the trees of the space need."""
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
            settings=settings.model_copy(update={"drafts": tuple(pool.references)}),
            settings_key=settings.key,
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
        return content_key([self.settings_key, self.pool.key])

    @property
    def tune_key(self) -> object:
        """Hashes of the tuning prompts, as the target's answers depend on them."""
        return self.pool.answer_keys.of_workload(self.tune)

    @property
    def num_processes(self) -> int:
        """Processes that record and screen."""
        return 1 + self.pool.worker_limits(self.settings.jobs)[0]

    def decided(self, what: str, documents: object, decide: Callable[[], Any]) -> Any:
        """A decision that depends on how much was done in time. It is a record: workers that share a ledger agree on
        it, and the same command continues with it.
        """
        key = content_key([what, self.pool.key, self.settings.budget_s, documents])
        return self.ledger.work("decisions", {key: lambda: {what: decide()}})[key][what]

    def show(self, result: HasTables) -> None:
        """Show the tables of a stage's result."""
        for table in result.tables():
            self.console.show(table)
