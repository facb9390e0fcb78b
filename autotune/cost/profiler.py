"""Measures a cost table through the very code that decodes: ``Decoder`` steps and draft proposals, at the sizes that
``Sampler`` asks for. The overhead outside the models is what real decoding showed beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

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
from autotune.runtime.generate_args import Request
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.tree import CHILD, MAX_STEP, ROOT, Tree, add_child, new_tree, plant
from autotune.workloads.workload import Workload

Report = Callable[[int, int], None]

WARM_UPS = 3
THREAD_REPEATS = 15
PREFILL_REPEATS = 3
PREFILL_LIMIT_MS = 20e3  # no repeat begins past it; one is measured in any case
PREFILLS = (6, 12)  # prompts, at least and at most: two of every task between them


def kv_lengths_for(shortest: int, longest: int) -> tuple[tuple[int, ...], int]:
    """Three KV lengths that span a workload, and one between them for testing."""
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
    settings: ProfileSettings | None = None,
    report: Report | None = None,
) -> CostTable:
    """Measure target and drafts on the device where they are. ``workload`` gives prompts for prefills and the overhead.

    Raises:
        UserError: no draft was given.
    """
    if not drafts:
        raise UserError("a cost table needs a draft; name one with --draft")
    settings = settings or ProfileSettings()
    references = [draft_reference for _, draft_reference in drafts]
    loaded = [draft for draft, _ in drafts]

    def tell(done: float) -> None:
        if report is not None:
            report(round(done), 100)

    benches = [_Bench(target, draft, settings) for draft in loaded]
    threads = choose_threads(benches)
    sampler = Sampler(benches, settings)
    with limited_threads(threads), torch.inference_mode():
        sampler.run(lambda share: tell(60 * share))
    prefill, draft_prefills = measure_prefills(target, loaded, processor, workload)
    overheads: dict[ModelReference, Overhead] = {}
    costs = []
    for number, (draft, draft_reference, draft_prefill) in enumerate(
        zip(loaded, references, draft_prefills, strict=True)
    ):
        tell(70 + 30 * number / len(loaded))
        # How many heads a subnet has kept is nothing to what comes between its forwards.
        if draft_reference not in overheads:
            runs = overhead_runs(target, draft, processor, workload, settings, threads=threads)
            overheads[draft_reference] = fit_overhead(runs)
        costs.append(
            DraftCosts(
                draft=draft_reference,
                heads=draft.subnet.heads,
                num_parameters=draft.num_parameters,
                kv_bytes_per_token=draft.kv_bytes_per_token,
                shape=shape_of(draft),
                draft_first=sampler.draft_firsts[number].surface(),
                draft_level=sampler.draft_levels[number].surface(),
                prefill=draft_prefill,
                overhead=overheads[draft_reference],
            )
        )
    tell(100)
    return CostTable(
        provenance=stamp(),
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
    """Times single steps of a decoder whose caches hold whatever numbers: latency does not depend on them."""

    def __init__(self, target: Target, draft: LoadedDraft, settings: ProfileSettings) -> None:
        capacity = max(settings.kv_lengths) + 2 * MAX_STEP
        self.kv_length, self.max_tokens = settings.kv_lengths[0], max(settings.tokens)
        self.rule = TokenSampler(device=target.device)
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
        """Of nobody: the caches hold no prompt."""
        tokens = torch.zeros(1, dtype=torch.long)
        return Request(self.rule, Prompt(tokens, tokens.bool()), tokens[None], 1, tokens=[1])

    def round_ms(self) -> float:
        """Of two rounds of usual size, a chain and a small tree, as far as sizes are prepared."""
        m, largest = self.kv_length, self.max_tokens
        levels = sum(self.draft_level_ms(min(n, largest), m) for n in (1, 1, 1, 4, 4))
        return levels + self.verify_ms(min(6, largest), m) + self.verify_ms(min(12, largest), m)

    def decode_ms(self, kv_length: int) -> float:
        """Of a plain step."""
        self.decoder.target.output_layers = ()  # plain decoding needs nobody's features
        self.decoder.target.cache.length = kv_length
        request = self._request()
        self.decoder.host_round.plain_step(request)
        return request.stats.verify_ms

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """Of a verification of so many tokens, the root among them."""
        self.decoder.target.output_layers = self.draft.aux_layers
        self.decoder.target.cache.length = kv_length
        _plant_star(self.tree, tokens - 1)
        request = self._request()
        self.decoder.host_round.verify(request, self.decoder.point)
        return request.stats.verify_ms

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """Of the draft's first forward of a round, which reads as many committed tokens: a level of that size."""
        return self.draft_level_ms(tokens, kv_length)

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        """Of a draft level."""
        draft, tree = self.draft, self.tree
        draft.cache.length = kv_length
        _plant_star(tree, tokens)
        frontier = np.arange(1, tokens + 1)
        draft.begin_round()
        started = now_ms(draft.device)
        draft.propose(tree, frontier, 10)
        return now_ms(draft.device) - started


def choose_threads(benches: list[_Bench]) -> int | None:
    """The number of CPU threads with which steps are fastest: of those whose plain step is not surely more than 3 % slower than
    the fastest, so that the baseline of every speedup is at its best, the one with the fastest rounds. None where there
    is no choice.
    """
    available = torch.get_num_threads()
    if benches[0].decoder.target.device.type != "cpu" or available == 1:
        return None
    choices = sorted({1, max(1, available // 2), available})
    repeats = max(6, THREAD_REPEATS // len(benches))
    plain: dict[int, list[float]] = {number: [] for number in choices}
    rounds: dict[int, list[float]] = {number: [] for number in choices}
    for _ in range(repeats):
        for number in choices:
            for bench in benches:
                with limited_threads(number), torch.inference_mode():
                    plain[number] += plain_steps_ms(bench, bench.kv_length)
                    rounds[number].append(bench.round_ms())
    steps = {number: float(np.median(plain[number])) for number in choices}
    errors = {number: standard_error(plain[number]) for number in choices}
    fastest = min(choices, key=lambda number: steps[number])

    def may_be_as_fast(number: int) -> bool:
        return steps[number] / steps[fastest] <= 1.03 + 2 * float(np.hypot(errors[number], errors[fastest]))

    fast = [number for number in choices if may_be_as_fast(number)]
    return min(fast, key=lambda number: float(np.median(rounds[number])))


def _plant_star(tree: Tree, num_children: int) -> None:
    """A root with children: the shape of a tree does not matter to its latency, its size does."""
    plant(tree, 1, 0)
    proposals = np.zeros((1, max(1, num_children)), CHILD)
    for rank in range(num_children):
        add_child(tree, ROOT, rank, proposals)


def measure_prefills(
    target: Target, drafts: Sequence[LoadedDraft], processor: Any, workload: Workload
) -> tuple[PrefillCost, list[PrefillCost]]:
    """Prefill latencies of the target and of every draft over some of the workload's prompts and some visual keep ratios.
    The target reads a prompt once for all drafts.
    """
    clock = partial(now_ms, target.device)
    of_target: list[tuple[int, int, float]] = []
    of_drafts: list[list[tuple[int, int, float]]] = [[] for _ in drafts]
    kept = [draft.visual_keep for draft in drafts]
    target.output_layers = tuple(sorted({layer for draft in drafts for layer in draft.aux_layers}))
    prompts = workload.prompts[: min(max(PREFILLS[0], 2 * len(workload.tasks)), PREFILLS[1])]
    began = clock()
    with torch.inference_mode():
        for attempt in range(1 + PREFILL_REPEATS):
            if attempt > 1 and clock() - began > PREFILL_LIMIT_MS:
                break
            for prompt in prompts:
                inputs = prompt.inputs(processor, target.device)
                length = inputs["input_ids"].shape[1]
                target.reserve(length)
                started = clock()
                read = target.encode(inputs).prompts
                scores = target.prefill(read[0], rank_visual_tokens=True).visual_scores
                sees = read[0].num_visual_tokens > 0
                took = [(of_target, length, clock() - started)]
                for draft, of_draft in zip(drafts, of_drafts, strict=True):
                    for draft.visual_keep in (1.0, 0.5, 0.1) if sees else (1.0,):
                        started = clock()
                        (read_by_draft,) = draft.prompts(inputs, read)
                        draft.prefill(read_by_draft, scores, capacity=length + MAX_STEP)
                        took.append((of_draft, draft.length, clock() - started))
                for samples, num_tokens, ms in took if attempt > 0 else ():  # the first is a warm-up
                    samples.append((num_tokens, int(sees), ms))
    for draft, keep in zip(drafts, kept, strict=True):
        draft.visual_keep = keep
    return fit_prefill(of_target), [fit_prefill(samples) for samples in of_drafts]


def overhead_runs(
    target: Target,
    draft: LoadedDraft,
    processor: Any,
    workload: Workload,
    settings: ProfileSettings | None = None,
    *,
    threads: int | None = None,
) -> list[tuple[int, int, int, float]]:
    """Real decoding with shallow, deep and wide trees: (rounds, draft forwards, verified nodes, ms outside the models)."""
    runs = []
    settings = settings or ProfileSettings()
    # A chain has a node in each level: what a node costs shows beside trees that have many.
    trees: list[dict[str, Any]] = [
        {"policy": "chain", "depth": 1},
        {"policy": "chain", "depth": 8},
        {"policy": "eagle2", "depth": 4, "k": 8, "budget": 31},
    ]
    for tree in trees:
        decoder = Decoder(
            target, draft, tree=tree, capture_sizes=settings.capture_sizes, mode=settings.mode, threads=threads
        )
        for number, prompt in enumerate((*workload.prompts[:1], *workload.prompts[:4])):  # the first twice: warm-up
            inputs = prompt.inputs(processor, target.device)
            stats = decoder.generate(**inputs, max_new_tokens=4 if number == 0 else 24).stats
            if number > 0 and stats.rounds > 0:
                runs.append((stats.rounds, stats.draft_forwards, sum(stats.verified_nodes), stats.overhead_ms))
    return runs


def shape_of(mode: TreeModel | FeatureDraft) -> ModelShape:
    """The shape of a loaded model, for the roofline. A draft that reads features shares its target's head."""
    if isinstance(mode, FeatureDraft):
        width, hidden = mode.dtype.itemsize, mode.network.config.hidden_size
        return ModelShape(
            num_layers=len(mode.cache.blocks),
            hidden_size=hidden,
            text_parameters=mode.num_parameters + hidden * mode.vocab_size,
            vision_parameters=0,
            kv_bytes_per_token=mode.kv_bytes_per_token,
            bytes_per_parameter=width,
        )
    config = mode.text.config
    width = mode.dtype.itemsize
    layers = sum(parameter.numel() for layer in mode.text.layers for parameter in layer.parameters())
    vision = sum(p.numel() for part in vision_parts(mode.model) for p in part.parameters())
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        text_parameters=layers + config.hidden_size * config.vocab_size,
        vision_parameters=vision,
        kv_bytes_per_token=mode.text.kv_bytes_per_token,
        bytes_per_parameter=width,
    )
