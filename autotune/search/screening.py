"""Screening: every subnet of every draft is evaluated, exhaustively, as STAR chooses among its 200 subnets.

A subnet's speed is predicted from chains along recorded answers and the cost table, or measured by real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from autotune.acceptance.trace import bounds_for
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.decoding_profile import AR
from autotune.documents.provenance import version_of
from autotune.documents.subnet import Subnet
from autotune.evaluation.summary import summarize
from autotune.files import content_key
from autotune.search.evaluator import Evaluator
from autotune.search.finalists import NAMES, print_labels
from autotune.search.model_pool import ModelPool
from autotune.search.traces import record_trace
from autotune.study.ledger import Ledger, Record
from autotune.study.records import ScreenedSubnet
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import Workload

DEPTHS = range(1, 9)  # of the chains
NUM_PROMPTS = 8
NUM_TOKENS = 64  # of each answer, the same for all subnets
BOUNDS = bounds_for([ChainPolicy(depth=DEPTHS[-1])]).model_copy(update={"answer_tokens": NUM_TOKENS})
NUM_MEASURED_PROMPTS = 8


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
) -> list[ScreenedSubnet]:
    """Predict the speed of every variant with its best chain; returns the fastest first.

    Every variant is a record of the ledger. Where that takes long, ``jobs`` processes share the work (None: one per core).
    """
    arguments = list(variants), table, workload, folder, ledger.storage
    with console.stage("screening") as update, model_pool.worker_pool(jobs, _screen_in_worker, *arguments) as workers:

        def report(done: int, of: int) -> None:
            update(done, of, "")
            workers.report(done, of)

        records = ledger.work("subnets", _screening_units(model_pool, variants, table, workload, folder), report=report)
    return _ranked(records)


def _screen_in_worker(
    model_pool: ModelPool,
    rank: int,
    variants: list[DraftVariant],
    table: CostTable,
    workload: Workload,
    folder: Path,
    storage: str | Path,
) -> None:
    Ledger(storage).work("subnets", _screening_units(model_pool, variants, table, workload, folder))


def _screening_units(
    model_pool: ModelPool, variants: Sequence[DraftVariant], table: CostTable, workload: Workload, folder: Path
) -> dict[str, Callable[[], Record]]:
    """Units that find the best chain of a variant."""
    prompts = Workload(workload.name, workload.split, workload.prompts[:NUM_PROMPTS])
    recorder = model_pool.recorder(folder)
    recorder.layers = tuple(sorted({layer for variant in variants for layer in model_pool.draft(*variant).aux_layers}))
    recorder.answers(prompts)

    def screen_variant(draft: str, subnet: Subnet) -> ScreenedSubnet:
        trace = record_trace(model_pool, recorder, (draft, subnet), prompts, BOUNDS)
        evaluator = Evaluator([trace], table, jobs=1)
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

    documents = ["screened", table.content_hash, prompts.sha256, BOUNDS.model_dump()]
    return _units(model_pool, variants, screen_variant, documents)


def measure(
    model_pool: ModelPool,
    screened: Sequence[ScreenedSubnet],
    threads: int | None,
    workload: Workload,
    ledger: Ledger,
    console: Console,
) -> list[ScreenedSubnet]:
    """Run screened subnets with their best chains beside plain decoding, as STAR does; returns the fastest first.

    Every variant is a record of the ledger.
    """
    prompts = Workload(workload.name, workload.split, workload.prompts[:NUM_MEASURED_PROMPTS])
    by_variant = {subnet.variant: subnet for subnet in screened}
    runner = model_pool.runner(threads)

    def measure_variant(draft: str, subnet: Subnet) -> ScreenedSubnet:
        predicted = by_variant[draft, subnet]
        tree = {"policy": "chain", "depth": predicted.depth}
        arm = runner.arm("chain", Configuration(tree=tree, draft=draft, subnet=subnet))
        runs = runner.compare([runner.plain, arm], prompts, min_prompts=len(prompts.prompts))
        speedup = summarize(arm.name, runs[arm.name], runs[AR]).speedup
        return predicted.model_copy(update={"measured_speedup": speedup})

    depths = sorted([predicted.draft, predicted.subnet.name, predicted.depth] for predicted in screened)
    units = _units(model_pool, list(by_variant), measure_variant, ["measured", prompts.sha256, depths])
    with console.stage("subnets, measured") as update:
        return _ranked(ledger.work("subnets", units, report=lambda done, of: update(done, of, "")))


def _units(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    make: Callable[[str, Subnet], ScreenedSubnet],
    documents: object,
) -> dict[str, Callable[[], Record]]:
    """A unit for every variant; its key contains everything that its record depends on."""
    common = [version_of("autotune"), model_pool.key, documents]

    def unit(draft: str, subnet: Subnet) -> Record:
        return make(draft, subnet).model_dump(mode="json")

    return {
        content_key([common, draft, subnet.model_dump(mode="json")]): partial(unit, draft, subnet)
        for draft, subnet in variants
    }


def _ranked(records: Mapping[str, Record]) -> list[ScreenedSubnet]:
    screened = (ScreenedSubnet.model_validate(record, strict=False) for record in records.values())
    return sorted(screened, key=lambda subnet: subnet.rank)


def survivors(screened: Sequence[ScreenedSubnet], count: int) -> list[DraftVariant]:
    """The variants whose trees are searched: the best subnet of each draft, then the best others, ``count`` in all."""
    best_of_draft = {subnet.draft: subnet for subnet in reversed(screened)}
    chosen = sorted(best_of_draft.values(), key=lambda subnet: subnet.rank)
    chosen += [subnet for subnet in screened if subnet not in chosen]
    return [subnet.variant for subnet in chosen[: max(count, len(best_of_draft))]]


def print_screened(screened: Sequence[ScreenedSubnet], chosen: Sequence[DraftVariant], console: Console) -> None:
    """Print the survivors, and the range of all speedups."""
    named = dict(zip(NAMES, (subnet for subnet in screened if subnet.variant in chosen), strict=False))
    rows = [
        [
            name,
            f"{subnet.depth}",
            f"{subnet.tokens_per_round:.2f}",
            f"{subnet.speedup:.2f}x",
            "-" if subnet.measured_speedup is None else f"{subnet.measured_speedup:.2f}x",
        ]
        for name, subnet in named.items()
    ]
    speedups = [subnet.measured_speedup or subnet.speedup for subnet in screened]
    console.table(
        f"{len(screened)} subnets screened ({min(speedups):.2f}x to {max(speedups):.2f}x), {len(chosen)} survivors",
        ["survivor", "best chain's depth", "M", "predicted", "measured"],
        rows,
    )
    print_labels({name: f"{subnet.draft} {subnet.subnet.label}" for name, subnet in named.items()}, console)
