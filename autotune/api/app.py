"""The routes of OpenAI's API over one decoder, with health and metrics."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest
from starlette.exceptions import HTTPException as RouteError
from starlette.requests import ClientDisconnect

from autotune.api.requests import ApiError, ChatRequest, CompletionRequest, Generation, parse_request
from autotune.api.service import CLIENT_GONE, READY, DecoderService, End, Job, Piece

MAX_BODY = 32 << 20  # bytes
BODY_S = 60.0  # longest time until the body is there


def is_local(name: str) -> bool:
    """Whether a name or address means this machine itself."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Reply:
    """The objects with which a request is answered, whole or in pieces."""

    def __init__(self, asked: Generation, model: str) -> None:
        self._asked, self._is_chat = asked, isinstance(asked, ChatRequest)
        names = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        kind = names[1] + (".chunk" if self._is_chat and asked.stream else "")
        head = {"id": f"{names[0]}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head = {**head, "model": model}

    async def whole(self, first: Piece | End, job: Job) -> dict[str, Any]:
        text, tokens, item = [], [], first
        while isinstance(item, Piece):
            text.append(item.text)
            tokens += item.tokens
            item = await job.next()
        return self._object("".join(text), tokens, item.reason) | {"usage": _usage(item)}

    async def events(self, first: Piece | End, job: Job) -> AsyncIterator[dict[str, Any]]:
        options, item = self._asked.stream_options, first
        has_usage = options is not None and options.include_usage
        extra = {"usage": None} if has_usage else {}
        role = {"role": "assistant"}  # of the first piece
        while isinstance(item, Piece):
            yield self._object(item.text, item.tokens, None, role) | extra
            role, item = {}, await job.next()
        yield self._object("", [], item.reason, role) | extra
        if has_usage:
            yield {**self._head, "choices": [], "usage": _usage(item)}

    def _object(
        self, text: str, tokens: list[int], reason: str | None, role: dict[str, str] | None = None
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._is_chat and role is None:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        elif self._is_chat:
            content = {"delta": {**(role or {}), "content": text}}
        if self._asked.return_token_ids:
            content["token_ids"] = tokens
        return {**self._head, "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]}


class EventStream(Response):
    """Server-sent events of a reply. However it ends, the request is over then."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, first: Piece | End, job: Job) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events, self._job = reply.events(first, job), job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def say(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await say(json.dumps(event))
                await say("[DONE]", more=False)
            except ApiError as error:
                await say(json.dumps(error.content), more=False)
        finally:
            self._job.close()


def create_app(service: DecoderService, *, api_key: str | None) -> FastAPI:
    """The routes. Without a key, only requests to names of this machine are answered: another site's page cannot make a
    browser send them.
    """

    def authorize(request: Request) -> None:
        if api_key is None:
            if not is_local(re.sub(r":\d+$", "", request.headers.get("host", "")).strip("[]")):
                raise ApiError(
                    403, "without a key, this server answers to the name localhost; start it with an API key"
                )
        elif request.url.path != "/health":
            given = request.headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
                raise ApiError(
                    401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
                )

    app = FastAPI(openapi_url=None, dependencies=[Depends(authorize)])
    open_requests = Gauge("autotune_open_requests", "Requests that wait or are decoded", registry=service.registry)
    open_requests.set_function(lambda: len(service.open))

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.content, error.status, error.headers)

    @app.exception_handler(RouteError)
    async def no_route(request: Request, error: HTTPException) -> Response:
        return await refused(
            request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        )

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
        service.require_model(name)
        about = {"id": name, "object": "model", "created": service.created, "owned_by": "autotune", "root": name}
        return {**about, "max_model_len": service.max_model_len}

    async def answer(kind: type[Generation], request: Request) -> Response:
        job, response = service.admit(), None
        try:
            asked = parse_request(kind, await _body(request))
            job.watch(request.receive)
            service.submit(job, asked)
            reply, first = Reply(asked, service.model), await job.next()
            response = EventStream(reply, first, job) if asked.stream else JSONResponse(await reply.whole(first, job))
            return response
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        finally:
            if not isinstance(response, EventStream):
                job.close()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(CompletionRequest, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(ChatRequest, request)

    return app


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


def _usage(end: End) -> dict[str, int]:
    prompt, new = end.num_prompt_tokens, end.num_new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
