"""One decoder in a thread of its own, and the requests that wait for it."""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import StoppingCriteriaList

from autotune.api.answer_text import AnswerText
from autotune.api.requests import ApiError, Generation
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.runtime.metrics import PrometheusMetrics

logger = logging.getLogger("autotune.api")
LOADING, READY, DRAINING, STALLED, BROKEN = "loading", "ready", "draining", "stalled", "broken"
CLIENT_GONE = 499  # as nginx logs it
STALL_S = 600.0  # without a token, after which health says so
CHARACTERS_A_TOKEN = 16  # at most, in a prompt that is worth tokenizing
SELF_TEST: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0}


@dataclass(frozen=True)
class Piece:
    """New text and tokens of an answer."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class End:
    """The end of an answer."""

    reason: str
    num_prompt_tokens: int
    num_new_tokens: int


class _NotWanted(Exception):
    """Ends the decoding of a request whose client is gone."""


class Job:
    """A request from its admission to its last token. Made and read in the event loop; the decoder's thread calls ``put``.

    Given to generate as a streamer, it receives the tokens of each round.
    """

    def __init__(self, service: DecoderService) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        self._items = asyncio.Queue[Piece | End | Exception]()
        self._watch: asyncio.Task[None] | None = None
        self.is_over = False
        self.asked: Generation
        self.text: AnswerText

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Cancel the request when its client goes away; ``receive`` is ASGI's, after the body."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.cancel(ApiError(CLIENT_GONE, "the client has closed the connection"))

        self._watch = asyncio.create_task(wait())

    def send(self, item: Piece | End | Exception) -> None:
        """Give an item to whoever waits for it. Called in the decoder's thread."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._deliver, item)

    def put(self, value: Tensor) -> None:
        """Receive the prompt [1, tokens], then the tokens of a round [tokens]."""
        if self.is_over:
            raise _NotWanted
        self._service.progressed = time.monotonic()
        if value.ndim == 1:
            if not self.asked.stops:
                self.text.add(value.tolist())
            if (text := self.text.take()) or self.asked.return_token_ids:
                self.send(Piece(text, value.tolist()))

    def end(self) -> None:
        """Called after the last round."""

    def _deliver(self, item: Piece | End | Exception) -> None:
        self._items.put_nowait(item)
        if not isinstance(item, Piece):
            self._service.open.discard(self)

    async def next(self) -> Piece | End:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self, reason: Exception) -> None:
        """Decode no further. Whoever waits for the answer gets the reason."""
        if not self.is_over:
            self.is_over = True
            self._deliver(reason)

    def close(self) -> None:
        """Decode no further, and let go of the client."""
        self.is_over = True
        self._service.open.discard(self)
        if self._watch is not None:
            self._watch.cancel()


class DecoderService(threading.Thread):
    """Loads a decoder, and decodes one request after the other.

    Args:
        load: called in the thread.
        model: name that requests have to give.
        max_waiting: requests that may wait.
        max_model_len: limit of prompt and answer together, in tokens; None: the target's.
        registry: for metrics, a ``prometheus_client.CollectorRegistry``.
    """

    def __init__(
        self, load: Callable[[], Decoder], *, model: str, max_waiting: int, max_model_len: int | None, registry: Any
    ) -> None:
        super().__init__(name="decoder", daemon=True)
        self.model, self.max_waiting, self.max_model_len, self.registry = (
            model,
            max_waiting,
            max_model_len or 0,
            registry,
        )
        self.open: set[Job] = set()
        """Requests that wait or are decoded. Changed in the event loop only."""
        self.is_draining, self.is_broken = False, False
        self.failure: BaseException | None = None
        """Why the decoder could not be loaded."""
        self.created = int(time.time())
        self.progressed = 0.0  # when the last token came or a request began
        self.decoder: Decoder
        self._load, self._is_loaded, self._jobs = load, False, queue.SimpleQueue[Job | None]()
        self._expected: list[int] = []

    @property
    def status(self) -> str:
        if self.is_broken or self.failure is not None:
            return BROKEN
        if self.is_draining:
            return DRAINING
        if not self._is_loaded:
            return LOADING
        return STALLED if self.open and time.monotonic() - self.progressed > STALL_S else READY

    def admit(self) -> Job:
        """Reserve a place among the requests; an ``ApiError`` if there is none."""
        if (status := self.status) not in (READY, STALLED):
            raise ApiError(503, f"the decoder is {status}; try again later", code=status, retry_s=5)
        if len(self.open) > self.max_waiting:
            raise ApiError(429, f"{self.max_waiting} requests wait; try again later", code="queue_full", retry_s=1)
        if not self.open:
            self.progressed = time.monotonic()
        job = Job(self)
        self.open.add(job)
        return job

    def require_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name not in (None, self.model):
            message = f"no model {name!r:.60}; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def submit(self, job: Job, asked: Generation) -> None:
        """Let a request wait for its turn."""
        self.require_model(asked.model)
        if asked.num_characters > CHARACTERS_A_TOKEN * self.max_model_len:
            raise too_long(f"{asked.num_characters} characters", self.max_model_len)
        job.asked = asked
        self._jobs.put(job)

    def cancel_all(self, reason: Exception) -> int:
        """End all requests, and the thread after the step that it runs; returns their number."""
        jobs = list(self.open)
        for job in jobs:
            job.cancel(reason)
        self._jobs.put(None)
        return len(jobs)

    def run(self) -> None:
        try:
            self.decoder = self._load()
            context = self.decoder.target.max_context
            self.max_model_len = min(self.max_model_len or context, context)
            self._expected = self._self_test()
            self.decoder.observers.append(PrometheusMetrics(self.decoder.points, self.registry))
        except BaseException as error:
            self.failure = error
            return
        self._is_loaded = True
        while (job := self._jobs.get()) is not None:
            if job.is_over:
                continue
            self.progressed = time.monotonic()
            try:
                job.send(self._decode(job))
            except _NotWanted:
                continue
            except ApiError as error:
                job.send(error)
            except UserError as error:
                job.send(ApiError(400, str(error)))
            except Exception as error:
                logger.exception("a request failed")
                self.is_broken = not self._is_sound()
                job.send(ApiError(500, f"the decoder failed ({type(error).__name__}); see the server's log"))

    def _decode(self, job: Job) -> End:
        decoder, asked = self.decoder, job.asked
        inputs = asked.inputs(decoder.processor, decoder.target.device)
        num_prompt, vocabulary = inputs["input_ids"].shape[1], decoder.target.text.vocab_size
        if num_prompt and int(inputs["input_ids"].max()) >= vocabulary:
            raise ApiError(400, f"prompt: tokens are below {vocabulary}; send others", param="prompt")
        limit = asked.num_tokens or self.max_model_len - num_prompt
        if limit < 1 or num_prompt + limit > self.max_model_len:
            raise too_long(f"{num_prompt} tokens and an answer of {max(limit, 1)}", self.max_model_len)
        tokenizer = getattr(decoder.processor, "tokenizer", decoder.processor)
        job.text = AnswerText(tokenizer, inputs["input_ids"][0].tolist(), asked.stops)
        hooks = {"stopping_criteria": StoppingCriteriaList([job.text])} if asked.stops else {}
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        options = {**asked.settings, **hooks, "max_new_tokens": limit, "seed": seed, "streamer": job}
        output = decoder.generate(**inputs, **options)
        if rest := job.text.take(is_last=True):
            job.send(Piece(rest, []))
        num_new, end = output.stats.new_tokens, decoder.target_model.generation_config.eos_token_id
        is_end = int(output.sequences[0, -1]) in ([end] if isinstance(end, int) else end or []) and not asked.ignore_eos
        is_cut = num_new == limit and not is_end and not job.text.is_stopped
        return End("length" if is_cut else "stop", num_prompt, num_new)

    def _self_test(self) -> list[int]:
        """The tokens of a short prompt, which is not counted in the metrics."""
        observers, self.decoder.observers = self.decoder.observers, []
        try:
            inputs = self.decoder.processor(text="1 2 3", return_tensors="pt").to(self.decoder.target.device)
            tokens: list[int] = self.decoder.generate(**inputs, **SELF_TEST).sequences[0].tolist()
            return tokens
        finally:
            self.decoder.observers = observers

    def _is_sound(self) -> bool:
        """Whether the decoder still gives the tokens that it gave when it was loaded."""
        try:
            return self._self_test() == self._expected
        except Exception:
            return False


def too_long(what: str, max_model_len: int) -> ApiError:
    message = (
        f"prompt and answer have at most {max_model_len} tokens; got {what}; shorten the prompt, or lower max_tokens"
    )
    return ApiError(400, message, code="context_length_exceeded")
