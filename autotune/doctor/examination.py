"""Examines this machine, and a target on one of its devices."""

from __future__ import annotations

from autotune.console import Console
from autotune.cost.roofline import find_limits
from autotune.doctor.diagnosis import DeviceFound, Diagnosis, findings
from autotune.doctor.target import examine_target
from autotune.documents.provenance import stamp
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.machine.device import choose_device, fingerprint, free_memory, gpu_fault, local_devices
from autotune.measuring.bandwidth import copy_gb_per_second
from autotune.modeling.loading import META, Dtype, load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.workloads.formats import Format
from autotune.workloads.workload import load_workload

NUM_PROMPTS = 4


def examine(
    target: str | None,
    workload: str,
    console: Console,
    *,
    device: str,
    dtype: Dtype | None = None,
    num_tokens: int,
    random_weights: bool,
    workload_format: Format | None,
    gpu: str | None = None,
) -> Diagnosis:
    """Examine the machine and, if one is named, a target.

    Args:
        workload: whose first prompts are answered; those with images are left out for a text model.
        device: ``auto``, ``cpu`` or ``cuda:N``.
        dtype: of the target, as of ``load_model``.
        num_tokens: of each answer.
        workload_format: of the workload's file; None finds it out.
        gpu: card of another machine: tell how many of them the target needs, and do not load its weights.

    Raises:
        UserError: the target cannot be loaded.
    """
    fault = gpu_fault() if device == "auto" else None
    chosen = "cpu" if fault else choose_device(device)
    chosen = "cuda:0" if chosen == "cuda" else chosen
    monitor = ContentionMonitor(chosen)
    with console.stage("copy bandwidth"):
        rate = copy_gb_per_second(chosen)
    limits, examined, needs = find_limits(gpu or fingerprint(chosen).name), None, []
    if target is not None and limits is not None:
        empty = Target(load_model(target, device=META, dtype=dtype, random_weights=True))
        needs = [empty.shape.cards_needed(limits.model, 1e9 * limits.memory_gb)]
    if target is not None and gpu is None:
        with console.stage("loading the target"):
            loaded = Target(
                load_model(target, device=chosen, dtype=dtype, random_weights=random_weights, console=console)
            )
            processor = load_processor(target, or_bundled=random_weights)
            limit = NUM_PROMPTS if hasattr(processor, "image_processor") else None
            prompts = load_workload(workload, "tune", num_prompts=limit, format=workload_format).first_turns()
            prompts = prompts.readable_by(processor).cut(NUM_PROMPTS, num_tokens)
        examined = examine_target(
            loaded, reference(target, weights=not random_weights), prompts, processor, console, num_tokens=num_tokens
        )
    contention = monitor.contention()
    diagnosis = Diagnosis(
        provenance=stamp(contention),
        devices=tuple(map(find_device, local_devices())),
        device=chosen,
        copy_gb_per_second=rate,
        contention=contention,
        target=examined,
    )
    sentences = findings(diagnosis)
    defects = (*filter(None, [fault]), *(sentence.text for sentence in sentences if sentence.is_defect))
    notes = (*needs, *(sentence.text for sentence in sentences if not sentence.is_defect))
    return diagnosis.model_copy(update={"defects": defects, "notes": notes})


def find_device(device: str) -> DeviceFound:
    """A device of this machine."""
    here = fingerprint(device)
    limits = find_limits(here.name)
    return DeviceFound(
        device=device,
        fingerprint=here,
        free_bytes=free_memory(device),
        datasheet_gb_per_second=None if limits is None else limits.memory_gb_per_second,
    )
