"""A small serving engine in a thread: this project's runtime behind an HTTP server with the API and the metrics of
vLLM.

Its rounds are real: a chain of an independent draft, which reads the placeholders of images as text.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from PIL import Image
from prometheus_client import CollectorRegistry, Counter, generate_latest

from autotune.runtime.decoder import Decoder

VLLM_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


class SmallEngine:
    """State of one server. Requests are decoded one at a time, by ``decoder``."""

    def __init__(self, decoder: Decoder, processor: Any, *, name: str = "vllm", version: str = "0.32.0") -> None:
        self.decoder = decoder
        self.processor = processor
        self.version = version
        self.refusal: str | None = None
        """Message with which every request is refused."""
        self.registry = CollectorRegistry()
        self.generated = Counter(f"{name}:generation_tokens", "tokens", registry=self.registry)
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        if decoder.draft is not None:
            for counter in VLLM_COUNTERS:
                self._counters[counter] = Counter(f"vllm:{counter}", "counts", registry=self.registry)

    def get(self, path: str) -> Any:
        """The answer to a question: text, or an object."""
        if path == "/metrics":
            return generate_latest(self.registry).decode()
        if path == "/v1/models":
            return {"data": [{"id": "served"}]}
        assert path == "/version"
        return {"version": self.version}

    def decode(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a completion or a chat."""
        assert body["model"] == "served" and body["temperature"] == 0.0 and body["return_token_ids"]
        if path == "/v1/completions":
            inputs: dict[str, Any] = {"input_ids": torch.tensor([body["prompt"]])}
        else:
            inputs = self._chat_inputs(body["messages"])
        with self._lock:
            output = self.decoder.generate(**inputs, max_new_tokens=body["max_tokens"])
            tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            self._count(output.stats, len(tokens))
        names = ("token_ids", "prompt_token_ids")
        choice = dict(zip(names, (tokens, inputs["input_ids"][0].tolist()), strict=True))
        return {"choices": [choice]}

    def _chat_inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        images = []
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image_url":
                    data = base64.b64decode(part.pop("image_url")["url"].partition("base64,")[2])
                    images.append(Image.open(io.BytesIO(data)))
                    part["type"] = "image"
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return dict(self.processor(text=text, images=images, return_tensors="pt"))

    def _count(self, stats: Any, num_tokens: int) -> None:
        self.generated.inc(num_tokens)
        if self.decoder.draft is None:
            return
        drafts, drafted, accepted = (self._counters[name] for name in VLLM_COUNTERS)
        drafts.inc(stats.rounds)
        drafted.inc(sum(stats.verified_nodes))
        accepted.inc(sum(stats.accepted_lengths))


@contextmanager
def running(engine: SmallEngine) -> Iterator[str]:
    """Run an engine on a free port of this machine; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, engine.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if engine.refusal is not None:
                self._reply(400, {"error": {"message": engine.refusal}})
            else:
                self._reply(200, engine.decode(self.path, body))

        def _reply(self, status: int, content: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write((content if isinstance(content, str) else json.dumps(content)).encode())

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
