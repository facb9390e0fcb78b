"""The routes of OpenAI's API over one decoder, with health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from autotune.serve.address import is_local
from autotune.serve.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from autotune.serve.service import READY, AnswerJob, DecoderService, Piece

MAX_BODY = 32 << 20  # bytes
BODY_S = 30.0  # longest time until the body is there


Asked = CompletionRequest | ChatRequest


class Reply:
    """The objects with which a request is answered, whole or in pieces."""

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked, self._is_chat = asked, isinstance(asked, ChatRequest)
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        kind += ".chunk" if self._is_chat and asked.stream else ""
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    async def whole(self, first: Piece, job: AnswerJob) -> dict[str, Any]:
        pieces = [first]
        while pieces[-1].reason is None:
            pieces.append(await job.next())
        text, tokens = "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens]
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        usage = _usage(first.num_prompt_tokens, len(tokens))
        return self._object(message if self._is_chat else {"text": text}, tokens, pieces[-1].reason) | usage

    async def events(self, first: Piece, job: AnswerJob) -> AsyncIterator[str]:
        """Server-sent events; an error ends them."""
        options, item = self._asked.stream_options, first
        has_usage = options is not None and options.include_usage
        is_counted = options is not None and options.continuous_usage_stats
        delta, num_tokens = {"role": "assistant"}, 0  # of the first event
        try:
            while True:
                content = {"delta": {**delta, "content": item.text}} if self._is_chat else {"text": item.text}
                event = self._object(content, item.tokens, item.reason)
                num_tokens += len(item.tokens)
                usage = _usage(item.num_prompt_tokens, num_tokens) if is_counted else {"usage": None}
                yield _event(event | usage if has_usage or is_counted else event)
                if item.reason is not None:
                    break
                delta, item = {}, await job.next()
            if has_usage:
                yield _event({**self._head, "choices": [], **_usage(item.num_prompt_tokens, num_tokens)})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.content)

    def _object(self, content: dict[str, Any], tokens: list[int], reason: str | None) -> dict[str, Any]:
        extra = {"token_ids": tokens} if self._asked.return_token_ids else {}
        return {**self._head, "choices": [{"index": 0, **content, **extra, "logprobs": None, "finish_reason": reason}]}


def create_app(service: DecoderService, api_key: str | None) -> FastAPI:
    """The routes. Without a key, requests name this machine as their host: the page of another site cannot make a
    browser send such ones.
    """

    async def authorize(request: Request) -> None:
        host, given = (request.headers.get(name, "") for name in ("host", "authorization"))
        if api_key is None and not is_local(re.sub(r":\d+$", "", host).strip("[]")):
            raise ApiError(403, "without a key, the host of a request is localhost; start the server with a key")
        is_open = api_key is None or request.url.path == "/health"
        if not is_open and not hmac.compare_digest(given.encode("latin-1"), f"Bearer {api_key}".encode()):
            raise ApiError(401, "a key is needed; send Authorization: Bearer KEY", code="invalid_api_key")

    app = FastAPI(openapi_url=None, dependencies=[Depends(authorize)])
    app.exception_handler(ApiError)(_refusal)
    app.exception_handler(HTTPException)(_no_route)

    @app.get("/health")
    async def health() -> Response:
        status = service.status
        return JSONResponse({"status": status, "open_requests": len(service.open)}, 200 if status == READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(service.model)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_ready()
        service.require_model(name)
        about = {"id": name, "object": "model", "created": service.created, "owned_by": "autotune", "root": name}
        return {**about, "max_model_len": service.max_model_len}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, CompletionRequest, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, ChatRequest, request)

    return app


async def _refusal(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.content, error.status, error.headers)


async def _no_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refusal(request, ApiError(error.status_code, message))


async def _answer(service: DecoderService, kind: type[Asked], request: Request) -> Response:
    """The whole answer to a request, or the stream of its events."""
    job = service.accept()
    try:
        asked = parse_request(kind, await _body(request))
        job.watch(request.receive)
        service.submit(job, asked)
        reply, first = Reply(asked, service.model), await job.next()  # what is wrong with a request comes first
        if asked.stream:
            return StreamingResponse(reply.events(first, job), media_type="text/event-stream")
        return JSONResponse(await reply.whole(first, job))
    except BaseException as error:
        job.cancel(ApiError(499, "the request has ended"))
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        raise


async def _body(request: Request) -> bytes:
    """The body of a request, if it is JSON and not too long."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "a body is JSON; send Content-Type: application/json")  # which no form of another site can
    too_large = ApiError(413, f"a body has at most {MAX_BODY} bytes; send smaller images")
    size, body = request.headers.get("content-length", ""), bytearray()
    if size.isdecimal() and int(size) > MAX_BODY:
        raise too_large
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
    return bytes(body)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(prompt: int, new: int) -> dict[str, Any]:
    """The numbers of tokens of a prompt and its answer so far."""
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}
