"""Machines and models are examined, and a broken verification is found."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from autotune.cli.main import main
from autotune.console import Console
from autotune.doctor import target as examination
from autotune.doctor.diagnosis import Diagnosis
from autotune.doctor.target import attention_uses, audit_near_ties, examine_target, time_steps, why_masks
from autotune.documents.provenance import ModelReference
from autotune.modeling.loading import load_processor
from autotune.modeling.near_ties import flips, largest_difference
from autotune.modeling.self_check import allowed_difference, compare_tree_decoding
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.workloads.workload import load_workload
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, on_device

NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "REPEATS", 1)
    monkeypatch.setattr("autotune.measuring.bandwidth.COPY_BYTES", 1 << 16)


def test_flips_by_hand() -> None:
    """Token 0 flips by 0.1, token 2 by 3; a masked logit is no difference."""
    low = -torch.inf
    alone = torch.tensor([[1.0, 0.9, low], [2.0, 0.0, low], [3.0, 0.0, low]])
    together = torch.tensor([[0.9, 1.0, 0.0], [2.0, 0.0, low], [0.0, 3.0, low]])
    first, second = flips(alone, together, 0.06)
    assert (first.index, first.tokens, second.index) == (0, (0, 1), 2)
    assert first.is_near_tie and not second.is_near_tie
    assert largest_difference(alone, together) == 3.0
    assert flips(alone, alone, 0.0) == []


def test_the_attention_of_every_kind_of_forward_is_seen(text_pair: Pair) -> None:
    target = Target(text_pair.target)
    (prompt,) = target.encode({"input_ids": torch.arange(5, 15)[None]}).prompts
    uses = {use.forward: use for use in attention_uses(target, prompt, 6)}
    assert [use.query[2] for use in uses.values()] == [10, 1, 6], "of the prefill, the plain step and the verification"
    assert [use.key[2] for use in uses.values()] == [10, 11, 17]
    assert uses["verification"].has_mask and not uses["plain step"].has_mask
    assert all(use.num_layers == len(target.text.layers) for use in uses.values())
    assert {use.backend for use in uses.values()} <= {name.lower() for name in SDPBackend.__members__} - {"error"}


@pytest.mark.parametrize(("dtype", "num_tokens"), [(torch.float32, NUM_TOKENS), (torch.bfloat16, 24)])
def test_verification_equals_single_steps_but_for_near_ties(
    dtype: torch.dtype, num_tokens: int, text_pair: Pair
) -> None:
    target = Target(copy.deepcopy(text_pair.target).to(dtype))
    difference, noise = compare_tree_decoding(target)
    allowed = allowed_difference(target, noise)
    inputs: list[Inputs] = [{"input_ids": torch.arange(5, 5 + n)[None]} for n in range(6, 18)]
    found = audit_near_ties(target, inputs, num_tokens, allowed=allowed)
    assert found.num_tokens == len(inputs) * (num_tokens - 1) and difference <= allowed
    assert found.num_unexplained == 0 and (found.num_flips > 0) == (dtype == torch.bfloat16)


def test_a_broken_verification_is_unexplained(text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes of several tokens see them in another order, although the logits' noise is then as large as any
    margin.
    """
    target = Target(text_pair.target)
    forward = target.forward

    def broken(step: Step) -> Any:
        return forward(step).flip(0) if len(step.tokens) > 1 else forward(step)

    monkeypatch.setattr(target, "forward", broken)
    found = audit_near_ties(target, [{"input_ids": torch.arange(5, 25)[None]}], NUM_TOKENS, allowed=1e-4)
    assert found.num_unexplained > 0 and found.example.endswith("not a tie")


def test_preparing_forward_passes_is_timed(text_pair: Pair) -> None:
    """``fixed`` prepares as ``cuda-graph`` does, on any device."""
    target = Target(text_pair.target)
    eager, fixed = (time_steps(target, mode, 40) for mode in ("eager", "fixed"))
    assert eager.prepare_s is None
    assert fixed.prepare_s is not None and fixed.prepare_s > 0
    assert fixed.why_eager is None and target.mode == "eager"


def test_the_command_examines_machine_and_target(text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled prompts without images serve a text model."""
    alone = CliRunner().invoke(main, ["doctor", "--device", "cpu", "--json"])
    machine = Diagnosis.model_validate(without_schema(alone.stdout), strict=False)
    assert alone.exit_code == 0 and machine.target is None and machine.copy_gb_per_second > 0
    assert machine.examined.device == "cpu" and machine.examined.datasheet_gb_per_second is None
    command = ["doctor", "--device", "cpu", "--target", str(text_pair.target_folder), "--tokens", "8"]
    found = CliRunner().invoke(main, [*command, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    diagnosis = Diagnosis.model_validate(without_schema(found.stdout), strict=False)
    assert diagnosis.target is not None and diagnosis.target.near_ties.num_tokens > 0
    assert diagnosis.notes and diagnosis.defects == ()
    assert (diagnosis.target.mode, diagnosis.target.captured_steps) == ("eager", None)
    monkeypatch.setattr("autotune.doctor.target.compare_tree_decoding", lambda model: (9.0, 1e-6))
    printed = CliRunner().invoke(main, command)
    assert printed.exit_code == 1 and "DEFECT: a tree's logits differ" in printed.stderr
    for text in ("Attention", "verifications in plain steps", "Other devices (--gpu NAME)"):
        assert text in printed.stderr and printed.stdout == ""


@pytest.mark.parametrize("no_triton", [None, "ImportError: no Triton"])
def test_captured_steps_run_triton_kernels_or_say_why_not(
    no_triton: str | None, rehearsal: Rehearsal, text_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "why_no_triton", lambda device: no_triton if device.type == "cuda" else "wrong")
    half = replace(text_pair, target=copy.deepcopy(text_pair.target).to(torch.bfloat16))
    assert why_masks(Target(on_device(text_pair, "cuda:0").target)) == "there is no kernel for float32"
    target, tokenizer = Target(on_device(half, "cuda:0").target), load_processor(str(text_pair.target_folder))
    workload = load_workload("digits", "tune").readable_by(tokenizer).cut(1, 4)
    reference = ModelReference(id="a/model", sha256="")
    found = examine_target(target, reference, workload, tokenizer, Console(), num_tokens=4)
    assert found.captured_steps is not None and found.why_masks == no_triton
    monkeypatch.setattr(target.text.module, "_supports_attention_backend", False)
    assert why_masks(target) == "the model's layers do not call an attention function by its name"


def without_schema(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    assert content.pop("schema") == "autotune.diagnosis/1"
    return content
