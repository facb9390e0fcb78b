"""vLLM: its speculation by n-grams and draft models, answers by its OpenAI-compatible API, and counts by its metrics,
request by request. Loads no torch.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.documents.engine_profile import (
    OPTIONS,
    ModelType,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.documents.provenance import ModelReference
from autotune.engines.client import TEXT, TOKENS, Counters, EngineClient
from autotune.engines.engine import EngineServer, ServingEngine, text_chat
from autotune.engines.model_files import served_draft
from autotune.engines.ngram_replay import total
from autotune.engines.vllm_export import vllm_arguments
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.modeling.gguf import SUFFIX
from autotune.modeling.hub import is_id
from autotune.modeling.loading import bundled_models, reference, resolve
from autotune.strict_parsing import parse_json
from autotune.workloads.prompt import WorkloadPrompt

COMPLETIONS = "/v1/completions"
PRICED_BY = Speculation(
    type="ngram", options={"prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 31}
)
FIRST_TEXT_TOKEN = 300  # of most vocabularies; smaller ones may control the chat
BLOCK = 16  # tokens: blocks of the prefix cache have a multiple of it
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
SUFFIX_DEPTHS, SUFFIX_LENGTHS = (8, 24), (3, 5, 8, 24)
SUFFIX_FACTORS, SUFFIX_PROBABILITIES = (0.5, 1.0, 2.0, 4.0), (0.05, 0.1, 0.2, 0.3, 0.5)


class VllmServer(EngineClient, EngineServer):
    """A client of one vLLM, whose counters are read before and after each request."""

    priced_by = "{} '{}'".format(*vllm_arguments([PRICED_BY]))
    longest = int(PRICED_BY.options["num_speculative_tokens"]) + 1
    spins_s = 1.2

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.build, self.alias = self.version, self.model
        with self.reply_of("/v1/models"):
            (self.context,) = TOKENS.validate_python([self.models["data"][0]["max_model_len"]], strict=True)
        self.counted = SpeculationCounts(verifications=0, drafted=0, accepted=0)

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        request = {"model": self.model, **text_chat(prompt)}
        with self.reply_of("/tokenize"):
            tokens = self.read_json("/tokenize", request, "check its chat template")["tokens"]
            return TOKENS.validate_python(tokens, strict=True)

    def answer(self, tokens: list[int], limit: int) -> ServedAnswer:
        """After a request that only reads the prompt, unless the server drafts from its earlier answers."""
        if not self.keeps_answers:
            self._counted(tokens, 1)
        answer, counts = self._counted(tokens, limit)
        found = SpeculationCounts(verifications=counts.rounds, drafted=answer.drafted, accepted=answer.accepted)
        self.counted = total([self.counted, found])
        return answer

    def continuation(self, answer: ServedAnswer) -> list[int]:
        """vLLM verifies, and counts, the part of a draft that lies beyond the end."""
        tokens = [*answer.prompt_tokens, *answer.tokens]
        room = min(self.longest - 1, self.context - len(tokens) - 1)
        if self.has_draft or self.keeps_answers or room <= 0:
            return []
        return self._counted(tokens, room, ignore_eos=True)[0].tokens

    def verify(self, prompt: list[int], n: int) -> ServedAnswer:
        """The prompt ends in a run of a token that is not in it, and no other is allowed. Where the run is longer than
        ``prompt_lookup_max``, vLLM drafts what lies behind the first of its n-grams.
        """
        token = next(one for one in range(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + len(prompt) + 1) if one not in prompt)
        run = 0 if n == 1 else int(PRICED_BY.options["prompt_lookup_max"]) + n - 2
        return self._counted([*prompt, *[token] * run], n + 1, ignore_eos=True, allowed_token_ids=[token])[0]

    def _counted(self, tokens: list[int], limit: int, **options: Any) -> tuple[ServedAnswer, Counters]:
        """Decode one prompt greedily, while the server decodes nothing else."""
        before, cpu_ms = self.counters(), self.cpu_ms()
        parts, seconds, is_ended = self._decode(tokens, limit, **options)
        found, right = list(itertools.chain(*parts)), [len(part) - 1 for part in parts[1:]] if self.has_draft else []
        cpu_ms, counts = max(0.0, self.cpu_ms() - cpu_ms), self.counters_after(before, len(found))
        if len(right) != counts.rounds and self.has_draft:
            raise UserError(
                f"{self.url}: {counts.rounds} verifications came in {len(right)} parts of the reply; give the command again"
            )
        with self.reply_of(COMPLETIONS):
            spent = seconds[-1] - seconds[0]
            answer = ServedAnswer(
                prompt_tokens=tokens,
                tokens=found,
                limit=limit,
                is_ended=is_ended,
                rounds=[(counts.drafted // counts.rounds, accepted) for accepted in right],
                drafted=counts.drafted,
                accepted=sum(right) if right else counts.accepted,
                wall_ms=1e3 * spent,
                cpu_ms=cpu_ms * spent / seconds[-1],
            )
        return answer, counts

    def _decode(self, tokens: list[int], limit: int, **options: Any) -> tuple[list[list[int]], list[float], bool]:
        """Tokens of each part of the reply, the seconds from the request to each, and whether the last token ends the
        generation.
        """
        request = {"model": self.model, "prompt": tokens, "max_tokens": limit, "temperature": 0.0, "stream": True}
        request |= {"return_token_ids": True} | options
        if len(tokens) % BLOCK == 1:  # with all blocks in the cache, vLLM would pad the first pass with drafts
            request["cache_salt"] = os.urandom(8).hex()
        found, seconds, is_ended, started = list[list[int]](), list[float](), False, time.perf_counter()
        for line in self.lines(COMPLETIONS, request, "look into its log"):
            if line.startswith(b"data: {"):
                seconds.append(time.perf_counter() - started)
                with self.reply_of(COMPLETIONS):
                    (part,) = parse_json(line[6:].decode())["choices"]
                    found.append(TOKENS.validate_python(part["token_ids"], strict=True))
                    is_ended = part["finish_reason"] == "stop"
        return found, seconds, is_ended

    def stream(self, answer: ServedAnswer) -> tuple[list[int], list[float]]:
        parts, seconds, _ = self._decode(answer.prompt_tokens, answer.limit)
        return list(itertools.chain(*parts)), seconds

    def text(self, tokens: list[int]) -> str:
        with self.reply_of("/detokenize"):
            reply = self.read_json("/detokenize", {"model": self.model, "tokens": tokens})
            return TEXT.validate_python(reply["prompt"], strict=True)

    def counts(self) -> SpeculationCounts:
        return self.counted


class VllmEngine(ServingEngine):
    """A vLLM with a folder or a Hugging Face id."""

    name = "vllm"
    program = "vllm"
    built = Path("vllm") / "bin" / program
    install = "install vLLM (pip install vllm)"
    models = "a folder with config.json, or an id of the Hugging Face hub"
    server = VllmServer
    own_arguments = ("--model", "--served-model-name", "--host", "--port", "-sc")
    pricing = (PRICED_BY,)
    tolerated_mismatches = 0.1
    has_one_loop = False  # it schedules a pass while the last one runs, unless it speculates by n-grams or suffixes

    @classmethod
    def find_model(cls, target: str, *, local_only: bool = False) -> tuple[str, ModelReference] | None:
        path = Path(bundled_models().get(target, target))
        if is_id(target) and not path.exists() and path.suffix != SUFFIX:
            if local_only:
                return target, ModelReference(id=target, sha256="")
            path = Path(resolve(target))
        return (str(path.resolve()), reference(target)) if (path / "config.json").exists() else None

    @classmethod
    def find_draft(cls, draft: str, target: str) -> tuple[ModelType, Path]:
        return served_draft(draft, target, WORKSPACE / "engines" / "drafts")

    @classmethod
    def space(cls) -> list[Speculation]:
        options: dict[SpeculationType, Iterable[tuple[float, ...]]] = {
            "ngram": ((n, most, k) for most in SIZES for n in SIZES[: SIZES.index(most) + 1] for k in LENGTHS),
            "suffix": itertools.product(SUFFIX_DEPTHS, SUFFIX_FACTORS, SUFFIX_PROBABILITIES, SUFFIX_LENGTHS),
        }
        rows = ((name, OPTIONS[name], values) for name, found in options.items() for values in found)
        return [Speculation(type=name, options=dict(zip(names, one, strict=True))) for name, names, one in rows]

    def types(self) -> list[SpeculationType]:
        """``suffix`` needs the package arctic-inference beside vLLM."""
        packages = self.executable.parents[1].glob("lib/python*/*-packages/arctic_inference")
        return [name for name in super().types() if name != "suffix" or any(packages)]

    def words(self, speculations: Sequence[Speculation] = ()) -> list[str]:
        return [str(self.executable), "serve", self.model, *self.arguments, *vllm_arguments(speculations)]

    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        return ["--served-model-name", alias, "--host", "127.0.0.1"]
