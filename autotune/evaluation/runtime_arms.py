"""The runtime's arms: decoders of one loaded target, and Hugging Face's ``generate`` with it."""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.decoding_profile import AR
from autotune.documents.execution import CAPTURED
from autotune.documents.published_defaults import PROMPT_LOOKUP
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import ArmFailed, UserError, errors_about, first_line
from autotune.evaluation.arms import Arm
from autotune.evaluation.divergence import quality
from autotune.evaluation.runner import ArmRunner
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.host import limited_threads, now_ms
from autotune.modeling.ranks import joined
from autotune.modeling.vision_timing import timed_forwards, timed_vision
from autotune.runtime.answer_keys import AnswerKeys
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import configured_decoder
from autotune.runtime.model_pool import ModelPool
from autotune.runtime.stats import DecodingStats
from autotune.runtime.token_sampler import not_finite
from autotune.workloads.conversations import Conversations
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import WARM_UP_TOKENS

WARM_UP_S = 1.0
SHAPE_TOKENS = 64  # prompts of up to so many tokens have one shape, those of up to twice as many the next one
# Prompt lookup decoding (Saxena, 2023) is the baseline that needs no draft model. Its chain is as long as the published
# one.
PROMPT_LOOKUP_CHAIN = Configuration(tree={"policy": "chain", "depth": 5})
PROMPT_LOOKUP_MATCH = 3  # tokens; ``max_ngram_size`` of its code


class RuntimeArms:
    """Makes arms for one loaded target.

    Args:
        decoder: gives the target, and mode, capture sizes and threads of all arms.
        processor: the target's; None: the decoder's.
        with_perplexity: also compute perplexity and agreement of every answer.
        draft_of: finds the draft of a configuration; left out, the decoder's own draft serves all.
        keys: of the decoder's target and the processor; None: its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        processor: Any | None = None,
        *,
        with_perplexity: bool = False,
        draft_of: Callable[[Configuration], LoadedDraft] | None = None,
        keys: AnswerKeys | None = None,
    ) -> None:
        self.decoder = decoder
        self.processor = decoder.processor if processor is None else processor
        self.with_perplexity = with_perplexity
        self.draft_of = draft_of
        self.keys = keys or AnswerKeys(decoder.target, self.processor)
        plain = Decoder(
            decoder.target, mode=decoder.mode, threads=decoder.threads, prefill_threads=decoder.prefill_threads
        )
        self.plain = DecoderArm(AR, plain, self)
        """Plain decoding."""
        self.conversations = Conversations(self.processor, self._plain_answers)
        self.warm: set[tuple[Any, ...]] = set()
        """Shapes of requests that an arm has been warmed up for, with the arm's key."""
        self._reserved: dict[str, int] = {}  # tokens of a prompt and its answer, by the prompt's hash
        self._decoders: dict[str, Decoder] = {}

    def arm(self, name: str, configuration: Configuration) -> DecoderArm:
        """Decodes by a configuration. Arms of equal configurations share a decoder."""
        key = configuration.key
        if key not in self._decoders:
            draft = self.draft_of(configuration) if self.draft_of else self.decoder.draft
            self._decoders[key] = self._decoder(configuration, draft)
        return DecoderArm(name, self._decoders[key], self, key=key)

    def prompt_lookup(self) -> DecoderArm:
        """Drafts by n-grams of the prompt and the answer."""
        decoder = self._decoder(PROMPT_LOOKUP_CHAIN, RetrievalDraft(max_match=PROMPT_LOOKUP_MATCH))
        return DecoderArm(PROMPT_LOOKUP, decoder, self, key=f"{PROMPT_LOOKUP}-{PROMPT_LOOKUP_CHAIN.key}")

    def runner(self, ledger: Path | None = None, *, context: object = None) -> ArmRunner:
        """A runner that knows prompts by the keys of their answers."""
        return ArmRunner(ledger, context=context, key_of=self.answer_key)

    def answer_key(self, prompt: WorkloadPrompt) -> str:
        """The key of plain decoding's answer to a prompt, whose earlier answers follow from the rest."""
        return self.keys.of(replace(prompt, answers=()) if prompt.answers else prompt)

    def reserve(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Prepare arms for the longest of these prompts and answers from the first one on: caches that grow later drop
        the captures of all arms.
        """
        if self.decoder.mode not in CAPTURED:
            return
        for prompt in (prompt for prompt in prompts if prompt.sha256 not in self._reserved):
            self._reserved[prompt.sha256] = prompt.most_tokens(self.processor)

    @property
    def longest(self) -> int:
        """Tokens of the longest reserved prompt and its answer; 0 where nothing is captured."""
        return max(self._reserved.values(), default=0)

    def _decoder(self, configuration: Configuration, draft: Any) -> Decoder:
        """A decoder like the given one, by another configuration."""
        return configured_decoder(
            self.decoder.target,
            draft,
            configuration,
            capture_sizes=self.decoder.capture_sizes,
            mode=self.decoder.mode,
            threads=self.decoder.threads,
            prefill_threads=self.decoder.prefill_threads,
        )

    def _plain_answers(self, prompts: Sequence[WorkloadPrompt]) -> list[list[int]]:
        return [
            self.plain.generate(prompt.inputs(self.processor, self.decoder.target.device), prompt.settings)[0]
            for prompt in prompts
        ]


class RuntimeArm(Arm):
    """Decodes with a loaded target. Later turns of conversations follow plain decoding's answers."""

    def __init__(self, name: str, arms: RuntimeArms, *, key: str | None = None) -> None:
        self.name = name
        self.key = key or name
        self.arms = arms

    @abstractmethod
    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        """The new tokens of one request, and counts and times."""

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        """Decode the first tokens of an answer, so that buffers grow and kernels are chosen."""
        few = min(settings.max_new_tokens, WARM_UP_TOKENS)
        self.generate(inputs, settings.model_copy(update={"max_new_tokens": few}))

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        self.arms.reserve(prompts)

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        """Decode one prompt, after a warm-up on the first prompt of a shape."""
        arms, target = self.arms, self.arms.decoder.target
        with errors_about(prompt.name):
            prompt = arms.conversations.follow(prompt)
            inputs = prompt.inputs(arms.processor, target.device)
            self._get_ready(inputs, prompt)
            memory = graph_memory(target.device)
            num_before = memory.num_kept
            tokens, stats = self.generate(inputs, prompt.settings)
            num_captures = memory.num_kept - num_before
            if self is arms.plain:
                arms.conversations.add(prompt, tokens)
            scores = {}
            if arms.with_perplexity:
                sampler = arms.decoder.sampler(**inputs, **prompt.settings.generation)
                scores = quality(target, inputs, tokens, sampler)._asdict()
        values = {name: getattr(stats, name) for name in Decoded.model_fields if hasattr(stats, name)}
        values |= {"acceptance_counts": stats.acceptance_counts.to_json(), "verified_nodes": sum(stats.verified_nodes)}
        return Decoded(
            arm=self.key,
            prompt=prompt.name,
            prompt_sha256=prompt.sha256,
            answer_key=arms.answer_key(prompt),
            task=prompt.settings.task,
            tokens=tokens,
            tokens_sha256=tokens_key(tokens),
            captures=num_captures,
            **scores,
            **values,
        )

    def _get_ready(self, inputs: dict[str, Any], prompt: WorkloadPrompt) -> None:
        length = inputs["input_ids"].shape[1]
        num_doublings = ((length - 1) // SHAPE_TOKENS).bit_length()
        shape = (self.key, bool(prompt.pixels), num_doublings)
        if shape not in self.arms.warm:
            self.warm_up(inputs, prompt.settings)
            self.arms.warm.add(shape)


def arms_of_pool(pool: ModelPool, table: CostTable | None) -> RuntimeArms:
    """Arms with any of the drafts of a pool, on the CPU threads of a cost table; None: on those of torch."""
    threads = (None, None) if table is None else (table.threads, table.prefill_threads)
    return RuntimeArms(pool.plain_decoder(*threads), draft_of=pool.draft_of, keys=pool.answer_keys)


class DecoderArm(RuntimeArm):
    """Decodes with a ``Decoder`` of its own: plainly, by a configuration, or by a loaded profile."""

    def __init__(self, name: str, decoder: Decoder, arms: RuntimeArms, *, key: str | None = None) -> None:
        super().__init__(name, arms, key=key)
        self.decoder = decoder

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        output = self.decoder.generate(**inputs, **settings.generation)
        return output.sequences[0, output.stats.prompt_tokens :].tolist(), output.stats

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        """Decode the first tokens of the answer, for a second at most, in buffers for all of it."""
        stream = self.decoder.stream(**inputs, **settings.generation)
        until = time.monotonic() + WARM_UP_S
        for _ in itertools.islice(stream, WARM_UP_TOKENS):
            if time.monotonic() > until:
                break

    def _get_ready(self, inputs: dict[str, Any], prompt: WorkloadPrompt) -> None:
        """Also capture again what other arms have dropped."""
        context = max(inputs["input_ids"].shape[1] + prompt.settings.max_new_tokens, self.arms.longest)
        self.decoder.prepare(context, sampled=[prompt.settings.temperature > 0])
        super()._get_ready(inputs, prompt)


class HuggingFaceArm(RuntimeArm):
    """Hugging Face's ``generate``; with ``assistant`` as its ``assistant_model``, assisted generation.

    Args:
        threads: of the CPU; None: torch's default.
    """

    def __init__(
        self, name: str, arms: RuntimeArms, assistant: Any | None = None, *, threads: int | None = None
    ) -> None:
        super().__init__(name, arms)
        self.assistant = assistant
        self.threads = threads

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        with limited_threads(self.threads):
            try:
                return hf_generate(
                    self.arms.decoder.target_model, inputs, assistant=self.assistant, **settings.generation
                )
            except Exception as error:  # whatever transformers raises for models that cannot assist
                if self.assistant is None or isinstance(error, UserError):
                    raise
                raise ArmFailed(f"generate raised {first_line(error)}") from error


class _TokenClock:
    """A streamer that records time and number of tokens: first of the prompt, then of every step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_ms: list[float] = []
        self.num_tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.at_ms.append(now_ms(self.device))
        self.num_tokens.append(value.numel())

    def end(self) -> None:
        pass


def hf_generate(
    model: Any,
    inputs: dict[str, Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    assistant: Any | None = None,
) -> tuple[list[int], DecodingStats]:
    """Call ``model.generate`` on one prompt, with ``assistant`` as its ``assistant_model``; returns the new tokens.

    Without an assistant, decoding time runs from the first token to the last. With one, the draft runs before the
    target has read the prompt, and the target reads prompt and first candidates in one forward. That forward is the
    prefill, and all other time until the last token is decoding. Time inside the two models is not measured.

    Raises:
        UserError: logits of a sampled prompt are not finite.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    settings = sampling if temperature > 0 else {"do_sample": False}
    assisted = {} if assistant is None else {"assistant_model": assistant}
    clock, drafts = _TokenClock(model.device), [] if assistant is None else [assistant]
    torch.manual_seed(seed)
    with (
        torch.inference_mode(),
        timed_vision(model) as vision,
        timed_forwards([model], model.device, first_only=True) as target,
        timed_forwards(drafts, model.device, first_only=True) as draft,
    ):
        if (ranks := joined()) is not None:
            ranks.send("generate", dict(inputs), {"max_new_tokens": max_new_tokens, **settings}, seed)
        started_ms = now_ms(model.device)
        try:
            sequences = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=clock, **settings, **assisted)
        except RuntimeError as error:  # torch draws no token
            if "probability tensor" not in str(error):
                raise
            raise not_finite(sum(clock.num_tokens), model.dtype) from None
    length = inputs["input_ids"].shape[1]
    prompt_ms, first_ms, last_ms = clock.at_ms[0], clock.at_ms[1], clock.at_ms[-1]
    if assistant is None:
        prefill_ms, decode_ms = first_ms - started_ms, last_ms - first_ms
        rounds = clock.num_tokens[2:]  # without the prompt and the token that the prefill emits
    else:
        prefill_ms = prompt_ms - started_ms + target.ms
        decode_ms = last_ms - prompt_ms - target.ms
        rounds = clock.num_tokens[1:]
    tokens = sequences[0, length:].tolist()
    return tokens, DecodingStats(
        prompt_tokens=length,
        new_tokens=len(tokens),
        accepted_lengths=[number - 1 for number in rounds],
        target_forwards=target.num_forwards - (assistant is None),
        draft_forwards=draft.num_forwards,
        target_prefill_ms=prefill_ms,
        vision_ms=vision.ms,
        draft_prefill_ms=draft.ms,
        decode_ms=decode_ms,
    )
