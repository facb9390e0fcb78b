"""The target's answers, by plain decoding of several prompts at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.documents.execution import EAGER
from autotune.documents.subnet import VISUAL_RANKINGS, VisualRanking
from autotune.errors import errors_about
from autotune.files import write_bytes
from autotune.modeling.target import Prefilled, Target
from autotune.runtime.answer_batch import GreedyBatch, SampledBatch, can_batch
from autotune.runtime.decoder import Decoder
from autotune.runtime.generate_args import Request
from autotune.runtime.token_sampler import COUPLED_TEMPERATURE, TokenSampler
from autotune.workloads.prompt import WorkloadPrompt

ANSWERS_AT_ONCE = 16  # limit on the prompts that are decoded together,
MAX_BATCH_BYTES = 1 << 30  # and on the size of their KV caches


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt."""

    tokens: list[int]
    prompt_length: int
    visual_scores: dict[VisualRanking, list[float]]
    """Scores of the visual tokens, for pruning, by ranking; empty without an image."""

    @property
    def num_visual_tokens(self) -> int:
        return max(map(len, self.visual_scores.values()), default=0)


def read_answer(path: Path, key: str) -> Answer | None:
    """A recorded answer; None where the record is missing, damaged or of another key."""
    try:
        content = json.loads(path.read_text())
        return Answer(**content) if content.pop("key", None) == key else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_answer(path: Path, key: str, answer: Answer) -> None:
    """Write an answer with the key of what it follows from; it replaces that of another key."""
    write_bytes(path, json.dumps({**asdict(answer), "key": key}).encode())


class AnswerRecorder:
    """Decodes answers with the target alone, and ranks the visual tokens of their prompts."""

    def __init__(self, target: Target, processor: Any, mode: str = EAGER) -> None:
        """``mode``: how answers are decoded by themselves."""
        self.target = target
        self.processor = processor
        self._plain = Decoder(target, mode=mode)

    def sampler(self, prompt: WorkloadPrompt) -> TokenSampler | None:
        """The sampler of a prompt's answer, if a draft's proposals are coupled to it."""
        if prompt.settings.temperature < COUPLED_TEMPERATURE:
            return None
        return self._plain.sampler(**self._inputs(prompt), **prompt.settings.generation)

    def record(self, prompts: Sequence[WorkloadPrompt]) -> Iterator[tuple[WorkloadPrompt, Answer]]:
        """Yield the answer of each prompt as soon as it is complete, in any order.

        Greedy prompts are decoded in batches. An answer with a near tie, where rounding in a batch may choose another
        token, is decoded again by itself.
        """
        batch: list[tuple[WorkloadPrompt, Request]] = []
        for prompt in prompts:
            request = self._request(prompt)
            if not can_batch(self.target, request):
                yield prompt, self._answer(request, self._alone(prompt))
            else:
                if batch and not self._fits([request, *(other for _, other in batch)]):
                    yield from self._record_batch(batch)
                    batch = []
                batch.append((prompt, request))
        if batch:
            yield from self._record_batch(batch)

    def write_together(self, prompts: Sequence[WorkloadPrompt], **settings: Any) -> list[list[int]]:
        """The tokens of answers that are decoded in one batch, in which rounding may choose others than one by one: to
        train on.

        A model with states, whose rows cannot be padded, decodes them one by one.

        Args:
            settings: of ``generate``, of all of them.
        """
        requests = [self._request(prompt, **settings) for prompt in prompts]
        if self.target.has_states or any(request.call.stops for request in requests):
            return [self._alone(prompt, **settings) for prompt in prompts]
        batch = SampledBatch(self.target, requests)
        is_certain: list[bool] = []
        prefilled: Prefilled | None = None
        for row, request in enumerate(requests):
            last, prompt = None if prefilled is None else prefilled.prompt, request.prompt
            is_again = last is not None and last.num_visual_tokens == 0 and torch.equal(last.tokens, prompt.tokens)
            if prefilled is None or not is_again:  # of equal prompts the cache still holds the last one
                prefilled = self._prefill(request, ())
            is_certain.append(batch.insert(row, prefilled))
        prompt_of = {id(request): prompt for request, prompt in zip(requests, prompts, strict=True)}
        for request, certain in batch.decode(is_certain):
            if not certain:  # the error about its logits names the prompt
                request.tokens = self._alone(prompt_of[id(request)], **settings)
        return [request.tokens for request in requests]

    def _request(self, prompt: WorkloadPrompt, **settings: Any) -> Request:
        with errors_about(prompt.name):
            (request,) = self._plain.requests(**self._inputs(prompt), **prompt.settings.generation, **settings)
        return request

    def _fits(self, requests: Sequence[Request]) -> bool:
        longest = max(len(r.prompt) for r in requests) + max(r.call.max_new_tokens for r in requests)
        return len(requests) * longest * self.target.kv_bytes_per_token <= MAX_BATCH_BYTES

    def _record_batch(self, batch: list[tuple[WorkloadPrompt, Request]]) -> Iterator[tuple[WorkloadPrompt, Answer]]:
        decoded = GreedyBatch(self.target, [request for _, request in batch])
        known, is_certain = {}, []
        for row, (prompt, request) in enumerate(batch):
            prefilled = self._prefill(request)
            known[id(request)] = prompt, _as_lists(prefilled.visual_scores)
            is_certain.append(decoded.insert(row, prefilled))
        for request, certain in decoded.decode(is_certain):
            prompt, scores = known[id(request)]
            yield prompt, Answer(request.tokens if certain else self._alone(prompt), len(request.prompt), scores)

    def _inputs(self, prompt: WorkloadPrompt) -> dict[str, Any]:
        return prompt.inputs(self.processor, self.target.device)

    def _answer(self, request: Request, tokens: list[int]) -> Answer:
        return Answer(tokens, len(request.prompt), _as_lists(self._prefill(request).visual_scores))

    @torch.inference_mode()
    def _prefill(self, request: Request, rankings: Sequence[VisualRanking] = VISUAL_RANKINGS) -> Prefilled:
        self.target.reserve(len(request.prompt))
        return self.target.prefill(request.prompt, visual_rankings=rankings)

    def _alone(self, prompt: WorkloadPrompt, **settings: Any) -> list[int]:
        inputs = self._inputs(prompt)
        with errors_about(prompt.name):
            sequence = self._plain.generate(**inputs, **prompt.settings.generation, **settings).sequences
        return sequence[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def _as_lists(scores: Mapping[VisualRanking, Tensor]) -> dict[VisualRanking, list[float]]:
    return {ranking: of_ranking.tolist() for ranking, of_ranking in scores.items()}
