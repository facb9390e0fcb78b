"""A check of a profile of the runtime: decoded in this process, and compared with worker processes."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from autotune.check.comparison import CHECKS, Contender, require_comparable
from autotune.check.decoded_workload import DecodedWorkload, decode_all
from autotune.check.evidence import evidence_for
from autotune.check.revision import checked_out
from autotune.check.settings import CheckSettings
from autotune.check.worker_process import Side, WorkerProcess
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile
from autotune.documents.provenance import beside
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
from autotune.files import content_key, read_json, sha256_of, write_bytes
from autotune.machine.device import choose_device, fingerprint
from autotune.modeling.weight_files import save_tensors
from autotune.runtime.load import load
from autotune.workloads.workload import Workload

# Files that a side decodes with: the package, and the bundled models next to it or, if installed, inside it.
CODE = ("autotune/**/*.py", "drafts/**/*.safetensors", "drafts/**/*.json", "autotune/_data/drafts/**/*.safetensors")


def decode_in_runtime(
    settings: CheckSettings, profile: DecodingProfile, workloads: Sequence[Workload], folder: Path, console: Console
) -> list[DecodedWorkload]:
    """Decode every workload in this process. Workers need the memory of the models, so these are freed.

    Args:
        folder: for the inputs of workers.
    """
    device = choose_device(settings.device)
    decoder = load(settings.profile, device=device, dtype=settings.dtype, console=console)
    arms = RuntimeArms(decoder)
    tuned = arms.plain if decoder.draft is None else DecoderArm(TUNED, decoder, arms)
    fit = decoder.processor, decoder.target.max_context, console.say
    workloads = [workload.fitting(*fit) for workload in workloads]
    evidence = [evidence_for(profile, workload, settings, arms.keys) for workload in workloads]
    decoded = []
    for number, (workload, known) in enumerate(zip(workloads, evidence, strict=True)):
        one = _decode(profile, tuned, workload, known, settings.seed, console)
        if settings.against is not None:
            one = replace(one, requests=_write_requests(one, arms, folder / f"{number}"))
        decoded.append(one)
    del decoder, arms, tuned, fit
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return decoded


def _decode(
    profile: DecodingProfile,
    tuned: DecoderArm,
    workload: Workload,
    evidence: list[Decoded] | str,
    seed: int,
    console: Console,
) -> DecodedWorkload:
    """Decode side by side with plain decoding; then again, to see if counts repeat."""
    arms, decoder = tuned.arms, tuned.decoder
    workload = arms.conversations.follow_workload(workload)
    plain, *_, runs = decode_all([arms.plain, tuned], workload, seed, console, arms.runner())
    (again,) = decode_all([tuned], workload, seed, console, arms.runner())
    divergences = divergences_from_plain(tuned, workload.prompts, runs, plain)
    precision = decoder.target.text.precision
    return DecodedWorkload(
        workload=workload,
        profile=profile,
        runs=runs,
        plain=plain,
        seed=seed,
        divergences={name: str(divergence) for name, divergence in divergences.items()},
        evidence=evidence,
        precision=precision,
        hardware=fingerprint(str(decoder.target.device)),
        rounding="" if precision == "float32" else f"near ties in {precision}",
        is_rounding=all(divergence.is_near_tie for divergence in divergences.values()),
        not_repeated=[one.prompt for one, other in zip(runs, again, strict=True) if one.counts != other.counts],
    )


def _write_requests(decoded: DecodedWorkload, arms: RuntimeArms, folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    requests = {}
    for number, prompt in enumerate(decoded.workload.prompts):
        path = folder / f"{number}.safetensors"
        save_tensors(path, prompt.inputs(arms.processor))
        requests[prompt.name] = path
    return requests


# -------- sides


@contextmanager
def open_workers(settings: CheckSettings, folder: Path) -> Iterator[tuple[Contender, Contender]]:
    """Base and head as worker processes. The base is the profile ``--against`` if that is a file, otherwise a git
    revision.
    """
    against, profile = str(settings.against), settings.profile
    head = Side(name="head", label="the current version", profile=profile, dtype=settings.dtype)
    opened: AbstractContextManager[Side] = checked_out(against, profile, head, folder)
    if Path(against).is_file():
        opened = nullcontext(replace(head, name="base", label=against, profile=Path(against)))
        head = replace(head, label=str(profile))
    with opened as base:
        require_comparable(DecodingProfile.load(base.profile), DecodingProfile.load(profile), base.label)
        yield _contender(base, settings.device, folder), _contender(head, settings.device, folder)


def _contender(side: Side, device: str, folder: Path) -> Contender:
    document = DecodingProfile.load(side.profile)
    choices = document.point.model_dump(exclude={"predicted", "measured"})
    steps = [document.mode, document.capture_sizes, document.threads, document.precision, document.target.sha256]
    code = sha256_of(*sorted(path for pattern in CODE for path in side.code.glob(pattern)))
    side = replace(side, profile=_without_evidence(side.profile, folder / f"{side.name}.json"))
    CHECKS.mkdir(parents=True, exist_ok=True)
    return Contender(
        label=side.label,
        key=content_key([code, side.dtype, side.python == sys.executable, choices, steps]),
        profile=document,
        launch=lambda decoded: WorkerProcess(
            side, decoded.requests, device=choose_device(device), log=CHECKS / f"{side.name}.log"
        ),
    )


def _without_evidence(profile: Path, copy: Path) -> Path:
    """Copy a profile without its evidence, which the code of the base may not know, with paths of models beside it."""
    content = {**read_json(profile), "evidence": {}}
    for model in filter(None, (content["target"], content["point"]["draft"])):
        model["id"] = beside(profile, model["id"])
    write_bytes(copy, json.dumps(content).encode())
    return copy
