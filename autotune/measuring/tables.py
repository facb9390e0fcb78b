"""Cost tables of the models of a pool, measured on its device."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.console import Console
from autotune.cost.latency_table import latency_table
from autotune.cost.table import CostTable
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import EAGER
from autotune.documents.subnet import Subnet
from autotune.machine.device import gib
from autotune.measuring.jobs import JobLog
from autotune.measuring.measurement import kv_lengths_for, measure_costs
from autotune.measuring.settings import CostSettings
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.model_pool import ModelPool
from autotune.workloads.workload import Workload

MAX_PRICED = 8  # choices of heads of a draft that are all timed; of more, those with one share in all blocks are


def priced_variants(variants: Sequence[DraftVariant]) -> list[DraftVariant]:
    """One variant per draft, share of heads, vocabulary and weights: visual tokens, operator and the layer read do not
    change a step's cost.

    Of a draft with more than ``MAX_PRICED`` choices of heads, those with one share in all blocks are priced; the costs
    of the others are interpolated (``CostTable.costs_around``).
    """
    priced: dict[tuple[str, object], dict[tuple[float, ...], Subnet]] = {}
    for draft, subnet in variants:
        plain = Subnet(**subnet.model_dump(include={"heads", "injection_layer", "vocabulary", "weights"}))
        priced.setdefault((draft, subnet.priced[1:]), {}).setdefault(subnet.head_shares, plain)
    for key, by_shares in priced.items():
        if len(by_shares) > MAX_PRICED:
            shares = sorted({share for triple in by_shares for share in triple}, reverse=True)
            some = next(iter(by_shares.values()))
            equal = [some.model_copy(update={"heads": share if share < 1.0 else None}) for share in shares]
            priced[key] = {subnet.head_shares: subnet for subnet in equal}
    return [(draft, subnet) for (draft, _), by_shares in priced.items() for subnet in by_shares.values()]


def measure_table(
    pool: ModelPool,
    variants: Sequence[DraftVariant],
    workload: Workload,
    console: Console,
    time_limit_s: float = CostSettings.time_limit_s,
    log: JobLog | None = None,
) -> CostTable:
    """Measure target and drafts at the KV lengths that the workload's prompts and answers reach. An interrupted
    measurement continues from the samples in its ``log``.
    """
    with console.stage("cost table", round(10 * time_limit_s)) as update:
        table = measure_costs(
            pool.target,
            pool.target_reference,
            [(pool.draft(draft, subnet), pool.references[draft]) for draft, subnet in variants],
            pool.processor,
            workload,
            settings=CostSettings(
                kv_lengths=kv_lengths_of(pool, workload),
                capture_sizes=pool.capture_sizes,
                mode=pool.mode,
                time_limit_s=time_limit_s,
            ),
            log=log,
            report=update,
            say=console.say,
        )
    if pool.mode != EAGER:
        memory = graph_memory(pool.target.device)
        console.say(f"{len(memory)} forward passes prepared, {gib(memory.memory_bytes)}")
    return table


def kv_lengths_of(pool: ModelPool, workload: Workload) -> tuple[int, ...]:
    """KV lengths of a table for these prompts and their answers."""
    lengths = [prompt.inputs(pool.processor)["input_ids"].shape[1] for prompt in workload.prompts]
    ends = (n + prompt.settings.max_new_tokens for n, prompt in zip(lengths, workload.prompts, strict=True))
    return kv_lengths_for(min(lengths), max(ends))


def show_table(table: CostTable, console: Console) -> None:
    """Show the latency of every surface by number of tokens."""
    threads = "" if table.threads is None else f", {table.threads} thread{'s' * (table.threads > 1)}"
    console.say(f"{table.device.model}{threads}, {table.precision}, {table.mode}")
    console.show(latency_table(table))
    if not table.estimated:
        disturbed = f"the device's speed changed during {table.disturbed_samples} of them"
        console.detail(f"{table.num_samples} steps timed; {disturbed}")
    if (contention := table.provenance.contention) is not None:
        console.say(contention.describe("while steps were timed"))
