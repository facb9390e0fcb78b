"""Plain decoding of several requests in one batch: of greedy ones with the tokens that decoding them one by one emits,
or of any where rounding may choose others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from autotune.modeling.grouped_attention import attention_of_steps
from autotune.modeling.kv_cache import new_cache
from autotune.modeling.masks import by_layer_type, first_visible
from autotune.modeling.step import NOT_FINITE, best_tokens
from autotune.modeling.target import Prefilled, Target
from autotune.runtime.generate_args import Request
from autotune.runtime.token_sampler import TokenSampler, mix_seed

NEAR_TIE = 2**-17
"""A token whose logit exceeds the next one by no more than this share of the largest magnitude may be another one in a
batch, because matrix products of other sizes round otherwise. It is 64 times the precision of float32; the largest
difference seen in answers of the bundled target was 10 times the precision.
"""


def can_batch(target: Target, request: Request) -> bool:
    """Whether a request can be decoded in a batch: it is greedy, and nothing but its length and end tokens stops it. In
    half precision and with quantized weights too many tokens are near ties. Padding would enter the states of a hybrid
    model. Other processes of a target hold no rows.
    """
    is_exact = target.text.is_exact and not target.has_states and target.ranks is None
    return is_exact and request.sampler.is_greedy and not request.call.stops


class GreedyBatch:
    """The KV caches of several prompts, a row each, padded on the left so that all rows end in the same column. The
    requests are encoded, and not prefilled.
    """

    def __init__(self, target: Target, requests: Sequence[Request]) -> None:
        self.target = target
        self.requests = list(requests)
        """One for each row. Finished ones are dropped once they are half of the rows."""
        self._longest = max(len(request.prompt) for request in requests)
        capacity = self._longest + max(request.call.max_new_tokens for request in requests)
        self.cache = new_cache(target.text, capacity)
        self.cache.length = self._longest
        device = target.device
        self._padding = torch.tensor([self._longest - len(request.prompt) for request in requests], device=device)
        # A text may have one axis only.
        deltas = np.broadcast_arrays(*(request.prompt.rope_delta for request in requests))
        self._rope_delta = torch.from_numpy(np.stack(deltas, 1)).to(device)  # [axes, rows]

    @torch.inference_mode()
    def insert(self, row: int, prefilled: Prefilled) -> bool:
        """Copy a prompt that the target has just prefilled, and emit its first token; returns whether that is
        certain.
        """
        self.cache.insert_row(row, len(self._padding), self.target.cache)
        return self._emit([self.requests[row]], prefilled.logits[None])[0]

    def decode(self, is_certain: list[bool]) -> Iterator[tuple[Request, bool]]:
        """Decode all requests, given the results of ``insert``; yields each as soon as it is finished, and whether its
        tokens are certain: where they are not, it is left unfinished and must be decoded by itself.
        """
        rows = list(range(len(self.requests)))  # of the requests that go on
        while True:
            for row in rows:
                request = self.requests[row]
                if request.is_finished or not is_certain[row]:
                    yield request, is_certain[row]
            rows = [row for row in rows if is_certain[row] and not self.requests[row].is_finished]
            if not rows:
                return
            if 2 * len(rows) <= len(self.requests):
                self._keep(rows)
                rows = list(range(len(rows)))
            logits = self._step([request.tokens[-1] for request in self.requests])
            certain = iter(self._emit([self.requests[row] for row in rows], logits[rows]))
            is_certain = [row in rows and next(certain) for row in range(len(logits))]

    def _emit(self, requests: Sequence[Request], logits: Tensor) -> list[bool]:
        """Emit a token of each request from its row of logits; returns whether each is certain, which none is from
        logits that are not finite.
        """
        best, tokens = logits.float().topk(2)
        for request, token in zip(requests, tokens[:, 0].tolist(), strict=True):
            request.emit([token])
        return (best[:, 0] - best[:, 1] > NEAR_TIE * logits.float().abs().amax(-1)).tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _keep(self, rows: list[int]) -> None:
        self.requests = [self.requests[row] for row in rows]
        at = torch.tensor(rows, dtype=torch.long, device=self._padding.device)
        self._padding, self._rope_delta = self._padding[at], self._rope_delta[:, at]
        self.cache.keep_rows(rows)

    @torch.inference_mode()
    def _step(self, tokens: list[int]) -> Tensor:
        """Evaluate a token of each row; returns the logits [rows, vocabulary]."""
        target, column = self.target, self.cache.length
        positions = column - self._padding + self._rope_delta
        is_padding = torch.arange(column + 1, device=target.device) < self._padding[:, None]
        mask = torch.zeros(is_padding.shape, dtype=target.dtype, device=target.device)
        mask = mask.masked_fill_(is_padding, target.mask_value)[:, None, None]
        masks = {name: mask[..., first_visible(column, window) :] for name, window in target.text.windows.items()}
        with attention_of_steps(target.text.config) if target.text.has_grouped_queries else nullcontext():
            hidden = target.text.module(
                input_ids=torch.tensor(tokens, device=target.device)[:, None],
                position_ids=positions[0][:, None] if len(positions) == 1 else positions[..., None],
                attention_mask=by_layer_type(masks),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        self.cache.advance(1)
        return target.text.logits(hidden)


class SampledBatch(GreedyBatch):
    """The same for greedy and sampled requests whose tokens need not be those of decoding them one by one: all are
    certain whose logits are finite.
    """

    def _emit(self, requests: Sequence[Request], logits: Tensor) -> list[bool]:
        positions = [len(request.prompt) + len(request.tokens) for request in requests]
        tokens = drawn_tokens([request.sampler for request in requests], logits, positions)
        for request, token in zip(requests, tokens, strict=True):
            request.emit([max(0, token)])
        return [token != NOT_FINITE for token in tokens]


def drawn_tokens(samplers: Sequence[TokenSampler], logits: Tensor, positions: Sequence[int]) -> list[int]:
    """A token of each row of ``logits`` [n, vocabulary], at one position each. A sampled one inverts the cumulative
    distribution at a number of the sampler's seed and the position, where ``TokenSampler.token``, which draws from the
    same distributions, makes noise of every token; it draws for samplers with processors. ``NOT_FINITE`` where logits
    are not finite.
    """
    tokens = best_tokens(logits, logits).tolist()
    finite = [(row, sampler) for row, sampler in enumerate(samplers) if tokens[row] != NOT_FINITE]
    rows = [row for row, sampler in finite if sampler.temperature > 0.0 and not sampler.processors]
    if rows:
        temperature = torch.tensor([samplers[row].temperature for row in rows], device=logits.device)
        mass = (logits[rows].float() / temperature[:, None]).softmax(-1).cumsum(-1)
        shares = [mix_seed(samplers[row].seed, positions[row]) / 2**63 for row in rows]
        wanted = torch.tensor(shares, device=logits.device)[:, None] * mass[:, -1:]
        found = torch.searchsorted(mass, wanted, right=True).clamp_max(mass.shape[-1] - 1)
        for row, token in zip(rows, found[:, 0].tolist(), strict=True):
            tokens[row] = token
    for row, sampler in finite:
        if sampler.processors:
            sampler.max_noise_bytes = 0  # no draft asks for it again, and there is one for each row
            tokens[row] = sampler.token(logits[row], positions[row])
    return tokens  # type: ignore[no-any-return]
