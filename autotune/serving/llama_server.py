"""llama.cpp's ``llama-server``. Loads no torch."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from autotune.documents.engine_profile import (
    OPTIONS,
    Options,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.files import known_sha256_of
from autotune.modeling.gguf import find_gguf, require_chat_template
from autotune.serving.client import TEXT, TIMES, TOKENS
from autotune.serving.engine import EngineServer, ServingEngine, text_messages
from autotune.strict_parsing import parse_json
from autotune.workloads.prompt import WorkloadPrompt

FIXED = ("--metrics", "--cache-ram", "0")
"""Arguments of every server: counters; no prompts of former requests."""
PRICED_BY = Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 64})
RUN = 8  # tokens that price a verification: more than n-match, and too few for the other types to draft
COUNTERS = {"verifications": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


def llama_arguments(speculations: Sequence[Speculation]) -> list[str]:
    """Arguments of llama-server for one or several types; none switch speculation off."""
    words = ["--spec-type", ",".join(one.type for one in speculations)] if speculations else []
    for one in speculations:
        for name, value in one.options.items():
            words += [f"--spec-{one.type}-{name}", str(value)]
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
            reply = self.read_json("/apply-template", {"messages": text_messages(prompt)}, "check its chat template")
            text = TEXT.validate_python(reply["prompt"], strict=True)
        request = {"content": text, "add_special": True, "parse_special": True}
        with self.reply_of("/tokenize"):
            tokens = self.read_json("/tokenize", request, "check its version")["tokens"]
            return TOKENS.validate_python(tokens, strict=True)

    def answer(self, tokens: list[int], limit: int) -> ServedAnswer:
        """After a request that only reads the prompt: from nothing, so that no answer depends on the order of prompts, and outside
        the CPU time.
        """
        self._complete(tokens, 1, cache_prompt=False)
        return self._timed(tokens, limit)

    def verify(self, prompt: list[int], n: int) -> ServedAnswer:
        """The prompt ends in a run of one token, the same token is forced at every position, so that the draft repeats it, and the
        server cuts the draft to what is left of ``n_predict``.
        """
        token = prompt[-1]
        return self._timed([*prompt, *[token] * RUN], n + 1, logit_bias=[[token, 1e4]])

    def _timed(self, tokens: list[int], limit: int, **options: Any) -> ServedAnswer:
        before = self.cpu_ms()
        reply = self._complete(tokens, limit, **options)
        spent = max(0.0, self.cpu_ms() - before)
        with self.reply_of("/completion"):
            timings = reply["timings"]
            times = [timings["predicted_ms"], timings["prompt_ms"]]
            wall_ms, prompt_ms = TIMES.validate_python(times, strict=True)
            return ServedAnswer(
                prompt_tokens=tokens,
                tokens=reply["tokens"],
                limit=limit,
                is_ended=reply["stop_type"] == "eos",
                drafted=timings.get("draft_n", 0),
                accepted=timings.get("draft_n_accepted", 0),
                wall_ms=wall_ms,
                cpu_ms=spent * wall_ms / max(wall_ms + prompt_ms, 1e-9),
            )

    def _complete(self, tokens: list[int], limit: int, **options: Any) -> dict[str, Any]:
        request = {"prompt": tokens, "temperature": 0.0, "return_tokens": True, "id_slot": 0, "n_predict": limit}
        return self.read_json("/completion", request | options, "look into its log")

    def stream(self, answer: ServedAnswer) -> tuple[list[int], list[float]]:
        request = {"prompt": answer.prompt_tokens, "n_predict": answer.limit, "temperature": 0.0, "return_tokens": True}
        tokens, seconds, started = list[int](), list[float](), time.perf_counter()
        for line in self.lines("/completion", request | {"cache_prompt": False, "stream": True}, "look into its log"):
            if line.startswith(b"data: "):
                with self.reply_of("/completion"):
                    tokens += TOKENS.validate_python(parse_json(line[6:].decode())["tokens"], strict=True)
                seconds.append(time.perf_counter() - started)
        return tokens, seconds

    def text(self, tokens: list[int]) -> str:
        with self.reply_of("/detokenize"):
            reply = self.read_json("/detokenize", {"tokens": tokens})
            return TEXT.validate_python(reply["content"], strict=True)

    def counts(self) -> SpeculationCounts:
        if self.process is None:
            return SpeculationCounts(**dict.fromkeys(COUNTERS, 0))
        text = self.read("/metrics", advice="start it with --metrics").decode(errors="replace")
        values = {
            name: re.search(rf"^llamacpp:spec_decode_num_{counter}_total (\S+)$", text, re.MULTILINE)
            for name, counter in COUNTERS.items()
        }
        with self.reply_of("/metrics"):
            return SpeculationCounts(**{name: int(float(found[1])) if found else 0 for name, found in values.items()})


class LlamaEngine(ServingEngine):
    """A llama-server with a GGUF file. One server may have all types; the longest n-grams are asked first."""

    name = "llama.cpp"
    program = "llama-server"
    built = Path("llama.cpp") / "bin" / program
    models = "a GGUF file, or a folder with one"
    server = LlamaServer
    own_arguments = ("-m", "--model", "-a", "--alias", "-np", "--parallel", "--host", "--port")
    default = ("--spec-default", Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"]))
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
    def find_model(cls, target: str) -> tuple[str, ModelReference] | None:
        if (path := find_gguf(target)) is None:
            return None
        return str(path.resolve()), ModelReference(id=target, sha256=known_sha256_of(path))

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
                f"{self.executable}: is no {self.program}, or one without --spec-type {PRICED_BY.type}; build b11434 or newer: make engines"
            )
        return [name for name in super().types() if name in names]
