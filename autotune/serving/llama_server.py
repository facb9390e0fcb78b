"""llama.cpp's ``llama-server``: finding it, starting it, and requests whose time and speculation it counts. Loads no torch."""

from __future__ import annotations

import math
import mmap
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.documents.engine_profile import (
    OPTIONS,
    NgramType,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    arguments_of,
)
from autotune.errors import UserError
from autotune.files import known_sha256_of, user_cache
from autotune.serving.client import EngineHttp
from autotune.serving.server import running
from autotune.workloads.prompt import Message, WorkloadPrompt

EXECUTABLE = "llama-server"
FIXED = ("--parallel", "1", "--metrics", "--cache-ram", "0")
"""Arguments of every server: one slot, whose state the replay follows, counters, and no prompts of former requests."""
METADATA_BYTES = 1 << 28  # of a GGUF file, in which its metadata lie
COUNTERS = {
    "verifications": "llamacpp:spec_decode_num_drafts_total",
    "drafted": "llamacpp:spec_decode_num_draft_tokens_total",
    "accepted": "llamacpp:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True)
class EngineCommand:
    """The words that start a llama-server with a model, without its speculation."""

    executable: Path
    model: Path
    arguments: tuple[str, ...]

    def words(self, speculations: Sequence[Speculation] = ()) -> list[str]:
        return [str(self.executable), "-m", str(self.model), *self.arguments, *arguments_of(list(speculations))]

    @property
    def build(self) -> str:
        """SHA-256 of the executable and the libraries next to it: builds from a source archive have no version."""
        libraries = sorted(path for path in self.executable.parent.glob("lib*.so*") if not path.is_symlink())
        return known_sha256_of(self.executable, *libraries)

    def types(self) -> list[NgramType]:
        """The n-gram types that the build has, by its help.

        Raises:
            UserError: another program, or a build without n-gram speculation.
        """
        try:
            done = subprocess.run([self.executable, "--help"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"--engine-command {self.executable}: cannot be run ({error}); name a llama-server"
            ) from None
        text = done.stdout + done.stderr
        if "--spec-type" not in text:
            what = "is older than --spec-type" if "--n-predict" in text else "is another program than llama-server"
            raise UserError(
                f"--engine-command {self.executable}: {what}; build llama.cpp b11434 or newer: make engines"
            )
        listed = set(re.findall(r"[\w-]+", text.partition("--spec-type")[2].partition("\n\n")[0][:400]))
        return [name for name in OPTIONS if name in listed]


def find_engine(command: str | None, model: Path) -> EngineCommand:
    """The server that ``--engine-command`` names, with further arguments; by default llama-server on the PATH, or the one that
    ``make engines`` built.

    Raises:
        UserError: there is none.
    """
    words = shlex.split(command) if command else [EXECUTABLE]
    if not words:
        raise UserError("--engine-command is empty; name a llama-server")
    built = user_cache().parent / "autotune-engines" / "llama.cpp" / "bin" / EXECUTABLE
    found = shutil.which(words[0]) or (str(built) if not command and built.exists() else None)
    if found is None:
        raise UserError(
            f"--engine-command {words[0]}: no such executable; build it with make engines, or name a llama-server"
        )
    if refused := [word for word in words[1:] if word.startswith(("--spec", "-m", "--model", "--parallel", "-np"))]:
        raise UserError(f"--engine-command: {refused[0]} is set by the search; leave it out")
    return EngineCommand(Path(found).resolve(), model.resolve(), tuple(words[1:]))


def require_chat_template(model: Path) -> None:
    """Refuse a GGUF file without a chat template, for which llama-server would take ChatML."""
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != b"GGUF":
            raise UserError(f"{model}: truncated, damaged or no GGUF file; download it again")
        if content.find(b"tokenizer.chat_template", 0, METADATA_BYTES) < 0:
            raise UserError(
                f"{model}: the GGUF file has no chat template; give --engine-command 'llama-server --chat-template NAME', or an "
                "instruction-tuned model"
            )


@dataclass(frozen=True)
class TimedAnswer:
    """An answer with its time from the first token to the last, and the counts of its speculation."""

    answer: ServedAnswer
    drafted: int
    accepted: int
    wall_ms: float
    cpu_ms: float
    """CPU time of the server's threads; NaN if they are not on this machine."""


class LlamaServer(EngineHttp):
    """A client of one llama-server.

    Raises:
        UserError: nothing answers at ``url``, or it is no llama-server.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(url)
        self.process = process
        props = self.read_json("/props")
        with self.reply_of("/props"):
            self.context = int(props["default_generation_settings"]["n_ctx"])
            self.num_slots = int(props["total_slots"])
            self.build = f"{props.get('build_info')}"

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        """The tokens of a prompt after the model's chat template."""
        if prompt.pixels:
            raise UserError(f"{prompt.name}: has an image, and speculation by n-grams is tuned on text; leave it out")
        content = prompt.content
        chat = [Message(role="user", content=content)] if isinstance(content, str) else content
        messages = [{"role": message.role, "content": message.text} for message in chat]
        advice = "check the chat template"
        text = self.read_json("/apply-template", {"messages": messages}, advice).get("prompt")
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = self.read_json("/tokenize", body, advice).get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise UserError(f"{self.url}/tokenize: no tokens of {prompt.name}; check the server's version")
        return [int(token) for token in tokens]

    def answer(self, tokens: list[int], limit: int, *, task: str = "prompt", forced: int | None = None) -> TimedAnswer:
        """Decode one prompt greedily, after its prefill in a request of its own.

        The prefill starts from nothing, so that answers do not depend on the order of prompts, and is outside the CPU time.

        Args:
            forced: a token that every position is made to choose.
        """
        bias = {} if forced is None else {"logit_bias": [[forced, 1e4]]}
        if forced is None:
            self._complete(tokens, 1, cache_prompt=False)
        before = self._cpu_ms()
        body = self._complete(tokens, limit, cache_prompt=True, **bias)
        spent = self._cpu_ms() - before
        with self.reply_of("/completion"):
            timings = body["timings"]
            wall_ms, prompt_ms = float(timings["predicted_ms"]), float(timings["prompt_ms"])
            return TimedAnswer(
                answer=ServedAnswer(
                    prompt_tokens=tokens,
                    tokens=[int(token) for token in body["tokens"]],
                    limit=limit,
                    is_ended=body["stop_type"] == "eos",
                    task=task,
                ),
                drafted=int(timings.get("draft_n", 0)),
                accepted=int(timings.get("draft_n_accepted", 0)),
                wall_ms=wall_ms,
                cpu_ms=spent * wall_ms / max(wall_ms + prompt_ms, 1e-9),
            )

    def counts(self) -> SpeculationCounts:
        """Counts of all requests since the server's start.

        Raises:
            UserError: the server exposes no metrics.
        """
        text = self.read("/metrics", advice="start it with --metrics").decode(errors="replace")
        found = {name: re.search(rf"^{counter} (\S+)$", text, re.MULTILINE) for name, counter in COUNTERS.items()}
        return SpeculationCounts(**{name: int(float(match[1])) if match else 0 for name, match in found.items()})

    def _complete(self, tokens: list[int], limit: int, **options: Any) -> dict[str, Any]:
        request = {"prompt": tokens, "n_predict": limit, "temperature": 0.0, "return_tokens": True, "id_slot": 0}
        return self.read_json("/completion", request | options, "look into its log")

    def _cpu_ms(self) -> float:
        if self.process is None:
            return math.nan
        total = 0
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except (OSError, ValueError, IndexError):  # a thread that has ended
                continue
        return total / 1e6 or math.nan


@contextmanager
def started_llama(command: EngineCommand, speculations: Sequence[Speculation] = ()) -> Iterator[LlamaServer]:
    """Start a llama-server in a new state; see ``server.running``."""
    words = command.words(speculations)
    with running([*words, *FIXED], EXECUTABLE) as (url, process):
        yield LlamaServer(url, process)
