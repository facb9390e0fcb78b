"""The token that the target emits at a position, a function of logits, seed and position (``docs/concepts.md``,
losslessness).

The token at absolute position t is ``argmax(processed_logits / T + gumbel(seed, t))``; at temperature 0 there is no
noise. By the Gumbel-max trick it is distributed as softmax(processed_logits / T). Plain decoding, trees and recording
all use this function, and the noise does not depend on the order of calls, so they emit the same tokens at any
temperature.

A draft that ranks tokens by the same function of its own logits, with the same noise, proposes the target's token more
often (coupled sampling: Daliri, Musco and Suresh, arXiv 2408.07978). Which tokens are emitted does not depend on it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from autotune.drafters.draft import Coupling, cut_scores
from autotune.errors import UserError
from autotune.modeling import host
from autotune.modeling.step import NOT_FINITE, Draw, Evaluated, best_tokens
from autotune.modeling.target import NOISE_ROWS
from autotune.trees.limits import Floats, Ints

_MASK64 = (1 << 64) - 1
MAX_NOISE_BYTES = 64 << 20  # of the noise that a sampler keeps
COUPLED_TEMPERATURE = 0.01
"""The lowest temperature at which drafts are coupled. Below it noise decides near ties only, while scores over such a
temperature would tell a tree policy that every draft is certain. The defaults of Qwen2.5-VL have 1e-6.
"""
NUCLEUS_TOKENS = 1024  # that top-p looks at before it sorts a vocabulary
UNSURE = -1  # in place of a token that a sorted vocabulary decides
MASS_ROUNDING = 2**-18  # by which sums of a vocabulary's probabilities may differ
# Hugging Face's processors that do not read the prefix.
PREFIX_FREE = frozenset(
    {
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "MinPLogitsWarper", "TemperatureLogitsWarper", "TopKLogitsWarper"),
        *("TopPLogitsWarper", "TypicalLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization"),
        "SuppressTokensLogitsProcessor",
    }
)
# Those that captured steps of a draft compute themselves, in this order.
WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
# Those that read its length alone.
OF_LENGTH = frozenset(
    {
        *("ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
    }
)
# All that can decide several tokens at once: the repetition penalty reads which tokens the prefix has, in any order and
# number.
AT_ONCE = PREFIX_FREE | OF_LENGTH | {"RepetitionPenaltyLogitsProcessor"}


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings that are out of range."""
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise UserError(f"temperature must be a number of at least 0; got {temperature}; 0 is greedy decoding")
    if not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p must be above 0 and at most 1; got {top_p}; 1 keeps every token")
    if top_k < 0:
        raise UserError(f"top_k must be at least 0; got {top_k}; 0 keeps every token")


def not_finite(position: int, dtype: torch.dtype) -> UserError:
    """The error about logits of the target, in ``dtype``, that decide no token at ``position``."""
    name = str(dtype).removeprefix("torch.")
    advice = {"float16": "give --dtype bfloat16 or float32", "bfloat16": "give --dtype float32"}
    return UserError(
        f"the target's logits for the token at position {position} are not finite in {name}, and decide no token; "
        f"{advice.get(name, 'restore the weights and the config, or load another checkpoint')}"
    )


def mix_seed(seed: int, position: int) -> int:
    """A 63-bit generator seed for (seed, position), by splitmix64: neighbouring positions are uncorrelated."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


def nucleus(scores: Tensor, warper: TopPLogitsWarper) -> tuple[Tensor, Tensor]:
    """The ``scores`` [n, vocabulary] as ``warper`` leaves them, by the ``NUCLEUS_TOKENS`` best of each row, and whether
    a row is unsure, [n]: its nucleus may reach beyond these, or ends where rounding decides. Of equal scores that are
    kept in part, the last ones are kept.
    """
    best, index = scores.topk(min(NUCLEUS_TOKENS, scores.shape[-1]))
    # A softmax of the vocabulary would be added up less exactly.
    probability = (best - best[:, :1]).exp() / (scores - best[:, :1]).exp_().sum(-1, keepdim=True)
    mass = probability.cumsum(-1)
    missing = warper.top_p - (mass - probability)  # before each token
    is_kept = missing > 0.0
    is_kept[:, : warper.min_tokens_to_keep] = True
    last = best.gather(-1, is_kept.sum(-1, keepdim=True) - 1)
    num_equal = (is_kept & (best == last)).sum(-1, keepdim=True)  # 0 where the best is not a number
    first_equal = (
        torch.where(best == last, index, -1).sort(descending=True).values.gather(-1, (num_equal - 1).clamp_min(0))
    )
    is_kept = (best > last) | (best == last) & (index >= first_equal)
    kept = torch.where(is_kept, best, warper.filter_value)
    is_unsure = ~(mass[:, -1] >= warper.top_p) | (last <= best[:, -1:])[:, 0] | (missing.abs() < MASS_ROUNDING).any(-1)
    return torch.full_like(scores, warper.filter_value).scatter_(-1, index, kept), is_unsure


def candidate_logprobs(logits: Tensor, scores: Tensor, rows: Ints, tokens: Ints) -> Floats:
    """Log-probabilities of ``tokens`` [m] in the rows ``rows`` [m] of ``logits``, after a 0 for the root, [m + 1].

    They are the model's own at temperature 1, as a draft's are, whatever the temperature of the request; tokens that
    the request's top-k, top-p or processors exclude, whose ``scores`` are -inf, have -inf.
    """
    at = host.to_device(rows, logits.device), host.to_device(tokens, logits.device)
    picked = logits.float().log_softmax(-1)[at].masked_fill(scores[at] == -math.inf, -math.inf)
    return np.concatenate([[0.0], host.to_host(picked.double())])


class TokenSampler:
    """Turns the logits of a request into tokens.

    Args:
        processors: those of Hugging Face, which may read the prefix.
        prefix: the tokens before the first one that is decided, [1, tokens].
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        processors: Sequence[Any] = (),
        prefix: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.temperature = temperature
        self.seed = seed
        names = [type(processor).__name__ for processor in processors]
        self.processors = list(processors)
        self._proposal_processors = [each for each in self.processors if type(each).__name__ in PREFIX_FREE]
        by_name = {type(processor).__name__: processor for processor in self._proposal_processors}
        self._has_usual_warpers = self._proposal_processors == [by_name[name] for name in WARPERS if name in by_name]
        """Whether a captured step of a draft can process its logits as the request asks."""
        self._top_k = getattr(by_name.get("TopKLogitsWarper"), "top_k", 0)
        self._top_p = getattr(by_name.get("TopPLogitsWarper"), "top_p", 1.0)
        self._warped_by = getattr(by_name.get("TemperatureLogitsWarper"), "temperature", temperature)
        self._divisor = 1.0 if temperature == 0.0 or "TemperatureLogitsWarper" in names else temperature
        self.prefix = torch.empty(1, 0, dtype=torch.long, device=device) if prefix is None else prefix
        """The tokens so far, [1, tokens], if a processor reads them."""
        self.reads_prefix = not PREFIX_FREE.issuperset(names)
        ignored = [getattr(processor, "prompt_ignore_length", None) or 0 for processor in processors]
        longest = self.prefix.shape[1]  # that can be ignored: no new tokens
        self.one_by_one = [n for n, k in zip(names, ignored, strict=True) if n not in AT_ONCE or k > longest]
        """Processors that decide one token at a time, because they read more of the prefix."""
        self.decided = self.prefix[0, :0]
        """The latest tokens, on their device."""
        self._generator = torch.Generator(device)
        self._device = device
        self.max_noise_bytes = MAX_NOISE_BYTES
        self._noise: dict[tuple[int, int], Tensor] = {}  # by position and vocabulary, the oldest first
        self._drawn: tuple[Tensor, int] | None = None
        """Rows of noise that captured steps read, and the position up to which they were written."""

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits."""
        return self.temperature == 0.0 and not self.processors

    def token(self, logits: Tensor, position: int, evaluated: Evaluated | None = None) -> int:
        """The token at ``position`` after the prefix, to which it is appended, from logits [vocabulary].

        Args:
            evaluated: the step of one token whose logits they are; a captured one knows the greedy token.

        Raises:
            UserError: the logits are not finite.
        """
        (token,) = (
            self.tokens(logits[None], np.array([position]))
            if evaluated is None or not self.is_greedy
            else evaluated.greedy_tokens()
        )
        if token == NOT_FINITE:
            raise not_finite(position, logits.dtype)
        if self.reads_prefix:
            self.append(self.decided)
        return int(token)

    def tokens(self, logits: Tensor, positions: Ints, paths: Tensor | None = None) -> Ints:
        """The tokens at ``positions`` [n], from logits [n, vocabulary]; ``NOT_FINITE`` where logits are not finite.
        Other arguments are those of ``scores``.
        """
        unsure: list[Tensor] | None = None if self.one_by_one else []  # processors with a state read a token once
        self.decided = best_tokens(self.scores(logits, positions, paths, unsure), logits)
        for is_unsure in unsure or ():
            self.decided = self.decided.masked_fill(is_unsure, UNSURE)
        tokens = host.to_host(self.decided)
        if (tokens == UNSURE).any():
            rows = np.union1d(0, np.flatnonzero(tokens == UNSURE))  # positions count from the first one
            at = host.to_device(rows, logits.device)
            scores = self.scores(logits[at], positions[rows], None if paths is None else paths[at])
            exact = best_tokens(scores, logits[at])
            self.decided[at] = torch.where(self.decided[at] == UNSURE, exact, self.decided[at])
            tokens = host.to_host(self.decided)
        return tokens

    def append(self, tokens: Tensor) -> None:
        """Append tokens [n] to the prefix."""
        self.prefix = torch.cat([self.prefix, tokens[None]], dim=1)

    def scores(
        self, logits: Tensor, positions: Ints, paths: Tensor | None = None, unsure: list[Tensor] | None = None
    ) -> Tensor:
        """The scores whose argmax is the token, [n, vocabulary].

        Args:
            positions: of the tokens, [n]; the first row's follows the prefix.
            paths: for processors that read the prefix, the tokens after it in each row, [n, columns]; other columns
                repeat one of them, or are no token. None: there are no tokens after it.
            unsure: with it, top-p does not sort the vocabulary, and appends whether a row needs that, [n].
        """
        if self.is_greedy:
            return logits
        scores = logits.float() / self._divisor  # a copy, to which users' processors may write
        prefix = self.prefix.expand(len(scores), -1)
        if paths is not None:
            prefix = torch.cat([prefix, paths], dim=1)
        for processor in self.processors:
            if unsure is not None and isinstance(processor, TopPLogitsWarper):
                scores, is_unsure = nucleus(scores, processor)
                unsure.append(is_unsure)
            elif type(processor).__name__ in OF_LENGTH:
                # Rows with equal positions have prefixes of one length.
                edges = [0, *(np.flatnonzero(np.diff(positions)) + 1).tolist(), len(positions)]
                lengths = self.prefix.shape[1] + positions - positions[0]
                parts = ((slice(*edge), lengths[edge[0]]) for edge in itertools.pairwise(edges))
                scores = torch.cat([processor(prefix[rows, :length], scores[rows]) for rows, length in parts])
            else:
                scores = processor(prefix, scores)
        return scores if self.temperature == 0.0 else scores + self._noise_of_rows(positions, scores)

    def proposal_scores(self, logits: Tensor, positions: Ints) -> Tensor:
        """The scores by which a draft ranks tokens under coupled sampling, [n, vocabulary]: ``scores`` of its own
        logits. Processors that read the prefix are left out, and top-p keeps at most ``NUCLEUS_TOKENS``.

        Args:
            logits: the draft's, over the target's vocabulary, on any device; -inf for tokens that the draft does not
                know.
            positions: of the proposed tokens, [n], or [1] if all rows have one position. The temperature is above 0.
        """
        if self._has_usual_warpers:
            scores = logits.float() / self._warped_by
            if self._top_k > 0 or self._top_p < 1.0:
                scores = cut_scores(scores, self._top_k or scores.shape[-1], self._top_p)
        else:
            scores = logits.float() / self._divisor
            for processor in self._proposal_processors:
                scores = processor(self.prefix, scores)
        return scores + self._noise_of_rows(positions, scores)

    def coupling(self, positions: Ints) -> Coupling:
        """Couples the proposals for ``positions``, as in ``proposal_scores``."""
        draw = None
        if self._drawn is not None and self._has_usual_warpers:
            noise, row = self._drawn[0], int(positions[0]) % NOISE_ROWS
            draw = Draw(noise, row, self._warped_by, self._top_k or noise.shape[1], self._top_p)
        return Coupling(functools.partial(self.proposal_scores, positions=positions), draw)

    def draw_ahead(self, noise: Tensor, first: int, end: int) -> None:
        """Write the noise of the positions from ``first`` to ``end`` to its rows of ``noise``, [``NOISE_ROWS``,
        vocabulary], where it is not there yet.
        """
        if self._drawn is not None:
            first = max(first, self._drawn[1])
        for position in range(first, end):
            noise[position % NOISE_ROWS] = self._noise_at(position, noise.shape[1])
        self._drawn = noise, max(first, end)

    def noise(self, positions: Iterable[int], vocabulary: int) -> Tensor:
        """Standard Gumbel noise of each position, [positions, vocabulary]."""
        return torch.stack([self._noise_at(position, vocabulary) for position in positions])

    def _noise_of_rows(self, positions: Ints, logits: Tensor) -> Tensor:
        """The noise of each row of logits, [n, vocabulary], or [vocabulary] for a single position, on their device."""
        if len(positions) == 1:
            return self._noise_at(int(positions[0]), logits.shape[-1]).to(logits.device)
        distinct, inverse = np.unique(positions, return_inverse=True)
        noise = self.noise(distinct.tolist(), logits.shape[-1]).to(logits.device)
        return noise[host.to_device(inverse, noise.device)]

    def _noise_at(self, position: int, vocabulary: int) -> Tensor:
        """The noise of a position, [vocabulary]. Draft and target ask for the same positions, so recent ones
        are kept.
        """
        key = position, vocabulary
        if key not in self._noise:
            while self._noise and (len(self._noise) + 1) * vocabulary * 4 > self.max_noise_bytes:
                del self._noise[next(iter(self._noise))]
            self._generator.manual_seed(mix_seed(self.seed, position))
            # -log of an exponential variate is Gumbel distributed.
            variates = torch.empty(vocabulary, device=self._device).exponential_(generator=self._generator)
            self._noise[key] = -variates.log()
        return self._noise[key]
