"""llama.cpp's ``llama-server``. Loads no torch."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import DEEPEST, ModelType, Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.engine_server import NATURAL, TEXT, TIMES, TOKENS, EngineServer, text_chat
from autotune.engines.served import Served
from autotune.errors import UserError
from autotune.files import known_sha256_of
from autotune.modeling.gguf import SUFFIX, architecture_of, find_gguf, gguf_sizes, require_chat_template
from autotune.modeling.hub import is_id
from autotune.workloads.prompt import WorkloadPrompt

PRICED_BY = Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 64})
REPEATED_TOKENS = 8  # that price a verification: more than n-match
VERIFICATIONS = "llamacpp:spec_decode_num_drafts_total"
SUMS = ("predicted_n", "draft_n", "draft_n_accepted")
"""Tokens, draft tokens and accepted ones of a reply so far."""
HEADS: dict[str, ModelType] = {"eagle3": "draft-eagle3", "dflash": "draft-dflash"}
"""Types of files that hold a head alone, by their architecture."""
FILE_TYPES = {
    **{0: "float32", 1: "float16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{12: "Q3_K_M", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "bfloat16"},
}
"""Most files' types of weights, by ``general.file_type``."""


def llama_arguments(speculation: Speculation | None) -> list[str]:
    """Arguments of llama-server."""
    if speculation is None:
        return []
    words = ["--spec-type", speculation.type]
    words += ["--spec-draft-model", speculation.model] if speculation.model else []
    for name, value in speculation.options.items():
        words += [f"--spec-{'draft' if speculation.is_chain else speculation.type}-{name}", str(value)]
    return words


def verifications_of(sums: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
    """Verifications as ``Served.verifications``, of a reply that is streamed token by token.

    A part that ends inside a character is not sent, so the next one may tell of several tokens. Where it tells of more
    draft tokens than one verification has, the places are unknown until the next part of a single token.

    Args:
        sums: tokens, draft tokens and accepted ones up to each part (``SUMS``).
        depth: most draft tokens of a verification.
    """
    verifications, place = list[list[int]](), 1
    for (tokens_before, *counts_before), (tokens, *counts) in itertools.pairwise([[1, 0, 0], *sums]):
        drafted, accepted = (after - before for after, before in zip(counts, counts_before, strict=True))
        if drafted and tokens == tokens_before + 1:
            place = tokens_before
        elif drafted > depth:
            place = 0
        if drafted and place:
            verifications.append([place, drafted, accepted])
            place += accepted + 1
    return verifications


class LlamaServer(EngineServer):
    """A client of one llama-server, whose first slot it uses."""

    priced_by = shlex.join(llama_arguments(PRICED_BY))
    longest = int(PRICED_BY.options["n-max"])

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prompts_read = list[tuple[int, int]]()
        self.context = self.value("/props", NATURAL, "default_generation_settings", "n_ctx")
        self.build = self.value("/props", TEXT, "build_info")
        self.alias = self.value("/props", TEXT, "model_alias")

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        chat, advice = text_chat(prompt), "check its chat template"
        text = self.value("/apply-template", TEXT, "prompt", body=chat, advice=advice)
        request = {"content": text, "add_special": True, "parse_special": True}
        return self.value("/tokenize", TOKENS, "tokens", body=request)

    def answer(self, tokens: list[int], limit: int, prompt: WorkloadPrompt | None = None) -> Served:
        """After a request that only reads the prompt: from nothing, so that no answer depends on the order of prompts,
        and outside the CPU time.
        """
        self._parts(tokens, 1, cache_prompt=False)
        return self._timed(tokens, limit)

    def _verifications(self) -> int:
        """Verifications of a server that was started here, as others may count none."""
        return self.metrics("start it with --metrics")[VERIFICATIONS] if self.process else 0

    def verify(self, prompt: list[int], n: int) -> Served:
        """The prompt ends in a run of one token, the same token is forced at every position, so that the draft repeats
        it, and the server cuts the draft to what is left of ``n_predict``.
        """
        token = prompt[-1]
        return self._timed([*prompt, *[token] * REPEATED_TOKENS], n + 1, logit_bias=[[token, 1e4]])

    def verified(self, tokens: list[int]) -> Served:
        return self._timed(tokens, DEEPEST + 2)

    def _timed(self, tokens: list[int], limit: int, **options: Any) -> Served:
        """The reply; of a server that drafts chains in parts, whose sums tell its verifications."""
        rounds, before = self._verifications(), self.cpu_ms()
        parts = self._parts(tokens, limit, is_streamed=self.is_chain, **options)
        spent, rounds = max(0.0, self.cpu_ms() - before), self._verifications() - rounds
        with self.reply_of("/completion"):
            sums = [[part["timings"].get(name, 0) for name in SUMS] for part in parts]
            depth = (self.speculation.depth or 0) if self.speculation else 0
            verifications = verifications_of(sums, depth) if self.is_chain else []
            answer, timings = [token for part in parts for token in part["tokens"]], parts[-1]["timings"]
            if self.is_chain and len(answer) < timings["predicted_n"]:
                answer = self._parts(tokens, limit, **options)[0]["tokens"]
            wall_ms, prompt_ms = TIMES.validate_python([timings["predicted_ms"], timings["prompt_ms"]], strict=True)
            drafted = timings.get("draft_n", 0)
            return Served.of(
                tokens,
                answer,
                limit,
                is_ended=parts[-1]["stop_type"] == "eos",
                rounds=rounds,
                accepted_lengths=[timings.get("draft_n_accepted", 0)] if drafted else [],
                verified_nodes=drafted,
                verifications=verifications,
                decode_ms=wall_ms,
                cpu_ms=spent * wall_ms / max(wall_ms + prompt_ms, 1e-9),
            )

    def _parts(
        self, tokens: list[int], limit: int, *, is_streamed: bool = False, **options: Any
    ) -> list[dict[str, Any]]:
        """The reply, or the parts of one that is streamed, token by token with the sums so far."""
        request = {"prompt": tokens, "temperature": 0.0, "return_tokens": True, "id_slot": 0, "n_predict": limit}
        if is_streamed:
            parts = self.streamed("/completion", request | options | {"timings_per_token": True})
            return [part for part, _ in parts]
        return [self.read_json("/completion", request | options, "look into its log")]

    def stream(
        self, answer: Served, prompt: WorkloadPrompt | None = None, cache: str = ""
    ) -> tuple[list[int], list[float]]:
        """Repeated prompts are read from nothing, and do not count in ``under_load``."""
        is_new = cache.endswith(".0")
        request = {"prompt": answer.prompt_tokens, "n_predict": answer.limit, "temperature": 0.0, "return_tokens": True}
        parts = list(self.streamed("/completion", request | {"cache_prompt": is_new}))
        with self.reply_of("/completion"):
            tokens = TOKENS.validate_python([token for part, _ in parts for token in part["tokens"]], strict=True)
            timings = parts[-1][0]["timings"]
            cached, read = TOKENS.validate_python([timings.get("cache_n", 0), timings.get("prompt_n", 0)], strict=True)
        if is_new:
            self.prompts_read.append((cached, cached + read))
        return tokens, [spent for _, spent in parts]

    def under_load(self) -> tuple[int, int, int]:
        return 0, sum(cached for cached, _ in self.prompts_read), sum(read for _, read in self.prompts_read)

    def text(self, tokens: Sequence[int]) -> str:
        return self.value("/detokenize", TEXT, "content", body={"tokens": list(tokens)})


class LlamaBackend(EngineBackend):
    """A llama-server with a GGUF file."""

    name = "llama.cpp"
    program = "llama-server"
    install = "install llama.cpp (https://github.com/ggml-org/llama.cpp)"
    models = "a GGUF file, or a folder with one"
    has_server_per_load = True
    server = LlamaServer
    own_arguments = ("-m", "--model", "-a", "--alias", "-np", "--parallel", "--host", "--port")
    tested = (PRICED_BY, Speculation(type="ngram-simple", options={"size-n": 12, "size-m": 16}))
    space: ClassVar[
        dict[str, Sequence[tuple[float, ...]]]
    ] = {  # of which the fastest is that of 700 (``benchmarks/engine_regret.py``)
        "ngram-simple": [
            *((1, most) for most in (3, 12, 16, 24, 32, 48)),
            *((2, most) for most in (4, 6, 16, 24)),
            *((3, 6), (3, 48), (4, 8), (4, 24), (6, 24)),
        ],
        "ngram-mod": [(4, 0, 8), (4, 2, 4), (8, 0, 8), (10, 2, 8), (20, 4, 24)],
    }

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
        return HEADS.get(architecture_of(path), "draft-simple"), path.resolve()

    def find_heads(self) -> list[tuple[ModelType, Path | None, int]]:
        """Heads in the file, and those in its folder that have its hidden size."""
        path = Path(self.target)
        sizes = gguf_sizes(path)
        heads: list[tuple[ModelType, Path | None, int]] = (
            [("draft-mtp", None, DEEPEST)] if "head_layers" in sizes else []
        )
        for file in sorted(path.parent.glob(f"*{SUFFIX}")):
            if (kind := HEADS.get(architecture_of(file))) and gguf_sizes(file).get("hidden_size") == sizes.get(
                "hidden_size"
            ):
                heads.append((kind, file.resolve(), DEEPEST))
        return heads

    def read_model(self) -> str:
        if self.url is None and "--chat-template" not in " ".join(self.arguments):
            require_chat_template(Path(self.target))
        return FILE_TYPES.get(gguf_sizes(Path(self.target)).get("file_type", -1), "quantized")

    def words(self, speculation: Speculation | None) -> list[str]:
        if speculation is not None and (draft := speculation.model) and is_id(draft.partition(":")[0]):
            speculation = speculation.model_copy(update={"model": str(find_gguf(draft, is_split=True) or draft)})
        return [str(self.executable), "-m", self.target, *self.arguments, *llama_arguments(speculation)]

    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        """With counters, and without prompts of former requests in a cache."""
        room = ["--ctx-size", f"{at_once * longest}"] if longest else []
        return ["--metrics", "--cache-ram", "0", "--parallel", f"{at_once}", *room, "--alias", alias]

    def build_of(self, server: EngineServer) -> str:
        """SHA-256 of the executable and the libraries next to it: builds from a source archive have no version."""
        libraries = sorted(path for path in self.executable.parent.glob("lib*.so*") if not path.is_symlink())
        return known_sha256_of(self.executable, *libraries)
