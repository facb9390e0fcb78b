"""Training of a text model on its own answers: those of the sampled answers that are good take the place of the reference answers
(rejection sampling fine-tuning, Yuan et al., arXiv 2308.01825). Answers then end, and repeat themselves less.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autotune.errors import UserError
from autotune.files import write_bytes
from autotune.training.code_batches import Answered, CodeBatches
from autotune.training.sampled_batches import POOL_ROWS, draw_prompts, sample_answers
from autotune.workloads.code.judge import OPEN_TASKS, good_part


def write_own_answers(
    path: Path,
    model: Any,
    batches: CodeBatches,
    *,
    num_prompts: int,
    temperature: float,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Sample answers to prompts of the open tasks, and write the good ones: JSON with prompts and answers as token ids, by task.

    Args:
        model: a Hugging Face model, which is not compiled.
        batches: prompts are drawn by the frequencies of its tasks; a prompt and its answer fit into one of its rows.
        report: called as report(done, of).

    Raises:
        UserError: no answer is good.
    """
    drawn = draw_prompts(batches, np.random.default_rng([batches.seed, 2]), num_prompts, OPEN_TASKS)
    drawn.sort(key=lambda pair: len(pair[0]))  # rows that are sampled at once are padded to the longest prompt
    end = batches.tokenizer.eos_token_id
    good: defaultdict[str, list[Answered]] = defaultdict(list)
    for first in range(0, num_prompts, POOL_ROWS):
        pool = drawn[first : first + POOL_ROWS]
        answers = sample_answers(
            model,
            [prompt for prompt, _ in pool],
            max_tokens=batches.sequence_length + 1,
            temperature=temperature,
            seed=batches.seed + first,
        )
        for (prompt, example), answer in zip(pool, answers, strict=True):
            is_ended = answer[-1] == end
            tokens = answer[:-1] if is_ended else answer
            text = batches.tokenizer.decode(tokens)
            length = good_part(example.task, example.prompt, text, tokens, is_ended=is_ended)
            if length > 0:
                good[example.task].append((prompt, answer if is_ended else answer[:length]))
        if report is not None:
            report(first + len(pool), num_prompts)
    if not good:
        raise UserError(
            f"training on own answers needs good ones; got none of {num_prompts} that were sampled at temperature {temperature}; "
            "train the model further before, or lower the temperature"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, json.dumps(good).encode())


def read_own_answers(path: Path) -> dict[str, list[Answered]]:
    """The answers of a file that ``write_own_answers`` wrote, in an order that does not depend on their lengths."""
    answers: dict[str, list[Answered]] = json.loads(path.read_bytes())
    for task, items in answers.items():
        order = np.random.default_rng(len(items)).permutation(len(items))
        answers[task] = [items[number] for number in order]
    return answers
