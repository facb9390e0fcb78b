"""``autotune search``: profile, record, search, measure, and write the decoding profile.

Each stage leaves documents that the next run finds again.
"""

from __future__ import annotations

import time

from autotune.acceptance.trace import ForestBounds, bounds_for
from autotune.console import Console
from autotune.cost.profiler import shape_of
from autotune.cost.settings import ProfileSettings
from autotune.cost.table import TOKENS, CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.files import content_key
from autotune.search.cost_tables import (
    foreign_table,
    local_table,
    priced_apart,
    print_agreement,
    print_table,
)
from autotune.search.evaluator import Constraints, Evaluator
from autotune.search.model_pool import ModelPool
from autotune.search.profile_selection import ProfileSelection
from autotune.search.screening import measure, print_screened, screen, survivors
from autotune.search.settings import SearchSettings, check_settings, device_for
from autotune.search.space import SearchSpace, largest_policies, load_space
from autotune.search.traces import record_traces
from autotune.search.tree_search import search_trees
from autotune.study.document import LEDGER, PROFILE, DraftEntry, StudyDocument, save_study
from autotune.study.ledger import Ledger
from autotune.workloads.workload import Workload, load_workload

MIN_TREES_S = 20.0  # for the trees, however late it is
TABLE_SHARE = 0.3  # of the budget that steps may be timed for, where that is less than they take


def space_of(settings: SearchSettings) -> SearchSpace:
    """The space searched, its heads and layers narrowed to what was asked for."""
    space = load_space(settings.space)
    if settings.heads is not None:
        space = space.model_copy(update={"heads": [settings.heads]})
    if settings.injection_layer is not None:
        space = space.model_copy(update={"injection_layers": [settings.injection_layer]})
    return space


def bounds_of(space: SearchSpace, largest: int = TOKENS[-1]) -> ForestBounds:
    """How far traces must reach for a space; refuses one that cost tables of steps up to ``largest`` tokens do not reach,
    before anything is made.

    Raises:
        UserError: trees larger or wider than what is measured.
    """
    policies = list(largest_policies(space))
    for policy in policies:
        if max(policy.max_nodes + 1, policy.max_width) > largest:
            raise UserError(
                f"space {space.name}: steps are priced up to {largest} tokens; {policy.policy} verifies up to "
                f"{policy.max_nodes + 1} and drafts {policy.max_width} at once; narrow the space"
            )
    return bounds_for(policies)


def search(settings: SearchSettings, console: Console, *, started: float | None = None) -> DecodingProfile:
    """The main job. Interrupted at any moment, the same call goes on from what is on disk; several of them with one
    ``storage`` share the work. The budget counts from ``started``, of ``time.monotonic()``; None: from now.

    Raises:
        UserError: anything the user can mend, before long work where possible.
    """
    check_settings(settings)
    deadline = (time.monotonic() if started is None else started) + settings.budget_s
    space = space_of(settings)
    bounds = bounds_of(space, max(settings.capture_sizes, default=TOKENS[-1]))
    tune = load_workload(settings.workload, "tune", num_prompts=settings.num_tune_prompts)
    evaluate = load_workload(settings.workload, "evaluate", num_prompts=settings.num_evaluate_prompts)
    device = device_for(settings.gpu)
    shared = None if settings.storage is None else Ledger(settings.storage)
    model_pool = ModelPool(settings.target, settings.drafts, device or "cpu", settings.capture_sizes, settings.mode)
    variants = model_pool.subnets(space)
    folder = settings.folder / (settings.study or f"{settings.target.replace('/', '-')}-{model_pool.key}")
    ledger = shared or Ledger(folder / LEDGER)
    console.say(
        f"target {settings.target}, draft{'s' * (len(settings.drafts) > 1)} {', '.join(settings.drafts)}, "
        f"workload {settings.workload}; study in {folder}"
    )
    clock = _StageClock()
    constraints = Constraints(settings.max_round_ms, settings.max_draft_mib)

    priced = priced_apart(variants)
    if device is None:
        table = foreign_table(settings.gpu, model_pool, priced)
        table.save(folder / f"{table.device.name}.cost.json")
    else:
        limit_s = min(ProfileSettings.time_limit_s, TABLE_SHARE * settings.budget_s)
        table = local_table(model_pool, priced, tune, folder, ledger, console, time_limit_s=limit_s)
    clock.ended("cost table")
    constraints.check_table(table)
    left = _study_of(settings, model_pool, table, tune, space)
    save_study(folder, left)
    print_table(table, console)
    if len(variants) > space.survivors:
        screened = screen(model_pool, variants, table, tune, folder, ledger, console, jobs=settings.jobs)
        if settings.measure == "all" and device is not None:
            screened = measure(model_pool, screened, table.threads, tune, ledger, console)
        left = left.model_copy(update={"records": ledger.used_keys})
        save_study(folder, left)
        variants = survivors(screened, space.survivors)
        print_screened(screened, variants, console)
        clock.ended("subnets")
    traces = record_traces(model_pool, variants, tune, folder, console, bounds=bounds, jobs=settings.jobs)
    print_agreement(traces, console)
    clock.ended("traces")

    evaluator = Evaluator(traces, table, constraints=constraints, jobs=settings.jobs)
    with console.stage("trees by replay") as update:
        found = search_trees(
            evaluator,
            space,
            ledger,
            num_trials=settings.num_trials,
            documents=[model_pool.key, tune.sha256, table.content_hash, bounds.model_dump()],
            seed=settings.seed,
            deadline=time.monotonic() + max(MIN_TREES_S, 0.4 * (deadline - time.monotonic())),
            report=update,
        )
    clock.ended("trees")
    console.say(
        f"{found.num_replayed:,} configurations replayed; plain decoding is predicted at {evaluator.ar_ms_per_token:.2f} ms a token"
    )
    left = left.model_copy(update={"records": ledger.used_keys, "sampled": found.sampled})
    save_study(folder, left)
    selection = ProfileSelection(
        found, model_pool, table, evaluator, folder, tune, evaluate, settings.seed, deadline, console
    )
    if device is None:
        document = selection.predicted_profile()
    elif shared is None:
        document = selection.measured_profile()
    else:  # one worker measures, for all
        best = found.fastest[0].key
        key = content_key(["profile", best, evaluate.sha256, settings.budget_s, settings.seed, table.content_hash])
        units = {key: lambda: selection.measured_profile().model_dump(mode="json")}
        document = DecodingProfile.model_validate(ledger.work("profile", units)[key], strict=False)
    clock.ended("finalists and evaluation")
    save_study(folder, left.model_copy(update={"finalists": selection.finalists, "stage_seconds": clock.seconds}))
    for path in (folder / PROFILE, settings.output):
        document.save(path)
    console.say(f"time: {clock.said}")
    console.say(f"decoding profile written to {settings.output}")
    return document


def _study_of(
    settings: SearchSettings,
    model_pool: ModelPool,
    table: CostTable,
    tune: Workload,
    space: SearchSpace,
) -> StudyDocument:
    """What the search was asked, before it has made any record."""
    return StudyDocument(
        provenance=stamp(),
        command=settings.command,
        target=model_pool.target_reference,
        target_shape=shape_of(model_pool.target),
        drafts=[
            DraftEntry(kind=model_pool.kind(draft), reference=reference, shape=shape_of(model_pool.draft(draft)))
            for draft, reference in model_pool.references.items()
        ],
        hardware=table.device,
        workload=settings.workload,
        tune_sha256=tune.sha256,
        space=space.name,
        cost_table=table.content_hash,
    )


class _StageClock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def ended(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = now - self._last
        self._last = now

    @property
    def said(self) -> str:
        return ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in self.seconds.items())
