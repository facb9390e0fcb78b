"""The right to run a target and its drafts: one request at a time, of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from autotune.errors import UserError

_lock = threading.RLock()
_held: WeakSet[Ownership] = WeakSet()


def _nothing() -> None:
    pass


class Ownership:
    """The right to run models, from here to ``close`` or the end of the context.

    Another thread that asks for them is refused at once. The thread that ran them last takes them over between two
    steps: the request that had them cannot go on. That thread may have ended, as those of a pool do; then any other
    takes them over.

    Args:
        cached: targets and drafts, whose caches hold one request.
        modules: of these only the weights are used, as to encode images; requests of the same thread go on afterwards.

    Raises:
        UserError: another thread has one of the models, or runs a step with one.
    """

    def __init__(self, *cached: Any, modules: tuple[Any, ...] = ()) -> None:
        self._cached = {id(model) for model in cached}
        # Two targets may wrap one model, whose modules have the hooks of both.
        self._modules = {id(getattr(model, "model", model)) for model in (*cached, *modules)}
        self._thread, self._is_running, self._is_open = threading.current_thread(), False, True
        self.close_request: Callable[[], None] = _nothing
        """Restores the models after a request; called when they are taken over."""
        with _lock:
            others = [other for other in _held if other._modules & self._modules]
            for other in others:
                is_foreign = other._thread is not self._thread and other._thread.is_alive()
                if is_foreign or other._is_running:
                    raise UserError(
                        "a target and its drafts decode one request at a time, and another one has not ended; "
                        "wait until it has, or close its stream"
                    )
            for other in others:
                if other._cached & self._cached:
                    other.close()
            _held.add(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a step. A ``UserError`` says if another request has taken the models over."""
        with _lock:
            if not self._is_open:
                raise UserError(
                    "another request has begun on this target; finish or close a stream before the next one"
                )
            self._is_running, self._thread = True, threading.current_thread()
        try:
            yield
        finally:
            self._is_running = False

    def close(self) -> None:
        """Give the models up. Closing twice does nothing."""
        with _lock:
            self._is_open = False
            _held.discard(self)
            close_request, self.close_request = self.close_request, _nothing  # which would keep the request in memory
            close_request()

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
