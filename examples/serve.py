"""Serve a decoding profile over HTTP, with Prometheus metrics: one request at a time, answered whole or as a stream.

Usage: pip install "autotune-speculative[serve]"
       python examples/serve.py profile.json
       curl localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Count to ten."}'
       curl localhost:8000/metrics
"""

from __future__ import annotations

import base64
import io
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

import autotune


class Question(BaseModel):
    prompt: str
    images: list[str] = []  # base64
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stream: bool = False


def create_app(profile: Path) -> FastAPI:
    decoder = autotune.load(profile)
    processor, registry = decoder.processor, CollectorRegistry()
    decoder.observers.append(autotune.PrometheusMetrics(decoder.points, registry))
    one_request = threading.Lock()  # the caches of target and draft hold one request
    app = FastAPI()

    def arguments(question: Question) -> dict[str, Any]:
        images = [Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB") for image in question.images]
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question.prompt}]
        chat = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        settings = question.model_dump(include={"max_new_tokens", "temperature", "seed"})
        return {**processor(text=text, images=images or None, return_tensors="pt"), **settings}

    def pieces(question: Question) -> Iterator[str]:
        tokens: list[int] = []
        sent = ""
        with one_request:
            for token in decoder.stream(**arguments(question)):
                tokens.append(token)
                text = processor.decode(tokens, skip_special_tokens=True)
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # more bytes of this character follow
                    yield text[len(sent) :]
                    sent = text

    @app.post("/generate", response_model=None)
    def generate(question: Question) -> dict[str, Any] | StreamingResponse:
        if question.stream:
            return StreamingResponse(pieces(question), media_type="text/plain")
        with one_request:
            output = decoder.generate(**arguments(question))
        tokens = output.sequences[0, output.stats.prompt_tokens :]
        return {
            "text": processor.decode(tokens, skip_special_tokens=True),
            "new_tokens": output.stats.new_tokens,
            "rounds": output.stats.rounds,
        }

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


if __name__ == "__main__":
    import uvicorn

    logging.basicConfig(level=logging.INFO)  # a line for every request
    uvicorn.run(create_app(Path(sys.argv[1])))
