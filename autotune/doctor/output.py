"""Tables of a diagnosis, for people."""

from __future__ import annotations

from autotune.console import Console
from autotune.cost.roofline import datasheets, find_limits
from autotune.cost.table import shipped_tables
from autotune.doctor.diagnosis import Diagnosis, TargetFound
from autotune.documents.decoding_profile import AR
from autotune.machine.device import gib


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
    measured = {
        name: ", ".join(path.name.removesuffix(".cost.json") for path in paths)
        for name, paths in shipped_tables().items()
    }
    rows = [[name, *_limits(name), measured.get(name, "datasheet")] for name in sorted({*datasheets(), *measured})]
    console.table("Other devices (--gpu NAME)", ["name", "model", "bandwidth", "prices from"], rows)
    if diagnosis.target is not None:
        _print_target(diagnosis.target, console)


def _limits(name: str) -> tuple[str, str]:
    """Model and memory bandwidth in the datasheet of a device."""
    limits = find_limits(name)
    return ("-", "-") if limits is None else (limits.model, f"{limits.memory_gb_per_second:.0f} GB/s")


def _print_target(target: TargetFound, console: Console) -> None:
    rows = [
        [
            use.forward,
            use.backend,
            " x ".join(map(str, use.query)),
            " x ".join(map(str, use.key)),
            "yes" if use.has_mask else "no",
            str(use.num_layers),
        ]
        for use in target.attention
    ]
    console.table("Attention", ["forward pass", "kernel", "queries", "keys", "mask", "layers"], rows)
    sizes = sorted({tokens for times in target.steps for tokens in times.verify_ms})
    rows = [
        [
            times.mode,
            f"{times.plain_ms:.2f}",
            f"{target.step_gb_per_second(times):.1f}",
            *(f"{times.verify_ms[tokens]:.2f}" for tokens in sizes),
        ]
        for times in target.steps
    ]
    columns = ["mode", "plain step, ms", "GB/s", *(f"{tokens} tokens" for tokens in sizes)]
    console.table(f"Forward passes of {target.model.id}, {target.precision}", columns, rows)
    if target.trials:
        rows = [
            [
                trial.draft or AR,
                trial.mode,
                "-" if trial.tokens_per_round is None else f"{trial.tokens_per_round:.2f}",
                f"{trial.ms_per_token:.2f}",
                f"{trial.speedup:.2f}x",
                f"{trial.num_answers - trial.num_near_ties - len(trial.unexplained)}/{trial.num_answers}",
                f"{trial.num_near_ties}",
                f"{trial.num_captures}",
                f"{trial.capture_s:.1f} s",
                gib(trial.capture_bytes),
            ]
            for trial in target.trials
        ]
        columns = [
            "draft",
            "mode",
            "M",
            "ms/token",
            "speedup",
            "same output",
            "near ties",
            "captures",
            "time",
            "memory",
        ]
        console.table(f"Decoding with drafts: {target.trials[-1].tree}", columns, rows)
