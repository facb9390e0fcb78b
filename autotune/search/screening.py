"""Screening: every subnet of every draft is evaluated, exhaustively, as STAR chooses among its subnets.

A subnet's speed is predicted from chains along recorded answers and the cost table. Subnets of a supernet that differ
in heads only are recorded together (``recording.chain_recorder``); their chains are the chains of the recorder of
traces, up to rounding, so nothing is estimated but the cost of unequal shares of heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autotune.acceptance.trace import bounds_for
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.documents.subnet import Subnet
from autotune.files import content_key
from autotune.prediction.evaluator import Evaluator
from autotune.recording.chain_recorder import chain_traces
from autotune.search.finalists import NAMES, print_labels
from autotune.search.model_pool import ModelPool
from autotune.search.thresholds import LEAST_SHARE
from autotune.search.traces import record_trace
from autotune.study.ledger import Ledger, Record
from autotune.study.records import ScreenedSubnet, record_of, screened_in
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import Workload

DEPTHS = range(1, 9)  # of the chains
NUM_PROMPTS = 8
NUM_TOKENS = 64  # of each answer, the same for all subnets
BOUNDS = bounds_for([ChainPolicy(depth=DEPTHS[-1])]).model_copy(update={"answer_tokens": NUM_TOKENS})
ORDER_SEED = 0

Units = dict[str, Callable[[], Record]]


@dataclass(frozen=True)
class ScreeningWork:
    """Variants that processes screen together."""

    variants: Sequence[DraftVariant]
    table: CostTable
    workload: Workload
    folder: Path
    """Keeps the target's answers."""
    storage: str | Path
    """The storage of the ledger."""
    deadline: float | None
    """A value of ``time.monotonic``."""


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
    deadline: float | None = None,
) -> list[ScreenedSubnet]:
    """Predict the speed of every variant with its best chain; returns the fastest first.

    Every variant is a record of the ledger. Where that takes long, ``jobs`` processes share the work (None: one per core).
    No variant is begun after ``deadline``, of ``time.monotonic``, but the full subnet of every draft.
    """
    work = ScreeningWork(variants, table, workload, folder, ledger.storage, deadline)
    with console.stage("screening") as update, model_pool.worker_pool(jobs, screen_in_worker, work) as workers:

        def report(done: int, of: int) -> None:
            update(done, of, "")
            workers.report(done, of)

        first, later = _screening_units(model_pool, work)
        records = ledger.work("subnets", first)
        records |= ledger.work("subnets", later, report=report, deadline=deadline)
    screened = _ranked(records)
    if len(screened) < len(variants):
        console.say(f"{len(screened)} of {len(variants)} subnets were screened in their share of the budget")
    return screened


def screen_in_worker(model_pool: ModelPool, rank: int, work: ScreeningWork) -> None:
    """Screen the variants that no other process screens."""
    first, later = _screening_units(model_pool, work)
    Ledger(work.storage).work("subnets", first | later, deadline=work.deadline)


def _screening_units(model_pool: ModelPool, work: ScreeningWork) -> tuple[Units, Units]:
    """Units that find the best chain of each variant: those with the first variant of each draft, and the others in a random
    order, so that those that are screened before a deadline are a sample of all. Variants that are recorded together are
    one unit.
    """
    prompts = work.workload.cut(NUM_PROMPTS)
    recorder = model_pool.recorder(work.folder)
    layers = {
        layer
        for draft, subnet in work.variants
        for layer in (
            model_pool.draft(draft).aux_layers if subnet.injection_layer is None else [subnet.injection_layer]
        )
    }
    recorder.layers = tuple(sorted(layers))
    recorder.answers(prompts)

    def screen_together(group: Sequence[DraftVariant]) -> Record:
        draft, subnets = group[0][0], [subnet for _, subnet in group]
        if len(group) == 1:
            traces = [record_trace(model_pool, recorder, group[0], prompts, BOUNDS)]
        else:
            supernet = model_pool.draft(draft, Subnet(vocabulary=subnets[0].vocabulary))
            reference = model_pool.references[draft]
            traces = chain_traces(recorder, supernet, reference, prompts, subnets, BOUNDS)
        evaluator = Evaluator(traces, work.table, jobs=1)
        return record_of([_best_chain(evaluator, draft, subnet) for subnet in subnets])

    def units(groups: Sequence[Sequence[DraftVariant]]) -> Units:
        """A unit for every group of variants; its key contains everything that its record depends on."""
        documents = ["best chains", work.table.content_hash, prompts.sha256, BOUNDS.model_dump()]
        common = [version_of(DISTRIBUTION), model_pool.key, documents]
        keys = (content_key([common, [[draft, subnet.model_dump(mode="json")] for draft, subnet in g]]) for g in groups)
        return {key: partial(screen_together, group) for key, group in zip(keys, groups, strict=True)}

    groups = _recorded_together(model_pool, work.variants)
    first = list({group[0][0]: group for group in reversed(groups)}.values())
    later = [group for group in groups if group not in first]
    random.Random(ORDER_SEED).shuffle(later)
    return units(first), units(later)


def _recorded_together(model_pool: ModelPool, variants: Sequence[DraftVariant]) -> list[list[DraftVariant]]:
    """The variants in groups: subnets of a supernet that differ in heads only, and single ones."""
    groups: dict[object, list[DraftVariant]] = {}
    for draft, subnet in variants:
        is_supernet = model_pool.supernet_layers(draft) != ()
        key = subnet.model_copy(update={"heads": None}) if is_supernet else subnet
        groups.setdefault((draft, key), []).append((draft, subnet))
    return list(groups.values())


def _best_chain(evaluator: Evaluator, draft: str, subnet: Subnet) -> ScreenedSubnet:
    chains = [Configuration(tree={"policy": "chain", "depth": d}, draft=draft, subnet=subnet) for d in DEPTHS]
    best = min((evaluator.evaluate(chain) for chain in chains), key=lambda candidate: candidate.ms_per_token)
    return ScreenedSubnet(
        draft=draft,
        subnet=subnet,
        depth=best.configuration.tree["depth"],
        tokens_per_round=best.tokens_per_round,
        ms_per_token=best.ms_per_token,
        speedup=best.speedup,
    )


def _ranked(records: Mapping[str, Record]) -> list[ScreenedSubnet]:
    screened = (subnet for record in records.values() for subnet in screened_in(record))
    return sorted(screened, key=lambda subnet: subnet.rank)


def survivors(screened: Sequence[ScreenedSubnet], count: int) -> list[DraftVariant]:
    """The variants whose trees are searched: the best subnet of each draft that can still win, then the best others, ``count``
    in all.

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
    named = dict(zip(NAMES, (subnet for subnet in screened if subnet.variant in chosen), strict=False))
    rows = [
        [name, f"{subnet.depth}", f"{subnet.tokens_per_round:.2f}", f"{subnet.speedup:.2f}x"]
        for name, subnet in named.items()
    ]
    speedups = [subnet.speedup for subnet in screened]
    console.table(
        f"{len(screened)} subnets screened ({min(speedups):.2f}x to {max(speedups):.2f}x), {len(chosen)} survivors",
        ["survivor", "best chain's depth", "M", "predicted"],
        rows,
    )
    print_labels({name: f"{subnet.draft} {subnet.subnet.label}" for name, subnet in named.items()}, console)
    for draft in dict.fromkeys(subnet.draft for subnet in screened):
        _print_equal_shares([subnet for subnet in screened if subnet.draft == draft], console)


def _print_equal_shares(screened: Sequence[ScreenedSubnet], console: Console) -> None:
    """Compare a draft's best subnet with the best of those that keep one share of heads in all blocks, fastest first."""
    equal = [subnet for subnet in screened if len(set(subnet.subnet.head_shares)) == 1]
    if 0 < len(equal) < len(screened):
        best, best_equal = screened[0].speedup, equal[0].speedup
        console.say(
            f"{screened[0].draft}: best of {len(screened)} subnets {best:.3f}x ({screened[0].subnet.label}, "
            f"M {screened[0].tokens_per_round:.2f}); best of the {len(equal)} with one share of heads in all blocks "
            f"{best_equal:.3f}x ({equal[0].subnet.label}, M {equal[0].tokens_per_round:.2f})"
        )
