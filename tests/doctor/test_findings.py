"""Sentences of a diagnosis, and its file."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autotune.doctor.diagnosis import (
    AttentionUse,
    DeviceFound,
    Diagnosis,
    NearTies,
    StepTimes,
    TargetFound,
    TreeCheck,
    findings,
)
from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.contention import Contention
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, stamp

GPU = DeviceFound(
    device="cuda:0",
    fingerprint=Fingerprint(name="slate", kind="cuda", model="A slate", num_cores=4, memory_bytes=64 << 30),
    free_bytes=32 << 30,
)
TIMES = StepTimes(mode="eager", kv_length=1000, plain_ms=10.0, verify_ms={2: 10.0, 32: 15.0})
SOUND = TreeCheck(difference=1e-3, allowed=4e-3)
TIES = NearTies(num_tokens=90, num_flips=0, num_unexplained=0, noise=0.1)


def target(**fields: Any) -> TargetFound:
    values: dict[str, Any] = {
        "model": ModelReference(id="a/model", sha256=""),
        "model_type": "llama",
        "is_tested": True,
    }
    values |= {"precision": "bfloat16", "has_native_precision": True}
    values |= {"weight_bytes": 10**9, "kv_bytes_per_token": 10**5, "tree_check": SOUND, "near_ties": TIES}
    values |= {"attention": (attention("plain step", "flash_attention"),), "steps": (TIMES,)}
    return TargetFound(**values | fields)


def attention(forward: str, backend: str) -> AttentionUse:
    return AttentionUse(
        forward=forward, backend=backend, query=(1, 8, 1, 64), key=(1, 8, 9, 64), has_mask=False, num_layers=4
    )


def diagnosis(found: TargetFound | None, *, contention: Contention | None = None, **device: Any) -> Diagnosis:
    return Diagnosis(
        provenance=stamp(),
        devices=(GPU.model_copy(update=device),),
        device="cuda:0",
        copy_gb_per_second=400.0,
        contention=contention or Contention(seconds=9.0, num_cores=8, own_cores=1.0, other_cores=0.0),
        target=found,
    )


CAPTURED = CapturedSteps(num_tokens=49, num_near_ties=2, difference=0.01, allowed=0.05)
FLIPS = TIES.model_copy(update={"num_flips": 3, "num_unexplained": 2, "example": "token 7: 1 or 2"})
BUSY = Contention(seconds=9.0, num_cores=8, own_cores=1.0, other_cores=3.0)
FAST = {"mode": "cuda-graph", "plain_ms": 3.0, "prepare_s": 2.5, "prepared_bytes": 512 << 20, "why_eager": "no"}


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (diagnosis(None), "no datasheet of slate: .* add profiles/devices/slate.yaml"),
        (diagnosis(target(), contention=BUSY), r"the machine is busy \(other processes used 3.0 of 8 cores"),
        (diagnosis(target()), r"0 of 90 argmaxes flip in near ties \(noise 0.1\)"),
        (diagnosis(target(near_ties=FLIPS)), "1 of 90 argmaxes flip in near ties"),
        (
            diagnosis(target(), datasheet_gb_per_second=440.0),
            "mode eager: a plain step reads 110.0 GB/s, 25 % of 440 GB/s",
        ),
        (diagnosis(target()), "32.0 GiB are free: keys and values of 343,597 tokens"),
        (diagnosis(target(attention=())), "does not call torch's scaled dot-product attention"),
        (diagnosis(target(attention=(attention("prefill", "math"),))), "attention runs as math: it stores all scores"),
        (diagnosis(target(has_native_precision=False)), "the device emulates bfloat16"),
        (diagnosis(target(is_tested=False)), "type 'llama' are not in the test suite"),
        (diagnosis(target(steps=(TIMES.model_copy(update=FAST),))), "mode cuda-graph fails here and runs eagerly: no"),
        (diagnosis(target(captured_steps=CAPTURED)), "captured steps run attention in Triton kernels"),
        (diagnosis(target(captured_steps=CAPTURED, why_masks="no Triton")), "attention with masks: no Triton"),
        (
            diagnosis(target(mode="cuda-graph", captured_steps=CAPTURED)),
            "mode auto is cuda-graph: at 49 tokens, .* 2 argmaxes",
        ),
        (diagnosis(target(captured_steps=CapturedSteps(why_eager="no"))), "mode auto is eager: no"),
    ],
)
def test_what_a_search_can_expect_is_noted(found: Diagnosis, note: str) -> None:
    notes = [finding.text for finding in findings(found) if not finding.is_defect]
    assert any(re.search(note, text) for text in notes), notes


@pytest.mark.parametrize(
    ("found", "defect"),
    [
        (target(captured_steps=CapturedSteps(why_eager="slow, and not wrong")), None),
        (target(near_ties=FLIPS), r"2 of 90 argmaxes differ .* token 7: 1 or 2"),
        (target(tree_check=TreeCheck(difference=0.5, allowed=4e-3)), "by 0.5 standard deviations, more than the 0.004"),
        (
            target(captured_steps=CapturedSteps(difference=0.5, why_eager="captured steps differ")),
            "captured steps differ",
        ),
    ],
)
def test_what_is_wrong_here_is_a_defect(found: TargetFound, defect: str | None) -> None:
    defects = [finding.text for finding in findings(diagnosis(found)) if finding.is_defect]
    assert len(defects) == (defect is not None) and (defect is None or re.search(defect, defects[0])), defects


def test_the_tables_have_devices_kernels_and_prices_in_plain_steps() -> None:
    captured = TIMES.model_copy(update=FAST)
    devices, others, kernels, passes = diagnosis(target(steps=(TIMES, captured))).tables()
    assert devices.rows == [["cuda:0", "slate", "A slate", "-", "32.0 GiB of 64.0 GiB", "-", "400.0"]]
    assert ["a10", "NVIDIA A10", "600", "datasheet"] in others.rows
    assert kernels.rows == [["plain step", "flash_attention", "1 x 8 x 1 x 64", "1 x 8 x 9 x 64", "no", "4"]]
    assert passes.rows[0] == ["eager", "10.00", "110.0", "1.00", "1.50", "-"]
    assert passes.rows[1][-1] == "2.5 s, 512 MiB"
