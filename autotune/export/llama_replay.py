"""Replay of rounds as llama.cpp's server runs them, and the fastest settings of its own space. Loads no torch.

Every round takes the draft of the first type that proposes something: n-grams before the draft model. A draft model proposes a
chain that ends before a token of less probability than ``p_min``, and a chain of fewer than ``n_min`` tokens is dropped. The
draft model then reads the verified tokens again, in one forward pass, whoever proposed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autotune.acceptance.replay import plain_decode_ms
from autotune.acceptance.trace import Trace
from autotune.documents.decoding_profile import Predicted
from autotune.export.engine_replay import EngineReplay
from autotune.trees.limits import Floats, Ints

NUM_CANDIDATES = 10
"""llama.cpp's probability of a draft token is a share of this many most probable ones (``LLAMA_DRAFT_TOP_K``)."""
MAX_N_MIN = 2
SIZES_N = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SIZES_M = (2, 4, 8, 12, 16, 24, 32, 48, 64)
MATCHES = (4, 8, 16, 24)
MOD_N_MIN = (1, 4, 16, 48)
MOD_N_MAX = (8, 16, 32, 64)
POOL_CHUNK, MAX_LOW_DRAFTS = 32, 5
"""llama.cpp's constants of ``ngram-mod``."""
NUM_CHAINED = 8
"""The fastest settings of a draft model that are tried together with the n-grams that serve the fastest one best."""


@dataclass(frozen=True)
class ModelDraft:
    """``--spec-draft-n-max``, ``-n-min`` and ``-p-min``."""

    n_max: int
    n_min: int = 0
    p_min: float = 0.0

    @property
    def label(self) -> str:
        return f"n-max={self.n_max}, n-min={self.n_min}, p-min={self.p_min:g}"


@dataclass(frozen=True)
class NgramDraft:
    """``ngram-simple``: what followed the latest earlier occurrence of the last ``size_n`` tokens, ``size_m`` tokens of it."""

    size_n: int
    size_m: int

    @property
    def label(self) -> str:
        return f"size-n={self.size_n}, size-m={self.size_m}"


@dataclass(frozen=True)
class NgramMod:
    """``ngram-mod``: a pool of the token that last followed each ``n_match`` tokens, from which a draft of ``n_min`` to ``n_max``
    tokens is read token by token.
    """

    n_match: int
    n_min: int
    n_max: int

    @property
    def label(self) -> str:
        return f"n-match={self.n_match}, n-min={self.n_min}, n-max={self.n_max}"


class NgramPool:
    """The pool of ``ngram-mod`` in one request. The server's keeps what earlier requests left; replay begins with an empty one.
    Collisions of hashes are left out.
    """

    def __init__(self, settings: NgramMod, prompt: list[int]) -> None:
        self.settings = settings
        self._following: dict[tuple[int, ...], int] = {}
        self._num_added = self._num_low = 0
        self._add(prompt)

    def _add(self, history: list[int]) -> None:
        n = self.settings.n_match
        for i in range(self._num_added, len(history) - n):
            self._following[tuple(history[i : i + n])] = history[i + n]
        self._num_added = max(self._num_added, len(history) - n)

    def draft(self, history: list[int], sampled: int) -> list[int]:
        """The draft after ``history`` and the sampled token. New tokens are added when there are more than 32."""
        n, drafted = self.settings.n_match, list[int]()
        if len(history) < n:
            return drafted
        if self._num_added + POOL_CHUNK < len(history):
            self._add(history)
        context = (*history[len(history) - n + 1 :], sampled)
        while len(drafted) < self.settings.n_max and (token := self._following.get(context)) is not None:
            drafted.append(token)
            context = (*context[1:], token)
        return drafted if len(drafted) >= self.settings.n_min else []

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """After a draft of its own: the fifth one in a row of which less than a quarter was accepted empties the pool."""
        self._num_low = self._num_low + 1 if num_accepted < 0.25 * num_drafted else 0
        if self._num_low == MAX_LOW_DRAFTS:
            self._following.clear()
            self._num_added = self._num_low = 0


class Drafts(NamedTuple):
    """The drafts of all roots, arrays [roots]. Drafts are not shortened at the end of an answer."""

    length: Ints
    accepted: Ints
    forwards: Ints
    """Forward passes of the draft model."""


class Priced(NamedTuple):
    """Settings of llama.cpp and their replayed figures."""

    model: ModelDraft | None
    ngram: NgramDraft | NgramMod | None
    predicted: Predicted

    @property
    def rank(self) -> tuple[float, int]:
        """Fastest first; ties go to shorter drafts."""
        return self.predicted.ms_per_token, self.model.n_max if self.model else 0


class LlamaReplay:
    """Replays llama.cpp's speculation along the trace of an ``EngineReplay``, on its prompts."""

    def __init__(self, replay: EngineReplay) -> None:
        trace, prices = replay.trace, replay.prices
        self.trace, self._replay = trace, replay
        self._prompt, self._token, node = trace.roots()
        offset = self._token - trace.answer_start[self._prompt]
        self._bin = np.minimum(
            (trace.prompt_length[self._prompt] + offset) // prices.kv_step, len(prices.decode_ms) - 1
        )
        draft_length = trace.draft_kv_length(prices.crossing_share)[self._prompt] + offset
        self._draft_bin = np.minimum(draft_length // prices.kv_step, prices.draft_level_ms.shape[1] - 1)
        self._num_left = trace.answer_start[self._prompt + 1] - 1 - self._token  # tokens of the answer after the root
        self._probability, self._match = _chains(trace, node, self._token, self._num_left)
        self._ngrams: dict[int, Drafts] = {}
        selected = replay.prompts
        self._num_tokens = int((np.diff(trace.answer_start) - 1)[selected].sum())
        self._plain_ms = float(plain_decode_ms(trace, prices)[selected].sum())
        prefill_ms = prices.draft_prefill.ms(trace.draft_prompt_length, trace.num_visual_tokens > 0)
        self._prefill_ms = float(prefill_ms[selected].sum())
        self.max_draft = replay.max_tokens - 1
        """Tokens of the longest draft whose verification the table prices."""

    @property
    def has_ngrams(self) -> bool:
        """Whether the trace holds the tokens of prompts, in which n-grams are looked up."""
        return len(self.trace.prompt_tokens) > 0

    def model_drafts(self, draft: ModelDraft) -> Drafts:
        """The chains of the draft model at every root."""
        is_sure = self._probability[:, : draft.n_max] >= draft.p_min
        length = np.cumprod(is_sure, axis=1).sum(1)
        forwards = np.minimum(length + 1, draft.n_max)
        length[length < draft.n_min] = 0
        return Drafts(length, np.minimum(self._match, length), forwards)

    def ngram_drafts(self, draft: NgramDraft) -> Drafts:
        """The continuations of earlier n-grams at every root; as in llama.cpp a continuation shorter than the n-gram is dropped."""
        if draft.size_n not in self._ngrams:
            self._ngrams[draft.size_n] = self._find_ngrams(draft.size_n)
        ngrams = self._ngrams[draft.size_n]
        history = self.trace.prompt_length[self._prompt] + self._token - self.trace.answer_start[self._prompt]
        length = np.minimum(ngrams.length, draft.size_m)
        length[(length < draft.size_n) | (history <= draft.size_n + draft.size_m + 1)] = 0
        return Drafts(length, np.minimum(ngrams.accepted, length), ngrams.forwards)

    def price(self, model: ModelDraft | None, ngram: NgramDraft | NgramMod | None) -> Priced:
        """Replay a draft model, n-grams, or both, for one request at a time."""
        prices = self._replay.prices
        nothing = np.zeros(len(self._token), np.int64)
        drafts = Drafts(nothing, nothing, nothing) if model is None else self.model_drafts(model)
        if isinstance(ngram, NgramDraft):
            first = self.ngram_drafts(ngram)
            is_found = first.length > 0
            drafts = Drafts(*(np.where(is_found, a, b) for a, b in zip(first, drafts, strict=True)))
        if isinstance(ngram, NgramMod):
            visited, drafts = self._rounds_with_pool(ngram, drafts)
        else:
            visited = self._rounds(drafts.accepted)
        size = drafts.length + 1
        ms = np.where(size > 1, _price(prices.verify_ms, size, self._bin), prices.decode_ms[self._bin])
        ms += prices.overhead_round_ms * ((size > 1) | (drafts.forwards > 0))
        ms += prices.overhead_level_ms * drafts.forwards + prices.overhead_node_ms * drafts.length
        if model is not None:
            ms += drafts.forwards * _price(prices.draft_level_ms, 1 + nothing, self._draft_bin)
            ms += _price(prices.draft_first_ms, size, self._draft_bin)
        total_ms = float(ms[visited].sum()) + (self._prefill_ms if model is not None else 0.0)
        predicted = Predicted(
            speedup=self._plain_ms / total_ms,
            ms_per_token=total_ms / self._num_tokens,
            tokens_per_round=self._num_tokens / len(visited),
            estimated=self._replay.is_estimated,
        )
        return Priced(model, ngram, predicted)

    def fastest(self) -> list[Priced]:
        """The fastest draft model, the fastest n-grams, and the fastest of both together that were tried, where it beats either."""
        models = sorted((self.price(model, None) for model in self._models()), key=lambda priced: priced.rank)
        best = models[:1]
        if sizes := list(self._sizes()):
            # The n-grams that serve a model best are longer than those that serve alone.
            longest = min((self.price(models[0].model, size) for size in sizes), key=lambda priced: priced.rank)
            pairs = (self.price(draft.model, longest.ngram) for draft in models[:NUM_CHAINED])
            both = min(pairs, key=lambda priced: priced.rank)
            best.append(min((self.price(None, size) for size in sizes), key=lambda priced: priced.rank))
            if all(both.rank < priced.rank for priced in best):
                best.append(both)
        return best

    def _models(self) -> Iterator[ModelDraft]:
        """Every length, with every floor in steps of 0.1, and drafts of at least 0, 1 or 2 tokens."""
        for n_max in range(1, min(self._probability.shape[1], self.max_draft) + 1):
            for tenths, n_min in itertools.product(range(10), range(min(MAX_N_MIN, n_max) + 1)):
                if tenths > 0 or n_min == 0:  # without a floor no draft is short
                    yield ModelDraft(n_max, n_min, tenths / 10)

    def _sizes(self) -> Iterator[NgramDraft | NgramMod]:
        """Sizes of n-grams. A draft of ``ngram-simple`` has at least as many tokens as the n-gram."""
        if not self.has_ngrams:
            return
        for size_n, size_m in itertools.product(SIZES_N, SIZES_M):
            if size_n <= size_m <= self.max_draft:
                yield NgramDraft(size_n, size_m)
        for n_match, n_min, n_max in itertools.product(MATCHES, MOD_N_MIN, MOD_N_MAX):
            if n_min <= n_max <= self.max_draft:
                yield NgramMod(n_match, n_min, n_max)

    def _rounds(self, accepted: Ints) -> list[int]:
        """The roots of all rounds of the selected prompts."""
        steps, visited = (accepted + 1).tolist(), []
        starts = self._starts
        for p in np.flatnonzero(self._replay.prompts):
            root, end = int(starts[p]), int(starts[p + 1])
            while root < end:
                visited.append(root)
                root += steps[root]
        return visited

    def _rounds_with_pool(self, settings: NgramMod, fallback: Drafts) -> tuple[list[int], Drafts]:
        """The roots of all rounds, and the drafts there; ``others`` draft where the pool has nothing."""
        length, accepted, forwards = (drafts.copy() for drafts in fallback)
        starts, visited = self._starts, []
        for p in np.flatnonzero(self._replay.prompts):
            prompt, answer = self._tokens(int(p))
            pool, position = NgramPool(settings, prompt), 0
            while position < len(answer) - 1:
                root = int(starts[p]) + position
                visited.append(root)
                if drafted := pool.draft(prompt + answer[:position], answer[position]):
                    pairs = zip(drafted, answer[position + 1 :], strict=False)
                    num_accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                    length[root], accepted[root], forwards[root] = len(drafted), num_accepted, 0
                    pool.update(len(drafted), num_accepted)
                position += int(accepted[root]) + 1
        return visited, Drafts(length, accepted, forwards)

    @property
    def _starts(self) -> Ints:
        """The first root of every prompt, and their number; the last token of an answer is no root."""
        return self.trace.answer_start - np.arange(self.trace.num_prompts + 1)

    def _tokens(self, p: int) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of its answer."""
        trace, end = self.trace, int(self.trace.prompt_length[: p + 1].sum())
        prompt = trace.prompt_tokens[end - trace.prompt_length[p] : end]
        return prompt.tolist(), trace.forest.answer[trace.answer_start[p] : trace.answer_start[p + 1]].tolist()

    def _find_ngrams(self, size: int) -> Drafts:
        """At every root, the tokens that the whole history holds after the latest earlier occurrence of the last ``size``."""
        length, accepted = np.zeros((2, len(self._token)), np.int64)
        root = 0
        for p in range(self.trace.num_prompts):
            prompt, answer = self._tokens(p)
            tokens = prompt + answer
            latest: dict[tuple[int, ...], int] = {}
            begin = 1  # llama.cpp takes position 0 for no match
            for last in range(len(tokens) - len(answer), len(tokens) - 1):  # position of the root, the last token known
                while begin <= last - size - 1:  # neither the n-gram itself nor the one a token before
                    latest[tuple(tokens[begin : begin + size])] = begin
                    begin += 1
                start = latest.get(tuple(tokens[last - size + 1 : last + 1]))
                if start is not None:
                    length[root] = last - (start + size)
                    pairs = zip(tokens[last + 1 :], tokens[start + size : last], strict=False)
                    accepted[root] = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                root += 1
        return Drafts(length, accepted, np.zeros(len(length), np.int64))


def _chains(trace: Trace, node: Ints, token: Ints, num_left: Ints) -> tuple[Floats, Ints]:
    """The draft's chain from every root: the probability of each token [roots, depth], as llama.cpp takes it, and how many of
    the first ones are the answer's [roots]. Tokens that were not recorded have probability -1.
    """
    forest, depth = trace.forest, trace.header.bounds.depth
    probability, match = np.full((len(node), depth), -1.0), np.zeros(len(node), np.int64)
    is_match = np.ones(len(node), bool)
    for level in range(depth):
        logprobs = forest.child_logprob[node, :NUM_CANDIDATES].astype(np.float64)
        total = np.logaddexp.reduce(logprobs, axis=1)
        is_proposed = (node >= 0) & np.isfinite(logprobs[:, 0])
        probability[is_proposed, level] = np.exp(logprobs[is_proposed, 0] - total[is_proposed])
        is_match &= is_proposed & (level < num_left)
        following = forest.answer[np.minimum(token + 1 + level, len(forest.answer) - 1)]
        is_match &= forest.child_token[node, 0] == following
        match += is_match
        node = np.where(node >= 0, forest.child_node[node, 0], -1)
    return probability, match


def _price(table: Floats, tokens: Ints, bins: Ints) -> Floats:
    return np.asarray(table[np.minimum(tokens, table.shape[0] - 1), bins])
