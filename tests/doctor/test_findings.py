"""Sentences of a diagnosis, and its file."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.doctor.diagnosis import (
    AttentionUse,
    DecodingTrial,
    DeviceFound,
    Diagnosis,
    NearTies,
    StepTimes,
    TargetFound,
    TreeCheck,
)
from autotune.doctor.findings import findings
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
SOUND = TreeCheck(difference=1e-3, noise=1e-3, allowed=4e-3)
TIES = NearTies(num_tokens=90, num_flips=0, num_unexplained=0, noise=0.1, allowed_noise=0.2)


FIGURES: dict[str, Any] = {"tokens_per_round": 3.0, "ms_per_token": 4.0, "speedup": 2.0, "rounds_over_eager": 1.0}
CAPTURES: dict[str, Any] = {"num_captures": 40, "capture_s": 2.0, "capture_bytes": 1 << 30}
ANSWERS: dict[str, Any] = {"num_answers": 4, "num_near_ties": 1, "unexplained": ()}
TRIAL = DecodingTrial(draft="a/draft", tree="eagle2", mode="cuda-graph", **FIGURES, **CAPTURES, **ANSWERS)


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


def defects(found: Diagnosis) -> list[str]:
    return [finding.text for finding in findings(found) if finding.is_defect]


def notes(found: Diagnosis) -> list[str]:
    return [finding.text for finding in findings(found) if not finding.is_defect]


def test_without_a_target_the_machine_alone_is_noted() -> None:
    found = diagnosis(None)
    assert defects(found) == []
    no_datasheet, no_target = notes(found)
    assert "no datasheet of slate" in no_datasheet and "profiles/devices/slate.yaml" in no_datasheet
    assert no_target == "no target was examined; name one with --target"


def test_a_sound_target_has_no_defect() -> None:
    """It reads 1.1 GB in 10 ms, a quarter of what a copy reaches; a verification of 32 tokens costs 1.5 plain steps."""
    found = diagnosis(target(), datasheet_gb_per_second=440.0)
    assert defects(found) == []
    ties, price, rate, memory = notes(found)
    assert "no argmax of 90 flips" in ties
    assert "a plain step takes 10.00 ms" in price and "2: 1.00, 32: 1.50" in price
    assert "110.0 GB/s, 25 % of 440 GB/s: kernel launches" in rate
    assert memory == "32.0 GiB are free next to the weights: keys and values of 343,597 tokens"


def test_defects_are_told_from_near_ties() -> None:
    flips = TIES.model_copy(update={"num_flips": 3, "num_unexplained": 2, "examples": ("token 7: 1 or 2",)})
    found = diagnosis(target(near_ties=flips, tree_check=SOUND.model_copy(update={"difference": 0.5})))
    tree, unexplained = defects(found)
    assert "differ from token-by-token ones by 0.5 standard deviations, more than the 0.004" in tree
    assert "2 of 90 argmaxes" in unexplained and "token 7: 1 or 2" in unexplained
    assert any("1 of 90 argmaxes flip in near ties" in text for text in notes(found))


def test_what_will_be_slow_is_noted() -> None:
    prepared = {"prepare_s": 2.5, "prepared_bytes": 512 << 20, "num_prepared": 7, "why_eager": "RuntimeError: no"}
    captured = TIMES.model_copy(update={"mode": "cuda-graph", "plain_ms": 3.0, "verify_ms": {2: 3.0}, **prepared})
    uses = attention("plain step", "cudnn_attention"), attention("verification", "math"), attention("prefill", "math")
    busy = Contention(seconds=9.0, num_cores=8, own_cores=1.0, other_cores=3.0)
    found = diagnosis(
        target(attention=uses, steps=(TIMES, captured), has_native_precision=False, is_tested=False), contention=busy
    )
    text = "\n".join(notes(found))
    for expected in (
        "the machine is busy (other processes used 3.0 of 8 cores",
        "attention of plain step runs as cudnn_attention: it builds a plan",
        "attention of prefill and verification runs as math",
        "the device emulates bfloat16",
        "type 'llama' are not in the test suite",
        "mode cuda-graph prepares 7 forward passes in 2.5 s and 512 MiB",
        "mode cuda-graph fails here and runs eagerly: RuntimeError: no",
    ):
        assert expected in text, expected
    assert "does not call torch's scaled dot-product attention" in notes(diagnosis(target(attention=())))[1]


def test_the_self_test_and_the_drafts_are_judged() -> None:
    steps = CapturedSteps(num_tokens=49, num_near_ties=2, difference=0.01, allowed=0.05)
    sound = diagnosis(target(mode="cuda-graph", captured_steps=steps, trials=(TRIAL,)))
    assert defects(sound) == []
    assert any(
        text.startswith("mode auto is cuda-graph: at 49 tokens") and "2 argmaxes" in text for text in notes(sound)
    )
    wrong = steps.model_copy(update={"difference": 0.5, "why_eager": "captured steps differ"})
    update = {"unexplained": ("p, token 3",), "rounds_over_eager": 1.5, "why_eager": "RuntimeError: no"}
    broken = diagnosis(target(captured_steps=wrong, trials=(TRIAL.model_copy(update=update),)))
    test, answers, rounds = defects(broken)
    assert test == "captured steps differ" and "1 of 4 answers differ from eager plain decoding" in answers
    assert "a/draft in mode cuda-graph: the same tokens take 1.50 times as many rounds" in rounds
    assert {
        "mode auto is eager: captured steps differ",
        "a/draft in mode cuda-graph runs eagerly: RuntimeError: no",
    } <= {*notes(broken)}
    assert not any("because rounding changes trees" in text for text in notes(broken)), "it is a defect"
    fails = CapturedSteps(why_eager="RuntimeError: no")
    assert defects(diagnosis(target(captured_steps=fails))) == [], "slow, and not wrong"


@pytest.mark.parametrize(("why", "text"), [(None, "in Triton kernels"), ("no Triton", "with masks: no Triton")])
def test_the_attention_of_captured_steps_is_told(why: str | None, text: str) -> None:
    captured = diagnosis(target(captured_steps=CapturedSteps(num_tokens=49, allowed=0.05), why_masks=why))
    assert notes(captured)[1] == f"captured steps run attention {text}"
    assert not any("captured steps run" in note for note in notes(diagnosis(target())))
