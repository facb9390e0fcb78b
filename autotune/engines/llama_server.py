"""llama.cpp's ``llama-server``. Loads no torch."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from autotune.documents.engine_profile import (
    OPTIONS,
    ModelType,
    Options,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.documents.provenance import ModelReference
from autotune.engines.client import TEXT, TIMES, TOKENS
from autotune.engines.engine import EngineServer, ServingEngine, text_chat
from autotune.errors import UserError
from autotune.files import known_sha256_of
from autotune.modeling.gguf import architecture_of, find_gguf, require_chat_template
from autotune.strict_parsing import parse_json
from autotune.workloads.prompt import WorkloadPrompt

FIXED = ("--metrics", "--cache-ram", "0")
"""Arguments of every server: counters; no prompts of former requests."""
PRICED_BY = Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 64})
RUN = 8  # tokens that price a verification: more than n-match, and too few for the other types to draft
PREFIX = "llamacpp:spec_decode_num_"
COUNTERS = {"verifications": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def llama_arguments(speculations: Sequence[Speculation]) -> list[str]:
    """Arguments of llama-server for one or several types; none switch speculation off."""
    words = ["--spec-type", ",".join(one.type for one in speculations)] if speculations else []
    for one in speculations:
        words += ["--spec-draft-model", one.model] if one.model else []
        for name, value in one.options.items():
            words += [f"--spec-{'draft' if one.model else one.type}-{name}", str(value)]
    return words


class LlamaServer(EngineServer):
    """A client of one llama-server, whose first slot it uses."""

    priced_by = shlex.join(llama_arguments([PRICED_BY]))
    longest = int(PRICED_BY.options["n-max"])

    def __init__(self, url: str) -> None:
        super().__init__(url)
        props = self.read_json("/props")
        with self.reply_of("/props"):
            (self.context,) = TOKENS.validate_python([props["default_generation_settings"]["n_ctx"]], strict=True)
            self.build = TEXT.validate_python(props["build_info"], strict=True)
        self.alias = props.get("model_alias")

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        with self.reply_of("/apply-template"):
            reply = self.read_json("/apply-template", text_chat(prompt), "check its chat template")
            text = TEXT.validate_python(reply["prompt"], strict=True)
        request = {"content": text, "add_special": True, "parse_special": True}
        with self.reply_of("/tokenize"):
            tokens = self.read_json("/tokenize", request, "check its version")["tokens"]
            return TOKENS.validate_python(tokens, strict=True)

    def answer(self, tokens: list[int], limit: int) -> ServedAnswer:
        """After a request that only reads the prompt: from nothing, so that no answer depends on the order of prompts,
        and outside the CPU time.
        """
        self._parts(tokens, 1, cache_prompt=False)
        return self._timed(tokens, limit)

    def verify(self, prompt: list[int], n: int) -> ServedAnswer:
        """The prompt ends in a run of one token, the same token is forced at every position, so that the draft repeats
        it, and the server cuts the draft to what is left of ``n_predict``.
        """
        token = prompt[-1]
        return self._timed([*prompt, *[token] * RUN], n + 1, logit_bias=[[token, 1e4]])

    def _timed(self, tokens: list[int], limit: int, **options: Any) -> ServedAnswer:
        before = self.cpu_ms()
        parts = self._parts(tokens, limit, **options)
        spent = max(0.0, self.cpu_ms() - before)
        with self.reply_of("/completion"):
            timings = [part["timings"] for part in parts]
            times = [timings[-1][name] for name in ("predicted_ms", "prompt_ms")]
            wall_ms, prompt_ms = TIMES.validate_python(times, strict=True)
            sums = [(0, 0), *((one.get("draft_n", 0), one.get("draft_n_accepted", 0)) for one in timings)]
            rounds = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(dict.fromkeys(sums))]
            return ServedAnswer(
                prompt_tokens=tokens,
                tokens=[token for part in parts for token in part["tokens"]],
                limit=limit,
                is_ended=parts[-1]["stop_type"] == "eos",
                rounds=rounds if self.has_draft else [],
                drafted=sums[-1][0],
                accepted=sums[-1][1],
                wall_ms=wall_ms,
                cpu_ms=spent * wall_ms / max(wall_ms + prompt_ms, 1e-9),
            )

    def _parts(self, tokens: list[int], limit: int, **options: Any) -> list[dict[str, Any]]:
        """The reply; of a server with a draft model token by token, with the sums so far."""
        request = {"prompt": tokens, "temperature": 0.0, "return_tokens": True, "id_slot": 0, "n_predict": limit}
        if self.has_draft:
            return [part for part, _ in self._streamed(request | options | {"timings_per_token": True})]
        return [self.read_json("/completion", request | options, "look into its log")]

    def _streamed(self, request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        """Parts of a reply, and seconds from the request to each."""
        started = time.perf_counter()
        for line in self.lines("/completion", request | {"stream": True}, "look into its log"):
            if line.startswith(b"data: "):
                with self.reply_of("/completion"):
                    yield parse_json(line[6:].decode()), time.perf_counter() - started

    def stream(self, answer: ServedAnswer) -> tuple[list[int], list[float]]:
        request = {"prompt": answer.prompt_tokens, "n_predict": answer.limit, "temperature": 0.0, "return_tokens": True}
        parts = list(self._streamed(request | {"cache_prompt": False}))
        with self.reply_of("/completion"):
            tokens = TOKENS.validate_python([token for part, _ in parts for token in part["tokens"]], strict=True)
        return tokens, [spent for _, spent in parts]

    def text(self, tokens: list[int]) -> str:
        with self.reply_of("/detokenize"):
            reply = self.read_json("/detokenize", {"tokens": tokens})
            return TEXT.validate_python(reply["content"], strict=True)

    def counts(self) -> SpeculationCounts:
        if self.process is None:
            return SpeculationCounts(**dict.fromkeys(COUNTERS, 0))
        found = self.metrics("start it with --metrics")
        return SpeculationCounts(**{name: found[f"{PREFIX}{one}_total"] for name, one in COUNTERS.items()})


class LlamaEngine(ServingEngine):
    """A llama-server with a GGUF file. One server may have all types; the longest n-grams are asked first."""

    name = "llama.cpp"
    program = "llama-server"
    built = Path("llama.cpp") / "bin" / program
    install = "install llama.cpp (https://github.com/ggml-org/llama.cpp)"
    models = "a GGUF file, or a folder with one"
    server = LlamaServer
    own_arguments = ("-m", "--model", "-a", "--alias", "-np", "--parallel", "--host", "--port")
    pricing = (
        Speculation(type="ngram-simple", options={"size-n": 12, "size-m": 16}),
        Speculation(type="ngram-map-k", options={"size-n": 9, "size-m": 12}),
        Speculation(type="ngram-map-k4v", options={"size-n": 6, "size-m": 10, "min-hits": 1}),
        PRICED_BY,
        Speculation(type="ngram-cache"),
    )

    @classmethod
    def find(cls, command: str | None, model: str) -> Self:
        found = super().find(command, model)
        if "--chat-template" not in " ".join(found.arguments):
            require_chat_template(Path(model))
        return found

    @classmethod
    def find_model(cls, target: str, *, local_only: bool = False) -> tuple[str, ModelReference] | None:
        if (path := find_gguf(target, is_split=True)) is None:
            return None
        return str(path.resolve()), ModelReference(id=target, sha256=known_sha256_of(path))

    @classmethod
    def find_draft(cls, draft: str, target: str) -> tuple[ModelType, Path]:
        if (path := find_gguf(draft, is_split=True)) is None:
            raise UserError(
                f"--draft {draft}: llama.cpp drafts with GGUF files; give one of a model with the target's vocabulary, or of an EAGLE-3 head"
            )
        return "draft-eagle3" if architecture_of(path) == "eagle3" else "draft-simple", path.resolve()

    @classmethod
    def space(cls) -> list[Speculation]:
        pairs: list[Options] = [{"size-n": n, "size-m": m} for n in SIZES for m in LENGTHS]
        pools = [(n, least, most) for n in (*SIZES, 20) for least in (0, 1, 2, 4, 8, 48) for most in (*LENGTHS, 64)]
        options: dict[SpeculationType, list[Options]] = {
            "ngram-simple": [pair for pair in pairs if pair["size-m"] >= pair["size-n"]],  # shorter ones draft nothing
            "ngram-map-k": pairs,
            "ngram-map-k4v": [pair | {"min-hits": hits} for pair in pairs for hits in (1, 2, 3)],
            "ngram-mod": [{"n-match": n, "n-min": least, "n-max": most} for n, least, most in pools if least <= most],
            "ngram-cache": [],
        }
        return [
            Speculation(type=name, options=one) for name, found in options.items() for one in (OPTIONS[name], *found)
        ]

    def words(self, speculations: Sequence[Speculation] = ()) -> list[str]:
        return [str(self.executable), "-m", self.model, *self.arguments, *llama_arguments(speculations)]

    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        room = ["--ctx-size", f"{at_once * longest}"] if longest else []
        return [*FIXED, "--parallel", f"{at_once}", *room, "--alias", alias]

    def build_of(self, server: EngineServer) -> str:
        """SHA-256 of the executable and the libraries next to it: builds from a source archive have no version."""
        libraries = sorted(path for path in self.executable.parent.glob("lib*.so*") if not path.is_symlink())
        return known_sha256_of(self.executable, *libraries)

    def types(self) -> list[SpeculationType]:
        try:
            done = subprocess.run([self.executable, "--help"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"{self.executable}: cannot be run ({error}); name a {self.program}") from None
        names = set(re.findall(r"[\w-]+", done.stdout.partition("--spec-type")[2].partition("\n--")[0]))
        if PRICED_BY.type not in names:
            raise UserError(
                f"{self.executable}: is no {self.program}, or one without --spec-type {PRICED_BY.type}; install build b11434 or newer"
            )
        return [name for name in super().types() if name in names]
