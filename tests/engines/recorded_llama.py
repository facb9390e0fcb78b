"""A transcript of the real llama-server, and a small server that plays it back.

``python -m tests.engines.recorded_llama MODEL.gguf`` records ``llama_transcript.json`` from llama-server (b11434 and
SmolLM2-135M-Instruct Q4_1 here): greedy answers to the prompts below, and the counts of servers with every type. As an
executable the module is a llama-server that knows these prompts alone; its drafts are the replay's, whose counts the
transcript checks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL.Image import Image

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.ngram_drafters import Drafter, KnownRequest
from autotune.engines.replay import new_drafter, replay_request
from autotune.engines.served import Served
from autotune.workloads.prompt import Prompt, WorkloadPrompt

TRANSCRIPT = Path(__file__).with_name("llama_transcript.json")
CONTEXT, STEP_MS, LIMIT = 8192, 10.0, 24
PART_S = 0.0005  # between parts of a streamed reply
PROMPTS = (
    "Copy this list twice: apple, pear, plum, cherry, quince, apple, pear, plum, fig, grape.",
    "Say it again and again: one potato, two potatoes, three potatoes, one potato, two potatoes, three potatoes.",
    "Count from 1 to 30, separated by commas: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "Write the multiplication table of 7: 7 x 1 = 7, 7 x 2 = 14, 7 x 3 = 21,",
    "Translate into French: The cat sat on the mat. The dog sat on the mat. The bird sat on the mat.",
    "What is the capital of Italy? Answer with a whole sentence.",
    "Write an HTML table with three rows and three columns.",
    "Copy this list twice: apple, pear, plum, cherry, quince, apple, pear, plum, fig, grape. Then sort it.",
)
SWITCHES = ("--dies", "--killed", "--unsteady", "--lies", "--full")


class DraftModel(Drafter):
    """Proposes the answer's tokens but for every eleventh."""

    def __init__(self, speculation: Speculation) -> None:
        (self.k,) = map(int, speculation.options.values())
        self.ends_with_answer = speculation.type.startswith("draft-")

    def draft(self, request: KnownRequest, length: int) -> list[int]:
        places = range(length + 1, min(length + 1 + self.k, len(request.tokens)))
        right = [request.tokens[place] if place % 11 else -1 for place in places]
        return [*right, *[-1] * (self.k - len(right))]


class RecordedServer:
    """One server: the settings that it was started with, the state of its drafts, and its counters."""

    transcripts: tuple[Path, ...] = (TRANSCRIPT,)

    def __init__(self, arguments: list[str]) -> None:
        self.recorded = [row for path in self.transcripts for row in json.loads(path.read_text())["prompts"]]
        self.switches = {word for word in arguments if word in SWITCHES}
        given = dict(itertools.pairwise(arguments))
        self.lock = threading.Lock()
        speculation = self.speculation(given)
        self.drafter: Drafter | None = None
        if speculation is not None:
            self.drafter = DraftModel(speculation) if speculation.model else new_drafter(speculation)
        self.counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        self.asked = 0
        self.read, self.cached = Counter[str](), Counter[str]()

    def speculation(self, given: dict[str, str]) -> Speculation | None:
        """The settings of the command line, by option."""
        self.alias, self.slots = given.get("--alias"), int(given["--parallel"])
        if (name := given.get("--spec-type")) is None:
            return None
        prefix, model = ("draft", given["--spec-draft-model"]) if name.startswith("draft-") else (name, "")
        options = {key: int(given[f"--spec-{prefix}-{key}"]) for key in OPTIONS[name]}
        return Speculation(type=name, options=options, model=model)

    def get(self, path: str) -> Any:
        lines = [f"llamacpp:spec_decode_num_{name}_total {value}" for name, value in self.counts.items()]
        shown = {"/metrics": "\n".join(lines), "/health": "{}"}
        return shown[path] if path in shown else self.reply(path, {})

    def parts(self, body: dict[str, Any], reply: Any) -> list[dict[str, Any]] | None:
        """A reply that is streamed, by token, with the sums so far where they are asked for; None for another. A token
        that ends inside a character is not streamed.
        """
        if not body.get("stream"):
            return None
        cached = self.prefix_cached("", body["prompt"]) if body.get("cache_prompt") else 0
        reply["timings"] |= {"cache_n": cached, "prompt_n": len(body["prompt"]) - cached}
        parts = [{"tokens": [token], "stop": False} for token in reply["tokens"]]
        if body.get("timings_per_token"):
            rounds = [(0, 0), *(self.replayed.drafts if len(parts) > 1 else ()), *[(0, 0)] * len(parts)]
            passes = (number for number, (_, accepted) in enumerate(rounds) for _ in range(accepted + 1))
            for place, (part, number) in enumerate(zip(parts, passes, strict=False), start=1):
                drafted, accepted = map(sum, zip(*rounds[: number + 1], strict=True))
                part["timings"] = {"predicted_n": place, "draft_n": drafted, "draft_n_accepted": accepted}
            parts = [part for part in parts if part["tokens"][0] % 10 or len(parts) == 1]
        return [*parts, reply | {"tokens": [], "stop": True}]

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/props":
                settings = {"default_generation_settings": {"n_ctx": CONTEXT}, "build_info": "b0-unknown"}
                return settings | {"model_alias": self.alias}
            case "/apply-template":
                return {"prompt": body["messages"][-1]["content"]}
            case "/tokenize":
                return {"tokens": next(o["prompt_tokens"] for o in self.recorded if o["text"] == body["content"])}
            case "/detokenize":
                return {"content": " ".join(map(str, body["tokens"]))}
        assert path == "/completion" and body["temperature"] == 0.0
        assert ("id_slot" in body) == (self.slots == 1 and body.get("stream") == body.get("timings_per_token"))
        limit = body["n_predict"]
        if "logit_bias" in body:
            token = body["logit_bias"][0][0]
            drafted = limit - 2 if self.drafter is not None else 0
            return _reply([token] * limit, drafted, drafted, False)
        known = next(row for row in self.recorded if is_begun_by(body["prompt"], row["prompt_tokens"]))
        following = known["tokens"][len(body["prompt"]) - len(known["prompt_tokens"]) :]
        tokens, is_ended = following[:limit], known["is_ended"] and limit >= len(following)
        if limit == 1:
            return _reply(tokens, 0, 0, False)
        answer = self.answered(Served.of(body["prompt"], tokens, limit, is_ended=is_ended))
        return _reply(answer.tokens, answer.verified_nodes, answer.accepted_tokens, is_ended)

    def prefix_cached(self, salt: str, prompt: list[int]) -> int:
        """A prompt with whose first 8 tokens an earlier one with the same salt began has these in the cache."""
        key = f"{salt} {prompt[:8]}"
        cached = 8 * (self.read[key] > 0)
        self.read[key] += len(prompt)
        self.cached[key] += cached
        return cached

    def answered(self, answer: Served) -> Served:
        """The answer as the switches want it, counted; or the server's end."""
        self.asked += 1
        if self.asked == 3 and "--dies" in self.switches:
            os._exit(3)
        if self.asked == 3 and "--killed" in self.switches:
            os.kill(os.getpid(), signal.SIGKILL)
        if "--unsteady" in self.switches and self.asked % 3 == 0:
            answer = answer.model_copy(update={"tokens": [*answer.tokens[:-1], answer.tokens[-1] + 1]})
        return self.counted(answer)

    def counted(self, answer: Served) -> Served:
        self.replayed = replay_request(self.drafter, KnownRequest(answer), CONTEXT)
        rounds, drafted, accepted = self.replayed.counts
        for name, number in zip(self.counts, (rounds, drafted, accepted), strict=True):
            self.counts[name] += number
        return answer.model_copy(update={"verified_nodes": drafted, "accepted_lengths": [accepted]})


def is_begun_by(tokens: list[int], others: list[int]) -> bool:
    return tokens[: len(others)] == others


def _reply(tokens: list[int], drafted: int, accepted: int, is_ended: bool) -> dict[str, Any]:
    """Each pass takes a step, and a fiftieth of one for each draft token."""
    ms = STEP_MS * (max(0, len(tokens) - accepted - 1) + 0.02 * drafted)
    counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    timings = {"predicted_ms": ms, "predicted_n": len(tokens), "prompt_ms": STEP_MS, **counts}
    return {"tokens": tokens, "stop_type": "eos" if is_ended else "limit", "timings": timings}


def http_server(arguments: list[str], kind: type[RecordedServer] = RecordedServer) -> ThreadingHTTPServer:
    """The server of a command line, at its port or any free one."""
    server = kind(arguments)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, content: Any) -> None:
            encoded = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def do_GET(self) -> None:
            self._send(server.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                reply = server.reply(self.path, body)
            if (parts := server.parts(body, reply)) is None:
                self._send(reply)
                return
            self.send_response(200)
            self.end_headers()
            for part in parts:
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
                self.wfile.flush()
                time.sleep(PART_S)

    port = arguments[len(arguments) - arguments[::-1].index("--port")] if "--port" in arguments else 0
    return ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)


def serve(arguments: list[str], kind: type[RecordedServer] = RecordedServer) -> None:
    if "--bogus" in arguments:
        sys.exit("error: invalid argument: --bogus")
    if "--lacks-second" in arguments and any(name in " ".join(arguments) for name in ("ngram-simple", "suffix")):
        sys.exit("error: no such type")
    if "--lacks-drafts" in arguments and any("draft" in word and "--lacks" not in word for word in arguments):
        sys.exit("error: the head is of another model")
    if "--old" in arguments and (counting := "--per-request-spec-decode-metrics") in arguments:
        sys.exit(f"vllm: error: unrecognized arguments: {counting} detailed")
    http_server(arguments, kind).serve_forever()


def pixels_key(image: Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()[:16]


def text_prompts() -> list[WorkloadPrompt]:
    return [WorkloadPrompt(f"{n}", Prompt(prompt=text, max_new_tokens=LIMIT), ()) for n, text in enumerate(PROMPTS)]


def record(
    backend: EngineBackend,
    transcript: Path,
    prompts: Sequence[WorkloadPrompt],
    tried: Sequence[Speculation],
    servers: list[dict[str, Any]],
) -> None:
    """Record a transcript: a server for each setting, over the prompts and the first two again; those of known
    ``servers`` are not recorded again.
    """
    rows = []
    with backend.started() as server:
        for prompt in prompts:
            answer = server.ask(prompt)
            kept = answer.model_dump(include={"prompt_tokens", "tokens", "limit", "is_ended"})
            image = {"image": pixels_key(prompt.images[0])} if prompt.images else {}
            rows.append({"text": prompt.settings.text, **image, **kept, "beyond": server.continuation(answer, prompt)})
    plain = [row["tokens"] for row in (*rows, *rows[:2])]
    for speculation in tried:
        settings = speculation.model_dump(exclude_defaults=True)
        if settings in [one["speculation"] for one in servers]:
            continue
        with backend.started(speculation) as server:
            found = [server.ask(prompt) for prompt in (*prompts, *prompts[:2])]
        if [one.tokens for one in found] == plain:
            servers.append({"speculation": settings, "counts": [one.counts for one in found]})
        lines = (",\n".join(json.dumps(row) for row in part) for part in (rows, servers))
        transcript.write_text('{{"prompts": [\n{}\n],\n"servers": [\n{}\n]}}\n'.format(*lines))


if __name__ == "__main__":
    if "--port" in sys.argv:
        serve(sys.argv[1:])
    else:
        from autotune.engines.llama_cpp import LlamaBackend
        from benchmarks.engine_counts import settings

        backend = LlamaBackend(sys.argv[1], command="llama-server -t 1")
        record(backend, TRANSCRIPT, text_prompts(), settings("llama.cpp"), [])
