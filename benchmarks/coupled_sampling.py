"""Measures what coupled sampling gains: tokens per round (M) and speedup of chains with and without it.

Every draft decodes held-out prompts of the bundled digits, interleaved with plain decoding and with transformers'
assisted generation, where this takes the draft. For the record, the expected acceptance rate of speculative sampling by
rejection: one minus the total variation distance between the distributions of draft and target, a mean over the tokens
of the answers. The counts do not depend on the machine; the speedups need a quiet one. It takes about 15 minutes on two
cores.

    python benchmarks/coupled_sampling.py [--draft digits/star] [--temperature 0.7] [--prompts 64] [--depth 10]
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import HF_ASSISTED
from autotune.drafters.checkpoint import LoadedDraft, load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.modeling.loading import BUNDLED_TARGET, load_model, load_processor
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.recording.answers import Answer, AnswerRecorder
from autotune.recording.recorder import run_target
from autotune.runtime.decoder import Decoder
from autotune.trees.limits import MAX_STEP
from autotune.workloads.workload import Workload, load_workload


@click.command()
@click.option("--draft", "drafts", multiple=True, default=("digits/independent", "digits/star"), show_default=True)
@click.option("--temperature", "temperatures", multiple=True, default=(0.7, 1.0), show_default=True)
@click.option("--prompts", default=64, show_default=True)
@click.option("--depth", default=10, show_default=True, help="Tokens of a chain.")
@click.option("--tokens", default=None, type=int, help="Limit of the answers' length.")
def main(
    drafts: tuple[str, ...], temperatures: tuple[float, ...], prompts: int, depth: int, tokens: int | None
) -> None:
    """Compare chains with and without coupled sampling."""
    console, target = Console(), Target(load_model(BUNDLED_TARGET))
    processor = load_processor(BUNDLED_TARGET)
    workload = load_workload("digits", "evaluate", num_prompts=prompts).cut(prompts, tokens)
    rows = []
    for name in drafts:
        draft = load_draft(name, target)
        for temperature in temperatures:
            rows += measure(name, target, draft, processor, workload.sampled(temperature), temperature, depth, console)
    columns = ["draft", "T", "arm", "M", "speedup", "same output", "1 - TV"]
    console.table(f"Chains of {depth}, {prompts} held-out prompts", columns, rows)


def measure(
    name: str,
    target: Target,
    draft: LoadedDraft,
    processor: Any,
    workload: Workload,
    temperature: float,
    depth: int,
    console: Console,
) -> list[list[str]]:
    """A row for each arm of one draft at one temperature."""
    decoder = Decoder(target, draft, processor=processor)
    runtime = RuntimeArms(decoder, processor)
    chain_tree = {"policy": "chain", "depth": depth}
    chain = runtime.arm(f"chain-{depth}", Configuration(tree=chain_tree))
    uncoupled = Decoder(target, draft, tree=chain_tree, coupled=False, processor=processor)
    arms: list[Arm] = [runtime.plain, DecoderArm(f"{chain.name}-uncoupled", uncoupled, runtime), chain]
    if isinstance(draft, IndependentDraft):
        arms.append(HuggingFaceArm(HF_ASSISTED, runtime, draft.model))
    with console.stage(f"{name} at {temperature:g}") as update:
        runs = race(runtime.runner(), arms, workload.prompts, Everyone(), report=update).runs
    rate = rejection_rate(target, draft, processor, workload)
    rows = []
    for arm in arms[1:]:
        summary = summarize(arm.name, runs[arm.name], runs[runtime.plain.name])
        same = f"{summary.identical_outputs}/{summary.num_prompts}"
        speedup = f"{summary.speedup:.2f}x ({summary.ci95[0]:.2f}-{summary.ci95[1]:.2f})"
        tokens_per_round = f"{summary.tokens_per_round:.2f}"
        rows.append([name, f"{temperature:g}", arm.name, tokens_per_round, speedup, same, f"{rate:.3f}"])
    return rows


@torch.inference_mode()
def rejection_rate(target: Target, draft: LoadedDraft, processor: Any, workload: Workload) -> float:
    """Mean of 1 - TV over the tokens of the answers that drafting could propose."""
    recorder, overlaps = AnswerRecorder(target, processor), []
    for prompt, answer in recorder.record([(prompt, None) for prompt in workload.prompts]):
        inputs, temperature = prompt.inputs(processor), prompt.settings.temperature
        of_draft = draft_logits(target, draft, inputs, answer)
        (encoded,) = target.encode(inputs).prompts
        target.reserve(len(encoded) + len(answer.tokens))
        target.prefill(encoded)
        of_target = teacher_forced(target, answer)
        shared = min(of_draft.shape[1], of_target.shape[1])
        p, q = ((logits / temperature).softmax(-1)[:, :shared] for logits in (of_target, of_draft))
        overlaps.append(torch.minimum(p, q).sum(-1).numpy())
    return float(np.concatenate(overlaps).mean())


def teacher_forced(model: TreeModel, answer: Answer) -> Tensor:
    """Logits after each token of an answer but the last, [tokens, vocabulary]; the model has read the prompt."""
    logits = []
    tokens = np.array(answer.tokens[:-1], np.int64)
    for first in range(0, len(tokens), MAX_STEP):
        step = Step.causal(tokens[first : first + MAX_STEP], model.mask_value)
        logits.append(model.forward(step))
        model.cache.advance(len(step.tokens))
    return torch.cat(logits) if logits else torch.zeros(0, model.vocab_size)


def draft_logits(target: Target, draft: LoadedDraft, inputs: dict[str, Any], answer: Answer) -> Tensor:
    """The draft's logits after the same tokens, with the target's features of the tokens before."""
    capacity = answer.prompt_length + len(answer.tokens) + MAX_STEP
    if isinstance(draft, IndependentDraft):
        (prompt,) = draft.prompts(inputs)
        draft.prefill(prompt, None, capacity=capacity)
        return teacher_forced(draft, answer)
    reading = run_target(target, inputs, answer, draft.aux_layers)
    target.hidden = reading.prompt_hidden
    draft.prefill(reading.prompts[0], None, capacity=capacity)
    tokens = np.array(answer.tokens[:-1], np.int64)
    logits = []
    for first in range(0, len(tokens), MAX_STEP):
        rows = np.arange(first, min(first + MAX_STEP, len(tokens)))
        tree_mask = np.where(np.arange(rows[-1] + 1) > rows[:, None], draft.mask_value, 0.0).astype(np.float32)
        source = {layer: reading.answer_hidden[layer][torch.from_numpy(rows)] for layer in draft.aux_layers}
        logits.append(draft.forward(Step(tokens[rows], rows, tree_mask), source))
    return torch.cat(logits) if logits else torch.zeros(0, target.vocab_size)


if __name__ == "__main__":
    main()
