"""Training of drafts: teacher batches, losses, and runs that are killed and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from autotune.drafters.block_network import own_feature_mask, rows_of
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.star import StarNetwork
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.errors import UserError
from autotune.files import data_root, read_lines
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import Target
from autotune.training import trainer
from autotune.training.draft_task import DraftTask
from autotune.training.examples import Example
from autotune.training.recipe import Recipe, Stage
from autotune.training.teacher import Teacher, TeacherBatches
from autotune.training.trainer import make_optimizers, train
from tests.obvious import refused
from tests.tiny_models import TARGET_LAYERS, Inputs, Pair
from tests.training.conftest import SIZES, STAGE, Killed, Said, write_examples, write_recipe

LAST = TARGET_LAYERS
ALL_LAYERS = range(LAST + 1)  # layer 0 is the input of the first layer


@pytest.fixture(scope="module")
def examples(encoded: list[EncodedPrompt]) -> list[Example]:
    """Three examples of different lengths; the last five tokens of each are its answer."""
    return [Example(prompt, len(prompt) - 6) for prompt in encoded]


# -------- teacher batches


def test_padded_batch_equals_single_examples(
    pair: Pair, target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    batch = Teacher(target).read(examples, layers=ALL_LAYERS)
    logits = batch.head(batch.hidden[LAST][batch.loss_mask])
    for row, inputs in enumerate(prompts.values()):
        with torch.no_grad():
            alone = pair.target(**inputs, output_hidden_states=True)
        length = inputs["input_ids"].shape[1]
        assert int(batch.lengths[row]) == length and not batch.loss_mask[row, length:].any()
        for layer, hidden in enumerate(alone.hidden_states):
            torch.testing.assert_close(batch.hidden[layer][row, :length], hidden[0], atol=2e-4, rtol=1e-4)
        teacher_logprobs = alone.logits[0, length - 6 :]
        torch.testing.assert_close(logits[6 * row : 6 * row + 6], teacher_logprobs, atol=1e-3, rtol=1e-4)


def test_visual_scores_depend_on_the_prompt_only(
    target: Target, examples: list[Example], prompts: dict[str, Inputs]
) -> None:
    """Scores equal those of a prefill, which does not see the answer."""
    batch = Teacher(target).read(examples, layers=())
    assert set(batch.visual_scores) == {1, 2}
    for row, name in ((1, "image"), (2, "long")):
        inputs = dict(prompts[name])
        prompt_length = examples[row].loss_start + 1
        for key in ("input_ids", "attention_mask"):
            inputs[key] = inputs[key][:, :prompt_length]
        with torch.inference_mode():
            (prompt,) = target.encode(inputs).prompts
            target.reserve(prompt_length)
            expected = target.prefill(prompt, visual_rankings=["text_after_image"]).visual_scores
        torch.testing.assert_close(batch.visual_scores[row], expected["text_after_image"], atol=1e-5, rtol=0)


def test_attention_entropies_equal_those_of_an_eager_model(
    pair: Pair, target: Target, encoded: list[EncodedPrompt], prompts: dict[str, Inputs]
) -> None:
    """Mean attention entropy (AE) of every layer, over the sampled query tokens."""
    prompt = encoded[list(prompts).index("image")]
    batch = Teacher(target).read([Example(prompt, len(prompt) - 4)], layers=(), rule="entropy", seed=3)
    eager = AutoModelForImageTextToText.from_pretrained(pair.target_folder, attn_implementation="eager").eval()
    with torch.no_grad():
        attentions = eager(**prompts["image"], output_attentions=True).attentions
    rng = torch.Generator().manual_seed(3)
    torch.randint(1, (), generator=rng)
    queries = torch.randint(len(prompt), (64,), generator=rng)
    assert batch.entropies is not None
    for entropy, weights in zip(batch.entropies, attentions, strict=True):
        expected = -(weights[0] * weights[0].clamp_min(1e-30).log()).sum(-1)[:, queries].mean()
        torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-4)


def test_distilled_layer_of_worked_examples() -> None:
    """Layers count from 1, and the last one is excluded. AE + |change| of the first case: -, 1 + 2, 1.1 + 0.1,
    2 + 0.9.
    """
    cases = [([3.0, 1.0, 1.1, 2.0, 0.1], 2, 3), ([0.5, 2.0, 1.9, 1.2, 0.0], 1, 4), ([2.0, 2.0, 1.0, 3.0, 0.0], 3, 2)]
    for entropies, by_entropy, by_entropy_and_change in cases:
        batch = TeacherBatch(
            *([torch.zeros(1)] * 4), {}, {}, torch.tensor(entropies), lambda states: states, torch.zeros(1)
        )
        assert batch.distilled_layer("entropy") == by_entropy, entropies
        assert batch.distilled_layer("entropy-and-change") == by_entropy_and_change, entropies


def test_rows_drop_only_the_visual_tokens_of_lowest_score(target: Target, examples: list[Example]) -> None:
    batch = Teacher(target).read(examples, layers=(2,))
    network = StarNetwork.new(SIZES, target, source="test")
    rows = rows_of(network, batch, visual_keep=0.25, injection_layer=2)
    for row, example in enumerate(examples):
        length = len(example.prompt)
        kept = rows.positions[row][: length - (12 if row else 0)]
        text = set(range(length)) - set(batch.is_visual[row].nonzero()[:, 0].tolist())
        visual = sorted(set(kept.tolist()) - text)
        assert text <= set(kept.tolist()) and kept.tolist() == sorted(kept.tolist())
        if row:
            best = batch.is_visual[row].nonzero()[:, 0][batch.visual_scores[row].topk(4).indices]
            assert visual == sorted(best.tolist())
        # A token's embedding is next to the feature of the token before.
        for column, position in enumerate(kept.tolist()):
            assert torch.equal(rows.embeddings[row, column], batch.embeddings[row, position])
            if position > 0:
                before = network.target_features({2: batch.hidden[2][row, position - 1]})
                torch.testing.assert_close(rows.features[row, column], before)
    assert int(rows.loss_mask.sum()) == int(batch.loss_mask.sum())


def test_own_feature_runs_begin_with_a_target_feature(target: Target, examples: list[Example]) -> None:
    batch = Teacher(target).read(examples, layers=())
    network = DreamNetwork.new(SIZES, target, source="test")
    rows = rows_of(network, batch, visual_keep=1.0, injection_layer=4)
    masks = [own_feature_mask(rows, torch.Generator().manual_seed(seed)) for seed in range(40)]
    for is_own in masks:
        assert not is_own[~rows.loss_mask].any(), "prompts are read with the target's features"
        assert int(is_own.sum(1).max()) <= 5
        first = rows.loss_mask.int().argmax(1)
        assert not is_own[range(3), first].any(), "the first answer token follows a root"
    assert torch.stack(masks).any(0).sum() == 15, "every other answer token reads an own feature in some mask"


# -------- cached teacher batches


@dataclass
class CountedExamples:
    """Three batches that count how often each was requested."""

    examples: list[Example]
    num_batches: int = 3
    requests: Counter[int] = field(default_factory=Counter)

    def __getitem__(self, number: int) -> list[Example]:
        self.requests[number] += 1
        return [self.examples[number], self.examples[(number + 1) % 3]]


@pytest.fixture
def batches(examples: list[Example]) -> CountedExamples:
    return CountedExamples(examples)


def assert_same(first: TeacherBatch, second: TeacherBatch, **tolerance: float) -> None:
    """Bit for bit, unless a tolerance is given."""
    contents = [{name: value for name, value in vars(batch).items() if name != "head"} for batch in (first, second)]
    torch.testing.assert_close(*contents, **(tolerance or {"rtol": 0, "atol": 0}))


def test_repeated_batches_are_cached(target: Target, batches: CountedExamples, tmp_path: Path) -> None:
    """A later run reads the batches that an earlier run has cached."""
    teacher_batches = [
        TeacherBatches(batches, Teacher(target), layers=(2,), rule="entropy", cache=tmp_path) for _ in range(2)
    ]
    first = [teacher_batches[0][step] for step in range(3)]
    assert batches.requests == {0: 1, 1: 1, 2: 1}
    for step in range(3, 9):
        assert_same(teacher_batches[step % 2][step], first[teacher_batches[0].batch_of(step)])
    assert sum(batches.requests.values()) == 3, "the target has read every batch once"


def test_cached_batch_equals_teacher_outputs_in_half_precision(
    target: Target, batches: CountedExamples, tmp_path: Path
) -> None:
    teacher = Teacher(target)
    cached = TeacherBatches(batches, teacher, layers=ALL_LAYERS, cache=tmp_path)[0]
    assert_same(cached, teacher.read(batches[0], layers=ALL_LAYERS), atol=1e-3, rtol=1e-3)


def test_drafts_that_need_other_layers_share_the_cache(
    target: Target, batches: CountedExamples, tmp_path: Path
) -> None:
    first = TeacherBatches(batches, Teacher(target), layers=(1,), rule="entropy", cache=tmp_path)
    second = TeacherBatches(batches, Teacher(target), layers=(2, 3), cache=tmp_path)
    before = first[0]
    extended = second[0]
    assert extended.hidden.keys() >= {1, 2, 3, LAST} and batches.requests == {0: 2}
    after = first[0]
    assert batches.requests == {0: 2}, (
        "the file still holds the layers of the first draft, including the one chosen by entropy"
    )
    assert after.distilled_layer("entropy") == before.distilled_layer("entropy")
    assert all(torch.equal(after.hidden[layer], states) for layer, states in before.hidden.items())
    assert_same(second[0], extended)


def test_damaged_cache_files_are_replaced(target: Target, batches: CountedExamples, tmp_path: Path) -> None:
    """Files as a full disk or a crash may leave them: truncated, empty, random bytes, other tensors."""
    teacher_batches = TeacherBatches(batches, Teacher(target), layers=(2,), cache=tmp_path)
    expected = teacher_batches[0]
    (path,) = tmp_path.glob("*.pt")
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 100):
        batches.requests.clear()
        path.unlink()  # truncating it in place would damage batches that are memory-mapped
        path.write_bytes(damaged)
        for _ in range(2):
            assert_same(teacher_batches[0], expected)
            assert batches.requests == {0: 1}


# -------- runs


def test_run_killed_at_any_step_ends_with_the_same_weights(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bit for bit, in whichever stage it was killed; checkpoints are written every second step. Each killed run
    has a copy of the examples, without cached answers or teacher batches.
    """
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)

    def begin_in(name: str) -> Path:
        (tmp_path / name).mkdir()
        write_examples(tmp_path / name / "examples.jsonl")
        return write_recipe(tmp_path / name / "recipe.yaml", str(pair.target_folder))

    console = Said()
    expected = load_file(train(begin_in("uninterrupted"), console=console) / "model.safetensors")
    assert re.match(r"memory on cpu: steps on the largest batches fit; .*iB are free", console.lines[0])
    assert re.search(r"a chain of 5 emits \d\.\d\d tokens per round$", console.lines[-3])
    assert "other processes" in console.lines[-2] and "uninterrupted" in console.lines[-1]
    assert [(name, done) for name, done, _ in console.steps][2:5:2] == [
        ("tests/star stage 1/2", 3),
        ("tests/star stage 2/2", 2),
    ]
    assert re.match(r"loss \d+\.\d{3}, agreement \d\.\d{3}, held out agreement \d", console.steps[-1][2])
    for killed_after in range(1, 7):
        path = begin_in(f"killed{killed_after}")
        with pytest.raises(Killed):
            train(path, console=Said(killed_after))
        train(path, console=(resumed := Said()))
        assert len(resumed.steps) < 7 or killed_after < 2, "the run restarted from the beginning"
        actual = load_file(path.parent / "model.safetensors")
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    train(path)
    lines = read_lines(path.parent / "training.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [(0, 3), (1, 4)], "the end of every stage is logged"
    assert all("held_out_agreement" in line for line in lines)


def test_a_damaged_checkpoint_is_one_line(recipe: Callable[..., Path]) -> None:
    path = recipe()
    train(path, output=(folder := path.parent / "out"))
    checkpoint = folder / ".checkpoint" / trainer.STATE
    whole = checkpoint.read_bytes()
    saved = torch.load(checkpoint, weights_only=True)
    weights = saved["model"]
    damaged = "the checkpoint is damaged .*; delete it to start over"
    cases: list[tuple[bytes | dict[str, Any], str]] = [
        *((whole[:size], damaged) for size in (0, 7, 500, len(whole) - 1)),
        (b"\xff" * 100, damaged),
        ({"x": torch.zeros(1)}, damaged),
        (saved | {"recipe": "another"}, "has changed since this checkpoint; delete the checkpoint to start over"),
        (saved | {"model": {}}, damaged),
        (saved | {"model": weights | {"norm.weight": torch.zeros(3)}}, damaged),
        (
            saved | {"model": weights | {"norm.weight": weights["norm.weight"] * torch.nan}},
            "norm.weight are not finite",
        ),
    ]
    for content, message in cases:
        if isinstance(content, bytes):
            checkpoint.write_bytes(content)
        else:
            torch.save(content, checkpoint)
        with pytest.raises(UserError, match=rf"{trainer.STATE}: .*{message}") as caught:
            train(path, output=folder)
        assert "\n" not in str(caught.value)


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError("Unable to allocate 9 GiB"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_that_does_not_fit_is_refused_before_training(
    error: Exception, recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, on the examples of the longest batch."""

    def loss(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(StarNetwork, "loss", loss)
    path = recipe()
    with refused(
        r"the memory of cpu must hold a step on 2 examples of up to \d+ tokens; it is full .*; lower batch_size"
    ):
        train(path, output=path.parent / "out")
    assert not (path.parent / "out").exists()


def test_the_weights_of_the_best_evaluation_are_kept(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of the last stage, also if the run is killed between; trackers read the figures at the steps of all."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    states: list[dict[str, torch.Tensor]] = []
    agreements = iter([0.99, 0.5, 0.9, 0.6, 0.9, 0.9, 0.4])
    tracked: list[int] = []

    def evaluate(self: DraftTask) -> dict[str, float]:
        states.append({name: tensor.clone() for name, tensor in self.module.state_dict().items()})
        return {"held_out_agreement": next(agreements)}

    monkeypatch.setattr(DraftTask, "evaluate", evaluate)
    monkeypatch.setattr(trainer.Accelerator, "log", lambda _, values, step: tracked.append(step))
    path = recipe(stages=[{**STAGE, "steps": 1}, {**STAGE, "steps": 5}])
    with pytest.raises(Killed):
        train(path, console=Said(killed_after=4))
    folder = train(path, console=(console := Said()))
    kept = "those of step 2 of the last stage, whose held-out agreement is the highest: 90.0%"
    assert any(kept in line for line in console.lines)
    written = load_file(folder / "model.safetensors")
    for number, is_kept in ((2, True), (0, False), (-1, False)):
        state = {name: tensor.to(written[name].dtype) for name, tensor in states[number].items()}
        assert is_kept == all(torch.equal(written[name], tensor) for name, tensor in state.items())
    assert sorted({*tracked}) == [1, 2, 3, 4, 5, 6]


def test_fixed_layer_is_distilled_in_every_step(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """A draft that reads the last layer imitates layer 2, which its teacher batches keep without measuring entropy."""
    path = recipe(model="dream", stages=[{**STAGE, "steps": 3, "distillation": 2}])
    lines = read_lines(train(path) / "training.jsonl")
    assert [line.get("distilled_layers") for line in lines] == [{"2": 3}]
    cached = [torch.load(file) for file in tmp_path.glob(".autotune/teacher-batches/*/*.pt")]
    assert cached and all(2 in batch["hidden"] and batch["entropies"] is None for batch in cached)


def test_training_lowers_the_loss_and_scores_heads(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)
    folder = train(recipe(stages=[{**STAGE, "steps": 16, "learning_rate": 3e-3, "warmup_steps": 2}]))
    losses = [line["loss"] for line in read_lines(folder / "training.jsonl")]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert (load_file(folder / "model.safetensors")["head_importance"] > 0).all()


def test_muon_trains_the_matrices_of_a_drafts_blocks(target: Target) -> None:
    """The norms of the features are a matrix in shape only."""
    network = StarNetwork.new(SIZES, target, source="test")
    stage = Stage(steps=1, batch_size=1, learning_rate=1.0, optimizer="muon")
    adamw, muon = make_optimizers(network, list(network.parameters()), stage)
    matrices = {one for block in network.blocks for one in block.parameters() if one.dim() == 2}
    assert {one for group in muon.param_groups for one in group["params"]} == matrices
    others = {one for group in adamw.param_groups for one in group["params"]}
    assert others == set(network.parameters()) - matrices and network.feature_norms in others


@pytest.mark.nightly
def test_two_processes_share_a_batch(pair: Pair, tmp_path: Path) -> None:
    """Each process generates half of the answers and reads half of each batch; gradients are averaged, and one process
    writes files.

    On a CPU torchrun starts them, because ``accelerate launch`` starts only one process there.
    """
    write_examples(tmp_path / "examples.jsonl")
    path = write_recipe(tmp_path / "recipe.yaml", str(pair.target_folder))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "autotune", "train"]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [*command, str(path), "-o", "two"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "two" / "model.safetensors").exists()
    assert done.stderr.count("memory on cpu") == 1, "only one process prints"
    cached = [folder for folder in (tmp_path / ".autotune" / "teacher-batches").iterdir()]
    assert len(cached) == 2 and all(len([*folder.iterdir()]) == 2 for folder in cached), (
        "each process has read its share of both batches"
    )
    assert len([*(tmp_path / ".autotune" / "training-answers").iterdir()]) == 4


def test_more_processes_than_examples_in_a_batch(recipe: Callable[..., Path]) -> None:
    accelerator, path = SimpleNamespace(process_index=0, num_processes=4), recipe()
    with refused(r"got batch_size 2 for 4 processes; raise batch_size, or start fewer"):
        DraftTask(Recipe.load(path), path, accelerator, Said())  # type: ignore[arg-type]


# -------- invalid input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, r"key 'teacher' is required and missing"),
        ({"model": "stra"}, "model: .*'star'.*'mtp'; got 'stra'"),
        ({"data": {"fiel": "a.jsonl"}}, r"unknown key 'data\.fiel'; did you mean 'file'"),
        ({"draft": {**SIZES, "num_head": 4}}, "unknown key 'num_head'; did you mean 'num_heads'"),
        (
            {"model": "dream", "stages": [{**STAGE, "distillation": LAST + 1}]},
            f"distillation names a layer of the target, 1 to {LAST}; got {LAST + 1}; name one of them",
        ),
        ({"initial_weights": "stored"}, "unknown key 'initial_weights'"),
        (
            {"draft": {**SIZES, "num_heads": 6}},
            r"recipe\.yaml: num_heads must be a multiple of 4, because .* of them; give 4, 8 or 12$",
        ),
        (
            {"data": {"file": "w.jsonl", "magpie": {"num_prompts": 8}, "num_examples": 8}},
            "num_examples must be lower; got 8 of 8; raise num_prompts",
        ),
        (
            {"model": "eagle3", "stages": [{**STAGE, "distillation": "entropy"}]},
            "an eagle3 head has no subnets and imitates no features; remove distillation",
        ),
        (
            {"model": "mtp", "draft": {"mlp_size": 64}, "stages": [STAGE]},
            r"an mtp head has the sizes of its target's layers; got draft .*; remove it",
        ),
    ],
)
def test_recipe_that_cannot_be_trained(recipe: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with refused(message):
        train(recipe(**changes))
    assert not Path("w.jsonl").exists(), "nothing was written before"


@pytest.mark.parametrize("kind", ["star", "eagle3", "mtp"])
def test_a_draft_is_trained_for_a_target_in_float16(kind: str, recipe: Callable[..., Path], text_pair: Pair) -> None:
    lines = [json.dumps({"prompt": f"Row {number}", "answer": "reads 3, 1, 4."}) for number in range(8)]
    Path("examples.jsonl").write_text("\n".join(lines))
    sizes = {} if kind == "mtp" else SIZES
    teacher = str(text_pair.target_folder)
    folder = train(recipe(model=kind, draft=sizes, dtype="float16", stages=[STAGE], teacher=teacher))
    (line,) = read_lines(folder / "training.jsonl")
    assert 0 < line["held_out_loss"] < float("inf")


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_recipes_of_smollm2_train(kind: str, recipe: Callable[..., Path]) -> None:
    """Two steps of each on a tiny target, with its examples and vocabulary."""
    shipped = Recipe.load(data_root() / "drafts" / "smollm2" / kind / "recipe.yaml")
    assert shipped.vocabulary == 8192 and shipped.data.judged == ["smollm2"]
    stages = [shipped.stages[0].model_copy(update={"steps": 2, "batch_size": 2}).model_dump(exclude_defaults=True)]
    folder = train(recipe(model=kind, draft=shipped.draft, vocabulary=100, stages=stages))
    (line,) = read_lines(folder / "training.jsonl")
    assert line["step"] == 2 and line["held_out_loss"] > 0
