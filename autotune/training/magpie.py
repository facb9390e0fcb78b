"""Prompts that the target writes itself, as in Magpie (Xu et al., arXiv 2406.08464): a chat model that is given the
beginning of an empty user turn continues it with a question.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autotune.errors import UserError
from autotune.files import read_lines, write_bytes
from autotune.recording.answers import AnswerRecorder
from autotune.training.examples import ROWS
from autotune.training.recipe import Magpie
from autotune.workloads.chat import Variables, chat_text
from autotune.workloads.prompt import Prompt, WorkloadPrompt

MAX_EMPTY_BATCHES = 10  # in a row, without a new question
_MARK = "USER-TURN"


class _UserTurn(WorkloadPrompt):
    """The chat template up to where the user's message begins."""

    def inputs(self, processor: Any, device: Any = "cpu") -> dict[str, Any]:
        before, _ = user_turn(processor, self.settings.chat_template_kwargs)
        tokens = getattr(processor, "tokenizer", processor)(before, add_special_tokens=False, return_tensors="pt")
        return {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}


def user_turn(processor: Any, variables: Variables | None = None) -> tuple[str, str]:
    """The text of the chat template before the user's message, and after it.

    Raises:
        UserError: there is no chat template.
    """
    if not getattr(processor, "chat_template", None):
        raise UserError(
            "magpie has the target write questions by its chat template; it has none; remove magpie from data"
        )
    before, _, after = chat_text(processor, _MARK, num_images=0, variables=variables).partition(_MARK)
    return before, after


def write_questions(
    path: Path,
    settings: Magpie,
    answers: AnswerRecorder,
    report: Callable[[int, int], None] | None = None,
    variables: Variables | None = None,
) -> None:
    """Write the target's questions to a JSONL file, each once, until it holds ``settings.num_prompts``. Every batch is
    on disk before the next one begins, and a later call continues after the last.

    Raises:
        UserError: no chat template, or the target repeats itself.
    """
    lines = read_lines(path)
    found, seed, num_empty = {line.get("prompt") for line in lines}, 0, 0
    if lines:
        seed = (lines[-1].get("seed", 0) // ROWS + 1) * ROWS
    processor = answers.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    after = tokenizer(user_turn(processor, variables)[1], add_special_tokens=False)["input_ids"][:1]
    ends = {tokenizer.eos_token_id, *set(after).intersection(tokenizer.get_added_vocab().values())}
    ends |= set(torch.tensor(answers.target.model.generation_config.eos_token_id or []).flatten().tolist())
    while len(lines) < settings.num_prompts:
        options: dict[str, Any] = {"prompt": "", "temperature": settings.temperature, "top_p": settings.top_p}
        options |= {"max_new_tokens": settings.question_tokens, "chat_template_kwargs": variables}
        turns = [_UserTurn("magpie", Prompt(**options, seed=seed + n), ()) for n in range(ROWS)]
        written = answers.write_together(turns, eos_token_id=sorted(ends - {None}))
        before = len(lines)
        for number, tokens in enumerate(written):
            question = tokenizer.decode(tokens[:-1], skip_special_tokens=True).strip()
            if (
                tokens[-1] not in ends or not question or question in found
            ):  # an unfinished one breaks off in a sentence
                continue
            found.add(question)
            lines.append({"prompt": question, "max_new_tokens": settings.answer_tokens, "seed": seed + number})
        seed += ROWS
        num_empty = 0 if len(lines) > before else num_empty + 1
        if num_empty == MAX_EMPTY_BATCHES:
            raise UserError(
                f"{path}: magpie asks for {settings.num_prompts} questions, and the target writes no new ones after {before}; raise "
                "temperature or question_tokens, or lower num_prompts"
            )
        lines = lines[: settings.num_prompts]
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if report is not None:
            report(len(lines), settings.num_prompts)
