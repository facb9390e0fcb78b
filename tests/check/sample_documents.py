"""Hand-made results and pairs. Imports no torch."""

from __future__ import annotations

from typing import Any

from autotune.check.result import CheckResult, Gate, Timing, WorkloadResult
from autotune.documents.decoded import Decoded
from tests.sample_documents import DEVICE, PROVENANCE, TARGET


def prompt_evidence(name: str = "count", **fields: Any) -> Decoded:
    """A prompt of 10 rounds with 40 draft tokens, 30 of them accepted."""
    known: dict[str, Any] = {"arm": "tuned", "prompt": name, "prompt_sha256": name * 2, "tokens_sha256": "same"}
    known |= {"rounds": 10, "target_forwards": 10, "plain_steps": 0, "draft_forwards": 40, "verified_nodes": 40}
    known |= {"accepted_lengths": [3] * 10, "new_tokens": 41, "decode_ms": 100.0}
    return Decoded(**{**known, **fields})


def timing(**fields: Any) -> Timing:
    known: dict[str, Any] = {"base": "main (0123456789)", "head": "the current version", "ci95": (0.07, 0.09)}
    known |= {"slowdown": 0.08, "p_within_tolerance": 1e-5, "p_beyond_limit": 1.0}
    known |= {"base_ms": [100.0], "head_ms": [108.0]}
    return Timing(**{**known, **fields})


def check_result(*gates: Gate, **fields: Any) -> CheckResult:
    """A result with these gates and one timed workload."""
    measured: dict[str, Any] = {"num_prompts": 2, "identical_outputs": 2, "speedup": 2.0, "ci95": (1.9, 2.1)}
    measured |= {
        "divergences": [],
        "precision": "float32",
        "prompts": [prompt_evidence()],
        "plain_ms": [200.0],
        "timing": timing(),
    }
    known: dict[str, Any] = {"provenance": PROVENANCE, "profile": "profile.json", "hardware": DEVICE, "target": TARGET}
    known |= {
        "lossless": True,
        "against": "main (0123456789)",
        "gates": list(gates),
        "verdict": "passed",
        "exit_code": 0,
    }
    known |= {"workloads": [WorkloadResult(name="digits", sha256="c" * 64, **measured)]}
    return CheckResult(**{**known, **fields})


def gate(verdict: str, name: str = "counts", **fields: Any) -> Gate:
    known = {"name": name, "workload": "digits", "verdict": verdict, "summary": f"it {verdict}"}
    return Gate.model_validate({**known, **fields})
