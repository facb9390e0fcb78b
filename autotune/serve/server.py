"""The process of ``autotune serve``: its socket, its end by a signal, and its exit code."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from autotune.runtime.decoder import Decoder
from autotune.serve.app import create_app
from autotune.serve.requests import ApiError
from autotune.serve.service import READY, DecoderService
from autotune.serve.settings import ServeSettings

SEND_S = 5  # for what clients have not yet read when all requests are decoded
JOIN_S = 10.0  # for the step that the decoder runs


class ApiServer(uvicorn.Server):
    """Answers requests until a signal comes, then those that it has accepted, as long as there is time; the next signal
    ends it at once. Signals are not raised again.

    Args:
        load: called in the decoder's thread.
        announce: called with the longest prompt and answer, in tokens, when requests are answered.
    """

    def __init__(self, load: Callable[[], Decoder], settings: ServeSettings, announce: Callable[[int], None]) -> None:
        self.service, self.drain_s, self.signal = DecoderService(load, settings), settings.drain_s, 0
        self._announce: Callable[[int], None] | None = announce
        self._num_cut = 0
        options: dict[str, Any] = {"http": "h11", "ws": "none", "loop": "asyncio", "lifespan": "off"}
        options |= {"log_config": None, "access_log": False, "server_header": False}
        app = create_app(self.service, settings.api_key)
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=SEND_S, **options))

    def answer_until_signal(self, listener: socket.socket) -> int:
        """Run; returns the exit code, 0 if every accepted request was answered."""
        self.service.start()
        self.run(sockets=[listener])
        self.service.join(JOIN_S)
        if self.service.failure is not None and not self.signal:
            raise self.service.failure
        return 128 + self.signal if self._num_cut else 0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP are handled alike; a caller that ignores SIGHUP, as nohup, is obeyed."""
        hangup = getattr(signal, "SIGHUP", signal.SIGTERM)
        before = signal.getsignal(hangup)
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or before is signal.SIG_IGN:
                yield
                return
            signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(hangup, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.drain(0.0 if self.signal else self.drain_s)
        self.signal = self.signal or sig

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to end."""
        await super().on_tick(counter)
        if self._announce is not None and self.service.status == READY:
            self._announce(self.service.max_model_len)
            self._announce = None
        if self.service.is_drained or self.service.failure is not None:
            self._num_cut = self.service.cancel_all(ApiError(503, "the server ends", code="draining", retry_s=5))
            return True
        return False
