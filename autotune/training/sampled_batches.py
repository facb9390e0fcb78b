"""Training rows whose answers the target samples: a draft then learns from what the target writes when it decodes, and not only
from what people wrote (on-policy data, DistillSpec, arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from autotune.files import write_bytes
from autotune.training.batches import IGNORED, Batch
from autotune.training.code_batches import CodeBatches
from autotune.workloads.code.examples import CODE_TASKS, CodeExample

POOL_ROWS = 64  # rows that the target samples at once
MIN_ANSWER = 64  # tokens for which a prompt must leave room
MAX_ANSWER = 192  # tokens; most answers have ended by then


@dataclass
class SampledBatches:
    """Batches of rows of a workload, a share of which are prompts with answers that the model samples. Answers are sampled once for
    a pool of rows, and stored.
    """

    batches: CodeBatches
    model: Any
    """The target, a Hugging Face model."""
    share: float
    """Share of the batches that are sampled, evenly spaced."""
    temperatures: tuple[float, ...]
    """Temperatures of the pools, in turns; 0 is greedy."""
    cache: Path
    """Folder for this target and these prompts."""

    def __getitem__(self, number: int) -> Batch:
        num_sampled = int(number * self.share)  # among the batches before this one
        if int((number + 1) * self.share) == num_sampled:
            return self.batches[number]
        pool, within = divmod(num_sampled, self._pool_batches)
        rows = self._pool(pool)
        size = self.batches.batch_size
        ids, labels = (rows[name][within * size : (within + 1) * size] for name in ("ids", "labels"))
        longest = int((labels != IGNORED).any(0).nonzero().max()) + 1
        return Batch(ids[:, :longest], labels[:, :longest], None, None)

    @property
    def _pool_batches(self) -> int:
        return max(1, POOL_ROWS // self.batches.batch_size)

    def _pool(self, number: int) -> dict[str, Tensor]:
        """Token ids and labels of the rows of a pool, shorter rows first, [rows, sequence length] each."""
        path = self.cache / f"{number}.safetensors"
        if not path.exists():
            rows = self._sample(number)
            self.cache.mkdir(parents=True, exist_ok=True)
            write_bytes(path, safetensors.torch.save(rows))
        return safetensors.torch.load_file(path)

    def _sample(self, number: int) -> dict[str, Tensor]:
        batches, num_rows = self.batches, self._pool_batches * self.batches.batch_size
        drawn = draw_prompts(batches, np.random.default_rng([batches.seed, number, 1]), num_rows)
        prompts = [prompt for prompt, _ in drawn]
        answers = sample_answers(
            self.model,
            prompts,
            max_tokens=batches.sequence_length + 1,
            temperature=self.temperatures[number % len(self.temperatures)],
            seed=number,
        )
        end, length = batches.tokenizer.pad_token_id, batches.sequence_length + 1
        ids = torch.full((num_rows, length), end)
        labels = torch.full((num_rows, length), IGNORED)
        ranked = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        for row, (prompt, answer) in enumerate(ranked):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return {"ids": ids[:, :-1].contiguous(), "labels": labels[:, 1:].contiguous()}


def draw_prompts(
    batches: CodeBatches, rng: np.random.Generator, number: int, tasks: Sequence[str] = CODE_TASKS
) -> list[tuple[list[int], CodeExample]]:
    """Prompts of these tasks that leave room for an answer in a row, as token ids, with their examples."""
    drawn: list[tuple[list[int], CodeExample]] = []
    while len(drawn) < number:
        example = batches.example(rng, tasks)
        prompt = batches.encode_prompt(example)
        if len(prompt) <= batches.sequence_length - MIN_ANSWER:
            drawn.append((prompt, example))
    return drawn


@torch.no_grad()
def sample_answers(
    model: Any, prompts: list[list[int]], *, max_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Answers of a text model to prompts, with the end of text where they end.

    Args:
        max_tokens: of a prompt and its answer together.
        temperature: 0 is greedy.
    """
    width, end = max(map(len, prompts)), model.generation_config.eos_token_id
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sequences = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=min(MAX_ANSWER, max_tokens - min(map(len, prompts))),
            pad_token_id=end,
            cache_implementation="static",
            **sampling,
        )
    answers = []
    for prompt, sequence in zip(prompts, sequences[:, width:].tolist(), strict=True):
        answer = sequence[: max_tokens - len(prompt)]
        answers.append(answer[: answer.index(end) + 1] if end in answer else answer)
    return answers
