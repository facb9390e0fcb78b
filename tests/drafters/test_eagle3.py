"""EAGLE-3 heads in both published formats: tiny checkpoints against EAGLE's algorithm in plain torch."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotune.acceptance.replay import replay
from autotune.acceptance.trace import ForestBounds, join
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from tests.obvious import Seen, refused, with_true_tokens
from tests.sample_documents import free_prices, header
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP = 32, 4, 2, 8, 48
DRAFT_VOCABULARY = 120
TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
FORMATS = ("eagle3", "speculators")


def write_head(folder: Path, kind: str, *, norm_before_residual: bool = False, **changes: Any) -> Path:
    """Write a head with random weights for the tiny target. Its config names the layers, because the target's four layers
    are too few for the published default.
    """
    rng = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2) + (
            len(shape) == 1
        )

    heads, kv_heads = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, 2 * HIDDEN),
        "self_attn.k_proj": (kv_heads, 2 * HIDDEN),
        "self_attn.v_proj": (kv_heads, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads),
        **{f"mlp.{name}_proj": (MLP, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, MLP),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (HIDDEN,)),
    }
    layer = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    kept = torch.randperm(VOCABULARY_SIZE, generator=rng)[:DRAFT_VOCABULARY].sort().values
    tensors = {
        **{("midlayer." if kind == "eagle3" else "layers.0.") + name: tensor for name, tensor in layer.items()},
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": 2 * random(DRAFT_VOCABULARY, HIDDEN),
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.isin(torch.arange(VOCABULARY_SIZE), kept),
    }
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "max_position_embeddings": 2048,
        "model_type": "llama",
    }
    if kind == "eagle3":
        config: dict[str, Any] = {**sizes, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        tensors["embed_tokens.weight"] = random(VOCABULARY_SIZE, HIDDEN)
        config = {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": norm_before_residual,
            "target_hidden_size": HIDDEN,
            "transformer_layer_config": sizes,
        }
    config |= {"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **changes}
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    return folder


class Reference:
    """One forward pass over the whole text as in EAGLE's code: no cache, no tree, without the first token."""

    def __init__(self, folder: Path, model: Any, *, norm_before_residual: bool) -> None:
        self.model, self.norm_before_residual = model, norm_before_residual
        prefixes = ("midlayer.", "layers.0.")
        tensors = load_file(folder / "model.safetensors")
        self.w = {n.removeprefix(prefixes[0]).removeprefix(prefixes[1]): t for n, t in tensors.items()}

    def normed(self, states: Tensor, name: str) -> Tensor:
        return states * (states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def rotated(self, states: Tensor) -> Tensor:
        """Rotated halves, [n, heads, size]; only relative positions matter."""
        angles = torch.arange(len(states))[:, None] / 500.0 ** (torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = states[..., : HEAD_SIZE // 2], states[..., HEAD_SIZE // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def states(self, embeddings: Tensor, features: Tensor) -> Tensor:
        normed = self.normed(features, "hidden_norm")
        rows = torch.cat([self.normed(embeddings, "input_layernorm"), normed], -1)
        query, key, value = (
            (rows @ self.w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_SIZE)) for name in "qkv"
        )
        query, key = self.rotated(query), self.rotated(key)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = query[:, head] @ key[:, group].T / HEAD_SIZE**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ value[:, group])
        stream = normed if self.norm_before_residual else features
        stream = stream + torch.cat(heads, -1) @ self.w["self_attn.o_proj.weight"].T
        inner = self.normed(stream, "post_attention_layernorm")
        gated = torch.nn.functional.silu(inner @ self.w["mlp.gate_proj.weight"].T) * (
            inner @ self.w["mlp.up_proj.weight"].T
        )
        return stream + gated @ self.w["mlp.down_proj.weight"].T

    def logprobs_after(self, inputs: Inputs, committed: list[int], path: list[int]) -> Tensor:
        """Over the target's vocabulary, after prompt, committed tokens and a path of drafted ones."""
        ids = torch.cat([inputs["input_ids"], torch.tensor([committed], dtype=torch.long)], 1)
        extra = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask")}
        hidden = self.model(input_ids=ids, **extra, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[1][0], hidden[2][0], hidden[3][0]], -1)[:-1] @ self.w["fc.weight"].T
        embed = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        is_visual = (ids[0] == self.model.config.image_token_id)[:, None]
        embeddings = torch.where(is_visual, hidden[0][0], embed[ids[0]])[1:]
        for token in [*path, None]:
            states = self.states(embeddings, features)
            if token is not None:
                embeddings = torch.cat([embeddings, embed[token][None]])
                features = torch.cat([features, states[-1:]])
        logits = self.normed(states[-1], "norm") @ self.w["lm_head.weight"].T
        whole = torch.full((VOCABULARY_SIZE,), -torch.inf)
        whole[self.w["t2d"]] = logits.log_softmax(-1)
        return whole


@pytest.mark.parametrize(
    ("kind", "norm_before_residual"), [("eagle3", False), ("speculators", False), ("speculators", True)]
)
@pytest.mark.parametrize("prompt", ["text", "image"])
@torch.inference_mode()
def test_proposals_equal_eagles_algorithm(
    pair: Pair,
    prompts: dict[str, Inputs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    norm_before_residual: bool,
    prompt: str,
) -> None:
    folder = write_head(tmp_path / "head", kind, norm_before_residual=norm_before_residual)
    target, inputs = Target(pair.target), prompts[prompt]
    draft = load_draft(str(folder), target)
    reference = Reference(folder, pair.target, norm_before_residual=norm_before_residual)
    length = inputs["input_ids"].shape[1]
    answer = Decoder(target).generate(**inputs, max_new_tokens=12).sequences[0, length:].tolist()
    seen: list[Seen] = []
    # The first token is not in the cache.
    monkeypatch.setattr(draft, "propose", with_true_tokens(draft, answer, lambda: draft.length + 1 - length, seen))
    out = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=12)
    assert out.sequences[0, length:].tolist() == answer
    for committed, path, tokens, logprobs in seen:
        expected = reference.logprobs_after(inputs, answer[:committed], path[1:])
        # Rounding errors accumulate over drafted tokens, but stay far below the effect of a mistake.
        torch.testing.assert_close(logprobs, expected[torch.from_numpy(tokens).long()], atol=1e-3, rtol=0)
        assert expected.argmax() == tokens[0], "the target's id of the token"
    assert len(seen) > 20 and max(out.stats.accepted_lengths) > 0


def assert_lossless_and_replayed(target: Target, draft: FeatureDraft, prompts: dict[str, Inputs]) -> None:
    """Greedy and sampled requests have the tokens of plain decoding, and the rounds that replay counts."""
    bounds = ForestBounds(depth=4, num_proposals=8, width=64, floor=1e-9, beam=16)
    for inputs, temperature in itertools.product(prompts.values(), (0.0, 0.8)):
        request = {**inputs, "max_new_tokens": 16, "temperature": temperature, "seed": 1}
        plain = Decoder(target).generate(**request)
        out = Decoder(target, draft, tree=TREE).generate(**request)
        assert torch.equal(out.sequences, plain.sequences)
        length = inputs["input_ids"].shape[1]
        answer = Answer(plain.sequences[0, length:].tolist(), length, {})
        sampler = Decoder(target).sampler(**request) if temperature else None
        trace = join(
            header(1, bounds=bounds, aux_layers=draft.aux_layers),
            [record_forest(target, draft, inputs, answer, bounds, sampler=sampler)],
        )
        replayed = replay(trace, parse_policy(TREE), free_prices())
        assert replayed.missing[0] == 0 and replayed.accepted_lengths[0].tolist() == out.stats.accepted_lengths


@pytest.mark.parametrize("kind", FORMATS)
def test_decoding_is_lossless_and_replayed(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path, kind: str) -> None:
    target = Target(pair.target)
    draft = load_draft(str(write_head(tmp_path / "head", kind)), target)
    assert isinstance(draft, FeatureDraft) and draft.aux_layers == (1, 2, 3) and draft.subnet == Subnet()
    assert_lossless_and_replayed(target, draft, prompts)


def test_the_published_default_layers(pair: Pair, tmp_path: Path) -> None:
    """{2, L/2, L - 3}, if the config names none."""
    target = Target(pair.target)
    draft = load_draft(str(write_head(tmp_path / "head", "eagle3", eagle_aux_hidden_state_layer_ids=None)), target)
    assert draft.aux_layers == (2, 2, 1)


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_heads_that_do_not_fit_are_refused(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(pair.target)
    for number, (change, damage, message) in enumerate(
        (
            ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, None, r"reads 96 numbers a token; .* have 2 x 32"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, None, "layers 1, 2, 9 of this one"),
            ({}, ("fc.", "projection."), "an EAGLE-3 head has the tensor fc.weight; this file has"),
            ({}, ("q_proj", "qu_proj"), "not the tensors of the EAGLE-3 head that config.json describes"),
            ({"intermediate_size": 40}, None, "not the tensors of the EAGLE-3 head"),
        )
    ):
        folder = write_head(tmp_path / str(number), "eagle3", **change)
        if damage is not None:
            rename(folder, *damage)
        with refused(message):
            load_draft(str(folder), target)
    folder = write_head(tmp_path / "layer", "eagle3")
    with refused("reads the layers 1, 2, 3 together; got injection_layer 2"):
        load_draft(str(folder), target, Subnet(injection_layer=2))
    with refused("only a star draft has heads to choose"):
        load_draft(str(folder), target, Subnet(heads=0.5))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "d2t": tensors["d2t"] + 200}, folder / "model.safetensors")
    with refused("must share one vocabulary; the target has 300 tokens"):
        load_draft(str(folder), target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with refused(r"pytorch_model\.bin is a pickle, which is never opened"):
        load_draft(str(folder), target)
    published = tmp_path / "hub" / "models--author--head"  # with the pickle alone, as many heads are
    (published / "refs").mkdir(parents=True)
    (published / "refs" / "main").write_text("1234")
    shutil.copytree(folder, published / "snapshots" / "1234")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with refused(r"snapshots/1234: an EAGLE-3 head is read from model\.safetensors; there is none"):
        load_draft("author/head", target)
