"""Tables of a diagnosis, for people."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.console import Console
from autotune.cost.roofline import datasheets, find_limits
from autotune.cost.table import shipped_tables
from autotune.device import gib
from autotune.doctor.diagnosis import DecodingTrial, Diagnosis, TargetFound
from autotune.documents.decoding_profile import AR


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print devices, devices of other machines, attention kernels and times of forward passes."""
    rows = [
        [
            device.device,
            device.fingerprint.name,
            device.fingerprint.model,
            device.fingerprint.driver or "-",
            f"{gib(device.free_bytes)} of {gib(device.fingerprint.memory_bytes)}",
            "-" if device.datasheet_gb_per_second is None else f"{device.datasheet_gb_per_second:.0f} GB/s",
            f"{diagnosis.copy_gb_per_second:.1f} GB/s" if device.device == diagnosis.device else "-",
        ]
        for device in diagnosis.devices
    ]
    console.table("Devices", ["device", "name", "model", "driver", "free memory", "datasheet", "copy"], rows)
    print_other_devices(console)
    if diagnosis.target is not None:
        _print_target(diagnosis.target, console)


def measured_pairs() -> dict[str, list[str]]:
    """Names of the pairs with a shipped cost table, by device."""
    return {name: [path.name.removesuffix(".cost.json") for path in paths] for name, paths in shipped_tables().items()}


def print_other_devices(console: Console) -> None:
    """Print the devices that searches can be made for without having them."""
    measured, sheets = measured_pairs(), datasheets()
    rows = []
    for name in sorted({*sheets, *measured}):
        limits = find_limits(name)
        known = ["-", "-"] if limits is None else [limits.model, f"{limits.memory_gb_per_second:.0f} GB/s"]
        rows.append([name, *known, ", ".join(measured.get(name, [])) or "none: estimated from the datasheet"])
    console.table("Other devices (--gpu NAME)", ["name", "model", "bandwidth", "measured pairs"], rows)


def _print_target(target: TargetFound, console: Console) -> None:
    rows = []
    for use in target.attention:
        shapes = [" x ".join(map(str, sizes)) for sizes in (use.query, use.key)]
        rows.append([use.forward, use.backend, *shapes, "yes" if use.has_mask else "no", str(use.num_layers)])
    console.table("Attention", ["forward pass", "kernel", "queries", "keys", "mask", "layers"], rows)
    sizes = sorted({tokens for times in target.steps for tokens in times.verify_ms})
    rows = []
    for times in target.steps:
        verified = [f"{times.verify_ms[tokens]:.2f}" for tokens in sizes]
        rows.append([times.mode, f"{times.plain_ms:.2f}", f"{target.step_gb_per_second(times):.1f}", *verified])
    columns = ["mode", "plain step, ms", "GB/s", *(f"{tokens} tokens" for tokens in sizes)]
    console.table(f"Forward passes of {target.model.id}, {target.precision}", columns, rows)
    if target.trials:
        _print_trials(target.trials, console)


def _print_trials(trials: Sequence[DecodingTrial], console: Console) -> None:
    rows = []
    for trial in trials:
        num_same = trial.num_answers - trial.num_near_ties - len(trial.unexplained)
        m = "-" if trial.tokens_per_round is None else f"{trial.tokens_per_round:.2f}"
        figures = [m, f"{trial.ms_per_token:.2f}", f"{trial.speedup:.2f}x", f"{num_same}/{trial.num_answers}"]
        captures = [f"{trial.num_captures}", f"{trial.capture_s:.1f} s", gib(trial.capture_bytes)]
        rows.append([trial.draft or AR, trial.mode, *figures, f"{trial.num_near_ties}", *captures])
    columns = ["draft", "mode", "M", "ms/token", "speedup", "same output", "near ties", "captures", "time", "memory"]
    console.table(f"Decoding with drafts: {trials[-1].tree}", columns, rows)
