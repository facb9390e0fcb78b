"""The token that the target emits at a position, a function of logits, seed and position (``docs/concepts.md``, losslessness).

The token at absolute position t is ``argmax(processed_logits / T + gumbel(seed, t))``; at temperature 0 there is no noise.
By the Gumbel-max trick it is distributed as softmax(processed_logits / T). Plain decoding, trees and recording all use this
function, and the noise does not depend on the order of calls, so they emit the same tokens at any temperature.

A draft that ranks tokens by the same function of its own logits, with the same noise, proposes the target's token more often
(coupled sampling: Daliri, Musco and Suresh, arXiv 2408.07978). Which tokens are emitted does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from autotune.errors import UserError
from autotune.modeling import transfer

_MASK64 = (1 << 64) - 1
MAX_NOISE_BYTES = 64 << 20  # of the noise that a sampler keeps
# Hugging Face's processors that do not read the prefix.
PREFIX_FREE = frozenset(
    {
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"),
        *("TopPLogitsWarper", "TypicalLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
        "SuppressTokensLogitsProcessor",
    }
)


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings that are out of range."""
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise UserError(f"temperature must be a number of at least 0; got {temperature}; 0 is greedy decoding")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p must be above 0 and at most 1; got {top_p}; 1 keeps every token")
    if top_k < 0:
        raise UserError(f"top_k must be at least 0; got {top_k}; 0 keeps every token")


def mix_seed(seed: int, position: int) -> int:
    """A 63-bit generator seed for (seed, position), by splitmix64: neighbouring positions are uncorrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


class TokenSampler:
    """Turns logits into tokens. ``processors`` are those of Hugging Face, which may read the prefix."""

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        processors: Sequence[Any] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        self.temperature = temperature
        self.seed = seed
        prefix_free = [processor for processor in processors if type(processor).__name__ in PREFIX_FREE]
        # If no processor reads the prefix, all tokens of a round are computed at once.
        is_prefix_free = len(prefix_free) == len(processors)
        own: list[Any] = [TopKLogitsWarper(top_k)] if temperature > 0.0 and top_k > 0 else []
        own += [TopPLogitsWarper(top_p)] if temperature > 0.0 and top_p < 1.0 else []
        self.processors = [] if is_prefix_free else list(processors)
        self.warpers = LogitsProcessorList([*(processors if is_prefix_free else ()), *own])
        self._proposal_warpers = LogitsProcessorList([*prefix_free, *own])
        self._generator = torch.Generator(device)
        self._device = device
        self._noise: dict[tuple[int, int], Tensor] = {}  # by position and vocabulary, the oldest first

    @property
    def needs_prefix(self) -> bool:
        """Whether a token depends on the prefix beyond its logits, so that only visited nodes can be decided."""
        return bool(self.processors)

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits."""
        return self.temperature == 0.0 and not self.warpers and not self.processors

    def token(self, logits: Tensor, position: int, prefix: Tensor | None = None) -> int:
        """The token at ``position`` after a prefix [1, tokens], from logits [vocabulary]."""
        if self.processors:
            assert prefix is not None
            logits = LogitsProcessorList(self.processors)(prefix, logits[None].float().clone())[0]
        row = logits[None]
        greedy = self.temperature == 0.0
        scores = self._warped(row) if greedy else self._with_noise(row, self._noise_at(position, row.shape[-1]))
        return int(transfer.to_host(scores.argmax(-1))[0])

    def tokens(self, logits: Tensor, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens at ``positions`` [n], from logits [n, vocabulary]."""
        return transfer.to_host(self.scores(logits, positions).argmax(-1))

    def scores(self, logits: Tensor, positions: NDArray[np.int64]) -> Tensor:
        """The scores whose argmax is the token, [n, vocabulary]."""
        if self.temperature == 0.0:
            return self._warped(logits)
        return self._with_noise(logits, self._noise_of_rows(positions, logits))

    def _with_noise(self, logits: Tensor, noise: Tensor) -> Tensor:
        return self._warped(logits.float() / self.temperature) + noise

    def proposal_scores(self, logits: Tensor, positions: NDArray[np.int64]) -> Tensor:
        """The scores by which a draft ranks tokens under coupled sampling, [n, vocabulary]: ``scores`` of its own logits.
        Processors that read the prefix are left out, because they would have to run on every node of a tree.

        Args:
            logits: the draft's, over the target's vocabulary, on any device; -inf for tokens that the draft does not know.
            positions: of the proposed tokens, [n], or [1] if all rows have one position. The temperature is above 0.
        """
        if len(positions) == 1:
            noise = self._noise_at(int(positions[0]), logits.shape[-1]).to(logits.device)
        else:
            noise = self._noise_of_rows(positions, logits)
        return _warped(logits.float() / self.temperature, self._proposal_warpers) + noise

    def logprobs(self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Log-probabilities of ``tokens`` [n] in the rows ``rows`` [n] of ``logits``, after a 0 for the root, [n + 1].

        They are the model's own at temperature 1, as a draft's are, whatever the temperature of the request; tokens that
        the request's top-k, top-p or processors exclude have -inf.
        """
        at = transfer.to_device(rows, logits.device), transfer.to_device(tokens, logits.device)
        picked = logits.float().log_softmax(-1)[at]
        if self.warpers:
            scaled = logits.float() / self.temperature if self.temperature > 0.0 else logits.float()
            picked = picked.masked_fill(self._warped(scaled)[at] == -math.inf, -math.inf)
        return np.concatenate([[0.0], transfer.to_host(picked.double())])

    def _warped(self, scores: Tensor) -> Tensor:
        return _warped(scores, self.warpers)

    def noise(self, positions: Iterable[int], vocabulary: int) -> Tensor:
        """Standard Gumbel noise of each position, [positions, vocabulary]."""
        return torch.stack([self._noise_at(position, vocabulary) for position in positions])

    def _noise_of_rows(self, positions: NDArray[np.int64], logits: Tensor) -> Tensor:
        """The noise of each row of logits, [n, vocabulary], on their device."""
        distinct, inverse = np.unique(positions, return_inverse=True)
        noise = self.noise(distinct.tolist(), logits.shape[-1]).to(logits.device)
        return noise[transfer.to_device(inverse, noise.device)]

    def _noise_at(self, position: int, vocabulary: int) -> Tensor:
        """The noise of a position, [vocabulary]. Draft and target ask for the same positions, so recent ones are kept."""
        key = position, vocabulary
        if key not in self._noise:
            while self._noise and (len(self._noise) + 1) * vocabulary * 4 > MAX_NOISE_BYTES:
                del self._noise[next(iter(self._noise))]
            self._generator.manual_seed(mix_seed(self.seed, position))
            # -log of an exponential variate is Gumbel distributed.
            variates = torch.empty(vocabulary, device=self._device).exponential_(generator=self._generator)
            self._noise[key] = -variates.log()
        return self._noise[key]


def _warped(scores: Tensor, warpers: LogitsProcessorList) -> Tensor:
    if not warpers:
        return scores
    empty_prefix = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    return warpers(empty_prefix, scores)  # type: ignore[no-any-return]
