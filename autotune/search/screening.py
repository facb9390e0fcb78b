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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant, variants_json
from autotune.documents.subnet import Subnet
from autotune.files import content_key
from autotune.recording.chain_recorder import chain_traces
from autotune.recording.traces import record_trace, recorder_of
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import ForestBounds, bounds_for
from autotune.runtime.model_pool import ModelPool
from autotune.search.thresholds import LEAST_SHARE
from autotune.study.ledger import Ledger, Record, Report
from autotune.study.records import ScreenedSubnet, record_of, screened_in
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import Workload

DEPTHS = range(1, 9)  # of the chains
NUM_PROMPTS = 8
NUM_TOKENS = 64  # of each answer, the same for all subnets
BOUNDS = bounds_for([ChainPolicy(depth=DEPTHS[-1])]).model_copy(update={"answer_tokens": NUM_TOKENS})
FIRST_PROMPTS, FIRST_TOKENS = 2, 16  # of the cheap chain of each draft
FIRST_BOUNDS = BOUNDS.model_copy(update={"answer_tokens": FIRST_TOKENS})
MAX_TOGETHER = 8  # subnets in a unit of work
ROUND_SIZE = 4  # units of each process between two rankings

Group = Sequence[DraftVariant]
Units = tuple[dict[str, Group], Callable[[Group], Record]]


def screen(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    table: CostTable,
    workload: Workload,
    folder: Path,
    ledger: Ledger,
    console: Console,
    *,
    jobs: int | None = None,
    deadline: float = math.inf,
    limit: float = math.inf,
) -> list[ScreenedSubnet]:
    """Predict the speed of every variant with its best chain; returns the fastest first.

    Every variant is a record of the ledger. Where that takes long, ``jobs`` processes share the work (None: one per
    core). No variant is begun that would end after ``deadline``, of ``time.monotonic``; a cheap chain and the whole
    subnet of every draft may end until ``limit``. Drafts for which there was no time are named. The target's answers
    are kept in ``folder``.
    """
    num_processes = 1 + model_pool.worker_limits(jobs)[0]
    given = (variants, table, workload, folder)
    times = (deadline, limit, num_processes)
    with (
        console.stage("screening", len(_recorded_together(model_pool, variants))) as update,
        model_pool.worker_pool(jobs, screen_units, ledger, given, times, deadline=deadline) as workers,
    ):
        screened = screen_units(model_pool, 0, ledger, given, times, workers.reporting(update))
    if len(screened) < len(variants):
        console.say(f"{len(screened)} of {len(variants)} subnets were screened in their share of the budget")
    if missing := {draft: None for draft, _ in variants if all(draft != subnet.draft for subnet in screened)}:
        console.say(
            f"not compared: {', '.join(missing)}; there was no time for them: give a longer --budget, or fewer --draft"
        )
    return screened


def screen_units(
    model_pool: ModelPool,
    rank: int,
    ledger: Ledger,
    given: Any,
    times: tuple[float, float, int],
    report: Report = lambda done, of: None,
) -> list[ScreenedSubnet]:
    """Make the records that no other process makes, the promising ones first; returns what is known, the
    fastest first.
    """
    deadline, limit, num_processes = times
    variants, table, workload, folder = given
    records: dict[str, Record] = {}
    of_drafts = [next(variant for variant in variants if variant[0] == draft) for draft in dict(variants)]
    first, screen_first = _screening_units(model_pool, of_drafts, table, workload, folder, FIRST_PROMPTS, FIRST_BOUNDS)
    for number, (key, group) in enumerate(first.items()):
        until = limit if number else math.inf
        records |= ledger.work("first chains", {key: partial(screen_first, group)}, deadline=until)
    waiting, screen_together = _screening_units(model_pool, *given)
    num_units = len(waiting)
    whole: dict[str, str] = {}
    for key, group in waiting.items():
        whole.setdefault(group[0][0], key)
    phases = [(list(whole.values()), limit), (_coarse(waiting, whole), deadline)]

    def screen_groups(chosen: Sequence[str], deadline: float) -> bool:
        """Whether there was time for all of them."""
        done = num_units - len(waiting)
        units = {key: partial(screen_together, waiting.pop(key)) for key in chosen}
        found = ledger.work("subnets", units, report=lambda more, _: report(done + more, num_units), deadline=deadline)
        records.update(found)
        return len(found) == len(units)

    in_time = [screen_groups(chosen, until) for chosen, until in phases]
    while waiting and all(in_time):
        in_time = [screen_groups(_nearest(waiting, _ranked(records), ROUND_SIZE * num_processes), deadline)]
    screen_groups(list(waiting), -math.inf)  # what an earlier run had time for
    return _ranked(records)


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


def _screening_units(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    table: CostTable,
    workload: Workload,
    folder: Path,
    num_prompts: int = NUM_PROMPTS,
    bounds: ForestBounds = BOUNDS,
) -> Units:
    """Groups of variants that are recorded together, by a key that contains everything that their record depends on,
    and the function that finds the best chain of each variant of a group.
    """
    prompts = workload.cut(num_prompts)
    recorder = recorder_of(model_pool, folder)
    read = [model_pool.draft(d).aux_layers if s.injection_layer is None else [s.injection_layer] for d, s in variants]
    recorder.layers = tuple(sorted(set(itertools.chain.from_iterable(read))))
    recorder.answers(prompts)

    def screen_together(group: Group) -> Record:
        draft, subnets = group[0][0], [subnet for _, subnet in group]
        if len(group) == 1:
            traces = [record_trace(recorder, model_pool, group[0], prompts, bounds)]
        else:
            supernet = model_pool.draft(draft, Subnet(vocabulary=subnets[0].vocabulary, weights=subnets[0].weights))
            reference = model_pool.references[draft]
            traces = chain_traces(recorder, supernet, reference, prompts, subnets, bounds)
        evaluator = Evaluator(traces, table, jobs=1)
        return record_of([_best_chain(evaluator, draft, subnet) for subnet in subnets])

    answers = model_pool.answer_keys.of_workload(prompts)
    common = [model_pool.key, "best chains", table.content_hash, answers, bounds.model_dump()]
    groups = _recorded_together(model_pool, variants)
    return {content_key([common, variants_json(group)]): group for group in groups}, screen_together


def _recorded_together(model_pool: ModelPool, variants: Sequence[DraftVariant]) -> list[Group]:
    """The variants in groups: up to ``MAX_TOGETHER`` subnets of a supernet that differ in heads only, those with one
    share in all blocks first, and single ones.
    """
    groups: dict[object, list[DraftVariant]] = {}
    for draft, subnet in variants:
        is_supernet = model_pool.supernet_layers(draft) != ()
        key = subnet.model_copy(update={"heads": None}) if is_supernet else subnet
        groups.setdefault((draft, key), []).append((draft, subnet))
    return [
        part
        for group in groups.values()
        for ordered in [sorted(group, key=lambda variant: len(set(variant[1].head_shares)))]
        for part in (ordered[first : first + MAX_TOGETHER] for first in range(0, len(ordered), MAX_TOGETHER))
    ]


def _best_chain(evaluator: Evaluator, draft: str, subnet: Subnet) -> ScreenedSubnet:
    chains = [Configuration(tree={"policy": "chain", "depth": d}, draft=draft, subnet=subnet) for d in DEPTHS]
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


def print_screened(screened: Sequence[ScreenedSubnet], chosen: Sequence[DraftVariant], console: Console) -> None:
    """Print the survivors, and the range of all speedups."""
    found = [subnet for subnet in screened if subnet.variant in chosen]
    rows = [[f"{n}", f"{s.depth}", f"{s.tokens_per_round:.2f}", f"{s.speedup:.2f}x"] for n, s in enumerate(found, 1)]
    speedups = [subnet.speedup for subnet in screened]
    console.table(
        f"{len(screened)} subnets screened ({min(speedups):.2f}x to {max(speedups):.2f}x), {len(chosen)} survivors",
        ["survivor", "best chain's depth", "M", "predicted"],
        rows,
    )
    console.labels({f"{n}": f"{subnet.draft} {subnet.subnet.label}".strip() for n, subnet in enumerate(found, 1)})
