"""The process of ``autotune serve``: its socket, its end by a signal, and its exit code."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from autotune.api.app import create_app, is_local
from autotune.api.requests import ApiError
from autotune.api.service import READY, DecoderService
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder

SEND_S = 5  # for what slow clients have not yet read when all requests are decoded
Ready = Callable[[DecoderService], None]
"""Called once, when requests are answered."""
JOIN_S = 10.0  # for the step that the decoder runs


class _Server(uvicorn.Server):
    """On the first signal it refuses new requests and ends when the others are answered, or after ``drain_s``; on the second
    one it ends at once. Signals are not raised again.
    """

    def __init__(self, config: uvicorn.Config, service: DecoderService, drain_s: float, is_ready: Ready) -> None:
        super().__init__(config)
        self.service, self.drain_s = service, drain_s
        self._is_ready: Ready | None = is_ready
        self.signal, self.num_cut = 0, 0
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._deadline = 0.0 if self.signal else time.monotonic() + self.drain_s
        self.signal, self.service.is_draining = sig, True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to end."""
        await super().on_tick(counter)
        if self.service.status == READY and self._is_ready is not None:
            self._is_ready(self.service)
            self._is_ready = None
        is_over = self.signal and (not self.service.open or time.monotonic() >= self._deadline)
        if is_over or self.service.failure is not None:
            self.num_cut = self.service.cancel_all(ApiError(503, "the server ends", code="draining", retry_s=5))
            return True
        return False


def listen(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket that accepts connections.

    Raises:
        UserError: no such address, one that is taken, or one that other machines reach without a key.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not has_key and not is_local(str(address[0])):
            raise UserError(
                f"--host {host}: other machines can reach this address, so that a key is needed; set AUTOTUNE_API_KEY"
            )
        return socket.create_server(address[:2], family=family)
    except (OSError, ValueError) as error:  # ValueError: a name that is none
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port}: cannot listen there ({reason}); choose another --port or --host") from None


def serve(
    load: Callable[[], Decoder],
    listener: socket.socket,
    *,
    model: str,
    api_key: str | None,
    max_waiting: int,
    max_model_len: int | None,
    drain_s: float,
    is_ready: Ready,
) -> int:
    """Answer requests until a signal comes; returns the exit code: 0 if every request was answered."""

    limits: dict[str, Any] = {"max_waiting": max_waiting, "max_model_len": max_model_len}
    service = DecoderService(load, model=model, registry=CollectorRegistry(), **limits)
    app = create_app(service, api_key=api_key)
    options: dict[str, Any] = {
        "http": "h11",
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "off",
        "server_header": False,
    }
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=SEND_S, **options)
    server = _Server(config, service, drain_s, is_ready)
    service.start()
    server.run(sockets=[listener])
    service.join(JOIN_S)
    if service.failure is not None and not server.signal:
        raise service.failure
    return 128 + server.signal if server.num_cut else 0
