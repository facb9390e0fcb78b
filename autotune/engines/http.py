"""Requests to serving engines over HTTP. Loads no torch."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from autotune.documents.speculation import Milliseconds, Natural
from autotune.errors import UserError, reading
from autotune.strict_parsing import parse_json

ANSWER_TIMEOUT_S = 600.0  # of one request
ASK_TIMEOUT_S = 20.0  # of a question about the engine
MOST_BYTES = 1 << 26  # of a reply
TEXT, TOKENS, TIMES = TypeAdapter(str), TypeAdapter(list[Natural]), TypeAdapter(list[Milliseconds])
THIS_MACHINE = ("localhost", "0.0.0.0", "::1", "::")
ADVICE = "give the address of a serving engine, such as http://localhost:8000"

SAMPLE = re.compile(r"^((?:vllm|llamacpp):(?:spec_decode|generation)\w+_total)(?:\{.*\})? (\S+)", re.MULTILINE)


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """The response to a request. One to this machine is not sent to the proxy that ``http_proxy`` names."""
    host = urlsplit(request.full_url).hostname or ""
    direct = [urllib.request.ProxyHandler({})] if host in THIS_MACHINE or host.startswith("127.") else []
    return urllib.request.build_opener(*direct).open(request, timeout=timeout_s)


class EngineHttp:
    """Requests to one engine, with errors in one line."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url}: an address begins with http:// or https://; {ADVICE}")

    def reply_of(self, path: str) -> AbstractContextManager[None]:
        """Inside the context, a reply is read, whose form no server has to keep."""
        return reading(f"{self.url}{path}: not the reply of a serving engine", ADVICE)

    def read_json(self, path: str, body: dict[str, Any] | None = None, advice: str = ADVICE) -> dict[str, Any]:
        content = self.read(path, body, advice)
        try:
            value = parse_json(content.decode())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"{self.url}{path}: not a JSON object; {ADVICE}")
        return value

    def read(self, path: str, body: dict[str, Any] | None = None, advice: str = ADVICE) -> bytes:
        return b"".join(self.lines(path, body, advice))

    def metrics(self, advice: str = ADVICE) -> Counter[str]:
        """The counters of speculation and of answers' tokens by name, summed over the engine's replicas."""
        text, found = self.read("/metrics", advice=advice).decode(errors="replace"), Counter[str]()
        with self.reply_of("/metrics"):
            for name, value in SAMPLE.findall(text):
                found[name] += int(float(value))
            TOKENS.validate_python(list(found.values()))
        return found

    def lines(self, path: str, body: dict[str, Any] | None, advice: str) -> Iterator[bytes]:
        """Lines of a reply as they come."""
        content, timeout_s = (None, ASK_TIMEOUT_S) if body is None else (json.dumps(body).encode(), ANSWER_TIMEOUT_S)
        try:
            request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
            with open_url(request, timeout_s) as response:
                left = MOST_BYTES
                while line := response.readline(left + 1):
                    if (left := left - len(line)) < 0:
                        raise HTTPException(f"its reply is longer than {MOST_BYTES} bytes")
                    yield line
                if response.length:
                    raise HTTPException("its reply is cut short")
        except urllib.error.HTTPError as error:
            message = ""
            with suppress(OSError, HTTPException):
                message = _message(error.read(MOST_BYTES))
            raise UserError(
                f"{self.url}{path}: the engine answers {error.code}{message and f', {message}'}; {advice}"
            ) from None
        except (OSError, ValueError, HTTPException) as error:  # refused, timed out, cut short, no HTTP, or no address
            reason = getattr(error, "reason", error)
            raise UserError(f"{self.url}: no engine answers ({reason}); start it, or check the address") from None


def _message(body: bytes) -> str:
    """The message of an error in one line, as OpenAI's API has it."""
    try:
        content = parse_json(body.decode())
        found = content.get("error", content)
        message = found.get("message", "") if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        return ""
    return " ".join(str(message).split())[:400]
