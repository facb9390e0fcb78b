"""Measures cost tables with the code that decodes: steps of a ``Decoder`` at the sizes of a ``Sampler``, and real decoding for
the overhead outside the models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from autotune.contention import ContentionMonitor
from autotune.cost.adaptive_grid import standard_error
from autotune.cost.sampling import Sampler, plain_steps_ms
from autotune.cost.settings import ProfileSettings
from autotune.cost.table import CostTable, DraftCosts, ModelShape, Overhead, PrefillCost, fit_overhead, fit_prefill
from autotune.device import fingerprint
from autotune.documents.provenance import ModelReference, stamp
from autotune.drafters.checkpoint import LoadedDraft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.errors import UserError
from autotune.modeling.clock import now_ms
from autotune.modeling.prompt import Prompt
from autotune.modeling.target import Target
from autotune.modeling.threads import limited_threads
from autotune.modeling.tree_model import TreeModel
from autotune.modeling.vision_timing import vision_parts
from autotune.runtime.decoder import Decoder
from autotune.runtime.generate_args import Call, Request
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.tree import CHILD, MAX_STEP, ROOT, Tree, add_child, new_tree, plant
from autotune.workloads.workload import Workload

Report = Callable[[int, int], None]
"""Called as report(done, total)."""
DEFAULT_SETTINGS = ProfileSettings()

WARM_UPS = 3
THREAD_REPEATS = 15
PREFILL_REPEATS = 3
PREFILL_LIMIT_MS = 20e3  # no repeat begins after it, except the first
MIN_PREFILL_PROMPTS, MAX_PREFILL_PROMPTS = 6, 12  # in between, two of every task


def kv_lengths_for(shortest: int, longest: int) -> tuple[tuple[int, ...], int]:
    """Three KV lengths that span a workload, and a held-out one."""
    first = max(16, shortest)
    last = max(32, longest, first + 8)
    lengths = (first, (first + last) // 2, last)
    return lengths, (lengths[0] + lengths[1]) // 2


def profile(
    target: Target,
    target_reference: ModelReference,
    drafts: list[tuple[LoadedDraft, ModelReference]],
    processor: Any,
    workload: Workload,
    *,
    settings: ProfileSettings = DEFAULT_SETTINGS,
    report: Report = lambda done, total: None,
) -> CostTable:
    """Measure a target and its drafts on their device, with prompts of a workload for prefills and overhead.

    Raises:
        UserError: no draft was given.
    """
    if not drafts:
        raise UserError("a cost table needs a draft; name one with --draft")
    monitor = ContentionMonitor(str(target.device))
    loaded = [draft for draft, _ in drafts]
    benches = [_Bench(target, draft, settings) for draft in loaded]
    threads = choose_threads(benches)
    sampler = Sampler(benches, settings)
    with limited_threads(threads), torch.inference_mode():
        sampler.run(lambda share: report(round(60 * share), 100))
    prefill, draft_prefills = measure_prefills(target, loaded, processor, workload)
    overheads: dict[ModelReference, Overhead] = {}
    costs = []
    for number, (draft, reference) in enumerate(drafts):
        report(round(70 + 30 * number / len(drafts)), 100)
        if reference not in overheads:  # the number of heads does not change it
            runs = overhead_runs(target, draft, processor, workload, settings, threads=threads)
            overheads[reference] = fit_overhead(runs)
        costs.append(
            DraftCosts(
                draft=reference,
                heads=draft.subnet.heads,
                num_parameters=draft.num_parameters,
                kv_bytes_per_token=draft.kv_bytes_per_token,
                shape=shape_of(draft),
                draft_first=sampler.draft_firsts[number].surface(),
                draft_level=sampler.draft_levels[number].surface(),
                prefill=draft_prefills[number],
                overhead=overheads[reference],
            )
        )
    report(100, 100)
    return CostTable(
        provenance=stamp(monitor.contention),
        device=fingerprint(str(target.device)),
        precision=str(target.dtype).removeprefix("torch."),
        mode=settings.mode,
        capture_sizes=settings.capture_sizes,
        threads=threads,
        remeasured_samples=sampler.remeasured_samples,
        drifted_samples=sampler.drifted_samples,
        target=target_reference,
        target_shape=shape_of(target),
        decode=sampler.decode.surface(),
        verify=sampler.verify.surface(),
        prefill=prefill,
        drafts=costs,
    )


class _Bench:
    """Times single steps of a decoder. The contents of its KV caches are arbitrary, because latency does not depend on them."""

    def __init__(self, target: Target, draft: LoadedDraft, settings: ProfileSettings) -> None:
        capacity = max(settings.kv_lengths) + 2 * MAX_STEP
        self.kv_length, self.max_tokens = settings.kv_lengths[0], max(settings.tokens)
        self.token_sampler = TokenSampler(device=target.device)
        with torch.inference_mode():
            target.reserve(capacity)
            draft.reserve(capacity)
            self.draft = draft
            self.decoder = Decoder(target, draft, capture_sizes=settings.capture_sizes, mode=settings.mode)
            draft.capture_sizes = settings.capture_sizes
            for model in (target, draft):
                model.use_mode(settings.mode)
            self.tree = self.decoder.point.grower.tree = new_tree(MAX_STEP)
            for _ in range(WARM_UPS):
                self.decode_ms(self.kv_length)
                self.round_ms()

    def _request(self) -> Request:
        tokens = torch.zeros(1, dtype=torch.long)
        return Request(Call({}, 1), self.token_sampler, Prompt(tokens, tokens.bool()), tokens[None], tokens=[1])

    def round_ms(self) -> float:
        """Two rounds of typical sizes: a chain and a small tree."""
        m, largest = self.kv_length, self.max_tokens
        levels = sum(self.draft_level_ms(min(n, largest), m) for n in (1, 1, 1, 4, 4))
        return levels + self.verify_ms(min(6, largest), m) + self.verify_ms(min(12, largest), m)

    def decode_ms(self, kv_length: int) -> float:
        self.decoder.target.output_layers = ()  # plain decoding needs no features
        self.decoder.target.cache.length = kv_length
        request = self._request()
        self.decoder.host_round.plain_step(request)
        return request.stats.verify_ms

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification of ``tokens`` tokens, including the root."""
        self.decoder.target.output_layers = self.draft.aux_layers
        self.decoder.target.cache.length = kv_length
        _plant_star(self.tree, tokens - 1)
        request = self._request()
        self.decoder.host_round.verify(request, self.decoder.point)
        return request.stats.verify_ms

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward, which reads ``tokens`` committed tokens, costs as much as a level of that size."""
        return self.draft_level_ms(tokens, kv_length)

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        draft, tree = self.draft, self.tree
        draft.cache.length = kv_length
        _plant_star(tree, tokens)
        frontier = np.arange(1, tokens + 1)
        draft.begin_round()
        started = now_ms(draft.device)
        draft.propose(tree, frontier, 10)
        return now_ms(draft.device) - started


def choose_threads(benches: list[_Bench]) -> int | None:
    """The number of CPU threads for decoding; None on a GPU or a single core.

    It has the fastest rounds of those whose plain steps are not significantly more than 3 % slower than the fastest: the
    baseline of every speedup must not be slowed down.
    """
    available = torch.get_num_threads()
    if benches[0].decoder.target.device.type != "cpu" or available == 1:
        return None
    choices = sorted({1, max(1, available // 2), available})
    repeats = max(6, THREAD_REPEATS // len(benches))
    plain: dict[int, list[float]] = {threads: [] for threads in choices}
    rounds: dict[int, list[float]] = {threads: [] for threads in choices}
    for _ in range(repeats):
        for threads in choices:
            for bench in benches:
                with limited_threads(threads), torch.inference_mode():
                    plain[threads] += plain_steps_ms(bench, bench.kv_length)
                    rounds[threads].append(bench.round_ms())
    plain_ms = {threads: float(np.median(plain[threads])) for threads in choices}
    errors = {threads: standard_error(plain[threads]) for threads in choices}
    best = min(choices, key=lambda threads: plain_ms[threads])
    eligible = [
        threads
        for threads in choices
        if plain_ms[threads] / plain_ms[best] <= 1.03 + 2 * float(np.hypot(errors[threads], errors[best]))
    ]
    return min(eligible, key=lambda threads: float(np.median(rounds[threads])))


def _plant_star(tree: Tree, num_children: int) -> None:
    """Plant a root with children. Latency depends on the size of a tree, not on its shape."""
    plant(tree, 1, 0)
    proposals = np.zeros((1, max(1, num_children)), CHILD)
    for rank in range(num_children):
        add_child(tree, ROOT, rank, proposals)


def measure_prefills(
    target: Target, drafts: Sequence[LoadedDraft], processor: Any, workload: Workload
) -> tuple[PrefillCost, list[PrefillCost]]:
    """Measure prefills of a target and its drafts over prompts of a workload, drafts also over shares of visual tokens."""
    clock = partial(now_ms, target.device)
    target_samples: list[tuple[int, int, float]] = []
    draft_samples: list[list[tuple[int, int, float]]] = [[] for _ in drafts]
    visual_keeps = [draft.visual_keep for draft in drafts]
    target.output_layers = tuple(sorted({layer for draft in drafts for layer in draft.aux_layers}))
    prompts = workload.prompts[: min(max(MIN_PREFILL_PROMPTS, 2 * len(workload.tasks)), MAX_PREFILL_PROMPTS)]
    first_started = clock()
    with torch.inference_mode():
        for attempt in range(1 + PREFILL_REPEATS):
            if attempt > 1 and clock() - first_started > PREFILL_LIMIT_MS:
                break
            for prompt in prompts:
                inputs = prompt.inputs(processor, target.device)
                length = inputs["input_ids"].shape[1]
                target.reserve(length)
                started = clock()
                encoded = target.encode(inputs).prompts
                scores = target.prefill(encoded[0], visual_rankings=["text_after_image"]).visual_scores
                has_image = encoded[0].num_visual_tokens > 0
                times = [(target_samples, length, clock() - started)]
                for draft, samples in zip(drafts, draft_samples, strict=True):
                    for draft.visual_keep in (1.0, 0.5, 0.1) if has_image else (1.0,):
                        started = clock()
                        (draft_prompt,) = draft.prompts(inputs, encoded)
                        draft.prefill(draft_prompt, scores.get("text_after_image"), capacity=length + MAX_STEP)
                        times.append((samples, draft.length, clock() - started))
                for samples, num_tokens, ms in times if attempt > 0 else ():  # the first attempt is a warm-up
                    samples.append((num_tokens, int(has_image), ms))
    for draft, visual_keep in zip(drafts, visual_keeps, strict=True):
        draft.visual_keep = visual_keep
    return fit_prefill(target_samples), [fit_prefill(samples) for samples in draft_samples]


def overhead_runs(
    target: Target,
    draft: LoadedDraft,
    processor: Any,
    workload: Workload,
    settings: ProfileSettings = DEFAULT_SETTINGS,
    *,
    threads: int | None = None,
) -> list[tuple[int, int, int, float]]:
    """Decode with shallow, deep and wide trees: (rounds, draft forwards, verified nodes, ms outside the models) per run."""
    runs = []
    # Chains have one node per level. A wide tree tells the cost of a node from that of a level.
    trees: list[dict[str, Any]] = [
        {"policy": "chain", "depth": 1},
        {"policy": "chain", "depth": 8},
        {"policy": "eagle2", "depth": 4, "k": 8, "budget": 31},
    ]
    for tree in trees:
        decoder = Decoder(
            target, draft, tree=tree, capture_sizes=settings.capture_sizes, mode=settings.mode, threads=threads
        )
        for number, prompt in enumerate((*workload.prompts[:1], *workload.prompts[:4])):  # the first run is a warm-up
            inputs = prompt.inputs(processor, target.device)
            stats = decoder.generate(**inputs, max_new_tokens=4 if number == 0 else 24).stats
            if number > 0 and stats.rounds > 0:
                runs.append((stats.rounds, stats.draft_forwards, sum(stats.verified_nodes), stats.overhead_ms))
    return runs


def shape_of(model: TreeModel | FeatureDraft) -> ModelShape:
    """The shape of a loaded model, for roofline estimates. A draft that reads features shares its target's head."""
    if isinstance(model, FeatureDraft):
        hidden_size = model.network.config.hidden_size
        return ModelShape(
            num_layers=len(model.cache.blocks),
            hidden_size=hidden_size,
            text_parameters=model.num_parameters + hidden_size * model.vocab_size,
            vision_parameters=0,
            kv_bytes_per_token=model.kv_bytes_per_token,
            bytes_per_parameter=model.dtype.itemsize,
            crossing_share=model.network.crossing_share,
        )
    config = model.text.config
    layers = sum(parameter.numel() for layer in model.text.layers for parameter in layer.parameters())
    vision = sum(parameter.numel() for part in vision_parts(model.model) for parameter in part.parameters())
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        text_parameters=layers + config.hidden_size * config.vocab_size,
        vision_parameters=vision,
        kv_bytes_per_token=model.text.kv_bytes_per_token,
        bytes_per_parameter=model.dtype.itemsize,
    )
