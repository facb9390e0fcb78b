"""How good the target of the pair `code` is, on packages that it was never trained on.

    python benchmarks/code_quality.py bits [--model FOLDER]   # takes about three minutes
    python benchmarks/code_quality.py answers [--model FOLDER]  # takes about two minutes

``bits`` compares bits per byte on rows of held-out files: of the model, of a 5-gram model over the same tokens with interpolated
Kneser-Ney smoothing, trained on the whole training split, and of gzip, which may look at all of the held-out text. ``answers``
decodes the evaluation prompts greedily: the share of completed functions that are valid Python, and of edits, tables and
explanations that are exactly right.
"""

from __future__ import annotations

import gzip
import math
from collections import defaultdict
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.training.batches import IGNORED
from autotune.training.code_batches import CodeBatches
from autotune.workloads.code.corpus import corpus
from autotune.workloads.code.judge import is_valid
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import code_prompts

TARGET = "code/target"
ORDER = 5
TOKEN_BITS = 12  # of a packed n-gram
NUM_ROWS, ROW_TOKENS, BATCH = 96, 512, 8
EXACT_TASKS = ("edit", "fill", "explain")

Keys = NDArray[np.int64]
Tokens = NDArray[np.int64]


class KneserNey:
    """An interpolated Kneser-Ney model (Chen and Goodman 1999, section 2.7) of packed n-grams, with one discount an order."""

    def __init__(
        self, tokens: Tokens, vocabulary_size: int, *, order: int = ORDER, token_bits: int = TOKEN_BITS
    ) -> None:
        assert vocabulary_size <= 1 << token_bits and order * token_bits < 63
        self.vocabulary_size, self.order, self.token_bits = vocabulary_size, order, token_bits
        self.levels: list[tuple[Keys, NDArray[np.int64], float, Keys, NDArray[np.int64], NDArray[np.int64]]] = []
        keys, counts = np.unique(self.pack(tokens, order), return_counts=True)
        for length in range(order, 0, -1):
            ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
            discount = ones / max(ones + 2 * twos, 1)
            contexts, first = np.unique(keys >> token_bits, return_index=True)
            totals, types = np.add.reduceat(counts, first), np.diff(np.append(first, len(keys)))
            self.levels.append((keys, counts, discount, contexts, totals, types))
            # Shorter n-grams are counted by the number of different tokens before them.
            keys, counts = np.unique(keys & ((1 << token_bits * (length - 1)) - 1), return_counts=True)

    def pack(self, tokens: Tokens, length: int) -> Keys:
        """All n-grams as integers, [tokens - length + 1]; the last token has the lowest bits."""
        count = len(tokens) - length + 1
        packed = np.zeros(count, np.int64)
        for offset in range(length):
            packed = (packed << self.token_bits) | tokens[offset : offset + count]
        return packed

    def probabilities(self, tokens: Tokens) -> NDArray[np.float64]:
        """Probability of every token after the first ``order - 1``, which are its context, [tokens - order + 1]."""
        grams = self.pack(tokens, self.order)
        found = np.full(len(grams), 1.0 / self.vocabulary_size)
        for length, level in zip(range(1, self.order + 1), reversed(self.levels), strict=True):
            keys, counts, discount, contexts, totals, types = level
            wanted = grams & ((1 << self.token_bits * length) - 1)
            count = lookup(keys, counts, wanted)
            total = lookup(contexts, totals, wanted >> self.token_bits)
            kinds = lookup(contexts, types, wanted >> self.token_bits)
            known = total > 0
            discounted = (np.maximum(count - discount, 0) + discount * kinds * found) / np.maximum(total, 1)
            found = np.where(known, discounted, found)
        return found


def lookup(keys: Keys, values: NDArray[np.int64], wanted: Keys) -> NDArray[np.int64]:
    """The values of keys, which are sorted; 0 for keys that are missing."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


@click.group()
def main() -> None:
    """Measure the target of the pair `code`."""


@main.command()
@click.option("--model", default=TARGET, show_default=True)
@click.option("--rows", default=NUM_ROWS, show_default=True, help="Rows of held-out files.")
@click.option("--tokens", default=ROW_TOKENS, show_default=True, help="Tokens of a row.")
def bits(model: str, rows: int, tokens: int) -> None:
    """Compare bits per byte with a 5-gram model and gzip."""
    tokenizer, network = load_processor(model), load_model(model)
    batches = CodeBatches(tokenizer, {"files": 1.0}, "evaluate", BATCH, tokens, seed=0)
    held_out = [batches[step] for step in range(rows // BATCH)]
    num_bytes = sum(batches.num_bytes(step) for step in range(rows // BATCH))
    nats = 0.0
    with torch.inference_mode():
        for batch in held_out:
            labels = batch.labels.flatten()
            logits = network(input_ids=batch.input_ids).logits.flatten(0, 1)
            nats += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
    texts = [tokenizer.decode(row[row != IGNORED]) for batch in held_out for row in batch.labels]
    packed = gzip.compress("\n".join(texts).encode(), 9)
    click.echo(f"{rows} rows of {tokens} tokens, {num_bytes} bytes")
    click.echo(f"model: {nats / math.log(2) / num_bytes:.3f} bits per byte")
    begin = [tokenizer.bos_token_id] * (ORDER - 1)
    encode = tokenizer.backend_tokenizer.encode
    training = np.concatenate([np.array([*begin, *encode(file.text).ids], np.int64) for file in corpus("train")])
    grams = KneserNey(training, len(tokenizer))
    logs = 0.0
    for batch in held_out:
        for labels in batch.labels.numpy():  # only the begin of another file has none
            is_labelled = labels != IGNORED
            row = np.array([*begin, *np.where(is_labelled, labels, tokenizer.bos_token_id)], np.int64)
            logs += float(np.log2(grams.probabilities(row))[is_labelled].sum())
    click.echo(f"5-gram model of {len(training) / 1e6:.1f} million tokens: {-logs / num_bytes:.3f} bits per byte")
    click.echo(f"gzip: {8 * len(packed) / num_bytes:.3f} bits per byte")


@main.command()
@click.option("--model", default=TARGET, show_default=True)
@click.option("--prompts", default=40, show_default=True, help="Evaluation prompts of each task.")
def answers(model: str, prompts: int) -> None:
    """Decode the evaluation prompts, and judge the answers."""
    tokenizer = load_processor(model)
    decoder = Decoder(Target(load_model(model)))
    verdicts: dict[str, list[bool]] = defaultdict(list)
    ended: dict[str, list[bool]] = defaultdict(list)
    for _, line in code_prompts():
        if line.split != "evaluate" or line.task == "continue" or len(ended[line.task]) >= prompts:
            continue
        text, is_ended = answer(decoder, tokenizer, line.unanswered)
        ended[line.task].append(is_ended)
        if line.task in EXACT_TASKS:
            verdicts[line.task].append(text == line.answer)
        if line.task == "complete":
            verdicts[line.task].append(is_ended and is_valid(line.prompt, text))
    for task, ends in ended.items():
        right = verdicts[task]
        judged = f"{'valid' if task == 'complete' else 'exact'} {100 * np.mean(right):.1f} %, " if right else ""
        click.echo(f"{task}: {judged}ended within the limit {100 * np.mean(ends):.1f} % of {len(ends)}")


def answer(decoder: Decoder, tokenizer: Any, settings: Prompt) -> tuple[str, bool]:
    """A greedy answer, and whether it ended by itself."""
    inputs = WorkloadPrompt("prompt", settings, ()).inputs(tokenizer)
    output = decoder.generate(**inputs, max_new_tokens=settings.max_new_tokens)
    tokens = output.sequences[0, output.stats.prompt_tokens :]
    is_ended = bool(tokens[-1] == tokenizer.eos_token_id)
    return tokenizer.decode(tokens, skip_special_tokens=True), is_ended


if __name__ == "__main__":
    main()
