"""Records chains of many subnets of a supernet at once.

A chain is accepted up to its first token that differs from the answer, so a node matters only while every token before
it is the answer's own. The tokens of all nodes that matter are therefore known before anything is drafted and are the
same for all subnets: the answer is evaluated level by level, for every position and every subnet in one batch. A row of
the batch is a subnet, whose heads are masked in place of sliced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.drafters.blocks import AttentionContext, Crossing
from autotune.drafters.draft import kept_tokens
from autotune.drafters.star import StarNetwork
from autotune.modeling import host
from autotune.modeling.prompt import num_patches
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, Recorder, TargetFeatures
from autotune.replay.trace import Forest, ForestBounds, RecordedPrompt, Trace, join
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.limits import Ints
from autotune.trees.static import NO_TOKEN
from autotune.workloads.workload import Workload

ROWS_AT_ONCE = 1 << 15  # limit on the batch rows times their tokens


class _GrownCache:
    """Keys and values of one block for a batch of subnets: those of all tokens, then those of every level's nodes."""

    def __init__(self, slab: Tensor, rows: Tensor) -> None:
        self._slab = slab  # [batch, heads, 2, capacity, head size]
        self._rows = rows  # row of the first level's batch that each subnet continues, [batch]
        self._length = 0

    def write(self, keys_values: Tensor, begin: int | Tensor) -> tuple[Tensor, Tensor]:
        """See ``KeysValues``. New keys and values follow the earlier ones, whatever ``begin`` is."""
        begin, count = self._length, keys_values.shape[3]
        self._length += count
        if begin == 0:
            keys_values = keys_values.expand(int(self._rows.max()) + 1, -1, -1, -1, -1)
            self._slab.narrow(3, 0, count).copy_(keys_values[self._rows])
        else:
            self._slab.narrow(3, begin, count).copy_(keys_values)
            keys_values = self._slab.narrow(3, 0, self._length)
        keys, values = keys_values.unbind(2)
        return keys, values


class _SharedRows(NamedTuple):
    """The rows of one block in the first level: one for each different choice of heads in this block and those before
    it, because subnets differ in nothing else there.
    """

    of_subnet: Tensor
    """The row of each subnet, [subnets]."""
    example: Tensor
    """A subnet of each row, [rows]."""
    before: Tensor
    """The row of the block before that each row continues, [rows]."""


def _shared_rows(heads: Sequence[tuple[float, ...]], device: torch.device) -> list[_SharedRows]:
    """The rows of every block, for the shares of heads of each subnet."""
    shared, before = [], [0] * len(heads)
    for number in range(1, len(heads[0]) + 1):
        first: dict[tuple[float, ...], int] = {}
        for subnet, shares in enumerate(heads):
            first.setdefault(shares[:number], subnet)
        row_of = {prefix: row for row, prefix in enumerate(first)}
        of_subnet = [row_of[shares[:number]] for shares in heads]
        arrays = of_subnet, list(first.values()), [before[subnet] for subnet in first.values()]
        shared.append(_SharedRows(*(torch.tensor(array, device=device) for array in arrays)))
        before = of_subnet
    return shared


class _Level(NamedTuple):
    """The nodes of one level, tensors or arrays [subnets, nodes]."""

    roots: Any
    is_node: Any
    """False in the padding."""
    tokens: Any
    """The draft's most probable child of each node."""
    logprobs: Any


def chain_traces(
    recorder: Recorder,
    draft: Any,
    draft_reference: ModelReference,
    workload: Workload,
    subnets: Sequence[Subnet],
    bounds: ForestBounds,
) -> list[Trace]:
    """A trace of each subnet that holds chains only. The other arguments are those of ``record_chains`` and
    ``Recorder.trace``.
    """
    layer = subnets[0].injection_layer or draft.aux_layers[0]
    parts = []
    for prompt, whole in zip(workload.prompts, recorder.answers(workload), strict=True):
        answer = replace(whole, tokens=whole.tokens[: bounds.answer_tokens])
        inputs, target = prompt.inputs(recorder.processor, draft.device), recorder.target
        outputs, sampler = recorder.target_features(prompt, inputs, answer, (layer,)), recorder.sampler(prompt)
        patches = num_patches(target.model.config, inputs)
        recorded = record_chains(target, draft, subnets, answer, outputs, depth=bounds.depth, sampler=sampler)
        parts.append([part._replace(num_patches=patches) for part in recorded])
    return [
        join(recorder.header(draft, draft_reference, subnet, (layer,), workload, bounds), list(of_subnet))
        for subnet, *of_subnet in zip(subnets, *parts, strict=True)
    ]


@torch.inference_mode()
def record_chains(
    target: Target,
    draft: Any,
    subnets: Sequence[Subnet],
    answer: Answer,
    outputs: TargetFeatures,
    *,
    depth: int,
    sampler: TokenSampler | None = None,
) -> list[RecordedPrompt]:
    """Chains of up to ``depth`` tokens from every position of an answer, for each subnet.

    A forest holds the nodes whose tokens are the answer's. Other nodes are not evaluated, because none of their
    descendants is accepted: one path of placeholders stands for all of them, so that replay grows chains of full
    length.

    Args:
        draft: the whole supernet, attached to the target.
        subnets: subnets that differ in their heads only.
        outputs: the target's outputs for the prompt and the answer, at the injection layer of the subnets.
        sampler: that of a sampled answer, to which the draft's proposals are coupled.
    """
    at_once = max(1, ROWS_AT_ONCE // (len(outputs.prompts[0]) + len(answer.tokens)))
    if len(subnets) > at_once:
        parts = (subnets[first : first + at_once] for first in range(0, len(subnets), at_once))
        recorded = (record_chains(target, draft, part, answer, outputs, depth=depth, sampler=sampler) for part in parts)
        return list(itertools.chain.from_iterable(recorded))
    batch, first = _first_level(target, draft, subnets, answer, outputs, depth, sampler)
    levels = [first]
    while len(levels) < depth and (level := batch.next_level(levels[-1], len(levels))) is not None:
        levels.append(level)
    on_host = [_Level(*(array.cpu().numpy() for array in level)) for level in levels]
    forests = [_forest(np.array(answer.tokens), on_host, row, depth) for row in range(len(subnets))]
    num_prompt = len(outputs.prompts[0])
    return [RecordedPrompt(forest, num_prompt, batch.num_kept, answer.num_visual_tokens) for forest in forests]


def _first_level(
    target: Target,
    draft: Any,
    subnets: Sequence[Subnet],
    answer: Answer,
    outputs: TargetFeatures,
    depth: int,
    sampler: TokenSampler | None,
) -> tuple[_ChainBatch, _Level]:
    """The first level: every token of the prompt and the answer, with the target's features."""
    network: StarNetwork = draft.network
    device, batch, heads, size = draft.device, len(subnets), network.config.num_heads, network.config.head_size
    (prompt,) = outputs.prompts
    layer = subnets[0].injection_layer or draft.aux_layers[0]
    tokens = torch.tensor(answer.tokens, device=device)
    num_prompt, num_roots = len(prompt), len(tokens) - 1
    embed = target.text.module.get_input_embeddings()
    hidden = torch.cat([outputs.prompt_hidden[layer][:-1], outputs.answer_hidden[layer]])  # of the token before each
    features = torch.cat([network.first_feature[None], network.target_features({layer: hidden})])
    stream = network.fuse(torch.cat([target.embeddings(prompt), embed(tokens[:-1])]), features)
    scores = answer.visual_scores.get(subnets[0].visual_ranking)
    scored = None if scores is None else torch.tensor(scores, device=device)
    kept = kept_tokens(prompt.is_visual, scored, subnets[0].visual_keep)
    columns = torch.arange(num_prompt + num_roots, device=device)
    positions = torch.cat([kept, columns[num_prompt:]])
    masks = [network.head_masks(subnet.head_shares) for subnet in subnets]
    head_masks = [torch.stack(block)[:, None] for block in zip(*masks, strict=True)]  # [batch, 1, heads]
    shared = _shared_rows([subnet.head_shares for subnet in subnets], device)
    capacity = len(columns) + (depth - 1) * num_roots
    caches = [_GrownCache(features.new_empty(batch, heads, 2, capacity, size), rows.of_subnet) for rows in shared]
    is_before = (columns <= positions[:, None])[None, None]
    crossing = Crossing(is_before, features=features[None], factors=network.factors(columns)[None])
    states = network(
        stream[positions][None],
        features[positions][None],
        network.factors(positions)[None],
        AttentionContext(caches=caches, crossing=crossing),
        head_masks=[mask[rows.example] for mask, rows in zip(head_masks, shared, strict=True)],
        fan_out=[rows.before for rows in shared],
    )[shared[-1].of_subnet, len(kept) :]
    roots = torch.arange(num_roots, device=device).expand(batch, -1)
    is_node = torch.ones_like(roots, dtype=torch.bool)
    best, logprobs = _best(draft, states, sampler, num_prompt + roots + 1)
    chains = _ChainBatch(
        draft=draft,
        sampler=sampler,
        embed=embed,
        tokens=tokens,
        columns=columns,
        num_prompt=num_prompt,
        num_kept=len(kept),
        caches=caches,
        head_masks=head_masks,
        latest=states,
        evaluated=roots[:, :0],
    )
    return chains, _Level(roots, is_node, best, logprobs)


@dataclass
class _ChainBatch:
    """Chains of a batch of subnets, which grow level by level."""

    draft: Any
    sampler: TokenSampler | None
    embed: Any
    """The target's input embeddings."""
    tokens: Tensor
    """Tokens of the answer."""
    columns: Tensor
    """Positions of the prompt and of the roots."""
    num_prompt: int
    num_kept: int
    """Tokens of the prompt that the draft reads."""
    caches: list[_GrownCache]
    head_masks: list[Tensor]
    latest: Tensor
    """States of the last node of every root's chain, [batch, roots, hidden]."""
    evaluated: Tensor
    """The root of every node after the first level, [batch, nodes]."""

    def next_level(self, before: _Level, level: int) -> _Level | None:
        """The nodes whose tokens equal the answer so far, with the draft's own features; None if there are none."""
        network: StarNetwork = self.draft.network
        num_roots = len(self.tokens) - 1
        roots, is_node, best, _ = before
        answered = self.tokens[(roots + level).clamp(max=num_roots)]
        is_next = is_node & (best == answered) & (roots + level < num_roots)
        width = int(is_next.sum(1).max())
        if width == 0:
            return None
        order = (~is_next).byte().argsort(dim=1, stable=True)[:, :width]  # other rows are padding
        roots, is_node = roots.gather(1, order), is_next.gather(1, order)
        self.evaluated = torch.cat([self.evaluated, roots], 1)
        wide = roots[..., None].expand(-1, -1, self.latest.shape[2])
        features = network.own_features(self.latest.gather(1, wide))
        offsets = (roots + level).clamp(max=num_roots - 1)
        is_same_chain = self.evaluated[:, None] == roots[..., None]
        attended, crossing = (
            torch.cat([self.columns[: length + num_roots] <= length + roots[..., None], is_same_chain], 2)[:, None]
            for length in (self.num_kept, self.num_prompt)
        )
        states = network(
            network.fuse(self.embed(self.tokens[offsets]), features),
            features,
            network.factors(self.num_prompt + offsets),
            AttentionContext(attended, self.caches, crossing=Crossing(crossing)),
            head_masks=self.head_masks,
        )
        self.latest = self.latest.scatter(1, wide, states)
        best, logprobs = _best(self.draft, states, self.sampler, self.num_prompt + offsets + 1)
        return _Level(roots, is_node, best, logprobs)


def _best(draft: Any, states: Tensor, sampler: TokenSampler | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token after each state and its log-probability, [batch, n] each; ``positions`` [batch, n] are
    those of these tokens.
    """
    coupling = None if sampler is None else sampler.coupling(host.to_host(positions.flatten()))
    logits = draft.logits(states).flatten(0, 1)
    tokens, logprobs = draft.best_on_device(logits, 1, coupling)
    tokens = tokens.masked_fill(logprobs.isnan(), NO_TOKEN)  # as ``CachedDraft.best``
    return tokens.reshape(positions.shape), logprobs.nan_to_num(nan=-torch.inf).reshape(positions.shape)


def _forest(answer: Ints, levels: Sequence[_Level], row: int, depth: int) -> Forest:
    """The forest of one subnet. Its last nodes are the placeholders of rejected tokens' descendants."""
    tokens = [level.tokens[row][level.is_node[row]] for level in levels]
    logprobs = [level.logprobs[row][level.is_node[row]] for level in levels]
    roots = [level.roots[row][level.is_node[row]] for level in levels]
    num_nodes = sum(map(len, tokens))
    first = np.cumsum([0, *map(len, tokens)])
    placeholder = num_nodes + np.arange(depth - 1)
    children = []
    for number, of_level in enumerate(roots):
        if number == depth - 1:
            children.append(np.full(len(of_level), -1))
            continue
        child = np.full(len(answer), placeholder[0])
        if number + 1 < len(roots):
            child[roots[number + 1]] = first[number + 1] + np.arange(len(roots[number + 1]))
        children.append(child[of_level])
    return Forest(
        answer,
        np.concatenate([*tokens, np.full(depth - 1, NO_TOKEN)])[:, None],
        np.concatenate([*logprobs, np.zeros(depth - 1)]).astype(np.float32)[:, None],
        np.concatenate([*children, [*placeholder[1:], -1][: depth - 1]]).astype(np.int64)[:, None],
    )
