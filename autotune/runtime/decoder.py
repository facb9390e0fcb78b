"""Tree decoding of a target model with a draft: the tokens of the target alone, in fewer forward passes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation import GenerateDecoderOnlyOutput

from autotune.documents.execution import AUTO, CAPTURED, capture_sizes_for
from autotune.drafters.draft import Draft
from autotune.errors import UserError
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.host import limited_threads, now_ms
from autotune.modeling.target import Target
from autotune.runtime.generate_args import (
    Call,
    Request,
    check_tokens,
    check_values,
    generation_settings,
    new_request,
    prepare_call,
    prepared_call,
    takes_vision_inputs,
)
from autotune.runtime.ownership import Ownership
from autotune.runtime.points import LoadedPoint, as_draft, check_paths
from autotune.runtime.preparation import TREE_SLOTS, Preparation, Report, decoding_mode, prepare
from autotune.runtime.rounds import Round
from autotune.runtime.session import Session
from autotune.runtime.stats import DecodingOutput, Observer, log_request
from autotune.runtime.token_sampler import TokenSampler

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import DecodingProfile

DEFAULT_CONTEXT_TOKENS = 2048  # for which captures are made ahead


class Decoder:
    """Decodes with a target and a draft. Output equals that of the target alone, unless ``verification`` is lossy.

    A target and its drafts decode one request at a time, also those of several decoders. While a request runs, another
    thread's is refused with a ``UserError``; a request of the same thread ends a stream that is still open.

    Args:
        target: a Hugging Face model, as ``from_pretrained`` returns it.
        draft: a smaller model with the same vocabulary; the name of a draft as the commands take it (``retrieval``,
            a folder or id, ``digits/star``, ``FOLDER:mtp``); or None for plain autoregressive (AR) decoding through the
            same code.
        capture_sizes: numbers of tokens that forward passes are padded to. Without them, ``eager`` pads nothing and
            ``cuda-graph`` uses ``DEFAULT_CAPTURE_SIZES``.
        mode: how forward passes after the prefill run: ``eager``, or ``cuda-graph``, which captures them as CUDA
            graphs. ``auto``: ``cuda-graph`` for a target on one CUDA device whose captured steps pass a self-test, else
            ``eager``.
        threads: CPU threads after the prefill; None: as many as torch uses.
        prefill_threads: CPU threads of image encoders and prefills; None: as many as torch uses.
        processor: the target's processor or tokenizer; stop strings need it.
        profile: the decoding profile that the point is from.
        point: tree policy and other arguments of ``LoadedPoint``.

    Raises:
        UserError: different vocabularies, an unknown tree policy or hyperparameter, a value out of range, or a tree
            that branches for a model with recurrent states.
    """

    def __init__(
        self,
        target: Any,
        draft: Any | None = None,
        *,
        capture_sizes: Sequence[int] = (),
        mode: str = AUTO,
        threads: int | None = None,
        prefill_threads: int | None = None,
        processor: Any | None = None,
        profile: DecodingProfile | None = None,
        **point: Any,
    ) -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        self.processor: Any = processor
        self.profile = profile
        if processor is not None:
            self.target.tokenizer = getattr(processor, "tokenizer", processor)
        self.point = LoadedPoint(as_draft(draft, self.target), **point)
        if self.draft is not None:
            with Ownership(modules=(self.draft,)):
                self.draft.attach(self.target)
        check_paths(self.point, self.target)
        self.mode = decoding_mode(mode, self.target, [self.draft])
        self.capture_sizes = capture_sizes_for(self.mode, capture_sizes)
        self.threads, self.prefill_threads = threads, prefill_threads
        self.last_output = DecodingOutput(torch.empty(0, 0, dtype=torch.long), [])
        """Output of the latest ``generate``, also when it was called through the Hugging Face model."""
        self.observers: list[Observer] = [log_request]
        """Called with the statistics of every request, once it is finished, abandoned or has failed."""
        self.rounds = Round(self.target, self.mode, self.capture_sizes)
        self._prepared: dict[tuple[bool, ...], tuple[int, int]] = {}
        """By ``sampled``, context tokens, and how many captures of the device had been dropped by then."""

    def prepare(
        self,
        context_tokens: int = DEFAULT_CONTEXT_TOKENS,
        *,
        sampled: Sequence[bool] = (False, True),
        report: Report = lambda done, total: None,
    ) -> Preparation:
        """Capture everything that requests can need, in captured modes; nothing in the other modes. What is
        captured already is kept. Longer requests are captured when they come.

        Args:
            context_tokens: longest prompt and answer together; at most the target's context.
            sampled: whether requests sample: steps of drafts that are coupled to the target are captured apart.
            report: called as report(done, total).
        """
        if self.mode not in CAPTURED:
            return Preparation(0, 0)
        memory, num_tokens = graph_memory(self.target.device), min(context_tokens, self.target.max_context)
        most, num_dropped = self._prepared.get(tuple(sampled), (0, 0))
        if num_tokens <= most and num_dropped == memory.num_dropped:
            return Preparation(0, memory.memory_bytes)
        capacity = num_tokens + max(TREE_SLOTS, self._largest_tree)  # one for all decoders that share the models
        done = prepare(self.target, self.point, self.rounds, capacity, sampled, report)
        self._prepared[tuple(sampled)] = num_tokens, memory.num_dropped
        return done

    @property
    def _largest_tree(self) -> int:
        """KV slots of the largest tree."""
        policy = self.point.policy
        return max(policy.size.nodes, policy.max_evaluated) + 1 + max(self.capture_sizes, default=0)

    @property
    def target_model(self) -> Any:
        """The Hugging Face model of the target."""
        return self.target.model

    @property
    def draft(self) -> Draft | None:
        """The draft; None for plain decoding."""
        return self.point.draft

    def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        streamer: Any = None,
        **inputs: Any,
    ) -> DecodingOutput:
        """Decode prompts, given as the Hugging Face processor made them. A batch may be padded on either side.

        Every argument of ``model.generate`` may be given as well: settings of the generation config, logits processors,
        stopping criteria. The model's ``generation_config`` fills in what is left out. The rows of a batch are decoded
        one after the other.

        Args:
            max_new_tokens: 256 if neither the call nor the generation config sets a length.
            temperature: 0 is greedy. Above 0, tokens are sampled from the whole distribution, cut only by ``top_k`` and
                ``top_p`` of this call. None leaves sampling to the generation config.
            top_k: 0 keeps every token.
            top_p: 1 keeps every token.
            seed: seed of the noise; row r is decoded with ``seed + r``.
            streamer: receives the prompt, then the tokens of each round.

        Raises:
            UserError: inputs that cannot be decoded, or settings out of range.
        """
        settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        return self._generate(self._prepare({**inputs, **settings}, seed), streamer)

    def stream(self, *, seed: int = 0, **inputs: Any) -> Iterator[int]:
        """Yield the tokens of ``generate`` for one prompt, one by one, as soon as their round is verified.

        Takes the arguments of ``generate``, except ``streamer``.
        """
        requests = self.requests(seed=seed, **inputs)
        if len(requests) != 1:
            raise UserError(f"a stream is of one prompt; input_ids has {len(requests)} rows; stream them one by one")
        with self._own() as ownership, closing(self._decode(requests[0], ownership)) as rounds:
            for tokens in rounds:
                yield from tokens

    def requests(self, *, seed: int = 0, **inputs: Any) -> list[Request]:
        """The requests that ``generate`` decodes, one for each row. Takes the arguments of ``generate``, except
        ``streamer``.
        """
        call = self._prepare(inputs, seed)
        with Ownership(modules=(self.target,)) as ownership:
            return self._requests(call, ownership)

    def sampler(self, *, seed: int = 0, **inputs: Any) -> TokenSampler:
        """The sampler with which ``generate`` decodes the first prompt. Takes the arguments of ``generate``."""
        return self._prepare(inputs, seed).sampler(0, self.target.device)

    @takes_vision_inputs
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        seed: int | None = None,
        prepare_only: bool = False,
        **inputs: Any,
    ) -> Any:
        """Implement Hugging Face's hook: ``model.generate(**inputs, custom_generate=decoder)``.

        Greedy output equals that of ``model.generate(**inputs)``. With ``do_sample`` the distribution is the same, but
        the noise is keyed by position in place of torch's global random state; ``torch.manual_seed`` or ``seed`` makes
        it repeatable. With ``prepare_only`` the prepared ``Call`` is returned and nothing is decoded.

        Raises:
            UserError: ``model`` is not the decoder's target, or the call asks for several beams or sequences, a filled
                cache, or outputs of single steps.
        """
        if model is not self.target.model:
            raise UserError("custom_generate must be called on the decoder's own target; load it with target=model")
        inputs["input_ids"], hooks = input_ids, (logits_processor or (), stopping_criteria or ())
        call = prepared_call(generation_config, inputs, *hooks, seed=seed)
        check_tokens(model, inputs)
        if prepare_only:
            return call
        out = self._generate(call, streamer)
        return GenerateDecoderOnlyOutput(sequences=out.sequences) if call.returns_dict else out.sequences

    def _prepare(self, inputs: dict[str, Any], seed: int) -> Call:
        """Let Hugging Face's generate prepare a call, so that all of its settings keep their meaning."""
        model = self.target.model
        if inputs.get("input_ids") is None:
            names = ", ".join(name for name, value in inputs.items() if value is not None)
            raise UserError(f"generate needs input_ids, as the target's processor makes them; got {names or 'nothing'}")
        check_values(inputs)
        config = inputs.get("generation_config") or model.generation_config
        inputs = generation_settings(config, inputs)
        return prepare_call(model, self, self.processor, inputs, seed=seed)

    def _own(self) -> Ownership:
        """The right to run the target and the draft for a call."""
        return Ownership(self.target, *([] if self.draft is None else [self.draft]))

    def _requests(self, call: Call, ownership: Ownership) -> list[Request]:
        """Encode the rows of a call by embedding and vision tower."""
        started = now_ms(self.target.device)
        with ownership.running(), torch.inference_mode(), limited_threads(self.prefill_threads):
            encoded = self.target.encode(call.inputs)
        encoding_ms = now_ms(self.target.device) - started
        call.prompts = encoded.prompts
        requests = [new_request(call, prompt, row, self.target, self.point) for row, prompt in enumerate(call.prompts)]
        # The rows are encoded together; the first one's statistics contain the time of all.
        requests[0].stats.target_prefill_ms, requests[0].stats.vision_ms = encoding_ms, encoded.vision_ms
        return requests

    def _generate(self, call: Call, streamer: Any) -> DecodingOutput:
        num_rows = len(call.inputs["input_ids"])
        if streamer is not None and num_rows > 1:
            raise UserError(f"a streamer reads one prompt; input_ids has {num_rows} rows; stream them one by one")
        with self._own() as ownership:
            requests = self._requests(call, ownership)
            if streamer is not None:
                streamer.put(call.inputs["input_ids"].cpu())
            for request in requests:
                with closing(self._decode(request, ownership)) as rounds:
                    for tokens in rounds:
                        if streamer is not None:
                            streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        rows = [request.sequence() for request in requests]
        longest = max(row.shape[1] for row in rows)
        rows = [functional.pad(row, (0, longest - row.shape[1]), value=call.pad_token_id) for row in rows]
        self.last_output = DecodingOutput(torch.cat(rows), [request.stats for request in requests])
        return self.last_output

    def _decode(self, request: Request, ownership: Ownership) -> Generator[list[int], None, None]:
        """Yield the prefill's token, then the tokens of each round or plain step.

        The caller's time and grad mode between two yields are its own.
        """
        session = Session(
            request,
            self.point,
            rounds=self.rounds,
            ownership=ownership,
            capacity=len(request.prompt) + request.call.max_new_tokens + self._largest_tree,
            threads=self.threads,
            prefill_threads=self.prefill_threads,
        )
        try:
            yield session.prefill()
            while not session.request.is_finished:
                yield session.advance()
        finally:
            session.close()
            for observe in self.observers:
                observe(request.stats, is_finished=request.is_finished)
