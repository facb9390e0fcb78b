"""A study of hand-made documents and a real tree search, as a report reads it, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.table import ModelShape
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import (
    ComparedArm,
    DecodingProfile,
    DraftChoice,
    Evidence,
    Gain,
    Measured,
    OperatingPoint,
    Predicted,
    WorkloadReference,
)
from autotune.documents.provenance import ModelReference
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.files import append_line
from autotune.replay.evaluator import Evaluator
from autotune.replay.trace import Trace, save_trace
from autotune.report.sources import Sources, find_sources
from autotune.search import thresholds
from autotune.search.tree_search import search_trees
from autotune.study.document import MeasuredConfiguration, StudyDocument, StudyDraft
from autotune.study.ledger import Ledger
from autotune.study.records import ScreenedSubnet, record_of
from autotune.study.storage import LEDGER, PROFILE, RUNS, STUDY
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import load_workload
from tests.check.sample_documents import prompt_evidence
from tests.sample_documents import DEVICE, PROVENANCE, TARGET, cost_table, random_trace, write_image, write_workload

# Untrusted names and texts.
EVIL = ModelReference(id='evil/<script>alert("d")</script>&amp;', sha256="b" * 64)
QUESTION = """What's in <script>alert("p")</script> & "quotes"?"""
KEEPS = (1.0, 0.5)
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    text_parameters=10**6,
    vision_parameters=0,
    kv_bytes_per_token=512,
    bytes_per_parameter=4,
)
TREES: dict[str, Any] = {
    "chain": {"depth": {"low": 1, "high": 4}},
    "eagle2": {
        "depth": {"low": 1, "high": 4},
        "k": {"low": 1, "high": 3},
        "budget": {"low": 2, "high": 20, "log": True},
        "floor": {"low": 0.0, "high": 0.4},
    },
}
TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 9}


@dataclass(frozen=True)
class MadeStudy:
    """The paths of a study, and the documents written to it."""

    folder: Path
    profile_path: Path
    profile: DecodingProfile
    study: StudyDocument
    traces: list[Trace]
    screened: list[ScreenedSubnet]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeStudy]:
    """A profile, and its study next to it."""
    home = tmp_path_factory.mktemp("home")
    folder = home / ".autotune" / "tests-target-0123"
    prompts = [
        {"prompt": f"{QUESTION} {number}", "task": ("read", "count")[number % 2], "split": "tune"}
        | ({"images": [write_image(home / f"{number}.png", number)]} if number % 2 == 0 else {})
        for number in range(4)
    ]
    workload = load_workload(str(write_workload(home, prompts)), "tune")
    traces = [_of_workload(random_trace(7, visual_keep=keep, num_tokens=24, depth=5), workload) for keep in KEEPS]
    for trace in traces:
        save_trace(folder / "traces" / "evil-draft" / f"{trace.header.subnet.name}.trace.json", trace)
    table = cost_table(EVIL)
    costs = table.drafts[0].model_copy(update={"num_parameters": 10**6, "kv_bytes_per_token": 1024, "shape": SHAPE})
    half = SHAPE.model_copy(update={"text_parameters": SHAPE.text_parameters // 2, "crossing_share": 0.25})
    table = table.model_copy(
        update={"drafts": [costs, costs.model_copy(update={"subnet": Subnet(heads=0.5), "shape": half})]}
    )
    table.save(folder / "0123.cost.json")

    ledger = Ledger(folder / LEDGER)
    screened = _screened()
    ledger.work("subnets", {str(number): (lambda o=one: record_of([o])) for number, one in enumerate(screened)})
    evaluator = Evaluator(traces, table, jobs=1)
    space = SearchSpace.model_validate({"name": "by hand", "visual_keep": list(KEEPS), "trees": TREES})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "NUM_SWEPT", 64)
        patch.setattr(thresholds, "SWEEP_SIZE", 32)
        found = search_trees(evaluator, space, ledger, num_trials=20, documents="by hand")

    profile = _profile(evaluator, workload.sha256)
    overall = configuration_of(profile.point)
    assert overall is not None
    append_line(folder / RUNS, *_runs(profile, overall))
    finalist = MeasuredConfiguration(
        name="finalist 1",
        configuration=overall,
        predicted_speedup=1.9,
        interval90=(1.6, 2.2),
        speedup=1.8,
        ci95=(1.7, 1.9),
        num_runs=8,
        is_eliminated=False,
    )
    default = MeasuredConfiguration(
        name="sage", configuration=overall, speedup=1.3, ci95=(1.2, 1.4), num_runs=16, is_eliminated=False
    )
    study = StudyDocument(
        provenance=PROVENANCE,
        command="autotune search --draft '<evil>'",
        target=TARGET,
        target_shape=SHAPE,
        drafts=[StudyDraft(kind="independent", reference=EVIL, shape=SHAPE)],
        hardware=DEVICE,
        workload=workload.name,
        tune_sha256=workload.sha256,
        space=space.name,
        cost_table=table.content_hash,
        traces=[f"traces/evil-draft/{trace.header.subnet.name}.trace.json" for trace in traces],
        records=ledger.used_keys,
        optuna_study=found.optuna_study,
        finalists=[
            finalist,
            finalist.model_copy(
                update={"name": "finalist 2", "is_eliminated": True, "speedup": 1.4, "ci95": (1.2, 1.6)}
            ),
        ],
        defaults=[default],
        stage_seconds={"cost table": 12.0, "trees": 3.0},
    )
    study.save(folder / STUDY)
    path = home / "profile.json"
    profile.save(path)
    profile.save(folder / PROFILE)
    yield MadeStudy(folder, path, profile, study, traces, screened)


@pytest.fixture(scope="session")
def sources(made: MadeStudy) -> Sources:
    """The documents that a report of the profile finds."""
    return find_sources(made.profile_path)


def _of_workload(trace: Trace, workload: Any) -> Trace:
    names = [prompt.name for prompt in workload.prompts]
    tasks = [prompt.settings.task for prompt in workload.prompts]
    update = {"draft": EVIL, "workload": workload.name, "workload_sha256": workload.sha256}
    return replace(trace, header=trace.header.model_copy(update={**update, "prompts": names, "tasks": tasks}))


def _screened() -> list[ScreenedSubnet]:
    """Two shares of heads, two layers, three shares of visual tokens; the fastest has half of the heads and layer 3."""
    return [
        ScreenedSubnet(
            draft=EVIL.id,
            subnet=Subnet(heads=heads, injection_layer=layer, visual_keep=keep),
            depth=3,
            tokens_per_round=2.5,
            ms_per_token=(ms := 1.0 + 0.1 * (heads is None) + 0.05 * (layer == 4) + 0.02 * keep),
            speedup=2.0 / ms,
        )
        for heads, layer, keep in itertools.product((None, 0.5), (3, 4), (1.0, 0.5, 0.25))
    ]


def _profile(evaluator: Evaluator, tune_sha256: str) -> DecodingProfile:
    candidate = evaluator.evaluate(Configuration(tree=TREE, draft=EVIL.id, subnet=Subnet(visual_keep=0.5)))
    measured = Measured(
        speedup=1.83,
        ci95=(1.55, 2.17),
        tokens_per_round=2.34,
        tokens_per_second=876.0,
        num_prompts=2,
        identical_outputs=2,
    )
    point = OperatingPoint(
        draft=DraftChoice(kind="independent", id=EVIL.id, sha256=EVIL.sha256, subnet=Subnet(visual_keep=0.5)),
        tree=parse_policy(TREE),
        fallback=evaluator.round_price(candidate.configuration),
        predicted=Predicted(
            speedup=candidate.speedup, ms_per_token=candidate.ms_per_token, tokens_per_round=candidate.tokens_per_round
        ),
        measured=measured,
    )
    arms = [("ar", None, 1.0), ("chain", 1.51, 1.49), ("eagle2", 1.23, 1.18), ("tuned", None, 1.83)]
    return DecodingProfile(
        provenance=PROVENANCE,
        target=TARGET,
        workload=WorkloadReference(
            name="workload.jsonl",
            tune_sha256=tune_sha256,
            evaluate_sha256="e" * 64,
            num_tune_prompts=4,
            num_evaluate_prompts=3,
        ),
        hardware=DEVICE,
        precision="float32",
        point=point,
        evidence=Evidence(
            configurations_replayed=1234,
            best_default="chain",
            gains=[
                Gain(task=task, over=over, speedup=speedup, ci95=(speedup - 0.1, speedup + 0.1), num_prompts=3)
                for task, over, speedup in (("read", "ar", 1.9), ("all", "ar", 1.83), ("all", "chain", 1.23))
            ],
            prompts=[
                prompt_evidence(f"held/{number}", prompt_sha256=f"{number}" * 64, decode_ms=10.0 + number)
                for number in range(3)
            ],
            compared=[
                ComparedArm(
                    name=name,
                    predicted_speedup=predicted,
                    speedup=speedup,
                    ci95=(speedup - 0.1, speedup + 0.2) if name != "ar" else (1.0, 1.0),
                    tokens_per_round=2.0,
                    tokens_per_second=100 * speedup,
                    num_prompts=3,
                    identical_outputs=3,
                )
                for name, predicted, speedup in arms
            ],
        ),
    )


def _runs(profile: DecodingProfile, overall: Configuration) -> list[dict[str, Any]]:
    """Runs of the profile's evidence, and two others: of another arm, and with another time."""
    counts = {"by_depth": [[5, 4], [3, 2]], "by_rank": [[8, 5], [7, 1]]}
    times = {"target_prefill_ms": 5.0, "draft_prefill_ms": 1.0, "draft_ms": 3.0, "verify_ms": 4.0}
    known = {"arm": overall.key, "acceptance_counts": counts, **times}
    runs = [
        {**known, "prompt_sha256": one.prompt_sha256, "decode_ms": one.decode_ms} for one in profile.evidence.prompts
    ]
    return [*runs, runs[0] | {"arm": "another"}, runs[0] | {"decode_ms": 99.0}]
