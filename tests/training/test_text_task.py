"""Training of text models on the workload `code`: rows, growth of the model, and runs that are killed and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.drafters.checkpoint import load_draft, new_network
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.training import build, own_answers, trainer
from autotune.training.batches import IGNORED
from autotune.training.code_batches import CodeBatches
from autotune.training.recipe import Stage, load_recipe
from autotune.training.sampled_batches import SampledBatches
from autotune.training.teacher import Example, Teacher
from autotune.training.text_task import TextTask
from autotune.training.trainer import make_optimizers, train
from autotune.training.unrolled import unrolled_loss
from autotune.workloads.code import examples
from autotune.workloads.code.corpus import CodeFile
from autotune.workloads.workload import load_workload
from tests.workloads.code.test_examples import SPANS, TEXT

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SHALLOW = {
    "objective": "text",
    "steps": 3,
    "batch_size": 2,
    "sequence_length": 64,
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "optimizer": "muon",
    "num_layers": 2,
}
DEEP = {**SHALLOW, "num_layers": None, "sequence_length": 96}
JOINT = {**DEEP, "mtp_weight": 0.5, "mtp_rows": 1, "unrolled_steps": 2}
"""Trains a multi-token prediction head with the model."""
NAMES = tuple(f"name{letter}" for letter in "abcdefghijklmnop")


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file in place of the installed packages."""
    files = (CodeFile("package", "shape.py", TEXT, SPANS),)
    for module in (examples, build):
        monkeypatch.setattr(module, "corpus", lambda split: files)
    for cached in (examples._functions, examples._ends):
        monkeypatch.setattr(examples, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(examples, "names", lambda: NAMES)


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        corpus.__wrapped__(patch)  # type: ignore[attr-defined]
        return build.train_code_tokenizer(400)


def write_recipe(folder: Path, *stages: dict[str, Any], **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {
        "schema": "autotune.recipe/1",
        "name": "code/test",
        "description": "A small text model",
        "model": "target",
        "workload": "code",
        "vocabulary_size": 400,
        "text": SIZES,
        "stages": list(stages),
        **values,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


# ------------------------------------------------------------------------------------------------------------------ rows


def test_rows_hold_tasks_as_they_are_judged(tokenizer: Any) -> None:
    """A prompt in the chat's form, the answer and the end of text; made-up prompts are not trained on."""
    batches = CodeBatches(tokenizer, {"fill": 1.0}, "train", 1, 511, seed=0)
    batch = batches[0]
    text = tokenizer.decode(batch.input_ids[0])
    assert text.startswith("<|begin|><|user|>Write the records as ") and "<|end|><|begin|>" in text
    first_answer = int((batch.input_ids[0] == tokenizer.convert_tokens_to_ids("<|assistant|>")).nonzero()[0])
    labels = batch.labels[0].tolist()
    assert labels[:first_answer] == [IGNORED] * first_answer
    end = labels.index(tokenizer.eos_token_id)
    assert labels[first_answer:end] == batch.input_ids[0, first_answer + 1 : end + 1].tolist()


def test_rows_are_a_function_of_seed_and_step(tokenizer: Any) -> None:
    tasks = {"files": 1.0, "edit": 1.0, "continue": 1.0}
    batches, other = (CodeBatches(tokenizer, tasks, "train", 3, 64, seed) for seed in (0, 1))
    assert batches[5].input_ids.shape == batches[5].labels.shape == (3, 64)
    assert torch.equal(batches[5].input_ids, batches[5].input_ids)
    assert not torch.equal(batches[5].input_ids, other[5].input_ids)
    assert not torch.equal(batches[5].input_ids, batches[6].input_ids)


def test_bytes_are_those_of_the_labelled_tokens(tokenizer: Any) -> None:
    batches = CodeBatches(tokenizer, {"files": 1.0}, "train", 2, 64, seed=0)
    rows = [tokenizer.decode(row[row != IGNORED]) for row in batches[0].labels]
    assert batches.num_bytes(0) == sum(len(row.replace("<|begin|>", "")) for row in rows) > 128


# ---------------------------------------------------------------------------------------------------------------- growth


def test_a_grown_layer_shares_the_update_of_its_original(tmp_path: Path) -> None:
    recipe_path = write_recipe(tmp_path, SHALLOW, DEEP)
    task = TextTask(load_recipe(recipe_path), recipe_path)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    shallow, deep = (Stage(**stage) for stage in (SHALLOW, DEEP))
    assert task.running_layers(shallow) == [0, 2] and task.running_layers(deep) == [0, 1, 2, 3]
    task.grow(shallow, deep)
    after = task.model.state_dict()
    for name, value in after.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        original = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer // 2 * 2}.")
        share = 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        torch.testing.assert_close(value * share, before[original])


def test_a_shallow_stage_trains_only_its_layers(tmp_path: Path) -> None:
    recipe_path = write_recipe(tmp_path, SHALLOW)
    recipe = load_recipe(recipe_path)
    task = TextTask(recipe, recipe_path)
    parameters = task.begin(recipe.stages[0], 0)
    names = {name for name, one in task.model.named_parameters() if any(one is other for other in parameters)}
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "2"}
    assert "model.embed_tokens.weight" in names and "model.norm.weight" in names
    loss, _ = task.loss(recipe.stages[0], 0)
    loss.backward()
    trained = {name for name, one in task.model.named_parameters() if one.grad is not None}
    assert trained == names


def test_answers_may_weigh_more_than_prompts_and_files(tmp_path: Path) -> None:
    stage = {**DEEP, "sequence_length": 400, "tasks": {"edit": 1.0, "files": 0.2}}
    path = write_recipe(tmp_path, {**stage, "answer_weight": 3.0})
    recipe = load_recipe(path)
    task = TextTask(recipe, path)
    task.begin(recipe.stages[0], 0)
    batch = task._batches[0]
    losses = cross_entropy(task.model(batch.input_ids).logits.mT, batch.labels, reduction="none")
    is_answer = torch.zeros_like(batch.labels, dtype=torch.bool)
    assistant, end = (task.tokenizer.convert_tokens_to_ids(token) for token in ("<|assistant|>", "<|end|>"))
    for ids, row in zip(batch.input_ids.tolist(), is_answer, strict=True):
        inside = False
        for column, token in enumerate(ids):
            inside = token == assistant or (inside and token != end)
            row[column] = inside
    is_labelled = batch.labels != IGNORED
    assert is_answer[is_labelled].any() and not is_answer[is_labelled].all()
    weights = torch.where(is_answer, 3.0, 1.0) * is_labelled
    loss = task.loss(recipe.stages[0], 0)[0]
    torch.testing.assert_close(loss, (losses * weights).sum() / weights.sum())


def test_a_stage_may_have_tasks_of_its_own(tmp_path: Path) -> None:
    """Training reads these, and evaluation the recipe's, so that stages can be compared."""
    recipe_path = write_recipe(
        tmp_path, {**SHALLOW, "sequence_length": 511, "tasks": {"fill": 1.0}}, tasks={"explain": 1.0}
    )
    recipe = load_recipe(recipe_path)
    task = TextTask(recipe, recipe_path)
    task.begin(recipe.stages[0], 0)
    trained, held_out = (task.tokenizer.decode(rows.input_ids.flatten()) for rows in (task._batches[0], task._held_out))
    assert "Write the records" in trained and "Explain the traceback" not in trained
    assert "Explain the traceback" in held_out and "Write the records" not in held_out


def test_muon_trains_the_matrices_of_layers(tmp_path: Path) -> None:
    recipe_path = write_recipe(tmp_path, DEEP)
    recipe = load_recipe(recipe_path)
    task = TextTask(recipe, recipe_path)
    adamw, muon = make_optimizers(task.module, task.begin(recipe.stages[0], 0), recipe.stages[0])
    names = {parameter: name for name, parameter in task.module.named_parameters()}
    by_muon = {names[one] for group in muon.param_groups for one in group["params"]}
    by_adamw = {names[one] for group in adamw.param_groups for one in group["params"]}
    assert by_muon == {name for name in names.values() if name.endswith("_proj.weight")}
    assert by_adamw == set(names.values()) - by_muon


def test_muon_trains_the_matrices_of_a_drafts_blocks(target: Target) -> None:
    """The norms of the features are a matrix in shape only."""
    network = new_network("star", {"num_heads": 4, "head_size": 8, "mlp_size": 32}, target, source="test")
    stage = Stage(objective="drafting", steps=1, batch_size=1, learning_rate=1.0, optimizer="muon")
    adamw, muon = make_optimizers(network, list(network.parameters()), stage)
    matrices = {one for block in network.blocks for one in block.parameters() if one.dim() == 2}
    assert {one for group in muon.param_groups for one in group["params"]} == matrices
    others = {one for group in adamw.param_groups for one in group["params"]}
    assert others == set(network.parameters()) - matrices and network.feature_norms in others


# -------------------------------------------------------------------------------------------------------------- training


def test_an_interrupted_run_reaches_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed within a stage and between two stages, of which the second trains a head with the model."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    whole = train(write_recipe(tmp_path / "whole", SHALLOW, JOINT, mtp="head"))
    path = write_recipe(tmp_path / "killed", SHALLOW, JOINT, mtp="head")

    def kill_at(steps: set[int]) -> Any:
        def progress(stage: str, step: int, of: int, metrics: dict[str, float]) -> None:
            if (("1/2" in stage) * 10 + step) in steps:
                raise KeyboardInterrupt

        return progress

    for steps in ({13}, {1}, {3}):  # the third step of the first stage; the first and third step of the second
        with pytest.raises(KeyboardInterrupt):
            train(path, progress=kill_at(steps))
    train(path)
    for weights in ("model.safetensors", "head/model.safetensors"):
        expected, found = (load_file(folder / weights) for folder in (whole, path.parent))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


@torch.no_grad()
def test_a_new_head_begins_with_the_last_layer_of_the_trained_model(tmp_path: Path) -> None:
    """Where stages without it came before, and not again where such a stage lies between two that train it."""
    path = write_recipe(tmp_path, SHALLOW, JOINT, JOINT, DEEP, JOINT, mtp="head")
    recipe = load_recipe(path)
    task, stages = TextTask(recipe, path), recipe.stages
    layers = task.model.model.layers[-1].mlp.up_proj, task.head.layer.mlp.up_proj
    layers[0].weight.add_(1.0)
    task.grow(stages[0], stages[1])
    assert torch.equal(layers[0].weight, layers[1].weight)
    layers[1].weight.add_(1.0)
    trained = layers[1].weight.clone()
    for number in (2, 4):
        task.grow(stages[number - 1], stages[number])
        assert torch.equal(layers[1].weight, trained), "its training goes on"


def test_a_stored_head_goes_on_as_it_is(tmp_path: Path) -> None:
    train(write_recipe(tmp_path, SHALLOW, JOINT, mtp="head"))
    stored = load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / ".checkpoint" / "state.safetensors").unlink()
    quiet = {**JOINT, "learning_rate": 1e-9}
    train(write_recipe(tmp_path, SHALLOW, SHALLOW, quiet, mtp="head", trained_stages=2))
    for name, value in load_file(tmp_path / "head" / "model.safetensors").items():
        assert torch.equal(value, stored[name]), name


def test_a_head_is_trained_with_the_model(tmp_path: Path) -> None:
    """Its loss is that of unrolled drafting on the same row, reaches the model through what the head reads, and the head is a draft
    from which its own recipe continues.
    """
    path = write_recipe(tmp_path / "target", JOINT, mtp="../mtp", tasks={"files": 1.0})
    task, stage = TextTask(load_recipe(path), path), Stage(**JOINT)
    parameters, batch = task.begin(stage, 0), task._batches[0]
    with torch.no_grad():
        loss, alone = (task.loss(stage.model_copy(update={"mtp_weight": weight}), 0)[0] for weight in (0.5, 0.0))
    target = Target(task.model)
    (prompt,) = target.encode({"input_ids": batch.input_ids[:1]}).prompts
    one = Teacher(target).read([Example(prompt, 0)], layers=task.head.layers_read(None))
    expected, _ = unrolled_loss(task.head, one, num_steps=2)
    torch.testing.assert_close(loss - alone, 0.5 * expected)
    hidden = task._states(batch).detach().requires_grad_()
    task._head_loss(batch.input_ids, hidden, batch.labels)[0].backward()
    assert hidden.grad[:, :-1].abs().sum(-1).min() > 0 and not hidden.grad[:, -1].any()
    assert {*task.head.parameters()} < {*parameters}

    train(path)
    settings = {"model": "mtp", "teacher": "../target", "text": {}, "initial_weights": "stored"}
    first = load_file(tmp_path / "mtp" / "model.safetensors")
    drafting = {**DEEP, "objective": "drafting", "learning_rate": 1e-6, "optimizer": "adamw"}
    folder = train(write_recipe(tmp_path / "mtp", drafting, **settings))
    for name, value in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(value, first[name], atol=1e-3, rtol=0.01)
    trained = Target(AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval())
    tree = {"policy": "chain", "depth": 3}
    inputs = (
        load_workload("code", "tune", num_prompts=1)
        .prompts[0]
        .inputs(AutoTokenizer.from_pretrained(tmp_path / "target"))
    )
    plain, drafted = (
        decoder.generate(**inputs, max_new_tokens=12).sequences
        for decoder in (Decoder(trained), Decoder(trained, load_draft(str(folder), trained), tree=tree))
    )
    assert torch.equal(plain, drafted)


def test_a_share_of_the_batches_is_sampled(tokenizer: Any, tmp_path: Path) -> None:
    """Their answers are the target's own, greedily as it decodes them; they are sampled once."""
    path = write_recipe(tmp_path / "target", DEEP)
    task = TextTask(load_recipe(path), path)
    rows = CodeBatches(tokenizer, {"files": 1.0, "explain": 1.0}, "train", 2, 600, seed=0)
    sampled = SampledBatches(rows, task.model, 0.5, (0.0, 1.0), tmp_path / "rows")
    for number in (0, 2):
        assert torch.equal(sampled[number].input_ids, rows[number].input_ids)
    decoder = Decoder(Target(task.model))
    for ids, labels in zip(sampled[1].input_ids, sampled[1].labels, strict=True):
        is_answer = labels != IGNORED
        start = int(is_answer.int().argmax())
        assert tokenizer.decode(ids[: start + 1]).endswith("<|assistant|>")
        answer = decoder.generate(input_ids=ids[None, : start + 1], max_new_tokens=int(is_answer.sum()))
        assert torch.equal(answer.sequences[0, start + 1 :], labels[is_answer])
    again = SampledBatches(rows, None, 0.5, (0.0, 1.0), tmp_path / "rows")
    assert torch.equal(again[3].labels, sampled[3].labels) and len(list((tmp_path / "rows").iterdir())) == 1
    others = SampledBatches(rows, task.model, 1.0, (1.0,), tmp_path / "others")
    assert not torch.equal(others[0].labels[:, -32:], sampled[1].labels[:, -32:])


def test_good_answers_of_the_model_take_the_place_of_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sampled once, before the stage's first step, from the weights that it begins with; a resumed stage reads them again."""
    monkeypatch.chdir(tmp_path)  # where answers are stored
    monkeypatch.setattr(own_answers, "good_part", lambda task, *args, **kwargs: 9 * (task == "complete"))
    stage = {**DEEP, "own_answers": 6, "own_answers_temperature": 1e-4, "sequence_length": 400}
    tasks = {"continue": 1.0, "complete": 1.0, "explain": 1.0}
    path = write_recipe(tmp_path / "target", DEEP, {**stage, "tasks": tasks})
    reports: list[tuple[int, int]] = []
    task, settings = TextTask(load_recipe(path), path, lambda *done: reports.append(done)), load_recipe(path).stages[1]
    task.prepare(settings, 1)
    assert reports == [(6, 6)]

    task.begin(settings, 1)
    own = task._batches.own_answers
    assert {*own} == {"complete"} and 0 < len(own["complete"]) < 6
    decoder, end = Decoder(Target(task.model)), task.tokenizer.eos_token_id
    for prompt, answer in own["complete"]:
        assert task.tokenizer.decode(prompt).endswith("<|assistant|>")
        greedy = decoder.generate(input_ids=torch.tensor([prompt]), max_new_tokens=len(answer))
        assert greedy.sequences[0, len(prompt) :].tolist() == answer and (len(answer) == 9 or answer[-1] == end)
    prompt, answer = own["complete"][3 % len(own["complete"])]
    assert task._batches._item("complete", 3)[:2] == ([*prompt, *answer], [IGNORED] * len(prompt) + answer)
    references = dataclasses.replace(task._batches, own_answers={})
    assert task._batches._item("continue", 3) == references._item("continue", 3)

    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    task.begin(settings, 1)  # as a resumed stage does
    assert task._batches.own_answers == own
    task.prepare(settings, 1)
    task.begin(settings, 1)
    newer = task._batches.own_answers
    assert newer != own
    task._own_answers_path(1).unlink()
    task.begin(settings, 1)
    assert task._batches.own_answers == newer, "deleted answers are sampled again"


def test_a_model_without_good_answers_cannot_learn_from_them(tmp_path: Path) -> None:
    stage = {
        **DEEP,
        "own_answers": 2,
        "own_answers_temperature": 0.5,
        "sequence_length": 400,
        "tasks": {"complete": 1.0},
    }
    with pytest.raises(
        UserError, match=r"got none of 2 that were sampled at temperature 0\.5; train the model further"
    ):
        train(write_recipe(tmp_path / "target", stage))


def test_a_later_run_continues_from_the_stored_model(tmp_path: Path) -> None:
    """Only weights and tokenizer are needed; the log goes on."""
    folder = train(write_recipe(tmp_path / "model", SHALLOW))
    first = load_file(folder / "model.safetensors")
    (folder / ".checkpoint" / "state.safetensors").unlink()
    train(write_recipe(folder, SHALLOW, DEEP, trained_stages=1))
    grown = load_file(folder / "model.safetensors")
    # Four small steps away from the copies of the first stage's layers.
    original, copied = first["model.layers.2.self_attn.q_proj.weight"], grown["model.layers.3.self_attn.q_proj.weight"]
    assert 0 < (original - copied).abs().max() < 0.1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and tokenizer.decode(tokenizer("def f():").input_ids) == "def f():"
    assert '"stage": 1' in (folder / "training.jsonl").read_text() and (folder / "training.png").exists()


@pytest.mark.parametrize(
    ("kind", "values", "stage"),
    [
        (
            "independent",
            {"text": {**SIZES, "num_hidden_layers": 2}, "teacher_layers": [0, 3]},
            {"objective": "distillation"},
        ),
        (
            "eagle3",
            {
                "text": {},
                "draft": {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 32, "layers": [1, 2, 3]},
            },
            {"objective": "drafting"},
        ),
        ("star", {"text": {}, "draft": {"num_heads": 4, "head_size": 8, "mlp_size": 32}}, {"objective": "drafting"}),
        (
            "star",
            {"text": {}, "draft": {"num_heads": 4, "head_size": 8, "mlp_size": 32, "blocks": ["initial", "final"]}},
            {"objective": "drafting", "subnets": "random"},
        ),
    ],
)
def test_drafts_of_a_text_target(tmp_path: Path, kind: str, values: dict[str, Any], stage: dict[str, Any]) -> None:
    """They are trained on the same rows, and decode what the target decodes."""
    target_folder = train(write_recipe(tmp_path / "target", DEEP))
    stage = {**DEEP, **stage, "sequence_length": 48, "optimizer": "adamw"}
    recipe_path = write_recipe(tmp_path / kind, stage, model=kind, teacher="../target", **values)
    folder = train(recipe_path)
    target = Target(AutoModelForCausalLM.from_pretrained(target_folder).eval())
    draft = load_draft(str(folder), target)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    for prompt in load_workload("code", "tune", num_prompts=2).prompts:
        inputs = prompt.inputs(tokenizer)
        plain, drafted = (
            decoder.generate(**inputs, max_new_tokens=12).sequences
            for decoder in (Decoder(target), Decoder(target, draft, tree={"policy": "chain", "depth": 3}))
        )
        assert torch.equal(plain, drafted)


def test_a_draft_continues_from_the_stored_one(tmp_path: Path) -> None:
    """The second stage moves the weights of the first a little; a recipe for another kind of draft is refused."""
    train(write_recipe(tmp_path / "target", DEEP))
    stage = {**DEEP, "objective": "drafting", "sequence_length": 48, "optimizer": "adamw"}
    sizes = {"draft": {"num_heads": 4, "head_size": 8, "mlp_size": 32}, "text": {}}
    for kind, values in (("mtp", {"text": {}}), ("star", sizes)):
        values |= {"model": kind, "teacher": "../target"}
        folder = train(write_recipe(tmp_path / kind, stage, **values))
        first = load_file(folder / "model.safetensors")
        (folder / ".checkpoint" / "state.safetensors").unlink()
        train(write_recipe(folder, stage, {**stage, "learning_rate": 1e-5}, trained_stages=1, **values))
        second = load_file(folder / "model.safetensors")
        for name, value in first.items():
            if name != "token_frequencies":
                torch.testing.assert_close(second[name], value, atol=2e-4, rtol=0.01)
    with pytest.raises(UserError, match="which is of kind star; got model mtp; set trained_stages to 0 and"):
        (folder / ".checkpoint" / "state.safetensors").unlink()
        train(write_recipe(folder, stage, stage, trained_stages=1, model="mtp", teacher="../target", text={}))


@pytest.mark.parametrize(
    ("stages", "values", "message"),
    [
        ([{**SHALLOW, "num_layers": 3}], {}, "must divide the 4 layers of the model; got 3 in stage 1; give a divisor"),
        ([SHALLOW, DEEP], {"trained_stages": 1}, "trained_stages needs the model of these stages in .*; set it to 0"),
        ([{**SHALLOW, "objective": "distillation"}], {}, "distillation needs a teacher; add 'teacher: ../target'"),
        (
            [{**SHALLOW, "objective": "answers"}] * 2,
            {"workload": "digits", "trained_stages": 1},
            "trained_stages is for models of the workload code and for drafts that read features; got it for target; set it to 0",
        ),
        ([SHALLOW], {"trained_stages": 1}, "trained_stages must leave a stage to train; got 1 of 1; add a stage"),
        (
            [{**SHALLOW, "tasks": {"read": 1.0}}],
            {},
            "tasks must be among complete, .*; got read; remove or rename them",
        ),
        (
            [JOINT],
            {},
            "mtp names the head that stages with an mtp_weight train; got mtp None and such a stage; give both",
        ),
        ([DEEP], {"mtp": "../mtp"}, "got mtp ../mtp and no such stage; give both or neither"),
        (
            [{**DEEP, "divergence": "lk"}],
            {},
            "divergence is for drafts, and for stages with an mtp_weight; got lk for the objective text of code; remove it",
        ),
        (
            [SHALLOW],
            {"initial_weights": "stored"},
            "initial_weights is for dream, .*; got stored for target; remove it",
        ),
        (
            [SHALLOW],
            {"data": {"sampled_share": 0.5}},
            "sampled_share is for dream, .* on the workload code; got it for target on code; remove it",
        ),
        (
            [{**SHALLOW, "own_answers": 4, "tasks": {"edit": 1.0}}],
            {},
            "own_answers needs a task among complete, document, continue; got edit; add one",
        ),
        (
            [{**SHALLOW, "own_answers": 4, "objective": "distillation"}],
            {"teacher": "../target"},
            "own_answers of a stage is for the objective text; got it for distillation; remove it",
        ),
        (
            [{**SHALLOW, "answer_weight": 2.0, "objective": "distillation"}],
            {"teacher": "../target"},
            "answer_weight of a stage is for the objective text; got it for distillation; remove it",
        ),
        (
            [{**SHALLOW, "own_answers_temperature": 0.5}],
            {},
            "own_answers_temperature is for stages with own_answers; got 0.5 without; add own_answers, or remove it",
        ),
        ([SHALLOW], {"tasks": {"read": 1.0}}, "tasks must be among complete, .*; got read; remove or rename them"),
        (
            [SHALLOW],
            {"workload": "digits"},
            "objective text is for the workload code; got it for digits; change one of them",
        ),
        (
            [{**SHALLOW, "objective": "answers"}],
            {},
            "objectives of the workload code are text, distillation and drafting; got answers; change it",
        ),
    ],
)
def test_mistakes(tmp_path: Path, stages: list[dict[str, Any]], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(write_recipe(tmp_path, *stages, **values))
