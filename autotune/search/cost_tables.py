"""Cost tables of a search: found in its study's folder, measured now, or taken from another device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.console import Console, percent
from autotune.cost.latency_table import latency_table
from autotune.cost.roofline import estimate_table, find_limits
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, shipped_tables
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import AUTO, CUDA_GRAPH, EAGER, capture_sizes_for
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import content_key
from autotune.machine.device import gib
from autotune.measuring.jobs import JobLog
from autotune.measuring.measurement import kv_lengths_for, measure_costs
from autotune.measuring.settings import CostSettings
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.graph_runner import check_mode
from autotune.search.model_pool import ModelPool
from autotune.search.thresholds import MAX_PRICED
from autotune.study.ledger import Ledger, Record
from autotune.workloads.workload import Workload


def table_for_gpu(
    gpu: str,
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    mode: str = AUTO,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> CostTable:
    """The table of another device: its shipped measurement of models of these sizes, or an estimate from its datasheet
    and its measurements of other models.

    Args:
        mode: of the table; ``auto``: captured steps, as on every GPU, but for models with states.
        say: is told why a shipped table is not used.

    Raises:
        UserError: the device has no datasheet, and its shipped tables describe other models; or any mode but ``eager``
            for models with states.
    """
    target = model_pool.target_reference
    shipped = {path: CostTable.load(path) for path in shipped_tables().get(gpu, [])}
    shape = model_pool.target.shape
    drafts = [(model_pool.references[d], subnet, model_pool.draft(d, subnet).shape) for d, subnet in variants]
    mode = check_mode(mode, model_pool.target.device, has_states=True) if model_pool.has_states else mode
    mode = CUDA_GRAPH if mode == AUTO else mode
    sizes, precision = capture_sizes_for(mode, model_pool.capture_sizes), model_pool.precision
    for path, table in shipped.items():
        reason = table.why_not_of(gpu, target, shape, drafts, precision=precision, mode=mode, capture_sizes=sizes)
        if reason is None:
            return table.for_models(target, drafts)
        say(f"{path.name} does not price this search: {reason}")
    if find_limits(gpu) is None:
        raise UserError(
            f"--gpu {gpu}: its shipped tables are of other models than {target.id}; run autotune measure on that device"
        )
    return estimate_table(
        gpu,
        target=target,
        target_shape=shape,
        drafts=drafts,
        precision=precision,
        mode=mode,
        capture_sizes=sizes,
        measured=[*shipped.values()],
    )


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


def local_table(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    workload: Workload,
    folder: Path,
    ledger: Ledger,
    console: Console,
    *,
    time_limit_s: float = CostSettings.time_limit_s,
) -> CostTable:
    """This device's table: from the study's folder or ledger if it was measured for the same drafts in the same time,
    else measured now by one of the study's workers.

    Raises:
        UserError: the file in the folder is of another target, device or precision.
    """
    described = [[draft, *subnet.priced] for draft, subnet in variants]
    settings = model_pool.answer_keys.settings_of(workload.prompts[0])  # logits processors cost time too
    prompts = [workload.sha256, _kv_lengths(model_pool, workload), settings]
    documents = [model_pool.key, described, prompts, CostTable.schema_version]
    samples = folder / f"{content_key(documents)}.cost.jsonl"  # serve a table of any time limit
    key = content_key([*documents, time_limit_s])
    path = folder / f"{key}.cost.json"
    if path.exists():
        console.say(f"cost table of {CostTable.load(path).provenance.created} reused: {path}")
    else:

        def measure() -> Record:
            log = JobLog(samples)
            if log.jobs:
                num_samples = sum(len(job.samples) for job in log.jobs)
                console.say(f"cost table continued from {num_samples} samples of an interrupted run")
            return measure_table(model_pool, variants, workload, console, time_limit_s, log).model_dump(mode="json")

        record = ledger.work("cost table", {key: measure})[key]
        CostTable.model_validate(record, strict=False).save(path)
        samples.unlink(missing_ok=True)
    table = CostTable.load(path)
    table.check_is_of(model_pool.target_reference, model_pool.device, model_pool.precision, source=str(path))
    return table


def measure_table(
    model_pool: ModelPool,
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
            model_pool.target,
            model_pool.target_reference,
            [(model_pool.draft(draft, subnet), model_pool.references[draft]) for draft, subnet in variants],
            model_pool.processor,
            workload,
            settings=CostSettings(
                kv_lengths=_kv_lengths(model_pool, workload),
                capture_sizes=model_pool.capture_sizes,
                mode=model_pool.mode,
                time_limit_s=time_limit_s,
            ),
            log=log,
            report=update,
            say=console.say,
        )
    if model_pool.mode != EAGER:
        memory = graph_memory(model_pool.target.device)
        console.say(f"{len(memory)} forward passes prepared, {gib(memory.memory_bytes)}")
    return table


def _kv_lengths(model_pool: ModelPool, workload: Workload) -> tuple[int, ...]:
    """KV lengths of a table for these prompts and their answers."""
    lengths = [prompt.inputs(model_pool.processor)["input_ids"].shape[1] for prompt in workload.prompts]
    ends = (n + prompt.settings.max_new_tokens for n, prompt in zip(lengths, workload.prompts, strict=True))
    return kv_lengths_for(min(lengths), max(ends))


def print_table(table: CostTable, console: Console) -> None:
    """Print the latency of every surface by number of tokens; the other parts and all errors are details."""
    threads = "" if table.threads is None else f", {table.threads} thread{'s' * (table.threads > 1)}"
    console.say(f"{table.device.model}{threads}, {table.precision}, {table.mode}")
    console.show(latency_table(table))
    for name, part in table.parts.items():
        if not isinstance(part, Surface):
            found = f"leave-one-out error {percent(part.held_out_error)}, uncertainty {percent(part.uncertainty)}"
            console.detail(f"{name}: {part.describe()} ({found})")
    if not table.estimated:
        disturbed = f"the device's speed changed during {table.disturbed_samples} of them"
        console.detail(f"{table.num_samples} steps timed; {disturbed}")
    if (contention := table.provenance.contention) is not None:
        console.say(contention.describe("while steps were timed"))
