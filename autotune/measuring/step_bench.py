"""Times single steps of a decoder: the ``Bench`` of real models, and the choice of CPU threads."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from autotune.cost.surface import standard_error
from autotune.documents.execution import EAGER
from autotune.drafters.checkpoint import LoadedDraft
from autotune.machine.device import usable_threads
from autotune.measuring.jobs import plain_steps_ms
from autotune.measuring.settings import CostSettings
from autotune.modeling.host import limited_threads, now_ms
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.generate_args import Call, Request
from autotune.runtime.preparation import TREE_SLOTS
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.limits import Floats
from autotune.trees.tree import CHILD, MAX_STEP, ROOT, Ints, Tree, add_child, new_tree, set_root

WARM_UPS = 3
WARM_UP_MS = 500.0  # no warm-up begins after it, except the first
THREAD_REPEATS = 15


class StepBench:
    """Times single steps of a decoder, whose requests have ``sampler`` (None: greedy). The contents of its KV caches
    are arbitrary, because latency does not depend on them.
    """

    def __init__(
        self, target: Target, draft: LoadedDraft, settings: CostSettings, sampler: TokenSampler | None = None
    ) -> None:
        capacity = max(settings.kv_lengths) + TREE_SLOTS
        self.kv_length, self.max_tokens = settings.kv_lengths[0], max(settings.tokens)
        self.sampler = sampler or TokenSampler(device=target.device)
        with torch.inference_mode(), limited_threads(1 if target.device.type == "cpu" else None):
            self.draft = draft
            self.decoder = Decoder(target, draft, capture_sizes=settings.capture_sizes, mode=settings.mode)
            draft.capture_sizes = settings.capture_sizes
            for model in (target, draft):
                model.use_mode(settings.mode)
                model.reserve(capacity)
            self.tree = self.decoder.point.grower.tree = new_tree(MAX_STEP)
            started = now_ms(target.device)
            for _ in range(WARM_UPS):
                self.decode_ms(self.kv_length)
                self.round_ms()
                if now_ms(target.device) - started > WARM_UP_MS:
                    break

    def _request(self) -> Request:
        tokens = torch.zeros(1, dtype=torch.long)
        sampler = copy.copy(self.sampler)  # whose prefix grows
        return Request(Call({}, 1), sampler, EncodedPrompt(tokens, tokens.bool()), tokens[None], tokens=[1])

    def round_ms(self) -> float:
        """Two rounds of typical sizes: a chain and a small tree."""
        m, largest = self.kv_length, self.max_tokens
        levels = sum(self.draft_level_ms(min(n, largest), m) for n in (1, 1, 1, 4, 4))
        return levels + self.verify_ms(min(6, largest), m) + self.verify_ms(min(12, largest), m)

    def decode_ms(self, kv_length: int) -> float:
        self.decoder.target.output_layers = ()  # plain decoding needs no features
        self.decoder.target.cache.length = kv_length
        request = self._request()
        self.decoder.rounds.plain_step(request)
        return request.stats.verify_ms

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification of ``tokens`` tokens, including the root. If the target has states, half of the tokens are
        accepted and read again. The time hardly depends on how many they are; a round that accepts all of them is
        faster than its price.
        """
        self.decoder.target.output_layers = self.draft.aux_layers
        self.decoder.target.cache.length = kv_length
        _plant_star(self.tree, tokens - 1)
        request = self._request()
        self.decoder.rounds.verify(request, self.decoder.point)
        if self.decoder.target.has_states:
            self.decoder.rounds.keep(request, list(range((tokens + 1) // 2)))
        return request.stats.verify_ms

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward after a round that committed ``tokens`` tokens; it proposes after the last
        of them.
        """
        self.draft.prepare_step(kv_length, num_pending=tokens)
        _plant_star(self.tree, 0)
        return self._propose_ms(np.array([ROOT]))

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        self.draft.prepare_step(kv_length)
        _plant_star(self.tree, tokens)
        return self._propose_ms(np.arange(1, tokens + 1))

    def _propose_ms(self, frontier: Ints) -> float:
        sampler, positions = self.decoder.point.coupling_sampler(self.sampler), np.array([self.draft.length + 1])
        if sampler is not None and self.draft.mode != EAGER:
            sampler.draw_ahead(self.decoder.target.noise, int(positions[0]), int(positions[0]) + 1)
        started = now_ms(self.draft.device)
        coupling = None if sampler is None else sampler.coupling(positions)
        self.draft.propose(self.tree, frontier, 10, coupling)
        return now_ms(self.draft.device) - started


def choose_threads(
    benches: list[StepBench], *, until: float = math.inf, clock: Callable[[], float] = time.monotonic
) -> int | None:
    """The number of CPU threads for decoding; None on a GPU or a single core.

    It has the fastest rounds of those whose plain steps are not significantly more than 3 % slower than the fastest:
    the baseline of every speedup must not be slowed down. The choices are timed one after the other and compared by the
    ratios of such neighbors, which contention moves least.

    Args:
        until: the time of ``clock`` after which no repetition begins, apart from the first.
    """
    available = usable_threads()
    if benches[0].decoder.target.device.type != "cpu" or available == 1:
        return None
    choices = sorted({1, max(1, available // 2), available})
    plain: list[list[float]] = []  # [repetitions, choices]
    rounds: list[list[float]] = []
    while len(plain) < max(THREAD_REPEATS, 6 * len(benches)) and (not plain or clock() < until):
        bench = benches[len(plain) % len(benches)]
        plain.append([])
        rounds.append([])
        for threads in choices:
            with limited_threads(threads), torch.inference_mode():
                plain[-1].append(float(np.median(plain_steps_ms(bench, bench.kv_length))))
                rounds[-1].append(bench.round_ms())
    plain_ratios, round_ratios = (np.array(times) / np.array(plain)[:, :1] for times in (plain, rounds))
    best = int(np.argmin(_geometric_means(plain_ratios)))
    to_best = plain_ratios / plain_ratios[:, best : best + 1]
    allowed = [1.03 + 2 * standard_error(ratios.tolist()) for ratios in to_best.T]
    eligible = [number for number, mean in enumerate(_geometric_means(to_best)) if mean <= allowed[number]]
    return choices[min(eligible, key=lambda number: float(_geometric_means(round_ratios)[number]))]


def _geometric_means(ratios: Floats) -> Floats:
    """Means of the columns, which count every interruption: threads that wait for each other lose most when another
    process runs.
    """
    means: Floats = np.exp(np.log(ratios).mean(axis=0))
    return means


def _plant_star(tree: Tree, num_children: int) -> None:
    """Plant a root with children. Latency depends on the size of a tree, not on its shape."""
    set_root(tree, 1, 0)
    proposals = np.zeros((1, max(1, num_children)), CHILD)
    for rank in range(num_children):
        add_child(tree, ROOT, rank, proposals)
