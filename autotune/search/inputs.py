"""The prompts and models of a search, and the draft variants of its space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.cost.table import TOKENS, CostTable
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import AUTO, EAGER
from autotune.machine.device import choose_device
from autotune.measuring.settings import CostSettings
from autotune.measuring.tables import priced_variants
from autotune.modeling.loading import RETRIEVAL
from autotune.recording.traces import record_traces
from autotune.replay.trace import Trace
from autotune.runtime.draft_variants import variants_of
from autotune.runtime.model_pool import load_pool
from autotune.search.plan import SearchSize
from autotune.search.prices import local_table
from autotune.study.ledger import Ledger
from autotune.study.search_settings import SearchSettings, device_for
from autotune.study.spaces import bounds_of, load_space
from autotune.study.storage import LEDGER, study_folder
from autotune.workloads.workload import Workload, shipped_files


class SearchInputs:
    """The prompts, space and models of a search.

    Attributes:
        device: the local device that is tuned for; None where another card is, for which nothing is timed.
        variants: the draft variants of the space.
    """

    def __init__(self, settings: SearchSettings, console: Console, *, sizes_alone: bool = False) -> None:
        self.console = console
        self.tune = settings.load_prompts("tune", settings.num_tune_prompts)
        self.evaluate = settings.load_prompts("evaluate", settings.num_evaluate_prompts)
        if shipped_files(settings.workload):
            console.say(f"prompts: {settings.workload}, shipped with autotune; give your own with --workload FILE")
        if settings.has_default_drafts and settings.drafts == (RETRIEVAL,):
            console.say(
                f"drafts: {RETRIEVAL} alone, because no head of this target is here; name one with --draft, or train one"
            )
        has_images = any(prompt.pixels for prompt in (*self.tune.prompts, *self.evaluate.prompts))
        space = load_space(settings.space, settings.changes)
        self.space = space if has_images else space.without_images()
        most_tokens = max(settings.capture_sizes, default=TOKENS[-1])
        self.bounds = bounds_of(self.space, most_tokens)
        self.device = device_for(settings.gpu, settings.device)
        local = self.device or ("cpu" if settings.device == AUTO else choose_device(settings.device))
        mode = None if self.device and not sizes_alone else EAGER
        self.model_pool = pool = load_pool(settings, local, console, mode=mode, sizes_alone=sizes_alone)
        self.settings = settings.model_copy(update={"drafts": tuple(pool.references)})
        fit = pool.processor, pool.target.max_context, console.say
        self.tune, self.evaluate = self.tune.fitting(*fit), self.evaluate.fitting(*fit)
        if pool.has_states:
            self.space = self.space.chains()
            self.bounds = bounds_of(self.space, most_tokens)
            console.say("recurrent or convolution states follow one path: only chains are searched, no trees")
        self.variants = variants_of(pool, self.space)

    @cached_property
    def folder(self) -> Path:
        """The study's folder."""
        named = f"{self.settings.target.replace('/', '-')}-{self.model_pool.key}"
        return study_folder(self.settings.study or named, self.settings.folder)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / LEDGER)

    def traces(self, variants: Sequence[DraftVariant], workload: Workload, **options: Any) -> list[Trace]:
        """Traces of draft variants, which the study keeps; ``options`` are those of ``record_traces``."""
        known = {"jobs": self.settings.jobs, "bounds": self.bounds, **options}
        return record_traces(self.model_pool, variants, workload, self.folder, self.console, **known)

    def table(self, workload: Workload, limit_s: float) -> CostTable:
        """The cost table of this device for the drafts, measured in ``limit_s`` at most, which the study keeps."""
        priced, limit_s = priced_variants(self.variants), min(limit_s, CostSettings.time_limit_s)
        known = self.folder, self.ledger, self.console
        return local_table(self.model_pool, priced, workload, *known, time_limit_s=limit_s)

    @property
    def size(self) -> SearchSize:
        """The size of the search, if it cuts nothing."""
        return SearchSize(
            num_priced=len(priced_variants(self.variants)),
            num_variants=len(self.variants),
            num_drafts=len(self.model_pool.references),
            num_survivors=min(len(self.variants), max(self.space.survivors, len(self.model_pool.references))),
            answer_tokens=[prompt.settings.max_new_tokens for prompt in self.tune.prompts],
            num_evaluate_prompts=len(self.evaluate.prompts),
            num_processes=1 + self.model_pool.worker_limits(self.settings.jobs)[0],
            is_measured=self.device is not None,
        )
