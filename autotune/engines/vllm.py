"""vLLM: its speculation by n-grams, draft models and heads, and answers by its OpenAI-compatible API, with counts of
their own or, of builds before 0.32, by its metrics. Loads no torch.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from autotune.documents.draft_kinds import MTP_PROMISES
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import DEEPEST, OPTIONS, ModelType, Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.engine_server import NATURAL, TEXT, TOKENS, EngineServer, text_chat
from autotune.engines.model_files import find_model_files, served_draft, served_target
from autotune.engines.served import Served
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.modeling.gguf import SUFFIX
from autotune.modeling.hub import is_id
from autotune.modeling.loading import bundled_models, reference, resolve
from autotune.modeling.target_defaults import OWN, has_own_head, heads_near, sizes_of
from autotune.workloads.chat import chat_messages
from autotune.workloads.pixels import png_url
from autotune.workloads.prompt import WorkloadPrompt

PRICED_BY = Speculation(
    type="ngram", options={"prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 31}
)
FIRST_TEXT_TOKEN = 300  # of most vocabularies; smaller ones may control the chat
BLOCK = 16  # tokens: blocks of the prefix cache have a multiple of it
SETTLING_S = 10.0  # longest time after an answer until the engine has counted it
CONVERTED = WORKSPACE / "engines" / "models"
"""Checkpoints that were written in a form that vLLM loads."""
MOST_REQUESTS = 1024  # at once: the greatest default of ``--max-num-seqs``; a schedule may reach beyond the server's
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
"""A prompt of text is sent as its tokens, and one with images as a chat, because tokens hold no pixels."""
GENERATED = "vllm:generation_tokens_total"
COUNTERS = tuple(f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
"""Verifications, draft tokens and accepted ones of all requests; missing where vLLM does not speculate."""


def vllm_arguments(speculation: Speculation | None) -> list[str]:
    """Arguments of vLLM for settings. It counts the layers of MiMo's heads by the target's config."""
    if speculation is None:
        return []
    config: dict[str, Any] = {"method": speculation.type}
    config |= {"model": speculation.model} if speculation.model else {}
    config |= speculation.options
    config |= {"num_speculative_tokens_per_batch_size": speculation.schedule} if speculation.schedule else {}
    words = ["--speculative-config", json.dumps(config)]
    if speculation.type == "mtp" and speculation.model:
        words += ["--hf-overrides", json.dumps({"num_nextn_predict_layers": 1})]
    return words


def chat_request(prompt: WorkloadPrompt) -> dict[str, Any]:
    """A prompt as a chat of OpenAI's API, with its images as data URLs of PNG files, which keep every pixel."""
    if not prompt.images:
        return text_chat(prompt)
    messages = chat_messages(prompt.content, num_images=len(prompt.images))
    urls = map(png_url, prompt.images)
    for message in messages:
        message["content"] = [
            {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
            for part in message["content"]
        ]
    options = {
        "chat_template_kwargs": prompt.settings.chat_template_kwargs,
        "mm_processor_kwargs": prompt.settings.model_dump(include={"min_pixels", "max_pixels"}, exclude_none=True),
    }
    return {"messages": messages, **{name: value for name, value in options.items() if value}}


class VllmServer(EngineServer):
    """A client of one vLLM."""

    priced_by = "{} '{}'".format(*vllm_arguments(PRICED_BY))
    longest = int(PRICED_BY.options["num_speculative_tokens"]) + 1
    reads_images = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if "vllm:" not in self.read("/metrics", advice="it exposes no metrics").decode(errors="replace"):
            raise UserError(f"{url}: its metrics are not vLLM's; give the address of a vLLM")
        self.build = self.value("/version", TEXT, "version")
        self.alias = self.value("/v1/models", TEXT, "data", 0, "id")
        self.context = self.value("/v1/models", NATURAL, "data", 0, "max_model_len")

    @property
    def keeps_answers(self) -> bool:
        """Whether drafts follow from all earlier answers, so that every request changes those of later ones."""
        return self.speculation is not None and self.speculation.type == "suffix"

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        request = {"model": self.alias, **chat_request(prompt)}
        return self.value("/tokenize", TOKENS, "tokens", body=request, advice="check its chat template")

    def answer(self, tokens: list[int], limit: int, prompt: WorkloadPrompt | None = None) -> Served:
        """After a request that only reads the prompt, unless the server drafts from its earlier answers."""
        if not self.keeps_answers:
            self._counted(tokens, 1, prompt)
        return self._counted(tokens, limit, prompt)

    def continuation(self, answer: Served, prompt: WorkloadPrompt | None = None) -> list[int]:
        """vLLM verifies, and counts, the part of a draft that lies beyond the end. A chat is answered again, as its
        answer cannot be given as tokens.
        """
        tokens, known = answer.prompt_tokens, answer.tokens
        room = min(self.longest - 1, self.context - len(tokens) - len(known) - 1)
        if self.keeps_answers or room <= 0:
            return []
        if prompt is None or not prompt.images:
            return self._counted([*tokens, *known], room, ignore_eos=True).tokens
        return self._counted(tokens, len(known) + room, prompt, ignore_eos=True).tokens[len(known) :]

    def verify(self, prompt: list[int], n: int) -> Served:
        """The prompt ends in a run of a token that is not in it, and no other is allowed. Where the run is longer than
        ``prompt_lookup_max``, vLLM drafts what lies behind the first of its n-grams.
        """
        token = next(
            candidate
            for candidate in range(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + len(prompt) + 1)
            if candidate not in prompt
        )
        run = 0 if n == 1 else int(PRICED_BY.options["prompt_lookup_max"]) + n - 2
        return self._counted([*prompt, *[token] * run], n + 1, ignore_eos=True, allowed_token_ids=[token])

    def verified(self, tokens: list[int]) -> Served:
        return self._counted(tokens, 2)

    def _counted(self, tokens: list[int], limit: int, prompt: WorkloadPrompt | None = None, **options: Any) -> Served:
        """Decode one prompt greedily. A server without counts of each request decodes nothing else meanwhile."""
        before = self.metrics()
        answer, seconds, is_ended, counts, cpu_ms = self._decode(tokens, limit, prompt, clock=self.cpu_ms, **options)
        rounds, drafted, accepted, verifications = (
            self._counts_since(before, len(answer)) if counts is None else self._counts_of(counts, len(answer))
        )
        with self.reply_of(COMPLETIONS):
            return Served.of(
                tokens,
                answer,
                limit,
                is_ended=is_ended,
                rounds=rounds,
                accepted_lengths=[accepted] if rounds else [],
                verified_nodes=drafted,
                verifications=verifications if self.is_chain else [],
                decode_ms=1e3 * (seconds[-1] - seconds[0]),
                cpu_ms=max(0.0, cpu_ms),
            )

    def _counts_of(self, counts: dict[str, Any], num_tokens: int) -> tuple[int, int, int, list[list[int]]]:
        """Verifications, draft tokens and accepted ones of a reply with ``num_tokens`` tokens, and each verification
        where all tokens after the first come of one.

        Raises:
            UserError: the counts contradict the tokens.
        """
        with self.reply_of(COMPLETIONS):
            drafted, accepted = (
                TOKENS.validate_python(counts.get(f"per_step_{name}") or [], strict=True)
                for name in ("drafted", "accepted")
            )
            ends = list(itertools.accumulate((number + 1 for number in accepted), initial=1))
            sums = [counts["num_spec_steps"], len(accepted), counts["num_draft_tokens"]]
            if (
                sums != [len(drafted), len(drafted), sum(drafted)]
                or any(map(operator.gt, accepted, drafted))
                or [*ends, 1][len(drafted) - 1] > num_tokens
            ):
                raise UserError(
                    f"{self.url}: a reply of {num_tokens} tokens counts {len(drafted)} verifications that accepted {sum(accepted)}; "
                    "start a vLLM of another version"
                )
        placed = [list(row) for row in zip(ends, drafted, accepted, strict=False)]
        return len(drafted), sum(drafted), sum(accepted), placed if ends[-1] >= num_tokens else []

    def _counts_since(self, before: Counter[str], num_tokens: int) -> tuple[int, int, int, list[list[int]]]:
        """Verifications, draft tokens and accepted ones since ``before``, when the engine has counted an answer of
        ``num_tokens`` tokens, and the verification if there is one alone.

        Raises:
            UserError: the engine counts other tokens, because it serves other clients.
        """
        if self.process is not None and self.speculation is None:
            return 0, 0, 0, []
        deadline = time.monotonic() + SETTLING_S
        while (generated := (now := self.metrics())[GENERATED] - before[GENERATED]) != num_tokens:
            if time.monotonic() > deadline or generated > num_tokens:
                raise UserError(
                    f"{self.url}: the engine counted {generated} tokens for answers of {num_tokens}; stop its other clients"
                )
            time.sleep(0.01)
        rounds, drafted, accepted = (now[name] - before[name] for name in COUNTERS)
        return rounds, drafted, accepted, [[1, drafted, accepted]] if rounds == 1 else []

    def _decode(
        self,
        tokens: list[int],
        limit: int,
        prompt: WorkloadPrompt | None,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ) -> tuple[list[int], list[float], bool, dict[str, Any] | None, float]:
        """The tokens of the reply, the seconds from the request to each of its parts, whether the last token ends the
        generation, the request's counts if the reply has them, and the time by ``clock`` from the first part to the
        last. ``prompt`` has the images, if any.
        """
        path, request = COMPLETIONS, {"prompt": tokens}
        if prompt is not None and prompt.images:
            path, request = CHAT, chat_request(prompt)
        body = {"model": self.alias, "max_tokens": limit, "temperature": 0.0, "return_token_ids": True}
        if len(tokens) % BLOCK == 1:  # with all blocks in the cache, vLLM would pad the first pass with drafts
            body["cache_salt"] = os.urandom(8).hex()
        body |= request | options | {"stream_options": {"include_usage": True}}
        answer, seconds, is_ended, counts, begun = list[int](), list[float](), False, None, 0.0
        for event, second in self.streamed(path, body):
            with self.reply_of(path):
                if not event["choices"] and "usage" in event:
                    counts = (event.get("metrics") or {}).get("speculative_decoding")
                    continue
                (part,) = event["choices"]
                if path == CHAT and "role" in part["delta"]:  # without tokens
                    continue
                begun = begun if seconds else clock()
                seconds.append(second)
                answer += TOKENS.validate_python(part["token_ids"], strict=True)
                is_ended = part["finish_reason"] == "stop"
        return answer, seconds, is_ended, counts, clock() - begun

    def stream(
        self, answer: Served, prompt: WorkloadPrompt | None = None, cache: str = ""
    ) -> tuple[list[int], list[float]]:
        salt: dict[str, Any] = {"cache_salt": cache} if cache else {}
        return self._decode(answer.prompt_tokens, answer.limit, prompt, **salt)[:2]

    def under_load(self) -> tuple[int, int, int]:
        counters = self.metrics()
        cached, read = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
        return counters["vllm:num_requests_waiting"], counters[cached], counters[read]

    def text(self, tokens: Sequence[int]) -> str:
        return self.value("/detokenize", TEXT, "prompt", body={"model": self.alias, "tokens": list(tokens)})


class VllmBackend(EngineBackend):
    """A vLLM with a folder or a Hugging Face id."""

    name = "vllm"
    program = "vllm"
    install = "install vLLM (pip install vllm)"
    models = "a folder with config.json, or an id of the Hugging Face hub"
    server = VllmServer
    counting = ("--per-request-spec-decode-metrics", "detailed")
    own_arguments = ("--model", "--served-model-name", "--host", "--port", "-sc")
    tested = (PRICED_BY, Speculation(type="suffix", options=OPTIONS["suffix"]))
    space: ClassVar[
        dict[str, Sequence[tuple[float, ...]]]
    ] = {  # of which the fastest is that of 700 (``benchmarks/engine_regret.py``)
        "ngram": [
            *((1, 5, 3), (1, 6, 24), (1, 8, 12), (2, 8, 12), (3, 4, 6), (3, 8, 24), (4, 8, 6), (4, 8, 12)),
            *((6, 10, 8), (10, 10, 4), (10, 10, 6), (10, 16, 8)),
        ],
        "suffix": [
            *((8, 4.0, 0.3, 5), (24, 0.5, 0.5, 24), (24, 2.0, 0.2, 24), (24, 2.0, 0.5, 8)),
            *((24, 4.0, least, 24) for least in (0.05, 0.1, 0.2, 0.3)),
        ],
    }
    tolerated_mismatches = 0.1  # tokens beyond an answer's end are rounded otherwise when asked for
    has_one_loop = False  # it schedules a pass while the last one runs, unless it speculates by n-grams or suffixes
    pause_s = 1.2

    @classmethod
    def find_model(cls, target: str, *, local_only: bool = False) -> tuple[str, ModelReference] | None:
        path = Path(bundled_models().get(target, target))
        if is_id(target) and not path.exists() and path.suffix != SUFFIX:
            if local_only:
                return target, ModelReference(id=target, sha256="")
            path = Path(resolve(target))
        if not (path / "config.json").exists():
            return None
        return str(served_target(path, CONVERTED).resolve()), reference(target)

    @classmethod
    def find_draft(cls, draft: str, target: str) -> tuple[ModelType, Path]:
        return served_draft(draft, target, CONVERTED)

    def find_heads(self) -> list[tuple[ModelType, Path | None, int]]:
        folder, sizes = sizes_of(self.model.id)
        layers = max(int(sizes.get(key) or 0) for key in MTP_PROMISES) if has_own_head(folder, sizes) else 0
        deepest = layers if layers > 1 else DEEPEST  # of several, each drafts one token
        heads: list[tuple[ModelType, Path | None, int]] = [("mtp", None, deepest)] if layers else []
        near = [name for name, kind in heads_near(self.model.id, sizes).items() if kind != OWN]
        return heads + [(*served_draft(name, self.model.id, CONVERTED), DEEPEST) for name in near]

    def given(self, option: str) -> list[Any]:
        """The values of an option among the user's arguments."""
        given = [after for word, after in itertools.pairwise([*self.arguments, ""]) if word == option]
        return given + [word.removeprefix(f"{option}=") for word in self.arguments if word.startswith(f"{option}=")]

    def read_model(self) -> str:
        """``--dtype``, or the checkpoint's own. Reads ``--max-num-seqs``, too."""
        files = find_model_files(self.target)
        self.most_requests = int([*self.given("--max-num-seqs"), MOST_REQUESTS][0])
        return [*self.given("--dtype"), files.dtype if files else "auto"][0]

    def words(self, speculation: Speculation | None) -> list[str]:
        """With the checkpoint's precision, as vLLM would serve float32 in another one."""
        dtype = [] if self.given("--dtype") else ["--dtype", self.precision]
        return [str(self.executable), "serve", self.target, *self.arguments, *dtype, *vllm_arguments(speculation)]

    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        return ["--served-model-name", alias, "--host", "127.0.0.1"]
