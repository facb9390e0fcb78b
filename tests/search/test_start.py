"""The beginning of a search: loading, its budget, and the target's speed and answers on a GPU."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autotune.console import Console
from autotune.runtime.decoder import Decoder
from autotune.search import pipeline
from autotune.search.model_pool import ModelPool
from autotune.search.plan import RATE_TOKENS, measure_rates
from autotune.search.settings import SearchSettings
from autotune.workloads.workload import Workload
from tests.rehearsal import Counts, Rehearsal
from tests.tiny_models import Pair


def test_the_budget_begins_when_the_models_are_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Meanwhile the trees' steps are compiled, and an error of that is not lost."""
    now, is_loading = 100.0, Event()

    def load(*arguments: Any) -> ModelPool:
        nonlocal now
        now += 41.0
        is_loading.set()
        return ModelPool(*arguments)

    monkeypatch.setattr(pipeline, "ModelPool", load)
    monkeypatch.setattr(pipeline, "compile_steps", lambda: is_loading.wait(60) or pytest.fail("not meanwhile"))
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: now))
    models = {"target": str(pair.target_folder), "drafts": (str(pair.draft_folder),)}
    settings = SearchSettings(**models, gpu="cpu", budget_s=90.5, folder=tmp_path)
    run = pipeline._SearchRun(settings, Console())
    run.begin()
    assert (run.started, run.clock.deadline) == (141.0, 231.5)
    assert "models loaded in 41 s; the budget of 90.5 s begins now" in capsys.readouterr().err
    monkeypatch.setattr(pipeline, "compile_steps", Mock(side_effect=RuntimeError("of the compiler")))
    with pytest.raises(RuntimeError, match="of the compiler"):
        pipeline._SearchRun(settings, Console())


def test_a_gpu_loads_measures_and_answers_as_the_search_decodes(
    rehearsal: Rehearsal, pair: Pair, evaluate: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights go straight to the GPU; what is timed, and answers by themselves, replay captures."""
    moved: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: moved.append(module) or module)
    pool = ModelPool(str(pair.target_folder), (), "cuda:0", mode="auto")
    monkeypatch.undo()
    model = pool.target.model
    assert moved == [] and pool.mode == "cuda-graph" and not model.training
    for name, parameter in model.named_parameters():
        assert str(parameter.device) == "cuda:0" and not parameter.requires_grad
        assert torch.equal(parameter.cpu(), pair.target.get_parameter(name))
    assert {str(buffer.device) for buffer in model.buffers()} == {"cuda:0"}

    timed: list[Counts] = []
    generate = Decoder.generate

    def counted(self: Decoder, **inputs: Any) -> Any:
        with rehearsal.counted() as counts:
            output = generate(self, **inputs)
        timed.append(counts)
        return output

    monkeypatch.setattr(Decoder, "generate", counted)
    assert measure_rates(pool.plain_decoder(), evaluate).step_s > 0
    assert {(counts.captures, counts.replays) for counts in timed} == {(0, RATE_TOKENS - 1)}
    sampled = evaluate.sampled(0.5).cut(1)
    (answer,) = pool.recorder(tmp_path).answers(sampled)
    assert timed[-1].replays >= len(answer.tokens) - 1 - timed[-1].captures
    (inputs,) = (prompt.inputs(pool.processor, "cuda:0") for prompt in sampled.prompts)
    found = pool.plain_decoder().generate(**inputs, **sampled.prompts[0].settings.generation)
    assert found.sequences[0, answer.prompt_length :].tolist() == answer.tokens
