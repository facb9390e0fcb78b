"""The contract of hybrid families, some layers of which keep a recurrent or convolution state: chains decode as the
stock transformers model does, on tiny random models of the real classes (``tests/hybrids.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.documents.subnet import Subnet
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.mtp import MtpConfig, MtpNetwork
from autotune.drafters.retrieval import RetrievalDraft
from autotune.drafters.star import StarNetwork
from autotune.errors import UserError
from autotune.evaluation.bench_arms import choose_arms
from autotune.evaluation.divergence import first_divergence
from autotune.evaluation.runtime_arms import RuntimeArms
from autotune.modeling.kv_cache import HybridCache
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.replay.replay import replay
from autotune.replay.trace import bounds_for, join
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from autotune.search.prices import table_for_gpu
from autotune.trees.policy import parse_policy
from autotune.workloads.workload import Workload
from tests.families import FAMILIES, HYBRIDS, load, params_of, save
from tests.obvious import assert_same_logits
from tests.runtime.test_families import (
    NEW_TOKENS,
    NUM_SPECIAL_TOKENS,
    DecodingContract,
    Inputs,
    Member,
    answer,
    extended,
    new_member,
)
from tests.sample_documents import free_prices, header

CHAINS: list[dict[str, Any]] = [
    {"policy": "chain", "depth": 1},
    {"policy": "chain", "depth": 3},
    {"policy": "chain", "depth": 7},
    {"policy": "chain", "depth": 6, "p_min": 0.3},
    {"policy": "static", "paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
    {"policy": "priced", "k": 1, "width": 1},
]


@pytest.fixture(scope="module", params=params_of(HYBRIDS))
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return new_member(HYBRIDS[request.param], tmp_path_factory.mktemp(request.param))


class TestEveryHybrid(DecodingContract):
    """Every family in ``HYBRIDS`` must pass all of this."""

    trees = CHAINS
    least_prompts = 3
    least_accepted = 0.5
    batch_tree = CHAINS[1]

    @torch.inference_mode()
    def test_rejected_tokens_leave_no_trace(self, member: Member) -> None:
        """Logits of a chain in one forward pass, and in two of which the second sees the first, equal those of the
        stock model over the whole text, whatever was accepted before: nothing but the root, a part, all, or what was
        never committed.
        """
        rng = np.random.default_rng(3)
        target = Target(member.target)
        for inputs in (example.inputs for example in member.examples):
            (prompt,) = target.encode(inputs).prompts
            target.reserve(len(prompt) + 100)
            target.prefill_prompt(prompt)
            committed: list[int] = []
            for size, in_first, num_kept in ((6, 6, 1), (6, 4, 3), (1, 1, 0), (5, 5, 5), (7, 2, 2), (4, 4, 3)):
                tokens = rng.integers(NUM_SPECIAL_TOKENS, 340, size)
                whole = Step.causal(tokens, target.mask_value)
                parts = [whole._replace(tokens=tokens[:in_first], offsets=whole.offsets[:in_first])]
                parts[0] = parts[0]._replace(tree_mask=whole.tree_mask[:in_first, :in_first].copy())
                if in_first < size:
                    rest = slice(in_first, size)
                    parts.append(Step(tokens[rest], whole.offsets[rest], whole.tree_mask[rest].copy()))
                logits = torch.cat([target.forward(part) for part in parts])
                expected = logits_of_all(member.target, inputs, committed + tokens.tolist())
                assert_same_logits(logits, expected[-size:])
                if num_kept > 0:  # the target's forward pass may be repeated without a commit
                    target.cache.keep(list(range(num_kept)))
                    committed += tokens[:num_kept].tolist()
            assert_same_logits(target.step(99), logits_of_all(member.target, inputs, [*committed, 99])[-1])

    def test_drafts_of_other_kinds_keep_the_output(self, member: Member, text_draft: Any) -> None:
        """Retrieval, a text model of another family, and networks that read the target's features: Qwen's have mtp
        heads.
        """
        example, target = member.examples[-1], Target(member.target)
        torch.manual_seed(0)
        network = StarNetwork.new({"num_heads": 4, "head_size": 8, "mlp_size": 32}, target, source="test")
        drafts = [RetrievalDraft(), IndependentDraft(text_draft), FeatureDraft(network.eval())]
        if "qwen" in member.family.name:
            sizes = MtpConfig(hidden_size=target.text.config.hidden_size, num_target_layers=len(target.text.layers))
            drafts.append(FeatureDraft(MtpNetwork(sizes, target).eval()))
        for draft in drafts:
            out = Decoder(target, draft, tree=CHAINS[1]).generate(**example.inputs, max_new_tokens=NEW_TOKENS)
            assert torch.equal(out.sequences, example.sequences)
            assert out.stats.draft_forwards > 0

    def test_in_bfloat16_every_divergence_is_a_near_tie(self, member: Member) -> None:
        """Plain decoding updates a state token by token, a verification in one pass, which rounds otherwise."""
        target, draft = (load(member.folder / name, dtype=torch.bfloat16) for name in ("target", "draft"))
        for example in member.examples[-1:]:
            decoder = Decoder(target, draft, tree=CHAINS[1])
            with_draft = decoder.generate(**example.inputs, max_new_tokens=NEW_TOKENS).sequences
            alone = Decoder(target).generate(**example.inputs, max_new_tokens=NEW_TOKENS).sequences
            found = first_divergence(
                decoder.target, example.inputs, answer(alone, example.inputs), answer(with_draft, example.inputs)
            )
            assert found is None or found.is_near_tie, str(found)


def logits_of_all(model: Any, inputs: Inputs, tokens: list[int]) -> Tensor:
    """Logits [n, vocabulary] of prompt and tokens in one stock forward without a cache."""
    logits: Tensor = model(**extended(inputs, tokens), use_cache=False).logits[0]
    return logits


@pytest.fixture(scope="module")
def text_draft(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("text_draft")
    save(FAMILIES["llama"], folder)
    return load(folder / "draft")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Member:
    return new_member(HYBRIDS["qwen3_next"], tmp_path_factory.mktemp("pair"))


def test_trees_are_refused_for_a_hybrid_target_and_for_a_hybrid_draft(pair: Member, text_draft: Any) -> None:
    tree = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10}
    message = "type qwen3_next keeps recurrent or convolution states, which follow one path: it decodes chains, not trees; got eagle2"
    for target, draft in ((pair.target, text_draft), (text_draft, pair.draft)):
        with pytest.raises(UserError, match=message):
            Decoder(target, draft, tree=tree)
        with pytest.raises(UserError, match="choose the policy chain"):
            Decoder(target, draft, tree={"policy": "priced", "k": 1, "width": 1, "retrieval": True})


def test_a_hybrid_draft_keeps_the_output_of_a_target_without_states(pair: Member, tmp_path: Path) -> None:
    llama = new_member(FAMILIES["llama"], tmp_path)
    out = Decoder(llama.target, pair.draft, tree=CHAINS[2]).generate(
        **llama.examples[0].inputs, max_new_tokens=NEW_TOKENS
    )
    assert torch.equal(out.sequences, llama.examples[0].sequences)


def test_hybrids_run_eagerly(pair: Member, text_draft: Any) -> None:
    assert Decoder(pair.target, mode="auto").mode == "eager"
    for target, draft in ((pair.target, text_draft), (text_draft, pair.draft)):
        with pytest.raises(
            UserError, match="mode fixed cannot take back the recurrent or convolution states of a hybrid model"
        ):
            Decoder(target, draft, tree=CHAINS[1], mode="fixed")


def test_memory_counts_keys_and_values_of_attention_and_the_states(pair: Member) -> None:
    target = Target(pair.target)
    config = target.text.config
    layers = config.layer_types.count("full_attention")
    assert target.kv_bytes_per_token == 2 * 4 * layers * config.num_key_value_heads * config.head_dim
    with torch.inference_mode():
        target.reserve(64)
        target.prefill(target.encode(pair.examples[0].inputs).prompts[0])
    cache = target.cache
    assert isinstance(cache, HybridCache)
    heads, conv = config.linear_num_value_heads, 2 * 2 * 8 + 4 * 8
    states = config.layer_types.count("linear_attention") * 4 * (heads * 8 * 8 + conv * config.linear_conv_kernel_dim)
    assert cache.memory_bytes == cache.capacity * target.kv_bytes_per_token + states
    target.cache.release()
    assert cache.memory_bytes == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_counts_the_rounds_of_a_hybrid_pair(pair: Member, temperature: float) -> None:
    """Traces of a draft with states hold chains, recorded position by position."""
    rng, num_accepted = np.random.default_rng(13), 0
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    decoder = Decoder(target, draft)
    inputs = pair.inputs(rng, None)
    sampling = {"temperature": temperature, "seed": 3, "max_new_tokens": 2 * NEW_TOKENS}
    plain = Decoder(target).generate(**inputs, **sampling)
    sampler = decoder.sampler(**inputs, **sampling) if temperature > 0.0 else None
    recorded = Answer(answer(plain.sequences, inputs), inputs["input_ids"].shape[1], {})
    bounds = bounds_for([parse_policy(tree) for tree in CHAINS[:4]])
    part = record_forest(target, draft, inputs, recorded, bounds, sampler=sampler)
    trace = join(header(1, bounds=bounds), [part])
    for tree in CHAINS[:4]:
        decoder = Decoder(decoder.target, decoder.draft, tree=tree)
        replayed = replay(trace, parse_policy(tree), free_prices())
        stats = decoder.generate(**inputs, **sampling).stats
        assert not replayed.missing[0]
        assert replayed.accepted_lengths[0].tolist() == stats.accepted_lengths, tree
        num_accepted += sum(stats.accepted_lengths)
    assert num_accepted > 6


def test_arms_that_grow_trees_are_left_out_of_a_comparison(pair: Member, text_draft: Any) -> None:
    decoder = Decoder(pair.target, text_draft, tree=CHAINS[1])
    chosen = choose_arms(
        ["ar", "chain", "sage", "eagle2"], RuntimeArms(decoder, pair.processor), Workload("none", "", ())
    )
    assert [arm.name for arm in chosen.arms] == ["ar", "chain"]
    assert set(chosen.unavailable) == {"sage", "eagle2"}
    assert all("it decodes chains, not trees" in reason for reason in chosen.unavailable.values())


def test_estimates_of_hybrids_are_of_eager_forward_passes(pair: Member) -> None:
    """On a GPU too, where those of other models are captured."""
    pool = ModelPool(str(pair.folder / "target"), [str(pair.folder / "draft")], "cpu")
    variants = [(draft, Subnet()) for draft in pool.references]
    assert pool.has_states and table_for_gpu("h100", pool, variants).mode == "eager"
    with pytest.raises(UserError, match="mode cuda-graph cannot take back the recurrent or convolution states"):
        table_for_gpu("h100", pool, variants, "cuda-graph")


@torch.inference_mode()
def test_a_forward_pass_that_raises_leaves_no_trace(pair: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = Target(pair.target), pair.examples[0].inputs
    target.reserve(100)
    target.prefill(target.encode(inputs).prompts[0])
    tokens = np.arange(100, 104)
    with monkeypatch.context() as patch:
        patch.setattr(target.text.layers[-1].mlp, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.forward(Step.causal(tokens, target.mask_value))
    assert not any(module._forward_pre_hooks for module in target.text.mixers.values())
    target.forward(Step.causal(tokens, target.mask_value))
    target.cache.keep([0, 1])
    expected = logits_of_all(pair.target, inputs, [100, 101, 99])
    assert_same_logits(target.step(99), expected[-1])
