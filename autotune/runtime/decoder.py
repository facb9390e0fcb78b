"""The decoding loop: draft a tree, verify it in one target forward, accept, commit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.drafters.draft import Draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError, nearest
from autotune.runtime.masks import MaskBuffer
from autotune.runtime.stats import DecodingOutput, DecodingStats, now_ms
from autotune.runtime.target import Target
from autotune.runtime.token_rule import TokenRule
from autotune.trees.buckets import check_buckets, round_up
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.health import NEAR_IMAGE_TOKENS
from autotune.trees.policy import TreeGrower, parse_policy
from autotune.trees.tree import MAX_STEP, ROOT, write_tree_mask
from autotune.trees.verification import (
    WetapVerification,
    accept_by_ratio,
    accept_path,
    find_child,
    parse_verification,
)

if TYPE_CHECKING:
    from autotune.decoding_profile import DecodingProfile

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass
class _Request:
    """One prompt on its way: what stops it, and where its figures go."""

    rule: TokenRule
    prompt: Tensor
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    should_stop: Callable[[Tensor], bool] | None
    stats: DecodingStats = field(default_factory=DecodingStats)
    tokens: list[int] = field(default_factory=list)
    near_image_until: int = 0
    """The first position that is no longer near the prompt's last image."""
    is_finished: bool = False

    def emit(self, tokens: list[int]) -> list[int]:
        """Take up to the first end of sequence, and no more than asked for; returns what was taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            if (
                token in self.eos_token_ids
                or len(self.tokens) >= self.max_new_tokens
                or (self.should_stop is not None and self.should_stop(self.sequence()))
            ):
                self.is_finished = True
                break
        return taken

    def sequence(self) -> Tensor:
        return torch.cat([self.prompt, torch.tensor([self.tokens], dtype=torch.long, device=self.prompt.device)], dim=1)


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
        buckets: sizes that forwards are rounded up to, for devices that prepare sizes; none where left out.
        processor: the target's processor, kept for the caller.

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
        buckets: Sequence[int] = (),
        processor: Any | None = None,
        profile: DecodingProfile | None = None,
    ) -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        self.draft: Draft | None = draft if draft is None or hasattr(draft, "propose") else IndependentDraft(draft)
        self.processor = processor
        self.profile = profile
        if self.draft is not None and self.draft.vocab_size != self.target.vocab_size:
            raise UserError(
                f"target and draft must share one vocabulary; the target has {self.target.vocab_size} tokens, the draft {self.draft.vocab_size}; "
                "use a draft made for this target"
            )
        self.buckets = check_buckets(buckets)
        self.configure(
            tree if tree is not None else {"policy": "chain"},
            visual_keep=visual_keep,
            verification=verification,
            fallback=fallback,
        )
        self._path = np.zeros(MAX_STEP, np.int64)
        self._block = np.zeros((MAX_STEP, MAX_STEP), np.float32)
        self._masks = MaskBuffer(self.target.cache.capacity, dtype=self.target.dtype, device=self.target.device)

    def configure(
        self,
        tree: Any,
        *,
        visual_keep: float,
        verification: Any = None,
        fallback: RoundPrice | None = None,
    ) -> None:
        """Switch to another way to decode: free between requests.

        Raises:
            UserError: an unknown tree policy, hyperparameter or verification, a share out of range.
        """
        if not 0.0 < visual_keep <= 1.0:
            raise UserError(f"visual_keep must be above 0 and at most 1; got {visual_keep}; 1 keeps every visual token")
        self.policy = parse_policy(tree)
        self.verification = parse_verification(verification)
        self.fallback = Fallback(fallback)
        self._grower = TreeGrower(self.policy)
        self.visual_keep = visual_keep

    @property
    def target_model(self) -> Any:
        """The Hugging Face model that is decoded."""
        return self.target.model

    # ---------------------------------------------------------------------------------------------------------- public

    def generate(
        self,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        **inputs: Any,
    ) -> DecodingOutput:
        """Decode one prompt, given as the Hugging Face processor made it.

        Raises:
            UserError: inputs that cannot be decoded, or settings out of range.
        """
        self._check_names(inputs)
        rule = TokenRule(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, device=self.target.device)
        request = self._request(inputs, rule, max_new_tokens)
        for _ in self._decode(request, inputs):
            pass
        return DecodingOutput(request.sequence(), request.stats)

    def stream(
        self,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        **inputs: Any,
    ) -> Iterator[int]:
        """The tokens of ``generate``, one by one, as soon as their round is verified."""
        self._check_names(inputs)
        rule = TokenRule(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, device=self.target.device)
        for tokens in self._decode(self._request(inputs, rule, max_new_tokens), inputs):
            yield from tokens

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        streamer: Any = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Hugging Face's hook: ``model.generate(**inputs, custom_generate=decoder)``.

        Greedy output equals ``model.generate(**inputs)``. With ``do_sample`` the noise is keyed by position: the same
        distribution, other tokens than the global random state would give, repeatable through ``torch.manual_seed``.

        Raises:
            UserError: another model than the decoder's target, several beams or several sequences.
        """
        if model is not self.target.model:
            raise UserError(
                "custom_generate must be called on the decoder's own target; load the decoder with target=model"
            )
        if generation_config.num_beams > 1 or generation_config.num_return_sequences > 1:
            raise UserError("trees decode one sequence: num_beams and num_return_sequences must be 1; set them to 1")
        # Temperature, top-k and top-p are among the processors that generate prepared.
        seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
        rule = TokenRule(
            temperature=1.0 if generation_config.do_sample else 0.0,
            processors=logits_processor or (),
            seed=seed,
            device=self.target.device,
        )
        # What image encoders take is named in the signature so that generate hands it over as it is: encoded by the
        # target's vision tower it would be of no use to the draft.
        images = {
            "pixel_values": pixel_values,
            "image_sizes": image_sizes,
            "pixel_attention_mask": pixel_attention_mask,
        }
        given = {"input_ids": input_ids, **images, **model_kwargs}
        if not given.get("mm_encoder_outputs"):  # generate adds an empty one
            given.pop("mm_encoder_outputs", None)
        inputs = {name: value for name, value in given.items() if value is not None}
        eos = generation_config.eos_token_id
        eos_ids = () if eos is None else eos if isinstance(eos, Sequence) else (eos,)
        stops = [
            criterion
            for criterion in stopping_criteria or ()
            if type(criterion).__name__ not in ("MaxLengthCriteria", "EosTokenCriteria")
        ]
        request = self._request(
            inputs, rule, generation_config.max_length - input_ids.shape[1], frozenset(int(token) for token in eos_ids)
        )
        if stops:
            request.should_stop = lambda sequence: any(bool(stop(sequence, None).all()) for stop in stops)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        for tokens in self._decode(request, inputs):
            if streamer is not None:
                streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        self.last_stats = request.stats
        if not generation_config.return_dict_in_generate:
            return request.sequence()
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=request.sequence())

    # -------------------------------------------------------------------------------------------------------- the loop

    def _check_names(self, inputs: dict[str, Any]) -> None:
        """What is no setting must be an input of the model: transformers would drop a misspelt one in silence."""
        known = inspect.signature(self.target.model.forward).parameters
        for name in inputs:
            if name not in known:
                settings = [*known, "max_new_tokens", "temperature", "top_k", "top_p", "seed"]
                raise UserError(f"generate takes no {name!r}; {nearest(name, settings)}")

    def _request(
        self, inputs: dict[str, Any], rule: TokenRule, max_new_tokens: int, eos: frozenset[int] | None = None
    ) -> _Request:
        if inputs.get("input_ids") is None:
            raise UserError(
                "generate needs input_ids, as the target's processor makes them; got "
                + (", ".join(inputs) or "nothing")
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1; got {max_new_tokens}; ask for a token")
        prompt = inputs["input_ids"]
        if prompt.shape[1] + max_new_tokens > self.target.max_context:
            raise UserError(
                f"prompt and answer must fit the target's context of {self.target.max_context} tokens; "
                f"got {prompt.shape[1]} + {max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )
        if eos is None:
            configured = self.target.model.generation_config.eos_token_id
            eos = frozenset(() if configured is None else configured if isinstance(configured, list) else (configured,))
        if rule.needs_prefix and not self.verification.is_lossless and self.draft is not None:
            raise UserError(
                f"{self.verification.kind} verification knows no logits processors; drop them, or verify losslessly"
            )
        images = self.target.is_visual(prompt[0]).nonzero()
        near = int(images[-1]) + 1 + NEAR_IMAGE_TOKENS if len(images) else 0
        return _Request(rule, prompt, max_new_tokens, eos, None, near_image_until=near)

    def _decode(self, request: _Request, inputs: dict[str, Any]) -> Iterator[list[int]]:
        """Yields the tokens of each round as they are verified; the first list is the prefill's token.

        Inference mode is left at every yield, and what the caller does there is not decoding time.
        """
        stats, clock = request.stats, self._clock
        draft = self.draft if self.fallback.begin_request() else None
        with torch.inference_mode():
            started = clock()
            self.target.owner = request
            if draft is not None:  # which other decoders may have used
                draft.visual_keep, draft.buckets = self.visual_keep, self.buckets
            longest = self.policy.max_grown + 1 + max(self.buckets, default=0)
            capacity = request.prompt.shape[1] + request.max_new_tokens + longest
            self.target.reserve(capacity)
            if self.target.cache.capacity > self._masks.capacity:
                self._masks = MaskBuffer(self.target.cache.capacity, dtype=self.target.dtype, device=self.target.device)
            ranks = draft is not None and self.visual_keep < 1.0
            prefilled = self.target.prefill(inputs, rank_visual_tokens=ranks)
            token = request.rule.token(prefilled.logits, prefilled.prompt_length, request.prompt)
            emitted = request.emit([token])
            stats.prompt_tokens, stats.new_tokens = prefilled.prompt_length, 1
            stats.target_prefill_ms, stats.vision_ms = clock() - started, prefilled.vision_ms
        yield emitted
        while not request.is_finished:
            if self.target.owner is not request:
                raise UserError(
                    "another request has begun on this target; finish or close a stream before the next one"
                )
            with torch.inference_mode():
                started = clock()
                if draft is not None and stats.rounds == 0:
                    draft.prefill(inputs, prefilled.visual_scores, capacity=capacity)
                    draft.append(token)
                    self._grower.reset()
                    stats.draft_prefill_ms = clock() - started
                if draft is None or self.fallback.is_resting:
                    tokens = self._plain_step(token, draft, request)
                else:
                    tokens = self._round(token, draft, request)
                emitted = request.emit(tokens)
                token = tokens[-1]
                stats.accepted_lengths.append(min(len(tokens) - 1, len(emitted)))
                stats.new_tokens += len(emitted)
                stats.decode_ms += clock() - started
            yield emitted
        if draft is not None and stats.rounds > 0:
            self.fallback.end_request()

    def _plain_step(self, root: int, draft: Draft | None, request: _Request) -> list[int]:
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
            self.fallback.rest()
        return [token]

    def _round(self, root: int, draft: Draft, request: _Request) -> list[int]:
        """One round: returns the accepted draft tokens and the target's own token after them."""
        num_levels = self._grow_tree(root, draft, request)
        path, next_token = self._verify(request)
        tree = self._grower.tree
        tokens = [int(token) for token in tree.token[path]] + [next_token]
        request.stats.health.observe(tree, path, is_near_image=self.target.length < request.near_image_until)
        self.fallback.learn(draft_forwards=num_levels, nodes=int(tree.size[0]) - 1, accepted=len(path))
        self.target.cache.keep([ROOT, *(int(node) for node in path)])
        draft.commit(tree, path, next_token)
        self._grower.learn(len(path))
        return tokens

    def _grow_tree(self, root: int, draft: Draft, request: _Request) -> int:
        """Draft: alternate between the draft's proposals and the policy's choice, level by level; returns how many."""
        grower, num_levels = self._grower, 0
        grower.plant(root)
        while len(grower.frontier):
            started = self._clock()
            tokens, logprobs = draft.propose(grower.tree, grower.frontier, self.policy.num_proposals)
            request.stats.draft_ms += self._clock() - started
            grower.grow(tokens, logprobs)
            num_levels += 1
        grower.prune()
        request.stats.draft_forwards += num_levels
        return num_levels

    def _verify(self, request: _Request) -> tuple[NDArray[np.int64], int]:
        """One target forward over root and tree: the accepted nodes, and the token that the target emits after the
        last of them.
        """
        tree, rule = self._grower.tree, request.rule
        count = int(tree.size[0])
        size = round_up(count, self.buckets)
        block = self._block[:size, :size]
        write_tree_mask(tree, block, self._masks.closed)
        started = self._clock()
        device, length = self.target.device, self.target.length
        mask = self._masks.write(block, length) if size > 1 else None
        nodes, positions = np.zeros(size, np.int64), np.full(size, length)
        nodes[:count] = np.maximum(tree.token[:count], 0)
        positions[:count] += tree.depth[:count]
        logits = self.target.forward(
            torch.from_numpy(nodes)[None].to(device), torch.from_numpy(positions)[None].to(device), mask
        )[:count]
        request.stats.target_forwards += 1
        request.stats.verified_nodes.append(count - 1)
        if rule.needs_prefix:
            path, token = self._accept_visiting(logits, request)
        else:
            tokens = rule.tokens(logits, positions[:count] + 1)
            if isinstance(self.verification, WetapVerification):
                logprobs = rule.logprobs(logits, tree.parent[1:count], nodes[1:count])
                found = accept_by_ratio(tree, logprobs, np.log(self.verification.threshold), self._path)
            else:
                found = accept_path(tree, tokens, self._path)
            path = self._path[:found].copy()
            token = int(tokens[path[-1] if found else ROOT])
        request.stats.verify_ms += self._clock() - started
        return path, token

    def _accept_visiting(self, logits: Tensor, request: _Request) -> tuple[NDArray[np.int64], int]:
        """The lossless walk where logits processors read the prefix: tokens are decided on the visited nodes only."""
        prefix, node = request.sequence(), ROOT
        path: list[int] = []
        while True:
            token = request.rule.token(logits[node], self.target.length + len(path) + 1, prefix)
            child = find_child(self._grower.tree, node, token)
            if child < 0:
                return np.array(path, np.int64), token
            path.append(child)
            node = child
            prefix = torch.cat([prefix, torch.tensor([[token]], device=prefix.device)], dim=1)

    def _clock(self) -> float:
        return now_ms(self.target.device)
