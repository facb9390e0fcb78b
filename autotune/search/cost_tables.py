"""The cost table that a search stands on, found again or made; and what cost tables and traces say, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autotune.acceptance.trace import Trace
from autotune.console import Console
from autotune.cost.profiler import kv_lengths_for, profile, shape_of
from autotune.cost.roofline import datasheets, estimate_table
from autotune.cost.settings import ProfileSettings
from autotune.cost.table import CostTable, shipped_tables
from autotune.device import gib
from autotune.documents.configuration import DraftVariant
from autotune.errors import UserError
from autotune.files import content_key
from autotune.search.model_pool import ModelPool
from autotune.study.ledger import Ledger
from autotune.workloads.workload import Workload


def foreign_table(gpu: str, model_pool: ModelPool, priced: Sequence[DraftVariant]) -> CostTable:
    """Another device's table for these drafts: the shipped measurement, or an estimate from its datasheet and from what is
    shipped of other models.

    Raises:
        UserError: there is no datasheet, and the shipped tables speak of other models.
    """
    target = model_pool.target_reference
    shipped = [CostTable.load(path) for path in shipped_tables().get(gpu, [])]
    for table in shipped:
        is_of_these = all(table.holds(model_pool.references[draft], subnet) for draft, subnet in priced)
        if table.target.sha256 == target.sha256 and is_of_these:
            return table
    if gpu not in datasheets():
        raise UserError(
            f"--gpu {gpu}: its shipped tables are of other models than {target.id}; run autotune profile on that device"
        )
    tables = [
        estimate_table(
            gpu,
            target=target,
            target_shape=shape_of(model_pool.target),
            draft=model_pool.references[draft],
            draft_shape=shape_of(model_pool.draft(draft, subnet)),
            precision=model_pool.precision,
            subnet=subnet,
            measured=shipped,
        )
        for draft, subnet in priced
    ]
    drafts = [costs for table in tables for costs in table.drafts]
    return tables[0].model_copy(update={"capture_sizes": model_pool.capture_sizes, "drafts": drafts})


def priced_apart(variants: Sequence[DraftVariant]) -> list[DraftVariant]:
    """One subnet for every draft and share of heads: how many visual tokens it keeps, and which layer it reads, do not
    change what a step costs.
    """
    found: dict[tuple[str, tuple[float, ...]], DraftVariant] = {}
    for draft, subnet in variants:
        found.setdefault((draft, subnet.head_shares), (draft, subnet.model_copy(update={"visual_keep": 1.0})))
    return list(found.values())


def local_table(
    model_pool: ModelPool,
    priced: Sequence[DraftVariant],
    workload: Workload,
    folder: Path,
    ledger: Ledger,
    console: Console,
    *,
    time_limit_s: float = ProfileSettings.time_limit_s,
) -> CostTable:
    """This device's table: the one in the study's folder or ledger if it was measured for these drafts in as much time, else
    measured now, by one of the study's workers.

    Raises:
        UserError: a table of another target, device or precision was put in its place.
    """
    described = [[draft, list(subnet.head_shares)] for draft, subnet in priced]
    # Tables of older schemas hold no errors.
    named = [model_pool.key, described, workload.sha256, CostTable.schema_version]
    hurried = [] if time_limit_s == ProfileSettings.time_limit_s else [time_limit_s]
    key = content_key([*named, *hurried])
    path = folder / f"{key}.cost.json"
    if not path.exists():
        record = ledger.work(
            "cost table",
            {key: lambda: measure_table(model_pool, priced, workload, console, time_limit_s).model_dump(mode="json")},
        )[key]
        CostTable.model_validate(record, strict=False).save(path)
    else:
        console.say(f"cost table of {CostTable.load(path).provenance.created} reused: {path}")
    table = CostTable.load(path)
    table.check_is_of(model_pool.target_reference, model_pool.device, model_pool.precision, source=str(path))
    return table


def measure_table(
    model_pool: ModelPool,
    priced: Sequence[DraftVariant],
    workload: Workload,
    console: Console,
    time_limit_s: float = ProfileSettings.time_limit_s,
) -> CostTable:
    """Measure target and drafts at the KV lengths that the workload's prompts and answers reach."""
    lengths = [prompt.inputs(model_pool.processor)["input_ids"].shape[1] for prompt in workload.prompts]
    longest = max(
        length + prompt.settings.max_new_tokens for length, prompt in zip(lengths, workload.prompts, strict=True)
    )
    kv_lengths, between = kv_lengths_for(min(lengths), longest)
    with console.stage("cost table") as update:
        table = profile(
            model_pool.target,
            model_pool.target_reference,
            [(model_pool.draft(draft, subnet), model_pool.references[draft]) for draft, subnet in priced],
            model_pool.processor,
            workload,
            settings=ProfileSettings(
                kv_lengths=kv_lengths,
                held_out_kv_length=between,
                capture_sizes=model_pool.capture_sizes,
                mode=model_pool.mode,
                time_limit_s=time_limit_s,
            ),
            report=lambda done, of: update(done, of, ""),
        )
    for model in (model_pool.target, *(model_pool.draft(draft, subnet) for draft, subnet in priced)):
        if (prepared := model.graph_runner) is not None:
            console.say(f"{len(prepared)} forwards of {prepared.description} prepared, {gib(prepared.memory_bytes)}")
    return table


def print_table(table: CostTable, console: Console) -> None:
    """The cost table's summary: latency by size, and how well every part predicts what it was not fitted to."""
    sizes = (1, 4, 8, 16, 32, 64)
    lengths = [point.kv_length for point in table.verify.points]
    middle = (min(lengths) + max(lengths)) // 2
    shown = {"target, plain step": (table.decode, (1,)), "target, verification": (table.verify, sizes)}
    for costs in table.drafts:
        shown[f"draft {costs.name}, first"] = costs.draft_first, sizes
        shown[f"draft {costs.name}, a level"] = costs.draft_level, sizes
    rows = []
    for name, (surface, tokens) in shown.items():
        latencies = surface.latency_ms(np.array(tokens, np.float64), np.array([middle], np.float64))[:, 0]
        cells = [f"{ms:.2f}" for ms in latencies] + ["-"] * (len(sizes) - len(tokens))
        rows.append([name, *cells, surface.model, _percent(surface.held_out_error)])
    anchors = f" from {table.num_anchors} measured tables" if table.num_anchors else ""
    mark = f" (estimated{anchors})" if table.estimated else ""
    threads = "" if table.threads is None else f", {table.threads} thread{'s' * (table.threads > 1)} a step"
    columns = ["part", *(f"{n} tok" for n in sizes), "model", "held-out error"]
    console.table(
        f"Cost table, ms: {table.device.model}{threads}, {table.precision}, {table.mode}, KV length {middle}{mark}",
        columns,
        rows,
    )
    for name, prefill in {
        "target": table.prefill,
        **{f"draft {costs.name}": costs.prefill for costs in table.drafts},
    }.items():
        console.say(
            f"{name}: a prefill {prefill.intercept_ms:.1f} ms + {prefill.per_token_ms:.3f} ms a token + {prefill.image_ms:.1f} ms "
            f"for images (held-out error {_percent(prefill.held_out_error)})"
        )
    for costs in table.drafts:
        if costs.num_parameters is not None and costs.kv_bytes_per_token is not None:
            console.say(
                f"draft {costs.name}: {costs.num_parameters / 1e6:.3g}M parameters of its own, "
                f"{costs.kv_bytes_per_token} bytes of cache a token"
            )
    overheads = {costs.draft.id: costs.overhead for costs in table.drafts}  # the same for all subnets of a draft
    for draft, overhead in overheads.items():
        console.say(
            f"draft {draft}: outside the models {overhead.round_ms:.2f} ms a round + {overhead.level_ms:.2f} ms a draft level + "
            f"{1e3 * overhead.node_ms:.0f} us a node (held-out error {_percent(overhead.held_out_error)})"
        )
    if errors := table.held_out_errors:
        worst = max(errors, key=lambda part: errors[part])
        console.say(
            f"held-out error: median {_percent(float(np.median([*errors.values()])))} over {len(errors)} parts, "
            f"largest {_percent(errors[worst])} ({worst})"
        )
    if not table.estimated:
        console.say(
            f"{table.num_samples} steps timed; {table.remeasured_samples} more were thrown away because the device ran at "
            f"another speed around them"
            + (f", {table.drifted_samples} such were kept" if table.drifted_samples else "")
        )


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:.1f} %"


def print_agreement(traces: Sequence[Trace], console: Console) -> None:
    """Print how often each draft, at its first subnet in ``traces``, predicts the target's next token, by task."""
    import pandas as pd

    by_draft = {trace.header.draft.id: trace.agreement() for trace in reversed(traces)}
    drafts = list(dict.fromkeys(trace.header.draft.id for trace in traces))
    shares = pd.concat([by_draft[draft].assign(draft=draft) for draft in drafts])
    tasks = shares["task"].unique()
    if len(drafts) == 1:
        title, names = "Draft's agreement with the target", ["top-1", "top-4"]
        table = shares.pivot(index="task", columns="rank", values="share").loc[tasks]
    else:
        title, names = "Drafts' agreement with the target, top-1", drafts
        table = shares[shares["rank"] == 1].pivot(index="task", columns="draft", values="share").loc[tasks, drafts]
    rows = [[task, *(f"{100 * share:.1f} %" for share in row)] for task, *row in table.itertuples()]
    console.table(title, ["task", *names], rows)
