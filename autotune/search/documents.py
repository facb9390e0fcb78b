"""The documents that a search stands on, found again or made: the cost table of a device, the traces of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autotune.acceptance.recorder import Recorder
from autotune.acceptance.trace import ForestBounds, Trace, agreement, save_trace
from autotune.console import Console
from autotune.cost.device import choose_device, fingerprint, local_devices, shipped_tables
from autotune.cost.profiler import kv_lengths_for, profile
from autotune.cost.roofline import datasheets, estimate_table
from autotune.cost.sampling import ProfileSettings
from autotune.cost.table import CostTable
from autotune.drafters.checkpoint import LoadedDraft
from autotune.errors import UserError, nearest
from autotune.files import SCHEMA_VERSIONS, content_key, parse, read_json, write_document
from autotune.search.pair import Pair, shape_of
from autotune.workload import Workload


def device_for(gpu: str) -> str | None:
    """The local device to measure on, or None where ``gpu`` names another one, whose shipped table is used.

    Raises:
        UserError: a device that is neither here nor shipped.
    """
    if gpu == "auto" or gpu in local_devices():
        return choose_device(gpu)
    for device in local_devices():
        if fingerprint(device).name == gpu:
            return device
    known = {*shipped_tables(), *datasheets()}
    if gpu not in known:
        hint = nearest(gpu, ["auto", *local_devices(), *known])
        raise UserError(
            f"--gpu {gpu}: neither a device of this machine nor one with a shipped cost table or datasheet; {hint}"
        )
    return None


def load_table(path: Path) -> CostTable:
    """The cost table in ``path``."""
    return parse(CostTable, "cost-table", read_json(path), source=path)


def foreign_table(gpu: str, pair: Pair) -> CostTable:
    """Another device's table for this pair: the shipped measurement, or an estimate from its datasheet.

    Raises:
        UserError: there is no datasheet, and the shipped tables speak of other models.
    """
    for path in shipped_tables().get(gpu, []):
        table = load_table(path)
        if table.target.sha256 == pair.target_reference.sha256 and table.holds(pair.draft_reference, pair.draft.subnet):
            return table
    if gpu not in datasheets():
        raise UserError(
            f"--gpu {gpu}: its shipped tables are of other models than {pair.target_reference.id}; run autotune profile on that device"
        )
    table = estimate_table(
        gpu,
        target=pair.target_reference,
        target_shape=shape_of(pair.target),
        draft=pair.draft_reference,
        draft_shape=shape_of(pair.draft),
        precision=str(pair.target.dtype).removeprefix("torch."),
        subnet=pair.draft.subnet,
    )
    return table.model_copy(update={"buckets": pair.decoder.buckets})


def local_table(pair: Pair, workload: Workload, folder: Path, console: Console) -> CostTable:
    """This device's table: from the study's folder if it was measured for this pair, else measured now.

    Raises:
        UserError: a table of another target, device or precision was put in its place.
    """
    key = content_key([pair.key, workload.sha256, SCHEMA_VERSIONS["cost-table"]])  # older ones hold no errors
    path = folder / f"{key}.cost.json"
    if path.exists():
        table = load_table(path)
        precision = str(pair.target.dtype).removeprefix("torch.")
        table.check_speaks_of(pair.target_reference, pair.device, precision, source=str(path))
        console.say(f"cost table of {table.provenance.created} reused: {path}")
        return table
    table = measure_table(pair, workload, console)
    write_document(path, "cost-table", table)
    return table


def measure_table(pair: Pair, workload: Workload, console: Console, further: Sequence[LoadedDraft] = ()) -> CostTable:
    """Measure the pair at the KV lengths that the workload's prompts and answers reach, and ``further`` subnets of its
    draft beside it.
    """
    lengths = [prompt.inputs(pair.processor)["input_ids"].shape[1] for prompt in workload.prompts]
    longest = max(
        length + prompt.settings.max_new_tokens for length, prompt in zip(lengths, workload.prompts, strict=True)
    )
    kv_lengths, between = kv_lengths_for(min(lengths), longest)
    with console.stage("cost table") as update:
        return profile(
            pair.target,
            pair.target_reference,
            [(draft, pair.draft_reference) for draft in (pair.draft, *further)],
            pair.processor,
            workload,
            settings=ProfileSettings(kv_lengths=kv_lengths, held_out_kv_length=between, buckets=pair.decoder.buckets),
            report=lambda done, of: update(done, of, ""),
        )


def record_traces(
    pair: Pair,
    workload: Workload,
    keeps: list[float],
    folder: Path,
    console: Console,
    *,
    bounds: ForestBounds | None = None,
) -> list[Trace]:
    """The target's answers, then a trace of the draft for each visual keep ratio, saved under ``folder``."""
    bounds = bounds or ForestBounds()
    recorder = Recorder(pair.target, pair.target_reference, pair.processor, folder)
    with console.stage("answers of the target") as update:
        recorder.answers(workload, lambda done, of: update(done, of, ""))
    traces: list[Trace] = []
    with console.stage("traces of the draft") as update:
        for number, keep in enumerate(keeps):

            def report(done: int, of: int, first: int = number) -> None:
                update(first * of + done, len(keeps) * of, "")

            trace = recorder.trace(
                pair.draft, pair.draft_reference, workload, visual_keep=keep, bounds=bounds, report=report
            )
            save_trace(folder / "traces" / f"{trace.header.subnet.name}.trace.json", trace)
            traces.append(trace)
    return traces


def print_table(table: CostTable, console: Console) -> None:
    """The cost table's summary: latency by size, and how well every part predicts what it was not fitted to."""
    sizes = (1, 4, 8, 16, 32, 64)
    lengths = [point.kv_length for point in table.verify.points]
    middle = (min(lengths) + max(lengths)) // 2
    shown = {"target, plain step": (table.decode, (1,)), "target, verification": (table.verify, sizes)}
    for costs in table.drafts:
        shown[f"draft {costs.name}, first"] = costs.commit, sizes
        shown[f"draft {costs.name}, a level"] = costs.propose, sizes
    rows = []
    for name, (surface, tokens) in shown.items():
        latencies = surface.latency_ms(np.array(tokens, np.float64), np.array([middle], np.float64))[:, 0]
        cells = [f"{ms:.2f}" for ms in latencies] + ["-"] * (len(sizes) - len(tokens))
        rows.append([name, *cells, surface.model, _percent(surface.held_out_error)])
    mark = " (estimated)" if table.estimated else ""
    threads = "" if table.threads is None else f", {table.threads} thread{'s' * (table.threads > 1)} a step"
    columns = ["part", *(f"{n} tok" for n in sizes), "model", "held-out error"]
    console.table(
        f"Cost table, ms: {table.device.model}{threads}, {table.precision}, {table.runner}, KV length {middle}{mark}",
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
        overhead, size = costs.overhead, ""
        if costs.num_parameters is not None and costs.cache_bytes_per_token is not None:
            size = f"{costs.num_parameters / 1e6:.3g}M parameters of its own, {costs.cache_bytes_per_token} bytes of cache a token; "
        console.say(
            f"draft {costs.name}: {size}outside the models {overhead.round_ms:.2f} ms a round + {overhead.level_ms:.2f} ms a draft "
            f"level (held-out error {_percent(overhead.held_out_error)})"
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


def print_agreement(trace: Trace, console: Console) -> None:
    """How often the draft names the target's next token, by task."""
    shares = agreement(trace)
    rows = [[task, f"{100 * found[1]:.1f} %", f"{100 * found[4]:.1f} %"] for task, found in shares.items()]
    console.table("Draft's agreement with the target", ["task", "top-1", "top-4"], rows)
