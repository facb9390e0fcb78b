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

from prometheus_client import CollectorRegistry, Gauge
from torch import Tensor
from transformers import StoppingCriteriaList

from autotune.errors import UserError
from autotune.modeling.ranks import failure
from autotune.runtime.decoder import Decoder
from autotune.runtime.metrics import PrometheusMetrics
from autotune.serve.answer_text import AnswerText
from autotune.serve.requests import ApiError, ChatRequest, CompletionRequest
from autotune.serve.settings import ServeSettings

logger = logging.getLogger("autotune.api")
LOADING, READY, DRAINING, STALLED, BROKEN = "loading", "ready", "draining", "stalled", "broken"
STALL_S = 600.0  # without a round, after which health says so
CHARACTERS_A_TOKEN = 16  # at most, in a prompt that is tokenized at all


@dataclass(frozen=True)
class Piece:
    """New text and tokens of an answer, and of the last piece why the answer ended."""

    text: str
    tokens: list[int]
    num_prompt_tokens: int
    reason: str | None = None


class _NotWanted(Exception):
    """Ends the decoding of a request that was cancelled."""


class AnswerJob:
    """An accepted request. It lives in the event loop; the decoder's thread calls ``send``, and ``put`` and ``end``,
    which generate expects of a streamer.
    """

    def __init__(self, service: DecoderService) -> None:
        self._service, self._loop = service, asyncio.get_running_loop()
        self._items = asyncio.Queue[Piece | Exception]()
        self._watch: asyncio.Task[None] | None = None
        self.is_over = False
        self.asked: CompletionRequest | ChatRequest | None = None
        """Until it is over: the decoder's thread finds it in the queue later."""
        self.text: AnswerText
        self._num_prompt_tokens = 0

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Cancel the request as soon as its client goes away. After the body, ASGI's ``receive`` waits for that."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.cancel(ApiError(499, "the client has closed the connection"))

        self._watch = asyncio.create_task(wait())

    def cancel(self, reason: Exception) -> None:
        """Decode no further; whoever waits for the answer gets the reason."""
        if not self.is_over:
            self._deliver(reason)

    async def next(self) -> Piece:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _deliver(self, item: Piece | Exception) -> None:
        self._items.put_nowait(item)
        if isinstance(item, Exception) or item.reason is not None:
            self.is_over, self.asked = True, None
            self._service.open.discard(self)

    def send(self, item: Piece | Exception) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._deliver, item)

    def put(self, value: Tensor) -> None:
        """Receive the prompt [1, tokens], then the tokens of each round [tokens]."""
        self._service.progressed = time.monotonic()
        if self.is_over:
            raise _NotWanted
        if value.ndim == 2:
            self._num_prompt_tokens = value.shape[1]
            return
        self.text.read(value.tolist())
        self.send(Piece(self.text.take(), value.tolist(), self._num_prompt_tokens))

    def end(self) -> None:
        """Called after the last round."""


class DecoderService(threading.Thread):
    """Loads a decoder, and decodes one request after the other; ``load`` is called in the thread."""

    def __init__(self, load: Callable[[], Decoder], settings: ServeSettings) -> None:
        super().__init__(name="decoder", daemon=True)
        self.model, self.max_waiting = settings.model_name or "model", settings.max_waiting
        self.max_model_len, self.created = settings.max_model_len or 1 << 62, int(time.time())
        self.registry = CollectorRegistry()
        self.open: set[AnswerJob] = set()
        """Requests that wait or are decoded. Changed in the event loop alone."""
        gauge = Gauge("autotune_open_requests", "Requests that wait or are decoded", registry=self.registry)
        gauge.set_function(lambda: len(self.open))
        self.failure: BaseException | None = None
        """Why the decoder could not be loaded."""
        self.progressed = 0.0  # when a request began, or its last round ended
        self.decoder: Decoder
        self._load, self._jobs = load, queue.SimpleQueue[AnswerJob | None]()
        self._expected: list[int] | None = None  # tokens of the self-test, once it is loaded
        self._is_broken, self._deadline = False, float("inf")

    @property
    def status(self) -> str:
        if self._is_broken or self.failure is not None:
            return BROKEN
        if self._deadline < float("inf"):
            return DRAINING
        if self._expected is None:
            return LOADING
        return STALLED if self.open and time.monotonic() - self.progressed > STALL_S else READY

    def drain(self, seconds: float) -> None:
        """Accept no further requests; the others have this time."""
        self._deadline = time.monotonic() + seconds

    @property
    def is_drained(self) -> bool:
        return time.monotonic() >= self._deadline or (self.status == DRAINING and not self.open)

    def accept(self) -> AnswerJob:
        """A place among the requests, before the body is read; an ``ApiError`` if there is none."""
        self.require_ready()
        if len(self.open) > self.max_waiting:
            raise ApiError(429, f"{self.max_waiting} requests wait; try again later", code="queue_full", retry_s=1)
        if not self.open:
            self.progressed = time.monotonic()
        job = AnswerJob(self)
        self.open.add(job)
        return job

    def require_ready(self) -> None:
        if (status := self.status) not in (READY, STALLED):
            raise ApiError(503, f"the decoder is {status}; try again later", code=status, retry_s=5)

    def require_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            message = f"no model {name!r:.60}; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def submit(self, job: AnswerJob, asked: CompletionRequest | ChatRequest) -> None:
        """Let a request wait for its turn."""
        self.require_model(asked.model)
        if asked.num_characters > CHARACTERS_A_TOKEN * self.max_model_len:
            raise self._too_long(f"{asked.num_characters} characters")
        job.asked = asked
        self._jobs.put(job)

    def cancel_all(self, reason: Exception) -> int:
        """End all requests, and the thread after the step that it runs; returns the number of requests."""
        jobs = list(self.open)
        for job in jobs:
            job.cancel(reason)
        self._jobs.put(None)
        return len(jobs)

    def run(self) -> None:
        try:
            self.decoder = self._load()
            self.max_model_len = min(self.max_model_len, self.decoder.target.max_context)
            self._expected = self._self_test()
            self.decoder.observers.append(PrometheusMetrics(self.registry))
        except BaseException as error:
            self.failure = error
            return
        while (job := self._jobs.get()) is not None:
            self.progressed = time.monotonic()
            if (asked := job.asked) is not None:
                self._answer(job, asked)

    def _answer(self, job: AnswerJob, asked: CompletionRequest | ChatRequest) -> None:
        try:
            job.send(self._decode(job, asked))
        except _NotWanted:
            pass
        except UserError as error:
            job.send(ApiError(400, str(error)))
        except ApiError as error:
            job.send(error)
        except Exception as error:
            logger.exception("a request failed")
            if failure(error) is not None:  # another process of the target has ended
                self.failure = error
            with suppress(Exception):
                self._is_broken = True
                self._is_broken = self._self_test() != self._expected
            job.send(ApiError(500, f"the decoder failed ({type(error).__name__}); the server's log says more"))

    def _decode(self, job: AnswerJob, asked: CompletionRequest | ChatRequest) -> Piece:
        decoder = self.decoder
        variables = {} if decoder.profile is None else decoder.profile.chat_template_kwargs
        inputs = asked.inputs(decoder.processor, decoder.target.device, variables)
        prompt: list[int] = inputs["input_ids"][0].tolist()
        limit = asked.max_tokens or self.max_model_len - len(prompt)
        if limit < 1 or len(prompt) + limit > self.max_model_len:
            raise self._too_long(f"{len(prompt)} and {max(limit, 1)}")
        tokenizer = getattr(decoder.processor, "tokenizer", decoder.processor)
        config = decoder.target_model.generation_config
        ends = asked.ends(config, tokenizer)
        job.text = AnswerText(tokenizer, prompt, asked.stops, ends, shows_special=not asked.skip_special_tokens)
        options = {**asked.settings(config), "max_new_tokens": limit, "streamer": job}
        options |= {"eos_token_id": ends, "pad_token_id": 0}
        if asked.min_tokens and ends:
            options["min_new_tokens"] = asked.min_tokens
        if asked.stops:
            options["stopping_criteria"] = StoppingCriteriaList([job.text])
        options["seed"] = secrets.randbits(31) if asked.seed is None else asked.seed
        output = decoder.generate(**inputs, **options)
        is_end = int(output.sequences[0, -1]) in ends
        is_cut = output.stats.new_tokens == limit and not is_end and not job.text.is_stopped
        return Piece(job.text.take(is_last=True), [], len(prompt), "length" if is_cut else "stop")

    def _too_long(self, what: str) -> ApiError:
        rule = f"prompt and answer have at most {self.max_model_len} tokens"
        advice = "shorten the prompt, or lower max_tokens"
        return ApiError(400, f"{rule}; got {what}; {advice}", code="context_length_exceeded")

    def _self_test(self) -> list[int]:
        """The tokens of a short prompt, which the metrics do not count."""
        observers, self.decoder.observers = self.decoder.observers, []
        try:
            inputs = self.decoder.processor(text="1 2 3", return_tensors="pt").to(self.decoder.target.device)
            output = self.decoder.generate(**inputs, max_new_tokens=4, temperature=0.0)
            return output.sequences[0].tolist()  # type: ignore[no-any-return]
        finally:
            self.decoder.observers = observers
