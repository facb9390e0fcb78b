"""Drafts that read the target's features: proposals with caches, masks and pruning against forward passes of the same
network over the whole text with features of the stock model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS, load_draft, load_network
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.network import PromptRows
from autotune.drafters.specvlm import SpecVlmNetwork
from autotune.drafters.star import StarNetwork
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.replay.replay import replay
from autotune.replay.trace import ForestBounds, join
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from tests.obvious import Seen, assert_same_logits, read_whole_text, refused, with_true_tokens
from tests.sample_documents import free_prices, header
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair

SIZES = {"num_heads": 4, "head_size": 8, "mlp_size": 48}
KINDS = ("dream", "star", "specvlm")
# Dream and star share their code: tests that take long run one of them, and both nightly.
STAR_FOR_BOTH = [pytest.param("dream", marks=pytest.mark.nightly), "star"]
TREES = (
    {"policy": "chain", "depth": 3},
    {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10},
    {"policy": "sage", "d_min": 1, "d_max": 4, "w_min": 1, "w_max": 4, "n_max": 12},
)
PAIRS = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}


def new_draft(
    kind: str, target: Target, *, injection_layer: int | None = None, heads: Any = None, **sizes: Any
) -> FeatureDraft:
    """A draft with random weights. All its norms differ, so that a mistaken norm shows."""
    torch.manual_seed(5)
    network = NETWORKS[kind].new({**SIZES, **sizes}, target, source="test")
    for parameter in network.parameters():
        if parameter.dim() == 1 or parameter is network.feature_norms:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    if heads is not None:
        assert isinstance(network, StarNetwork)
        network.head_importance.uniform_()
        network = network.sliced(heads)
    draft = FeatureDraft(network.eval().requires_grad_(False), Subnet(heads=heads, injection_layer=injection_layer))
    draft.attach(target)
    return draft


def agreeing_draft(kind: str, target: Target, *, injection_layer: int, **sizes: Any) -> FeatureDraft:
    """A draft that is sometimes right: its blocks add little to the embedding, so it repeats the token before, and the
    targets of these tests repeat themselves.
    """
    draft = new_draft(kind, target, injection_layer=injection_layer, **sizes)
    for block in draft.network.blocks:
        block.to_stream.weight *= 0.3
    if isinstance(draft.network, SpecVlmNetwork):
        fusion = draft.network.fusion.weight
        fusion *= 0.1
        fusion[:, : len(fusion)] += torch.eye(len(fusion), device=fusion.device)
    return draft


class Stock:
    """The network over one whole text as in training: no cache, no tree, features of the stock model. ``kept`` are the
    prompt tokens that self-attention sees.
    """

    def __init__(self, target: Target, draft: FeatureDraft, inputs: Inputs, kept: Tensor) -> None:
        self.target, self.draft, self.inputs, self.kept = target, draft, inputs, kept

    @property
    def prompt_length(self) -> int:
        """Rows of the prompt in the draft's cache; ``prune`` leaves one visual row."""
        num_text = int((self.inputs["input_ids"] != self.target.model.config.image_token_id).sum())
        is_condensed = self.draft.kind == "specvlm" and num_text < self.inputs["input_ids"].shape[1]
        return num_text + 1 if is_condensed else len(self.kept)

    def logits_after(self, committed: list[int], path: list[int]) -> Tensor:
        """Logits after prompt, committed tokens and a path of nodes. Features of nodes are the draft's own."""
        network, (layer,) = self.draft.network, self.draft.aux_layers
        ids = torch.cat([self.inputs["input_ids"], torch.tensor([committed], dtype=torch.long)], 1)
        extra = {n: v for n, v in self.inputs.items() if n not in ("input_ids", "attention_mask")}
        model = self.target.model
        hidden = model(input_ids=ids, **extra, output_hidden_states=True).hidden_states
        more = model.get_input_embeddings()(torch.tensor([path], dtype=torch.long))
        embeddings = torch.cat([hidden[0], more], 1)[0]
        committed_features = network.target_features({layer: hidden[layer][0, :-1]})
        features = torch.cat([network.first_feature[None], committed_features])
        number, length = ids.shape[1], self.inputs["input_ids"].shape[1]
        if network.has_cross_attention:
            is_kept = torch.ones(number + len(path), dtype=torch.bool)
            is_kept[:length] = False
            is_kept[self.kept] = True
            for depth in range(len(path) + 1):
                rows = embeddings[: number + depth]
                states = read_whole_text(network, network.fuse(rows, features), features, is_kept[: len(rows)])
                features = torch.cat([features, network.own_features(states[-1:])])
            return model.lm_head(states[-1])
        kept = torch.cat([self.kept, torch.arange(length, number)])
        is_visual = ids[0, kept] == model.config.image_token_id
        stream = network.fuse(embeddings[kept], features[kept])
        question = hidden[layer][0, length - 1]
        prompt_stream, prompt_features, offsets, _ = network.condense(
            PromptRows(stream, features[kept], kept, is_visual), question
        )
        for depth in range(len(path) + 1):
            rows = torch.cat([offsets, torch.arange(number, number + depth)])
            own = features[number : number + depth]
            stream = torch.cat([prompt_stream, network.fuse(embeddings[number : number + depth], own)])
            all_features = torch.cat([prompt_features, own])
            states = network(stream[None], all_features[None], network.factors(rows)[None])
            features = torch.cat([features, network.own_features(states[0, -1:])])
        return model.lm_head(states[0, -1])


@pytest.mark.parametrize(
    ("kind", "keep", "mode", "tree", "prompt"),
    [
        ("dream", 1.0, "eager", PAIRS, "long"),
        ("dream", 0.5, "eager", TREES[0], "long"),
        ("dream", 0.5, "fixed", PAIRS, "long"),
        ("dream", 0.1, "eager", PAIRS, "text"),
        ("dream", 0.1, "fixed", TREES[0], "long"),
        ("star", 1.0, "fixed", PAIRS, "long"),
        ("star", 0.5, "fixed", TREES[0], "long"),
        ("star", 0.1, "eager", PAIRS, "long"),
        ("star", 0.1, "fixed", PAIRS, "text"),
        ("specvlm", 1.0, "eager", PAIRS, "text"),
        ("specvlm", 1.0, "eager", PAIRS, "long"),
        ("specvlm", 0.5, "fixed", PAIRS, "long"),
    ],
)
@torch.inference_mode()
def test_proposals_equal_forward_passes_over_the_whole_text(
    pair: Pair,
    prompts: dict[str, Inputs],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    keep: float,
    mode: str,
    tree: dict[str, Any],
    prompt: str,
) -> None:
    """At every level of every round. A draft with random weights would have few accepted nodes, so at every other level
    the target's token replaces the best proposal. ``star`` is a subnet with other heads in each block and another
    layer.
    """
    target, inputs = Target(pair.target), prompts[prompt]
    if kind == "star":
        draft = new_draft(kind, target, injection_layer=2, heads=(0.25, 0.75, 0.5))
    else:
        draft = new_draft(kind, target)
    scores = target.prefill(target.encode(inputs).prompts[0], visual_rankings=["text_after_image"]).visual_scores
    is_kept = inputs["input_ids"][0] != pair.target.config.image_token_id
    if scores:
        best = scores["text_after_image"].topk(max(1, round(keep * NUM_VISUAL_TOKENS))).indices
        is_kept[(~is_kept).nonzero()[:, 0][best]] = True
    stock = Stock(target, draft, inputs, is_kept.nonzero()[:, 0])
    decoder = Decoder(target, draft, tree=tree, visual_keep=keep, mode=mode)
    answer = Decoder(target).generate(**inputs, max_new_tokens=16).sequences[0, inputs["input_ids"].shape[1] :].tolist()
    prompt_length, seen = stock.prompt_length, list[Seen]()
    monkeypatch.setattr(draft, "propose", with_true_tokens(draft, answer, lambda: draft.length - prompt_length, seen))
    out = decoder.generate(**inputs, max_new_tokens=16)
    for num_committed, path, tokens, logprobs in seen:
        expected = stock.logits_after(answer[:num_committed], path[1:]).log_softmax(-1)
        assert_same_logits(logprobs, expected[torch.from_numpy(tokens.astype(np.int64))], expected)
    assert len(seen) > 20 and max(out.stats.accepted_lengths) > 0


@pytest.mark.parametrize("mode", ["eager", "fixed"])
@pytest.mark.parametrize("kind", STAR_FOR_BOTH)
def test_requests_with_other_shares_of_visual_tokens_do_not_mix(
    pair: Pair, prompts: dict[str, Inputs], kind: str, mode: str
) -> None:
    target = Target(pair.target)
    draft = agreeing_draft(kind, target, injection_layer=4)
    requests = [(name, keep) for name in ("image", "long", "text") for keep in (0.1, 1.0, 0.5)]

    def accepted(draft: FeatureDraft, name: str, keep: float) -> list[int]:
        decoder = Decoder(target, draft, tree=TREES[1], visual_keep=keep, mode=mode)
        return decoder.generate(**prompts[name], max_new_tokens=8).stats.accepted_lengths

    alone = [accepted(agreeing_draft(kind, target, injection_layer=4), *request) for request in requests]
    assert [accepted(draft, *request) for request in requests] == alone
    assert [accepted(draft, *request) for request in reversed(requests)] == alone[::-1]


def test_a_plain_request_reads_no_output_layers(pair: Pair, prompts: dict[str, Inputs]) -> None:
    target = Target(pair.target)
    decoder = Decoder(target, new_draft("dream", target), tree=TREES[1])
    stream = decoder.stream(**prompts["image"], max_new_tokens=24)
    next(stream)
    assert target.output_layers == (4,)
    next(Decoder(target).stream(**prompts["image"], max_new_tokens=2))
    assert target.output_layers == ()


SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_k": 8, "seed": 3})


@pytest.mark.parametrize(
    ("kind", "layer", "keep"),
    [
        ("dream", 4, 0.1),
        pytest.param("dream", 4, 0.5, marks=pytest.mark.nightly),
        pytest.param("star", 2, 0.1, marks=pytest.mark.nightly),
        ("star", 2, 1.0),
        ("specvlm", 4, 0.5),
    ],
)
def test_replay_counts_the_rounds_of_decoding(
    pair: Pair, prompts: dict[str, Inputs], kind: str, layer: int, keep: float
) -> None:
    """A trace has the proposals with the target's features up to every root and the draft's own below."""
    target = Target(pair.target)
    draft = agreeing_draft(kind, target, injection_layer=layer)
    bounds = ForestBounds(depth=5, num_proposals=16, width=128, floor=1e-30, beam=24)
    num_accepted = 0
    for name, settings in zip(("text", "image", "image", "long"), itertools.cycle(SETTINGS), strict=False):
        inputs = prompts[name]
        request = {**inputs, "max_new_tokens": 10, **settings}
        plain = Decoder(target).generate(**request)
        (read,) = target.encode(inputs).prompts
        with torch.inference_mode():
            target.reserve(len(read))
            scores = target.prefill(read, visual_rankings=["text_after_image"]).visual_scores
        tokens = plain.sequences[0, len(read) :].tolist()
        answer = Answer(tokens, len(read), {ranking: of_ranking.tolist() for ranking, of_ranking in scores.items()})
        draft.visual_keep = keep
        sampler = Decoder(target).sampler(**request) if settings else None
        part = record_forest(target, draft, inputs, answer, bounds, sampler=sampler)
        trace = join(header(1, bounds=bounds, subnet=draft.subnet, aux_layers=draft.aux_layers), [part])
        for tree in TREES:
            stats = Decoder(target, draft, tree=tree, visual_keep=keep).generate(**request).stats
            replayed = replay(trace, parse_policy(tree), free_prices())
            assert replayed.missing[0] == 0 or tree["policy"] == "sage"
            assert replayed.accepted_lengths[0].tolist() == stats.accepted_lengths, (name, tree)
            assert replayed.draft_forwards[0] == stats.draft_forwards
            num_accepted += sum(stats.accepted_lengths)
    assert num_accepted > 6


# -------- subnets


BY_SHARES = [(s, s, s) for s in (0.25, 0.5, 0.75, 1.0)] + [(0.25, 1.0, 0.5), (1.0, 0.25, 0.75)]


@torch.inference_mode()
def test_every_subnet_sliced_equals_the_masked_supernet(pair: Pair) -> None:
    network = new_draft("star", Target(pair.target)).network
    assert isinstance(network, StarNetwork)
    network.head_importance.copy_(torch.tensor([[3.0, 1, 2, 4], [1.0, 2, 3, 4], [4.0, 3, 2, 1]]))
    embeddings, features = torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    factors = network.factors(torch.arange(9))[None]
    whole = network(embeddings, features, factors)
    for shares in BY_SHARES:
        masked = network(embeddings, features, factors, head_masks=network.head_masks(shares))
        small = network.sliced(shares)
        torch.testing.assert_close(small(embeddings, features, factors), masked, atol=1e-5, rtol=0)
        assert (masked - whole).abs().max() > 0.05 or set(shares) == {1.0}, "the heads left out must matter"
        assert [block.num_heads for block in small.blocks] == [round(4 * share) for share in shares]
    assert [heads.tolist() for heads in network.kept_heads((0.5, 0.5, 0.5))] == [[0, 3], [2, 3], [0, 1]]


def test_head_importance_is_gradient_times_weight(pair: Pair) -> None:
    """Equation 1 by hand, for every head of each kind of block."""
    network = new_draft("star", Target(pair.target)).network.requires_grad_(True)
    rng = torch.Generator().manual_seed(0)
    embeddings, features = torch.randn(2, 2, 9, 32, generator=rng)
    network(embeddings, features, network.factors(torch.arange(9))[None]).pow(3).sum().backward()
    for block in network.blocks:
        linears = [(block.from_stream, range(1 if block.has_cross_attention else 3))]
        linears += [(block.from_features, range(2))] if block.from_features is not None else []
        for head in range(4):
            expected = 0.0
            for linear, groups in linears:
                for group in groups:
                    rows = slice(32 * group + 8 * head, 32 * group + 8 * head + 8)
                    expected += float((linear.weight.grad[rows] * linear.weight[rows].detach()).abs().sum())
            assert float(block.head_importance()[head]) == pytest.approx(expected, rel=1e-5)


# -------- files


def test_a_saved_draft_is_loaded_unchanged(pair: Pair, tmp_path: Any) -> None:
    target = Target(pair.target)
    network = new_draft("star", target).network
    network.save(tmp_path)
    loaded = load_network(tmp_path)
    assert loaded.config == network.config and isinstance(loaded, StarNetwork)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name].to(torch.bfloat16).float())


def test_networks_and_subnets_that_do_not_fit_are_refused(pair: Pair, tmp_path: Path) -> None:
    target = Target(pair.target)
    network = new_draft("dream", target).network
    DreamNetwork(network.config.model_copy(update={"hidden_size": 64})).save(tmp_path)
    supernet = new_draft("star", target).network
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: load_draft(str(tmp_path), target), "made for a target with hidden_size 64; this one has 32"),
        (
            lambda: FeatureDraft(network, Subnet(injection_layer=2)),
            "dream reads the output of one of the target's layers 4; got injection_layer 2",
        ),
        (
            lambda: new_draft("star", target, blocks=["initial", "final"]),
            "blocks of a supernet are initial, crossing, final; got initial, final; leave blocks out",
        ),
        (
            lambda: supernet.sliced((0.5, 0.3, 1.0)),
            r"heads are kept whole: a share of 0\.3 of 4 is 1\.2; choose among 0\.25, 0\.5",
        ),
    ]
    for make, message in cases:
        with refused(message):
            make()
