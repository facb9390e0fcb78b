"""Arms: ways to decode that are compared on the same prompts."""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol

from autotune.documents.condition import first_match
from autotune.evaluation.hf_generate import hf_generate
from autotune.modeling.host import limited_threads
from autotune.modeling.prompt import has_pixels
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt
from autotune.workloads.workload import WARM_UP_TOKENS

WARM_UP_S = 1.0


class Arm(Protocol):
    """A way to decode prompts. An implementation needs ``decode`` alone; the others have defaults."""

    name: str
    """Unique within a comparison."""
    key: str
    """Identifies the arm in ledgers: equal for equal arms, whatever their names."""

    def decode(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        """Decode one prompt; returns its new tokens, and counts and times."""
        ...

    def prepare(self, context_tokens: int, *, is_sampled: bool) -> None:
        """Capture what prompts and answers of so many tokens together need."""
        del context_tokens, is_sampled

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        """Decode the first tokens of the answer to the first prompt of a shape, so that buffers grow and kernels are
        chosen.
        """
        few = min(settings.max_new_tokens, WARM_UP_TOKENS)
        self.decode(inputs, settings.model_copy(update={"max_new_tokens": few}))

    def point_for(self, inputs: dict[str, Any], settings: Prompt) -> int:
        """Index of the operating point that decodes such a request."""
        return 0


class DecoderArm(Arm):
    """Decodes with a ``Decoder`` of its own: plainly, by a configuration, or by a loaded profile."""

    def __init__(self, name: str, decoder: Decoder, *, key: str | None = None) -> None:
        self.name = name
        self.key = key or name
        self.decoder = decoder

    def prepare(self, context_tokens: int, *, is_sampled: bool) -> None:
        self.decoder.prepare(context_tokens, sampled=[is_sampled])

    def decode(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        output = self.decoder.generate(**inputs, **settings.generation, workload=settings.task)
        return output.sequences[0, output.stats.prompt_tokens :].tolist(), output.stats

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        """Decode the first tokens of the answer, for a second at most, in buffers for all of it."""
        stream = self.decoder.stream(**inputs, **settings.generation, workload=settings.task)
        until = time.monotonic() + WARM_UP_S
        for _ in itertools.islice(stream, WARM_UP_TOKENS):
            if time.monotonic() > until:
                break

    def point_for(self, inputs: dict[str, Any], settings: Prompt) -> int:
        conditions = [point.when for point in self.decoder.points]
        return first_match(
            conditions,
            temperature=settings.temperature,
            prompt_tokens=inputs["input_ids"].shape[1],
            has_image=has_pixels(inputs),
            workload=settings.task,
        )


class HuggingFaceArm(Arm):
    """Hugging Face's ``generate``, on ``threads`` CPU threads (None: torch's); with ``assistant`` as its
    ``assistant_model``, assisted generation.
    """

    def __init__(self, name: str, model: Any, assistant: Any | None = None, *, threads: int | None = None) -> None:
        self.name = self.key = name
        self.model = model
        self.assistant = assistant
        self.threads = threads

    def decode(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        with limited_threads(self.threads):
            return hf_generate(self.model, inputs, assistant=self.assistant, **settings.generation)
