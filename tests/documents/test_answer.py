"""The answer of a search: sentences that fit a terminal of 80 columns, made of a profile alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.console import Console
from autotune.documents.answer import DECIDING, JUDGING, answer_of
from autotune.documents.decoding_profile import (
    ComparedArm,
    DecodingProfile,
    Evidence,
    Gain,
    Measured,
    OperatingPoint,
    Predicted,
)
from autotune.documents.deployment import BackendResult, Deployment, EngineEvidence, PredictedSettings
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.documents.subnet import Subnet
from autotune.search import pipeline
from autotune.search.thresholds import KEPT_PROMPTS
from autotune.study.search_settings import SearchSettings
from tests.check.sample_documents import prompt_evidence
from tests.engine_profiles import LOADS
from tests.sample_documents import TARGET, decoding_profile, write_workload
from tests.tiny_models import Pair

EAGLE3 = ModelReference(id="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", sha256="b" * 64)
SAGE = {"policy": "sage"}


def measured(
    *gains: tuple[str, float, float, float, int],
    hf: float | None = None,
    num_prompts: int = JUDGING,
    num_held_out: int = 0,
    num_runs: int | None = None,
    subnet: dict[str, Any] | None = None,
    draft: ModelReference | None = EAGLE3,
    **choices: Any,
) -> DecodingProfile:
    """A measured profile with gains over other arms: name, speedup, its interval, prompts."""
    profile = decoding_profile(draft=draft, **choices)
    figures = {"tokens_per_round": 2.0, "tokens_per_second": 9.0, "num_prompts": num_prompts, "identical_outputs": 1}
    point = profile.point.model_copy(update={"measured": Measured(speedup=1.5, ci95=(1.4, 1.6), **figures)})
    if draft is not None and point.draft is not None:
        chosen = point.draft.model_copy(update={"kind": "eagle3", "subnet": Subnet(**(subnet or {}))})
        point = point.model_copy(update={"draft": chosen})
    arm = ComparedArm(name="hf", predicted_speedup=None, speedup=hf or 1.0, ci95=(1.0, 1.2), **figures)
    evidence = profile.evidence.model_copy(
        update={
            "prompts": [prompt_evidence(str(number)) for number in range(num_prompts)],
            "compared": [] if hf is None else [arm],
            "best_default": next((name for name, *_ in gains if name not in ("ar", "hf")), None),
            "gains": [
                Gain(task="all", over=over, speedup=speedup, ci95=(low, high), num_prompts=number)
                for over, speedup, low, high, number in gains
            ],
            "num_deciding": num_runs,
        }
    )
    workload = profile.workload.model_copy(update={"num_evaluate_prompts": max(num_prompts, num_held_out)})
    return profile.model_copy(update={"point": point, "evidence": evidence, "workload": workload})


def predicted(*, estimated: bool, draft: ModelReference | None = EAGLE3) -> DecodingProfile:
    profile = decoding_profile(draft=draft)
    speed = Predicted(speedup=1.8, ms_per_token=1.0, tokens_per_round=2.0, interval90=(1.6, 2.0), estimated=estimated)
    point = profile.point.model_copy(update={"predicted": speed})
    return profile.model_copy(update={"point": point})


SUFFIX = Speculation(type="suffix", options={**OPTIONS["suffix"], "num_speculative_tokens": 8})
DRAFT = Speculation(type="draft_model", options=OPTIONS["draft_model"], model="Qwen/Qwen3-0.6B")


def engine_profile(
    chosen: Speculation | None, speedup: float, ci95: tuple[float, float], num_prompts: int
) -> DecodingProfile:
    """A profile of vLLM with speculation, or without any because SUFFIX has this speedup; without prompts a
    prediction.
    """
    deployment = Deployment(backend="vllm", model=TARGET, command=["vllm"], speculation=chosen, build="1")
    predicted = [PredictedSettings(label="x", type="x", is_default=True, speedup=speedup, ci95=ci95)]
    evidence: dict[str, Any] = {"engine": EngineEvidence(num_replayed={}, predicted=predicted)}
    figures = {"tokens_per_round": 2.0, "tokens_per_second": 9.0, "num_prompts": num_prompts, "identical_outputs": 1}
    measured = None
    if num_prompts:
        known = {"predicted_speedup": None, **figures}
        arms = {"ar": 1.0, (chosen or SUFFIX).label: speedup}
        evidence |= {
            "prompts": [prompt_evidence(str(number)) for number in range(num_prompts)],
            "compared": [ComparedArm(name=name, speedup=s, ci95=(s, s), **known) for name, s in arms.items()],
            "gains": [Gain(task="all", over="ar", speedup=speedup, ci95=ci95, num_prompts=num_prompts)],
        }
        measured = Measured(speedup=speedup, ci95=ci95, **figures)
    point = OperatingPoint(draft=None, tree=None, deployment=deployment, predicted=None, measured=measured)
    profile = decoding_profile()
    workload = profile.workload.model_copy(update={"num_evaluate_prompts": num_prompts})
    changes = {"point": point, "evidence": Evidence(**evidence), "workload": workload}
    return profile.model_copy(update=changes)


def loaded(profile: DecodingProfile, *schedule: tuple[int, int, int]) -> DecodingProfile:
    assert profile.evidence.engine is not None
    engine = profile.evidence.engine.model_copy(update={"loads": LOADS, "schedule": list(schedule)})
    return profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"engine": engine})})


def raced(profile: DecodingProfile, *results: BackendResult) -> DecodingProfile:
    evidence = profile.evidence.model_copy(update={"backends": list(results)})
    return profile.model_copy(update={"evidence": evidence})


def result(backend: str, seconds: float, **fields: Any) -> BackendResult:
    known = {"precision": "bfloat16", "label": "off", "speedup": 1.0, "ci95": (1.0, 1.0), "num_prompts": 16}
    known |= {"model": TARGET, "agreement": 1.0, "has_own_weights": True, "is_deployed": False}
    return BackendResult(backend=backend, seconds=seconds, **{**known, **fields})


Q4 = {"precision": "Q4_1", "has_own_weights": False, "agreement": 0.31}


CHAIN = "Chosen: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (eagle3), chains of up to 3 tokens."
FEW_HEADS = {"heads": (1.0, 0.5, 0.5), "visual_keep": 0.2, "injection_layer": 12, "vocabulary": 0.25}
MEASURED, MEASURED_60 = (f"Measured on {number} held-out prompts of by hand." for number in (16, 60))
ESTIMATED = "Not measured: estimated for An abacus by 1 prompt."
NEXT = "Next: autotune run profile.json, or {}."
BENCH, MORE, LONGER = (
    "autotune bench profile.json",
    "the same search with more prompts",
    "the same search with a larger --budget",
)
OTHER_DRAFT = "Next: search with another --draft, or autotune bench profile.json."
WITHOUT = "Next: the same search {} measures it."
FASTER = "1.48x (1.27 to 1.80) as fast as plain decoding."
CASES: dict[str, tuple[DecodingProfile, list[str]]] = {
    "better than plain decoding and the best default": (
        measured(("ar", 1.52, 1.44, 1.61, 16), ("eagle2", 1.08, 1.02, 1.14, 16), hf=0.9),
        [
            CHAIN,
            "1.52x (1.44 to 1.61) as fast as plain decoding.",
            "1.08x (1.02 to 1.14) as fast as eagle2, the best default.",
            MEASURED,
            NEXT.format(BENCH),
        ],
    ),
    "Hugging Face is the fastest without a draft": (
        measured(("ar", 1.52, 1.44, 1.61, 16), ("hf", 1.30, 1.21, 1.40, 16), ("star", 1.0, 0.97, 1.03, 16), hf=1.17),
        [
            CHAIN,
            "1.30x (1.21 to 1.40) as fast as Hugging Face.",
            "Not better than the best default, star: 1.00x (0.97 to 1.03).",
            MEASURED,
            NEXT.format(BENCH),
        ],
    ),
    "Hugging Face is the fastest": (
        measured(("ar", 1.05, 1.01, 1.09, 16), ("hf", 0.90, 0.86, 0.94, 16), ("star", 1.2, 1.1, 1.3, 16), hf=1.17),
        [
            "Chosen: plain decoding, by Hugging Face's generate.",
            "The fastest speculation is 0.90x (0.86 to 0.94) as fast.",
            MEASURED,
            OTHER_DRAFT,
        ],
    ),
    "nothing but a subnet's values": (
        measured(("ar", 1.03, 0.98, 1.08, 16), ("sage", 1.0, 1.0, 1.0, 16), tree=SAGE, subnet=FEW_HEADS),
        [
            "Chosen: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (eagle3), sage trees of up to 64",
            "tokens, heads=1/0.5/0.5 layer=12 keep=0.2 vocabulary=0.25.",
            "1.03x (0.98 to 1.08) as fast as plain decoding, perhaps by chance.",
            "Not better than the best default, sage: it is the same.",
            MEASURED,
            NEXT.format(BENCH),
        ],
    ),
    "a guess of few prompts": (
        measured(
            ("ar", 1.52, 1.40, 1.65, 4), ("eagle2", 1.08, 1.05, 1.11, 4), num_prompts=4, num_held_out=60, num_runs=2
        ),
        [
            CHAIN,
            "1.52x (1.30 to 1.77 on 4 prompts) as fast as plain decoding.",
            "1.08x (1.02 to 1.14 on 4 prompts) as fast as eagle2, the best default.",
            "Measured on 4 held-out prompts of by hand, a guess, chosen by 2.",
            NEXT.format(LONGER),
        ],
    ),
    "one prompt says nothing": (
        measured(("ar", 1.52, 1.52, 1.52, 1), ("eagle2", 1.2, 1.2, 1.2, 1), num_prompts=1),
        [
            CHAIN,
            "1.52x (0.00 to inf on 1 prompt) as fast as plain decoding, perhaps by chance.",
            "Not better than the best default, eagle2: 1.20x (0.00 to inf on 1 prompt).",
            "Measured on 1 held-out prompt of by hand, a guess.",
            NEXT.format(MORE),
        ],
    ),
    "an estimate": (
        predicted(estimated=True),
        [
            "Chosen: yuhuili/EAGLE3-LLaMA3.1-Instruct-8B (independent), chains of up to 3",
            "tokens.",
            "1.80x (1.60 to 2.00) as fast as plain decoding.",
            ESTIMATED,
            WITHOUT.format("on that device, without --gpu,"),
        ],
    ),
    "an engine without speculation": (
        engine_profile(None, 0.98, (0.96, 1.08), 60),
        [
            "Chosen for vllm: plain decoding.",
            "The fastest speculation is 0.98x (0.96 to 1.08) as fast.",
            MEASURED_60,
            NEXT.format(BENCH),
        ],
    ),
    "an engine's draft model": (
        engine_profile(DRAFT, 1.48, (1.27, 1.80), 60),
        [
            "Chosen for vllm: draft_model(3) drafted by Qwen/Qwen3-0.6B, by its defaults.",
            FASTER,
            MEASURED_60,
            NEXT.format(BENCH),
        ],
    ),
    "an engine whose depth follows from the load": (
        loaded(engine_profile(SUFFIX, 1.48, (1.27, 1.80), 60), (1, 3, 8), (4, 12, 2), (13, 1024, 0)),
        [
            "Chosen for vllm: suffix(24,1,0.1,8).",
            FASTER,
            "Best by load: depth 8, 2 above 3, off above 12 requests at once.",
            MEASURED_60,
            NEXT.format(BENCH),
        ],
    ),
    "an engine with one depth for all loads": (
        loaded(engine_profile(None, 0.98, (0.96, 1.08), 60), (1, 1024, 0)),
        [
            "Chosen for vllm: plain decoding.",
            "The fastest speculation is 0.98x (0.96 to 1.08) as fast.",
            "Best by load: off, up to 16 requests at once.",
            MEASURED_60,
            NEXT.format(BENCH),
        ],
    ),
    "a server that was not started": (
        engine_profile(SUFFIX, 1.48, (1.27, 1.80), 0),
        ["Chosen for vllm: suffix(24,1,0.1,8).", FASTER, ESTIMATED, WITHOUT.format("without the url")],
    ),
    "an engine after a race": (
        raced(
            engine_profile(SUFFIX, 1.48, (1.27, 1.80), 60),
            result("runtime", 7.5, is_slower=True),
            result("llama.cpp", 2.5, **Q4),
            result("llama.cpp", 6.0),
            result("vllm", 5.0, is_deployed=True),
            result("fake", 0.0, failure="it ended"),
        ),
        [
            "Deploy vllm with tests/target: suffix(24,1,0.1,8).",
            FASTER,
            "Relative times: runtime 1.50, llama.cpp 1.20 (perhaps by chance).",
            "llama.cpp (Q4_1) takes 0.50, 31 % alike: --any-weights.",
            MEASURED_60,
            NEXT.format(BENCH),
        ],
    ),
    "the runtime without a draft after a race": (
        raced(measured(("ar", 0.91, 0.85, 0.97, 16), draft=None), result("runtime", 5.0, is_deployed=True)),
        [
            "Deploy the runtime: plain decoding.",
            "The fastest speculation is 0.91x (0.85 to 0.97) as fast.",
            MEASURED,
            OTHER_DRAFT,
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_answer_says_what_was_chosen_and_by_what_evidence(name: str) -> None:
    profile, expected = CASES[name]
    lines = answer_of(profile, Path("profile.json"))
    assert lines == expected
    assert len(lines) <= 7 and max(map(len, lines)) <= 80


def test_a_command_is_quoted_and_not_wrapped() -> None:
    lines = answer_of(CASES["an engine's draft model"][0], Path("my profiles/" + "p" * 80))
    assert f"autotune run 'my profiles/{'p' * 80}'" in lines[-1]


def test_an_answer_is_a_guess_below_what_a_plan_keeps() -> None:
    assert KEPT_PROMPTS[0][:2] == (JUDGING, DECIDING)


@pytest.mark.parametrize("options", [[], ["--gpu", "h100"], ["--json"]])
def test_a_search_ends_with_its_answer_on_standard_output(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """With ``--json``, JSON alone is there."""
    profile = CASES["an estimate" if options == ["--gpu", "h100"] else "a guess of few prompts"][0]

    def searched(settings: SearchSettings, console: Console) -> DecodingProfile:
        console.say(f"decoding profile written to {settings.output}")
        return profile

    monkeypatch.setattr(pipeline, "search", searched)
    workload = str(write_workload(tmp_path, [{"prompt": "Go on."}] * 4))
    models = ["--target", str(pair.target_folder), "--draft", str(pair.draft_folder), "--workload", workload]
    path = tmp_path / "p.json"
    done = CliRunner().invoke(main, ["search", *models, "-o", str(path), *options])
    assert done.exit_code == 0, done.output
    expected = profile.dump() if options == ["--json"] else "\n".join(["", *answer_of(profile, path)])
    assert done.stdout == expected + "\n"
    assert done.output.endswith(done.stdout) and "decoding profile written to" in done.stderr
