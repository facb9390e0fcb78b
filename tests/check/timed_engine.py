"""A llama-server that plays a transcript back, and whose replies have simulated times: ``predicted_ms`` is exact.

Its processes and its requests differ in speed, and so does the machine between a search and a check. ``--slower 1.15``
is a build whose verifications take 15 % more time; ``--loses-one`` is one that accepts a token less in one answer.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from autotune.engines.served import Served
from tests.engines.recorded_llama import STEP_MS, RecordedServer, http_server

PROCESS_NOISE, REQUEST_NOISE = 0.01, 0.02  # standard deviations of logarithms of times
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.check.timed_engine import TimedServer
from tests.engines.recorded_llama import serve
serve(sys.argv[1:], TimedServer)
"""
_launches = itertools.count()


class TimedServer(RecordedServer):
    def __init__(self, arguments: list[str]) -> None:
        super().__init__(arguments)
        given = dict(itertools.pairwise(arguments))
        self.slower, self.loses_one = float(given.get("--slower", 1.0)), "--loses-one" in arguments
        self.draws = random.Random(f"{given.get('--seed', 0)} {next(_launches)} {given.get('--port')}")
        self.speed = float(given.get("--machine", 1.0)) * self.draws.lognormvariate(0.0, PROCESS_NOISE)

    def counted(self, answer: Served) -> Served:
        counted = super().counted(answer)
        if not self.loses_one or answer.prompt_tokens != self.recorded[1]["prompt_tokens"]:
            return counted
        return counted.model_copy(update={"accepted_lengths": [max(0, counted.accepted_tokens - 1)]})

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        reply = super().reply(path, body)
        if path == "/completion" and body["n_predict"] > 1 and "logit_bias" not in body:
            timings = reply["timings"]
            timings["predicted_ms"] += STEP_MS * (self.slower - 1) * self.replayed.counts[0]
            timings["predicted_ms"] *= self.speed * self.draws.lognormvariate(0.0, REQUEST_NOISE)
        return reply


@contextmanager
def running_in_thread(words: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    """``process.running`` of this engine in a thread, which takes no time to start."""
    server = http_server([*words[1:]], TimedServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", SimpleNamespace(pid=0)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
