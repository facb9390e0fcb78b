"""The independent draft: proposals with caches, masks and pruning against the same model on the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

from autotune.drafters.draft import Proposals, num_kept
from autotune.drafters.independent import IndependentDraft
from autotune.trees.tree import ROOT, Tree, new_tree, set_root
from tests.obvious import add_node, children_of, logits_after, refused, tokens_to
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair

NUM_PROPOSALS = 10
CAPACITY = 512
FIRST_TOKEN = 40  # the target's first token after the prompt


def explore(
    draft: IndependentDraft, rng: Generator, root_token: int, num_levels: int
) -> tuple[Tree, dict[int, Proposals]]:
    """Draft a round with random choices in place of a policy; returns the tree and the proposals at each expanded node.

    A random part of each level is expanded, in random order, because a draft may rely only on one level at a time.
    """
    tree, proposals, frontier = new_tree(200), {}, np.array([ROOT])
    set_root(tree, root_token, -1)
    for _ in range(num_levels):
        tokens, logprobs = draft.propose(tree, frontier, NUM_PROPOSALS)
        added = []
        for row, node in enumerate(frontier):
            proposals[int(node)] = tokens[row : row + 1], logprobs[row : row + 1]
            for rank in rng.choice(NUM_PROPOSALS, size=int(rng.integers(1, 4)), replace=False):
                path_logprob = float(tree.path_logprob[node] + logprobs[row, rank])
                added.append(add_node(tree, int(node), int(tokens[row, rank]), path_logprob, int(rank), -1))
        frontier = rng.permutation(added)[: max(1, len(added) * 2 // 3)]
    return tree, proposals


def random_path(rng: Generator, tree: Tree) -> list[int]:
    """A random path from the root to any node."""
    path: list[int] = []
    while (children := children_of(tree, path[-1] if path else ROOT)) and rng.random() < 0.8:
        path.append(int(rng.choice(children)))
    return path


def assert_same_proposals(actual: Proposals, logits: Tensor) -> None:
    """The model's best tokens and log-probabilities, to 1e-5 of its largest logit; near ties may be in either order."""
    expected, atol = logits.log_softmax(-1).numpy(), 1e-5 * float(logits.abs().max())
    tokens, logprobs = actual[0][0], actual[1][0]
    assert len(set(tokens.tolist())) == NUM_PROPOSALS
    np.testing.assert_allclose(logprobs, expected[tokens], atol=atol, rtol=0)
    np.testing.assert_allclose(logprobs, np.sort(expected)[::-1][:NUM_PROPOSALS], atol=atol, rtol=0)


@pytest.mark.parametrize("prompt", ["text", "image", "long"])
@torch.inference_mode()
def test_proposals_equal_those_of_the_model_on_the_whole_text(
    pair: Pair, prompts: dict[str, Inputs], prompt: str
) -> None:
    """Over several rounds: the cache after a commit is the prefix of the next round."""
    rng, inputs = np.random.default_rng(4), prompts[prompt]
    draft = IndependentDraft(pair.draft)
    draft.prefill(draft.prompts(inputs)[0], None, capacity=CAPACITY)
    draft.append(FIRST_TOKEN)
    committed = [FIRST_TOKEN]
    for num_levels in (4, 3, 1, 5):
        tree, proposals = explore(draft, rng, committed[-1], num_levels)
        for node, proposed in proposals.items():
            assert_same_proposals(proposed, logits_after(pair.draft, inputs, committed + tokens_to(tree, node)[1:])[-1])
        path, next_token = random_path(rng, tree), int(rng.integers(4, 300))
        draft.commit(tree, np.array(path, np.int64), next_token)
        committed += [*(int(tree.token[node]) for node in path), next_token]


# -------- visual pruning


def logits_with_pruned_image(model: Any, inputs: Inputs, kept_visual: list[int], tokens: list[int]) -> Tensor:
    """Logits after ``tokens``, in one forward pass without a cache: embeddings and image features are merged, then the
    kept ones are selected with their positions.
    """
    ids = inputs["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    offsets = (ids[0] == model.config.image_token_id).nonzero().squeeze(1)
    embeddings[0, offsets] = torch.cat(
        list(model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output)
    )
    pruned = set(offsets.tolist()) - {int(offsets[visual]) for visual in kept_visual}
    kept = [index for index in range(ids.shape[1]) if index not in pruned]
    embeddings = torch.cat([embeddings[:, kept], model.get_input_embeddings()(torch.tensor([tokens]))], 1)
    positions = torch.tensor([[*kept, *range(ids.shape[1], ids.shape[1] + len(tokens))]])
    # Without a mask of ones, transformers takes gaps between positions for packed sequences.
    mask = torch.ones_like(positions)
    hidden = model.model.language_model(
        inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return model.get_output_embeddings()(hidden[0, -1])


@pytest.mark.parametrize(("keep", "num_kept"), [(1.0, 16), (0.3, 5), (0.5, 8), (0.01, 1)])
@torch.inference_mode()
def test_pruned_visual_tokens_never_enter_the_cache_and_the_others_keep_their_positions(
    pair: Pair, prompts: dict[str, Inputs], keep: float, num_kept: int
) -> None:
    rng, inputs = np.random.default_rng(6), prompts["image"]
    scores = torch.from_numpy(rng.permutation(NUM_VISUAL_TOKENS).astype(np.float32))
    best = [visual for visual in range(NUM_VISUAL_TOKENS) if scores[visual] >= NUM_VISUAL_TOKENS - num_kept]
    assert len(best) == num_kept
    draft = IndependentDraft(pair.draft, visual_keep=keep)
    draft.prefill(draft.prompts(inputs)[0], scores, capacity=CAPACITY)
    length = inputs["input_ids"].shape[1] - NUM_VISUAL_TOKENS + num_kept
    assert draft.length == length

    draft.append(FIRST_TOKEN)
    committed = [FIRST_TOKEN]
    for num_levels in (3, 3):
        tree, proposals = explore(draft, rng, committed[-1], num_levels)
        assert draft.length == length + len(committed)
        for node, proposed in proposals.items():
            tokens = committed + tokens_to(tree, node)[1:]
            assert_same_proposals(proposed, logits_with_pruned_image(pair.draft, inputs, best, tokens))
        path = random_path(rng, tree)
        draft.commit(tree, np.array(path, np.int64), 50)
        committed += [*(int(tree.token[node]) for node in path), 50]


@torch.inference_mode()
def test_pruning_does_not_affect_the_next_request(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """The text model's hook is removed, also after an error, and positions are consecutive again."""
    draft = IndependentDraft(pair.draft, visual_keep=0.3)
    scores = torch.arange(NUM_VISUAL_TOKENS).float()
    draft.prefill(draft.prompts(prompts["image"])[0], scores, capacity=CAPACITY)
    with refused("tokens and pixels cannot be read"):
        draft.prompts({**prompts["image"], "pixel_values": torch.zeros(1, 3, 16, 16)})
    assert not draft.text.module._forward_pre_hooks
    draft.prefill(draft.prompts(prompts["text"])[0], None, capacity=CAPACITY)
    draft.append(FIRST_TOKEN)
    tree = new_tree(1)
    set_root(tree, FIRST_TOKEN, -1)
    assert_same_proposals(
        draft.propose(tree, np.array([ROOT]), NUM_PROPOSALS),
        logits_after(pair.draft, prompts["text"], [FIRST_TOKEN])[-1],
    )


def test_the_number_of_visual_tokens_kept() -> None:
    """It is rounded, and at least 1 for an image."""
    assert [num_kept(0.1, number) for number in (0, 1, 4, 16, 144)] == [0, 1, 1, 2, 14]


# -------- others


def test_an_unsupported_draft_is_refused() -> None:
    """Its layers keep a state instead of keys and values, from which rejected tokens cannot be removed."""
    config = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)
    with refused(r"text models of type .mamba. cannot be decoded with trees: .*; known: llama, "):
        IndependentDraft(MambaForCausalLM(config))
