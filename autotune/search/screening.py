"""Screening: every subnet of every draft is evaluated, as STAR chooses among its subnets, the promising ones first.

A cheap chain of each draft comes first, so that all drafts are compared in any budget, and the whole subnet of each
draft next. A few shares of visual tokens follow, then the subnets that are nearest to the best one of each draft that
can still win, so that a deadline leaves out those that are least likely to win.

A subnet's speed is predicted from chains along recorded answers and the cost table. Subnets of a supernet that differ
in heads only are recorded together (``recording.chain_recorder``); their chains are the chains of the recorder of
traces, up to rounding, so nothing is estimated but the cost of unequal shares of heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant, variants_json
from autotune.documents.subnet import Subnet
from autotune.files import content_key
from autotune.recording.chain_recorder import chain_traces
from autotune.recording.traces import record_trace, recorder_of
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import ForestBounds, bounds_for
from autotune.runtime.model_pool import ModelPool
from autotune.search.thresholds import (
    FIRST_CHAIN_PROMPTS,
    FIRST_CHAIN_TOKENS,
    LEAST_SHARE,
    MAX_SCREENED_TOGETHER,
    SCREENED_AT_ONCE,
    SCREENED_DEPTH,
    SCREENED_PROMPTS,
    SCREENED_TOKENS,
)
from autotune.search.tuning import Tuning
from autotune.study.ledger import Ledger, Record, Report
from autotune.study.records import ScreenedSubnet, record_of, screened_in
from autotune.table import Table, times
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import Workload

BOUNDS = bounds_for([ChainPolicy(depth=SCREENED_DEPTH)]).model_copy(update={"answer_tokens": SCREENED_TOKENS})
FIRST_BOUNDS = BOUNDS.model_copy(update={"answer_tokens": FIRST_CHAIN_TOKENS})

Group = Sequence[DraftVariant]


@dataclass(frozen=True)
class Screened:
    """The result of a screening."""

    subnets: list[ScreenedSubnet]
    """The fastest first."""
    survivors: list[DraftVariant]
    """The variants whose trees are searched."""

    def tables(self) -> list[Table]:
        """The survivors, with the range of all speedups."""
        shown = [subnet for subnet in self.subnets if subnet.variant in self.survivors]
        rows = [[f"{n}", f"{s.depth}", f"{s.tokens_per_round:.2f}", times(s.speedup)] for n, s in enumerate(shown, 1)]
        slowest, fastest = times(self.subnets[-1].speedup), times(self.subnets[0].speedup)
        title = f"{len(self.subnets)} subnets screened ({slowest} to {fastest}), {len(self.survivors)} survivors"
        labels = {f"{n}": f"{s.draft} {s.subnet.label}".strip() for n, s in enumerate(shown, 1)}
        return [Table(title, ["survivor", "best chain's depth", "M", "predicted"], rows, labels=labels)]


def screen(tuning: Tuning, table: CostTable) -> Screened:
    """Predict the speed of every variant with its best chain, and choose those whose trees are searched.

    Every variant is a record of the ledger. Where that takes long, processes share the work. Drafts for which there was
    no time are named.
    """
    clock, console, variants, jobs = tuning.clock, tuning.console, tuning.variants, tuning.settings.jobs
    deadline = clock.deadline_of("screening")
    given = variants, table, tuning.tune, tuning.folder, tuning.ledger
    times = deadline, clock.limit_of("screening"), tuning.num_processes
    with (
        console.stage("screening", len(_recorded_together(tuning.pool, variants))) as update,
        tuning.pool.worker_pool(jobs, screen_units, *given, *times, deadline=deadline) as workers,
    ):
        screened = screen_units(tuning.pool, 0, *given, *times, workers.reporting(update))
    if len(screened) < len(variants):
        console.say(f"{len(screened)} of {len(variants)} subnets were screened in their share of the budget")
    if missing := {draft: None for draft, _ in variants if all(draft != subnet.draft for subnet in screened)}:
        console.say(
            f"not compared: {', '.join(missing)}; there was no time for them: give a longer --budget, or fewer --draft"
        )
    documents = [variants_json(variants), table.content_hash, tuning.tune_key]
    best = survivors(screened, tuning.space.survivors)
    decided = tuning.decided("survivors", documents, lambda: variants_json(best))
    result = Screened(screened, [(draft, Subnet.model_validate(subnet, strict=False)) for draft, subnet in decided])
    for shown in result.tables():
        console.show(shown)
    return result


def screen_units(
    pool: ModelPool,
    rank: int,
    variants: Sequence[DraftVariant],
    table: CostTable,
    workload: Workload,
    folder: Path,
    ledger: Ledger,
    deadline: float = math.inf,
    limit: float = math.inf,
    num_processes: int = 1,
    report: Report = lambda done, of: None,
) -> list[ScreenedSubnet]:
    """Make the records that no other process makes, the promising ones first; returns what is known, the
    fastest first.

    Args:
        folder: keeps the target's answers.
        deadline: of ``time.monotonic``: no variant is begun that would end later.
        limit: the same for a cheap chain and the whole subnet of every draft.
    """
    records: dict[str, Record] = {}
    of_drafts = [next(variant for variant in variants if variant[0] == draft) for draft in dict(variants)]
    first = Units(pool, of_drafts, table, workload.cut(FIRST_CHAIN_PROMPTS), folder, FIRST_BOUNDS)
    for number, key in enumerate(first.groups):
        until = limit if number else math.inf
        records |= ledger.work("first chains", first.some([key]), deadline=until)
    units = Units(pool, variants, table, workload.cut(SCREENED_PROMPTS), folder, BOUNDS)
    waiting = dict(units.groups)

    def report_all(done: int, of: int) -> None:
        report(len(units.groups) - len(waiting) + done, len(units.groups))

    for keys, is_least in _in_order(waiting, records, SCREENED_AT_ONCE * num_processes):
        chosen = units.some(keys)
        made = ledger.work("subnets", chosen, deadline=limit if is_least else deadline, report=report_all)
        records |= made
        if len(made) < len(chosen):
            break
        for key in keys:
            del waiting[key]
    records |= ledger.work("subnets", units.some(waiting), deadline=-math.inf)  # an earlier run had time for them
    return _ranked(records)


def _in_order(
    waiting: Mapping[str, Group], records: Mapping[str, Record], at_once: int
) -> Iterator[tuple[list[str], bool]]:
    """Keys of the groups that are screened next, and whether they are the least: the whole subnets, a few shares of
    visual tokens, then the neighbours of the best subnets. ``waiting`` and ``records`` change in between.
    """
    whole: dict[str, str] = {}
    for key, group in waiting.items():
        whole.setdefault(group[0][0], key)
    coarse = _coarse(waiting, whole)
    yield list(whole.values()), True
    yield coarse, False
    while waiting:
        yield _nearest(waiting, _ranked(records), at_once), False


def _coarse(waiting: Mapping[str, Group], whole: Mapping[str, str]) -> list[str]:
    """Keys of groups like the first of their draft, ``whole`` by draft, with a middle and the least share of visual
    tokens.
    """
    chosen: list[str] = []
    for draft, whole_key in whole.items():
        first = waiting[whole_key][0][1]
        keeps = {
            subnet.visual_keep: key
            for key, ((of, subnet), *_) in waiting.items()
            if of == draft and subnet == first.model_copy(update={"visual_keep": subnet.visual_keep}) != first
        }
        ordered = [keeps[keep] for keep in sorted(keeps, reverse=True)]
        chosen += [*ordered[len(ordered) // 2 :][:1], *ordered[-1:]]
    return list(dict.fromkeys(chosen))


def _nearest(waiting: Mapping[str, Group], screened: Sequence[ScreenedSubnet], count: int) -> list[str]:
    """Keys of the groups that are nearest to the best subnet of their draft, the drafts in turn; last come drafts that
    cannot win.
    """
    best_of_draft = {subnet.draft: subnet for subnet in reversed(screened)}
    near: dict[str, list[tuple[float, str]]] = {draft: [] for draft in best_of_draft}
    for key, group in waiting.items():
        draft = group[0][0]
        near[draft].append((min(_distance(subnet, best_of_draft[draft].subnet) for _, subnet in group), key))
    order = [
        (best_of_draft[draft].speedup < LEAST_SHARE * screened[0].speedup, turn, key)
        for draft, groups in near.items()
        for turn, (_, key) in enumerate(sorted(groups))
    ]
    return [key for *_, key in sorted(order)[:count]]


def _distance(subnet: Subnet, best: Subnet) -> float:
    """How much a subnet differs from the best one: by one choice less than by two, and visual tokens by their
    logarithm.
    """
    changed = sum(getattr(subnet, name) != getattr(best, name) for name in Subnet.model_fields)
    return 10.0 * changed + abs(math.log(subnet.visual_keep / best.visual_keep))


class Units:
    """Groups of variants that are recorded together, each a unit of work.

    Attributes:
        groups: by a key that contains everything that their record depends on.
    """

    def __init__(
        self,
        pool: ModelPool,
        variants: Sequence[DraftVariant],
        table: CostTable,
        prompts: Workload,
        folder: Path,
        bounds: ForestBounds,
    ) -> None:
        self.pool, self.table, self.prompts, self.bounds = pool, table, prompts, bounds
        self.recorder = recorder_of(pool, folder)
        read = [pool.draft(d).aux_layers if s.injection_layer is None else [s.injection_layer] for d, s in variants]
        self.recorder.layers = tuple(sorted(set(itertools.chain.from_iterable(read))))
        self.recorder.answers(self.prompts)
        answers = pool.answer_keys.of_workload(self.prompts)
        common = [pool.key, "best chains", table.content_hash, answers, bounds.model_dump()]
        groups = _recorded_together(pool, variants)
        self.groups = {content_key([common, variants_json(group)]): group for group in groups}

    def some(self, keys: Iterable[str]) -> dict[str, Callable[[], Record]]:
        """The units with these keys."""
        return {key: partial(self.screen, self.groups[key]) for key in keys}

    def screen(self, group: Group) -> Record:
        """The best chain of each variant of a group."""
        draft, subnets = group[0][0], [subnet for _, subnet in group]
        if len(group) == 1:
            traces = [record_trace(self.recorder, self.pool, group[0], self.prompts, self.bounds)]
        else:
            supernet = self.pool.draft(draft, Subnet(vocabulary=subnets[0].vocabulary, weights=subnets[0].weights))
            reference = self.pool.references[draft]
            traces = chain_traces(self.recorder, supernet, reference, self.prompts, subnets, self.bounds)
        evaluator = Evaluator(traces, self.table, jobs=1)
        return record_of([_best_chain(evaluator, draft, subnet) for subnet in subnets])


def _recorded_together(pool: ModelPool, variants: Sequence[DraftVariant]) -> list[Group]:
    """The variants in groups: up to ``MAX_SCREENED_TOGETHER`` subnets of a supernet that differ in heads only,
    those with one share in all blocks first, and single ones.
    """
    groups: dict[object, list[DraftVariant]] = {}
    for draft, subnet in variants:
        is_supernet = pool.drafts[draft].dimensions.injection_layers != ()
        key = subnet.model_copy(update={"heads": None}) if is_supernet else subnet
        groups.setdefault((draft, key), []).append((draft, subnet))
    return [
        part
        for group in groups.values()
        for ordered in [sorted(group, key=lambda variant: len(set(variant[1].head_shares)))]
        for part in (
            ordered[first : first + MAX_SCREENED_TOGETHER] for first in range(0, len(ordered), MAX_SCREENED_TOGETHER)
        )
    ]


def _best_chain(evaluator: Evaluator, draft: str, subnet: Subnet) -> ScreenedSubnet:
    depths = range(1, SCREENED_DEPTH + 1)
    chains = [Configuration(tree={"policy": "chain", "depth": d}, draft=draft, subnet=subnet) for d in depths]
    best = min((evaluator.evaluate(chain) for chain in chains), key=lambda candidate: candidate.ms_per_token)
    speed = best.model_dump(include={"tokens_per_round", "ms_per_token", "speedup"})
    return ScreenedSubnet(draft=draft, subnet=subnet, depth=best.configuration.tree["depth"], **speed)


def _ranked(records: Mapping[str, Record]) -> list[ScreenedSubnet]:
    """The screened variants, the fastest first. The last of several records of a variant counts: not the first chain
    where the whole subnet was screened.
    """
    screened = {subnet.variant: subnet for record in records.values() for subnet in screened_in(record)}
    return sorted(screened.values(), key=lambda subnet: subnet.rank)


def survivors(screened: Sequence[ScreenedSubnet], count: int) -> list[DraftVariant]:
    """The variants whose trees are searched: the best subnet of each draft that can still win, then the best others,
    ``count`` in all.

    Args:
        screened: the fastest first.
    """
    best_of_draft = {subnet.draft: subnet for subnet in reversed(screened)}
    least = LEAST_SHARE * screened[0].speedup
    chosen = sorted((s for s in best_of_draft.values() if s.speedup >= least), key=lambda subnet: subnet.rank)
    num_drafts = len(chosen)
    chosen += [subnet for subnet in screened if subnet not in chosen]
    return [subnet.variant for subnet in chosen[: max(count, num_drafts)]]
