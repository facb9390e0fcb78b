"""The prices of a search: found in its study's folder, measured now, or taken from another device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.cost.roofline import estimate_table, find_limits
from autotune.cost.table import CostTable, shipped_tables
from autotune.documents.configuration import DraftVariant
from autotune.documents.execution import AUTO, CUDA_GRAPH, capture_sizes_for
from autotune.documents.fingerprint import split_cards
from autotune.errors import UserError
from autotune.files import content_key
from autotune.measuring.jobs import JobLog
from autotune.measuring.settings import CostSettings
from autotune.measuring.tables import kv_lengths_of, measure_table, priced_variants, show_table
from autotune.modeling.graph_runner import check_mode
from autotune.runtime.model_pool import ModelPool
from autotune.search import thresholds
from autotune.search.plan import Plan
from autotune.search.tuning import Tuning
from autotune.study.ledger import Record
from autotune.workloads.workload import Workload


def table_for_gpu(
    gpu: str,
    pool: ModelPool,
    variants: Sequence[DraftVariant],
    mode: str = AUTO,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> CostTable:
    """The table of another device, or of several that share the target: a shipped measurement of models of these sizes,
    or an estimate from the datasheet and measurements of other models.

    Args:
        gpu: the cards, ``h100`` or ``4xh100``.
        mode: of the table; ``auto``: captured steps, as on every GPU, but for models with states.
        say: is told why a shipped table is not used.

    Raises:
        UserError: the device has no datasheet, and its shipped tables describe other models; any mode but ``eager`` for
            models with states; or several devices that cannot share the target.
    """
    target = pool.target_reference
    num_devices, name = split_cards(gpu)
    shipped = {path: CostTable.load(path) for path in shipped_tables().get(name, [])}
    shape = pool.target.shape
    if num_devices not in shape.device_numbers:
        raise UserError(
            f"--gpu {gpu}: {num_devices} cards cannot share {target.id}; by its heads and transformers' plan of tensor "
            f"parallelism, these numbers can: {', '.join(map(str, shape.device_numbers))}; name one of them"
        )
    drafts = [(pool.references[d], subnet, pool.draft(d, subnet).shape) for d, subnet in variants]
    mode = check_mode(mode, pool.target.device, has_states=True) if pool.has_states else mode
    mode = CUDA_GRAPH if mode == AUTO else mode
    sizes, precision = capture_sizes_for(mode, pool.capture_sizes), pool.target.text.precision
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


def price(tuning: Tuning, plan: Plan) -> CostTable:
    """The cost table of the search: this device's, or that of another card."""
    settings = tuning.settings
    if tuning.device is None:
        priced = priced_variants(tuning.variants)
        table = table_for_gpu(str(settings.gpu), tuning.pool, priced, settings.mode, say=tuning.console.say)
        save_table(table, tuning.folder)
    else:
        # Not the deadline of the stage: the limit is part of the table's key.
        limit_s = min(CostSettings.time_limit_s, thresholds.STAGES["cost table"] * settings.budget_s)
        table = local_table(tuning, tuning.tune, plan.table_limit_s(limit_s))
    show_table(table, tuning.console)
    return table


def save_table(table: CostTable, folder: Path) -> None:
    """Keep a table in a study's folder, by its content."""
    table.save(folder / f"{table.content_hash}.cost.json")


def local_table(tuning: Tuning, workload: Workload, time_limit_s: float) -> CostTable:
    """This device's table for the drafts of a search: from the ledger if it was measured for the same drafts in the
    same time, else measured now by one of the study's workers. The study's folder keeps it.
    """
    pool, folder, console, variants = tuning.pool, tuning.folder, tuning.console, priced_variants(tuning.variants)
    described = [[draft, *subnet.priced] for draft, subnet in variants]
    settings = pool.answer_keys.settings_of(workload.prompts[0])  # logits processors cost time too
    prompts = [workload.sha256, kv_lengths_of(pool, workload), settings]
    documents = [pool.key, described, prompts, CostTable.schema_version]
    samples = folder / f"{content_key(documents)}.cost.jsonl"  # serve a table of any time limit
    key = content_key([*documents, time_limit_s])
    is_known = not tuning.ledger.missing([key])

    def measure() -> Record:
        log = JobLog(samples)
        if log.jobs:
            num_samples = sum(len(job.samples) for job in log.jobs)
            console.say(f"cost table continued from {num_samples} samples of an interrupted run")
        return measure_table(pool, variants, workload, console, time_limit_s, log).model_dump(mode="json")

    table = CostTable.model_validate(tuning.timed("cost table", key, measure), strict=False)
    if is_known:
        console.say(f"cost table of {table.provenance.created} reused")
    table.save(folder / f"{key}.cost.json")
    samples.unlink(missing_ok=True)
    return table
