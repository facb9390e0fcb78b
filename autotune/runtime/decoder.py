"""The decoding loop: draft a tree, verify it in one target forward, accept, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from autotune.documents.condition import first_match
from autotune.drafters.draft import Draft
from autotune.errors import UserError
from autotune.execution import EAGER, capture_sizes_for
from autotune.modeling.clock import now_ms
from autotune.modeling.graph_runner import check_mode
from autotune.modeling.prompt import Prompt
from autotune.modeling.target import Target
from autotune.modeling.threads import limited_threads
from autotune.runtime.device_rounds import DeviceRound, DeviceRounds
from autotune.runtime.generate_args import check_names, generation_settings, hf_call, prepared_call, processors_of_row
from autotune.runtime.host_rounds import HostRound
from autotune.runtime.points import LoadedPoint
from autotune.runtime.request import Call, Request
from autotune.runtime.stats import DecodingOutput, DecodingStats
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.acceptance_counts import NEAR_IMAGE_TOKENS
from autotune.trees.fallback import Fallback, RoundPrice

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import DecodingProfile


class Decoder:
    """Decodes with a target and a draft: the same tokens as the target alone, unless ``verification`` is a lossy one.

    Args:
        target: a Hugging Face model, as ``from_pretrained`` gave it.
        draft: a smaller model of the same vocabulary, or None for plain autoregressive (AR) decoding through the same
            runner.
        tree: a tree policy, ``{"policy": "sage", "d_max": 8, ...}``; what is left out takes the paper's default.
        visual_keep: share of visual tokens that the draft sees, in (0, 1].
        verification: how draft tokens are accepted, lossless where left out; ``{"kind": "wetap", "threshold": 0.9}`` is
            not.
        fallback: what a round costs in plain steps; where it is given, requests in which rounds do not pay go on by
            plain steps.
        ways: in place of all of these: several ways to decode, each with its condition. A request is decoded by the first
            whose condition it meets; every request must meet the last one's.
        buckets: sizes that forwards are rounded up to, for devices that prepare sizes; none where left out.
        runner: how forwards behind the prefills run: ``eager``, ``compile``, or ``graph`` for CUDA graphs (see ``graphs.py``).
            What prepares forwards prepares sizes: without ``capture_sizes``, those of ``DEFAULT_CAPTURE_SIZES``. Over prepared forwards the
            device leads the rounds that it can (see ``device_round.py``).
        threads: CPU threads of the steps behind the prefills; None: as many as torch uses.
        processor: the target's processor or tokenizer, kept for the caller; stop strings need it.

    Raises:
        UserError: vocabularies that differ, an unknown tree policy or hyperparameter, a share out of range.
    """

    def __init__(
        self,
        target: Any,
        draft: Any | None = None,
        *,
        tree: Any = None,
        visual_keep: float = 1.0,
        verification: Any = None,
        fallback: RoundPrice | None = None,
        points: Sequence[LoadedPoint] = (),
        capture_sizes: Sequence[int] = (),
        mode: str = EAGER,
        threads: int | None = None,
        processor: Any | None = None,
        profile: DecodingProfile | None = None,
    ) -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        self.processor: Any = processor
        self._profile = profile
        if processor is not None:
            self.target.tokenizer = getattr(processor, "tokenizer", processor)
        self.points = tuple(points) or (
            LoadedPoint(draft, tree=tree, visual_keep=visual_keep, verification=verification, fallback=fallback),
        )
        self.point = self.points[-1]
        """That of the latest request."""
        for point in self.points:
            if point.draft is not None:
                point.draft.attach(self.target)
        self.mode = check_mode(mode, self.target.device)
        self.capture_sizes = capture_sizes_for(self.mode, capture_sizes)
        self.threads = threads
        self.host_round = HostRound(self.target, self.capture_sizes)
        self._device_rounds = DeviceRounds(self.target, self.capture_sizes)

    def configure(
        self,
        tree: Any,
        *,
        visual_keep: float,
        verification: Any = None,
        fallback: RoundPrice | None = None,
    ) -> None:
        """Switch to another way to decode, for every request: free between requests.

        Raises:
            UserError: an unknown tree policy, hyperparameter or verification, a share out of range.
        """
        point = LoadedPoint(
            self.draft, tree=tree, visual_keep=visual_keep, verification=verification, fallback=fallback
        )
        self.points, self.point = (point,), point

    @property
    def profile(self) -> DecodingProfile:
        """The decoding profile in force.

        Raises:
            UserError: the decoder was created without one.
        """
        if self._profile is None:
            raise UserError("this decoder was created without a decoding profile; load one with autotune.load")
        return self._profile

    @property
    def target_model(self) -> Any:
        """The Hugging Face model that is decoded."""
        return self.target.model

    @property
    def draft(self) -> Draft | None:
        """The draft; of several ways that of the last one that has any."""
        return next((point.draft for point in reversed(self.points) if point.draft is not None), None)

    @property
    def fallback(self) -> Fallback:
        """Of the way of the latest request."""
        return self.point.fallback

    # ---------------------------------------------------------------------------------------------------------- public

    def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        workload: str | None = None,
        streamer: Any = None,
        **inputs: Any,
    ) -> DecodingOutput:
        """Decode prompts, given as the Hugging Face processor made them, padded on either side if they are several.

        What ``model.generate`` takes may be given here as well: settings of the generation config, logits processors,
        stopping criteria. What is left out is as the model's ``generation_config`` says. Rows of a batch are decoded one
        after the other.

        Args:
            max_new_tokens: 256 where neither the call nor the generation config says how long.
            temperature: 0 is greedy. Above it, tokens are drawn from the whole distribution but for ``top_k`` and
                ``top_p``. None leaves all of this to the generation config.
            top_k: 0 keeps every token.
            top_p: 1 keeps every token.
            seed: of the noise; row r is decoded with ``seed + r``.
            workload: what kind of request it is, for profiles that have a point for some kinds.
            streamer: gets the prompt, then the tokens of each round.

        Raises:
            UserError: inputs that cannot be decoded, or settings out of range.
        """
        call = self._prepared(inputs, max_new_tokens, temperature, top_k, top_p, seed, workload)
        return self._run(call, streamer)

    def stream(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        workload: str | None = None,
        **inputs: Any,
    ) -> Iterator[int]:
        """The tokens of ``generate`` of one prompt, one by one, as soon as their round is verified."""
        call = self._prepared(inputs, max_new_tokens, temperature, top_k, top_p, seed, workload)
        requests = self._requests(call)
        if len(requests) != 1:
            raise UserError(f"a stream is of one prompt; input_ids has {len(requests)} rows; stream them one by one")
        for tokens in self._decode(requests[0], call):
            yield from tokens

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        seed: int | None = None,
        workload: str | None = None,
        prepare_only: bool = False,
        # What image encoders take is named so that generate hands it over as it is: encoded by the target's vision tower
        # it would be of no use to the draft, and the grids that positions are computed from would be lost.
        pixel_values: Any = None,
        pixel_values_videos: Any = None,
        pixel_attention_mask: Any = None,
        image_sizes: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        batch_num_images: Any = None,
        vision_aspect_ratio: Any = None,
        vision_feature_layer: Any = None,
        vision_feature_select_strategy: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Hugging Face's hook: ``model.generate(**inputs, custom_generate=decoder)``.

        Greedy output equals ``model.generate(**inputs)``. With ``do_sample`` the noise is keyed by position: the same
        distribution, other tokens than the global random state would give, repeatable through ``torch.manual_seed`` or
        ``seed``. With ``prepare_only`` nothing is decoded: the call comes back as it is then decoded.

        Raises:
            UserError: another model than the decoder's target, several beams or several sequences, a cache or outputs
                that trees do not have.
        """
        if model is not self.target.model:
            raise UserError(
                "custom_generate must be called on the decoder's own target; load the decoder with target=model"
            )
        given = {
            "input_ids": input_ids,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "pixel_attention_mask": pixel_attention_mask,
            "image_sizes": image_sizes,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "batch_num_images": batch_num_images,
            "vision_aspect_ratio": vision_aspect_ratio,
            "vision_feature_layer": vision_feature_layer,
            "vision_feature_select_strategy": vision_feature_select_strategy,
            **model_kwargs,
        }
        call = prepared_call(
            generation_config, given, logits_processor or (), stopping_criteria or (), seed=seed, workload=workload
        )
        if prepare_only:
            return call
        out = self._run(call, streamer)
        self.last_stats = out.row_stats[0] if len(out.row_stats) == 1 else out.row_stats
        if not call.returns_dict:
            return out.sequences
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=out.sequences)

    # ------------------------------------------------------------------------------------------------------- the calls

    def _prepared(
        self,
        inputs: dict[str, Any],
        max_new_tokens: int | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        seed: int,
        workload: str | None,
    ) -> Call:
        """Let Hugging Face's generate prepare a call, so that all of its settings mean here what they mean there."""
        model = self.target.model
        check_names(model, inputs)
        if inputs.get("input_ids") is None:
            raise UserError(
                "generate needs input_ids, as the target's processor makes them; got "
                + (", ".join(inputs) or "nothing")
            )
        config = inputs.get("generation_config") or model.generation_config
        inputs |= generation_settings(config, inputs, max_new_tokens, temperature, top_k, top_p)
        return hf_call(model, self, self.processor, inputs, seed=seed, workload=workload)

    def _requests(self, call: Call) -> list[Request]:
        """The rows of a call, encoded by embedding and vision tower."""
        started = self._clock()
        with torch.inference_mode():
            encoded = self.target.encode(call.inputs)
        encoding_ms = self._clock() - started
        call.prompts = encoded.prompts
        requests = []
        for row, prompt in enumerate(encoded.prompts):
            request = self._request(call, prompt, row)
            if row == 0:  # which all rows went through
                request.stats.target_prefill_ms = encoding_ms
                request.stats.vision_ms = encoded.vision_ms
            requests.append(request)
        return requests

    def _request(self, call: Call, prompt: Prompt, row: int) -> Request:
        if call.max_new_tokens < 1:
            raise UserError(
                f"max_length leaves no room for a token behind {len(prompt)}; raise it, or give max_new_tokens"
            )
        if len(prompt) + call.max_new_tokens > self.target.max_context:
            raise UserError(
                f"prompt and answer must fit the target's context of {self.target.max_context} tokens; "
                f"got {len(prompt)} + {call.max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )
        number = first_match(
            (point.when for point in self.points),
            temperature=call.temperature,
            prompt_tokens=len(prompt),
            workload=call.workload,
        )
        point = self.points[number]
        rule = TokenSampler(
            temperature=1.0 if call.temperature > 0 else 0.0,  # itself it is among the processors
            processors=processors_of_row(call.processors, row),
            seed=call.seed + row,
            device=self.target.device,
        )
        if rule.needs_prefix and not point.verification.is_lossless and point.draft is not None:
            raise UserError(
                f"{point.verification.kind} verification knows no logits processors; drop them, or verify losslessly"
            )
        images = prompt.is_visual.nonzero()
        return Request(
            rule=rule,
            prompt=prompt,
            prefix=call.inputs["input_ids"][row : row + 1].to(self.target.device),
            max_new_tokens=call.max_new_tokens,
            eos_token_ids=call.eos_token_ids,
            stops=call.stops,
            row=row,
            stats=DecodingStats(point=number),
            near_image_until=int(images[-1]) + 1 + NEAR_IMAGE_TOKENS if len(images) else 0,
        )

    def _run(self, call: Call, streamer: Any) -> DecodingOutput:
        requests = self._requests(call)
        if streamer is not None and len(requests) > 1:
            raise UserError(f"a streamer reads one prompt; input_ids has {len(requests)} rows; stream them one by one")
        if streamer is not None:
            streamer.put(call.inputs["input_ids"].cpu())
        for request in requests:
            for tokens in self._decode(request, call):
                if streamer is not None:
                    streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        rows = [request.sequence() for request in requests]
        longest = max(row.shape[1] for row in rows)
        rows = [functional.pad(row, (0, longest - row.shape[1]), value=call.pad_token_id) for row in rows]
        return DecodingOutput(torch.cat(rows), [request.stats for request in requests])

    # -------------------------------------------------------------------------------------------------------- the loop

    def _decode(self, request: Request, call: Call) -> Iterator[list[int]]:
        """Yields the tokens of each round as they are verified; the first list is the prefill's token.

        Inference mode is left at every yield, and what the caller does there is not decoding time.
        """
        stats, clock = request.stats, self._clock
        point = self.point = self.points[stats.point]
        draft = point.draft if point.fallback.begin_request() else None
        with torch.inference_mode():
            started = clock()
            self.target.owner = request
            self.target.output_layers = () if draft is None else draft.aux_layers
            self.target.use_mode(self.mode)  # other decoders may have used these models otherwise
            if draft is not None:
                draft.visual_keep, draft.capture_sizes = point.visual_keep, self.capture_sizes
                draft.use_mode(self.mode)
            on_device = None if draft is None else self._device_rounds.of(point, request.rule)
            # Of all ways, so that caches do not grow with a change of ways.
            longest = max(point.policy.max_grown for point in self.points) + 1 + max(self.capture_sizes, default=0)
            capacity = len(request.prompt) + request.max_new_tokens + longest
            self.target.reserve(capacity)
            ranks = draft is not None and point.visual_keep < 1.0
            prefilled = self.target.prefill(request.prompt, rank_visual_tokens=ranks)
            token = request.rule.token(prefilled.logits, len(request.prompt), request.prefix)
            emitted = request.emit([token])
            stats.prompt_tokens, stats.new_tokens = len(request.prompt), 1
            stats.target_prefill_ms += clock() - started
        yield emitted
        while not request.is_finished:
            if self.target.owner is not request:
                raise UserError(
                    "another request has begun on this target; finish or close a stream before the next one"
                )
            with torch.inference_mode():
                started = clock()
                if draft is not None and stats.rounds == 0:
                    if draft not in call.draft_prompts:
                        call.draft_prompts[draft] = draft.prompts(call.inputs, call.prompts)
                    draft.prefill(call.draft_prompts[draft][request.row], prefilled.visual_scores, capacity=capacity)
                    draft.append(token)
                    point.grower.reset()
                    stats.draft_prefill_ms = clock() - started
                with limited_threads(self.threads):
                    if draft is None or point.fallback.is_plain:
                        tokens = self._plain_step(token, draft, request)
                    else:
                        tokens = self._round(token, request, on_device)
                emitted = request.emit(tokens)
                token = tokens[-1]
                stats.accepted_lengths.append(min(len(tokens) - 1, len(emitted)))
                stats.new_tokens += len(emitted)
                stats.decode_ms += clock() - started
            yield emitted
        if draft is not None and stats.rounds > 0:
            point.fallback.end_request()

    def _plain_step(self, root: int, draft: Draft | None, request: Request) -> list[int]:
        """One AR step: the baseline, and the fallback, through the same adapter, cache and token rule."""
        started = self._clock()
        logits = self.target.step(root)
        token = request.rule.token(
            logits, self.target.length, request.sequence() if request.rule.needs_prefix else None
        )
        request.stats.target_forwards += 1
        request.stats.plain_steps += 1
        request.stats.verified_nodes.append(0)
        request.stats.verify_ms += self._clock() - started
        if draft is not None:
            draft.append(token)
            self.fallback.count_plain_step()
        return [token]

    def _round(self, root: int, request: Request, on_device: DeviceRound | None) -> list[int]:
        """One round: returns the accepted draft tokens and the target's own token after them."""
        point, stats = self.point, request.stats
        is_near_image = self.target.length < request.near_image_until
        if on_device is not None:
            path, token, draft_forwards = on_device.run(request, point.grower)
        else:
            path, token, draft_forwards = self.host_round.run(root, request, point)
        tree = point.grower.tree
        num_nodes = int(tree.size[0]) - 1
        stats.draft_forwards += draft_forwards
        stats.target_forwards += 1
        stats.verified_nodes.append(num_nodes)
        stats.acceptance_counts.observe(tree, path, is_near_image=is_near_image)
        point.fallback.update(draft_forwards=draft_forwards, nodes=num_nodes, accepted=len(path))
        point.grower.update(len(path))
        return [*tree.token[path].tolist(), token]

    def _clock(self) -> float:
        return now_ms(self.target.device)
