"""The subnet stage: every subnet of every draft is screened, exhaustively, as STAR chooses its draft (among its 200 subnets); here by chains
along recorded answers, priced by the cost table, which takes a second or two each, or by real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from autotune.acceptance.recorder import Recorder
from autotune.acceptance.trace import bounds_for
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.decoding_profile import AR
from autotune.documents.provenance import version_of
from autotune.evaluation.summary import summarize
from autotune.files import content_key
from autotune.search.evaluator import Evaluator
from autotune.search.model_pool import ModelPool
from autotune.study.ledger import Ledger, Record
from autotune.study.records import ScreenedSubnet
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import Workload

DEPTHS = range(1, 9)  # of the chains that a subnet is screened by
NUM_PROMPTS = 8
NUM_TOKENS = 64  # of each answer: all subnets are compared along the same ones
CHAINS = bounds_for([ChainPolicy(depth=DEPTHS[-1])]).model_copy(update={"answer_tokens": NUM_TOKENS})
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
    """All of ``variants``, the best first. Every subnet is a record of the ledger; ``jobs`` processes make them where that takes
    long (None: one for each core).
    """
    arguments = list(variants), table, workload, folder, ledger.storage
    with console.stage("subnets by chains") as update, model_pool.helped(jobs, _help, *arguments) as helpers:

        def report(done: int, of: int) -> None:
            update(done, of, "")
            helpers.report(done, of)

        records = ledger.work("subnets", _units(model_pool, variants, table, workload, folder), report=report)
    return _ranked(records)


def _help(
    model_pool: ModelPool,
    rank: int,
    variants: list[DraftVariant],
    table: CostTable,
    workload: Workload,
    folder: Path,
    storage: str | Path,
) -> None:
    """Screen what nobody has claimed."""
    Ledger(storage).work("subnets", _units(model_pool, variants, table, workload, folder))


def _units(
    model_pool: ModelPool, variants: Sequence[DraftVariant], table: CostTable, workload: Workload, folder: Path
) -> dict[str, Callable[[], Record]]:
    """What screens each of the places by its best chain."""
    prompts = Workload(workload.name, workload.split, workload.prompts[:NUM_PROMPTS])
    recorder = Recorder(model_pool.target, model_pool.target_reference, model_pool.processor, folder)
    recorder.layers = tuple(sorted({layer for variant in variants for layer in model_pool.draft(*variant).aux_layers}))
    recorder.answers(prompts)

    def make(variant: DraftVariant) -> ScreenedSubnet:
        draft, subnet = variant
        trace = recorder.trace(
            model_pool.draft(draft, subnet),
            model_pool.references[draft],
            prompts,
            visual_keep=subnet.visual_keep,
            bounds=CHAINS,
        )
        evaluator = Evaluator([trace], table, jobs=1)
        chains = [Configuration(tree={"policy": "chain", "depth": d}, draft=draft, subnet=subnet) for d in DEPTHS]
        best = min((evaluator.evaluate(chain) for chain in chains), key=lambda found: found.ms_per_token)
        return ScreenedSubnet(
            draft=draft,
            subnet=subnet,
            depth=best.configuration.tree["depth"],
            tokens_per_round=best.tokens_per_round,
            ms_per_token=best.ms_per_token,
            speedup=best.speedup,
        )

    documents = ["screened", table.content_hash, prompts.sha256, CHAINS.model_dump()]
    return _units_of(model_pool, variants, make, documents)


def measure(
    model_pool: ModelPool,
    screened: Sequence[ScreenedSubnet],
    threads: int | None,
    workload: Workload,
    ledger: Ledger,
    console: Console,
) -> list[ScreenedSubnet]:
    """The same subnets run for real beside plain decoding, each with its best chain, as the paper measures them; the best
    first. Every one is a record of the ledger.
    """
    prompts = Workload(workload.name, workload.split, workload.prompts[:NUM_MEASURED_PROMPTS])
    of_place = {one.variant: one for one in screened}
    runner = model_pool.runner(threads)

    def make(variant: DraftVariant) -> ScreenedSubnet:
        one = of_place[variant]
        tree = {"policy": "chain", "depth": one.depth}
        arm = runner.arm("chain", Configuration(tree=tree, draft=one.draft, subnet=one.subnet))
        runs = runner.compare([runner.plain, arm], prompts, min_prompts=len(prompts.prompts))
        speedup = summarize(arm.name, runs[arm.name], runs[AR]).speedup
        return one.model_copy(update={"measured_speedup": speedup})

    depths = sorted([one.draft, one.subnet.name, one.depth] for one in screened)
    documents = ["measured", prompts.sha256, depths]
    units = _units_of(model_pool, list(of_place), make, documents)
    with console.stage("subnets, measured") as update:
        return _ranked(ledger.work("subnets", units, report=lambda done, of: update(done, of, "")))


def _units_of(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    make: Callable[[DraftVariant], ScreenedSubnet],
    documents: object,
) -> dict[str, Callable[[], Record]]:
    """A unit for every subnet, named by what its record depends on."""
    common = [version_of("autotune"), model_pool.key, documents]

    def unit(variant: DraftVariant) -> Record:
        return make(variant).model_dump(mode="json")

    return {
        content_key([common, draft, subnet.model_dump(mode="json")]): partial(unit, (draft, subnet))
        for draft, subnet in variants
    }


def _ranked(records: Mapping[str, Record]) -> list[ScreenedSubnet]:
    """The best first."""
    return sorted(
        (ScreenedSubnet.model_validate(one, strict=False) for one in records.values()), key=lambda one: one.rank
    )


def survivors(screened: Sequence[ScreenedSubnet], count: int) -> list[DraftVariant]:
    """Whose trees are searched: the best subnet of each draft, and then the best of all, ``count`` together."""
    best_of_draft = {one.draft: one for one in reversed(screened)}
    chosen = sorted(best_of_draft.values(), key=lambda one: one.rank)
    chosen += [one for one in screened if one not in chosen]
    return [one.variant for one in chosen[: max(count, len(best_of_draft))]]


def print_screened(screened: Sequence[ScreenedSubnet], chosen: Sequence[DraftVariant], console: Console) -> None:
    """The survivors, and how far behind the others are."""
    rows = [
        [
            one.draft,
            one.subnet.label,
            f"chain(depth={one.depth})",
            f"{one.tokens_per_round:.2f}",
            f"{one.speedup:.2f}x",
            "-" if one.measured_speedup is None else f"{one.measured_speedup:.2f}x",
        ]
        for one in screened
        if one.variant in chosen
    ]
    speedups = [one.measured_speedup or one.speedup for one in screened]
    columns = ["draft", "subnet", "best chain", "M", "predicted", "measured"]
    console.table(
        f"{len(screened)} subnets screened ({min(speedups):.2f}x to {max(speedups):.2f}x); {len(chosen)} go on",
        columns,
        rows,
    )
