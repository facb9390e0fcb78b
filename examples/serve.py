"""Serve a decoding profile over HTTP, with Prometheus metrics: one request at a time, answered whole or as a stream.

Usage: pip install "autotune-speculative[serve]"
       python examples/serve.py profile.json
       curl localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Count to ten."}'
       curl localhost:8000/metrics

Requests wait for each other, up to ``MAX_WAITING`` of them. A streaming client that goes away ends its request after the round that runs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, StreamingResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, Field

import autotune
from autotune.errors import UserError

MAX_WAITING = 32  # requests
MAX_BODY = 16 << 20  # bytes
MAX_PIXELS, MAX_ASPECT = 1 << 24, 20  # of an image; some processors scale its shorter side up


class Question(BaseModel):
    prompt: str = Field(max_length=100_000)
    images: list[str] = Field(default=[], max_length=8)  # base64
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stream: bool = False


def read_image(text: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
        if image.width * image.height > MAX_PIXELS or max(image.size) > MAX_ASPECT * min(image.size):
            raise ValueError(f"it has {image.width} x {image.height} pixels")
        return image.convert("RGB")
    except Exception as error:  # PIL's readers raise anything
        raise UserError(f"an image cannot be read ({error})") from None


class LimitBody:
    """Refuses bodies that are long, or do not say how long they are, before they are read."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = dict(scope.get("headers", ())).get(b"content-length", b"")
        app = self.app
        if scope["type"] == "http" and scope["method"] == "POST" and not (size.isdigit() and int(size) <= MAX_BODY):
            app = PlainTextResponse(f"a body has a content-length of at most {MAX_BODY} bytes", 413)
        await app(scope, receive, send)


def create_app(profile: Path) -> FastAPI:
    decoder = autotune.load(profile)
    processor, registry = decoder.processor, CollectorRegistry()
    decoder.observers.append(autotune.PrometheusMetrics(decoder.points, registry))
    thread = ThreadPoolExecutor(1)  # the caches of target and draft hold one request
    waiting: set[object] = set()
    app = FastAPI()
    app.add_middleware(LimitBody)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        """Without the value, which may be no Unicode."""
        reasons = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return PlainTextResponse("; ".join(reasons).encode(errors="replace"), 422)

    def arguments(question: Question) -> dict[str, Any]:
        images = [read_image(image) for image in question.images]
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question.prompt}]
        chat = [{"role": "user", "content": content}]
        settings = question.model_dump(include={"max_new_tokens", "temperature", "seed"})
        try:
            text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return {**processor(text=text, images=images or None, return_tensors="pt"), **settings}
        except (ValueError, TypeError) as error:  # a placeholder of an image typed into the prompt, for example
            raise UserError(f"the processor refuses the prompt ({error})") from None

    def decode(question: Question, put: Callable[[Any], None], is_over: threading.Event) -> None:
        """Put the tokens of an answer, then None or an error, until the client goes away."""
        try:
            for token in () if is_over.is_set() else decoder.stream(**arguments(question)):
                put(token)
                if is_over.is_set():
                    break
            put(None)
        except Exception as error:
            put(error)

    async def tokens_of(question: Question) -> AsyncIterator[int]:
        queue, is_over, loop = asyncio.Queue[Any](), threading.Event(), asyncio.get_running_loop()
        if len(waiting) >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests wait; try again later")
        waiting.add(queue)
        thread.submit(decode, question, lambda item: loop.call_soon_threadsafe(queue.put_nowait, item), is_over)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, UserError):
                    raise HTTPException(422, str(item))
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            is_over.set()
            waiting.discard(queue)

    async def pieces(first: int, tokens: AsyncIterator[int]) -> AsyncIterator[str]:
        so_far, sent = [first], ""
        async with aclosing(tokens):  # type: ignore[type-var]
            while True:
                text = processor.decode(so_far, skip_special_tokens=True)
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # more bytes of this character follow
                    yield text[len(sent) :]
                    sent = text
                if (token := await anext(tokens, None)) is None:
                    return
                so_far.append(token)

    @app.post("/generate", response_model=None)
    async def generate(question: Question) -> dict[str, Any] | StreamingResponse:
        tokens = tokens_of(question)
        first = await anext(tokens)  # errors of the request come before it
        if question.stream:
            return StreamingResponse(pieces(first, tokens), media_type="text/plain")
        answer = [first, *[token async for token in tokens]]
        return {"text": processor.decode(answer, skip_special_tokens=True), "new_tokens": len(answer)}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


if __name__ == "__main__":
    import uvicorn

    logging.basicConfig(level=logging.INFO)  # a line for every request
    uvicorn.run(create_app(Path(sys.argv[1])), timeout_graceful_shutdown=10)
