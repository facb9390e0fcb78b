"""Profiles of engines, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.documents.decoding_profile import ComparedArm, DecodingProfile, Evidence, OperatingPoint
from autotune.documents.deployment import BackendResult, Deployment, EngineEvidence, PredictedSettings, PricedStep
from autotune.documents.loads import LoadResult, ServedLoad
from autotune.documents.speculation import OPTIONS, Speculation
from tests.sample_documents import TARGET, decoding_profile

SPECULATION = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"])
OFF = ServedLoad(
    label="off",
    requests=16,
    tokens_per_second=(40.0, 38.0, 42.4),
    first_token_ms=(9.0, 8.0, 12.0),
    token_ms=(3.04, 2.9, 3.2),
    p95_ms=(14.0, 4.0),
    hit_rate=None,
    identical=7,
)
CHOSEN = OFF.model_copy(
    update={"label": "ngram-mod(4,0,3)", "tokens_per_second": (60.0, 55.0, 66.0), "hit_rate": 0.256}
)
LOADS = [
    LoadResult(at_once=4, depth=3, depths=[0, 3, 8], chosen=CHOSEN, off=OFF, ratio=(1.5, 1.4, 1.6)),
    LoadResult(at_once=16, depth=0, depths=[0, 3, 8], chosen=OFF, off=OFF, ratio=(1.0, 1.0, 1.0)),
]


def engine_profile(
    *command: str | Path, speculation: Speculation | None = SPECULATION, **evidence: Any
) -> DecodingProfile:
    """A profile of llama.cpp, whose engine is started by a command."""
    deployment = Deployment(
        backend="llama.cpp",
        model=TARGET,
        command=[str(word) for word in command or ("llama-server", "-m", "model.gguf")],
        arguments=["-t", "2"],
        speculation=speculation,
        build="b" * 64,
    )
    point = OperatingPoint(draft=None, tree=None, deployment=deployment, predicted=None, measured=None)
    default = PredictedSettings(
        label=SPECULATION.label, type="ngram-mod", is_default=True, speedup=1.4, ci95=(1.2, 1.6)
    )
    engine = EngineEvidence(
        num_replayed={"ngram-mod": 40, "ngram-simple": 12},
        predicted=[default, default.model_copy(update={"type": "ngram-simple", "is_default": False})],
        prices=[PricedStep(tokens=tokens, context=64, wall_ms=[10.0 * tokens], cpu_ms=[9.0]) for tokens in (1, 2)],
        factors={"verifications": 1.25},
        left_out={"ngram-simple": "the build <does> not have it"},
    )
    arms = [
        ComparedArm(
            name=name,
            predicted_speedup=None,
            speedup=speedup,
            ci95=(speedup, speedup),
            tokens_per_round=None,
            tokens_per_second=100 * speedup,
            num_prompts=3,
            identical_outputs=3,
        )
        for name, speedup in (("ar", 1.0), ("tuned", 1.5))
    ]
    changed = {"point": point, "precision": "Q4_1"}
    found = Evidence(compared=arms, engine=engine).model_copy(update=evidence)
    return decoding_profile().model_copy(update={**changed, "evidence": found})


def backend_result(backend: str, **values: Any) -> BackendResult:
    known: dict[str, Any] = {"model": TARGET, "precision": "float32", "label": "off", "seconds": 3.0, "speedup": 1.5}
    known |= {"ci95": (1.4, 1.6), "num_prompts": 3, "agreement": 1.0, "has_own_weights": True, "is_deployed": False}
    return BackendResult(backend=backend, **known | values)
