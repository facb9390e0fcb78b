"""EAGLE-3 heads in both published formats: tiny checkpoints against EAGLE's algorithm in plain torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.draft import kept_tokens
from autotune.drafters.feature_draft import FeatureDraft
from autotune.modeling.target import Target
from autotune.recording.recorder import Answer, record_forest
from autotune.replay.replay import replay
from autotune.replay.trace import ForestBounds, join
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from tests.obvious import Seen, refused, with_true_tokens
from tests.sample_documents import free_prices, header
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

DRAFT_VOCABULARY = 120
TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
Qwens = dict[str, tuple[Any, Inputs]]
QWEN3_VL = "AngelSlim/qwen3-vl-8b-eagle3-mrope"
LAYERS = "eagle_aux_hidden_state_layer_ids"
PUBLISHED = json.loads((Path(__file__).parent / "published_eagle3.json").read_text())
"""Configs of heads and of recipes of their authors, which is what published heads have."""


def write_head(folder: Path, name: str, target: Target | None = None, **changes: Any) -> Path:
    """Write a published head with few heads, narrow states and a small vocabulary, the tiny pair's without ``target``,
    and with random weights. Its config is the published one in all else.
    """
    published, hidden, vocabulary = PUBLISHED[name], 32, VOCABULARY_SIZE
    if target is not None:
        hidden, vocabulary = target.text.config.hidden_size, target.vocab_size
    is_nested = "transformer_layer_config" in published
    layer = dict(published.get("transformer_layer_config", published))
    divides = layer["hidden_size"] % layer["num_attention_heads"] == 0  # not that for Qwen2.5-VL-32B
    heads, kv_heads, mlp = (4, 2, 48) if divides else (5, 5, 48)
    layer |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    layer |= {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary}
    rng, size = torch.Generator().manual_seed(7), head_size(layer)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2) + (
            len(shape) == 1
        )

    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * size, 2 * hidden),
        "self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * size),
        **{f"mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, mlp),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    prefix = "layers.0" if is_nested else "midlayer"
    kept = torch.randperm(vocabulary, generator=rng)[:DRAFT_VOCABULARY].sort().values
    tensors = {
        **{f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()},
        "fc.weight": random(hidden, 3 * hidden),
        "norm.weight": random(hidden),
        "lm_head.weight": 2 * random(DRAFT_VOCABULARY, hidden),
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.isin(torch.arange(vocabulary), kept),
    }
    if is_nested:
        tensors["embed_tokens.weight"] = random(vocabulary, hidden)
    config = {**published, "transformer_layer_config": layer} if is_nested else layer
    config |= {"draft_vocab_size": DRAFT_VOCABULARY, LAYERS: [1, 2, 3] if published.get(LAYERS) else None}
    if "eagle_config" in config:
        config["eagle_config"] = {LAYERS: [0, 1, 2]}
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def head_size(layer: Mapping[str, Any]) -> int:
    return layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]


def frequencies(layer: Mapping[str, Any], rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Radians for each position, [head size / 2], and the factor of cosines and sines, as in SpecForge."""
    theta = rope.get("rope_theta") or layer.get("rope_theta") or 1e4
    size, factor, length = head_size(layer), rope.get("factor"), rope.get("original_max_position_embeddings")
    radians, scale = theta ** (-torch.arange(0, size, 2) / size), 1.0
    if rope.get("rope_type") == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((length * radians / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    elif rope.get("rope_type") == "yarn":
        turns = [length / (2 * math.pi * rope[name]) for name in ("beta_fast", "beta_slow")]
        first, last = (size * math.log(value) / (2 * math.log(theta)) for value in turns)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        kept = 1 - ((torch.arange(size // 2) - first) / (last - first)).clamp(0, 1)
        weights = (rope.get(name, default) for name, default in (("mscale", 1), ("mscale_all_dim", 0)))
        above, below = (1 + 0.1 * weight * math.log(factor) for weight in weights)
        scale = above / below
    else:
        return radians, scale
    return kept * radians + (1 - kept) * radians / factor, scale


class Reference:
    """One forward pass over the whole text as in EAGLE's and SpecForge's code: no cache, no tree, without the first
    token.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self.model, self.config = model, json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.rope = self.layer.get("rope_parameters") or self.layer.get("rope_scaling") or {}
        prefixes = ("midlayer.", "layers.0.")
        tensors = load_file(folder / "model.safetensors")
        self.w = {n.removeprefix(prefixes[0]).removeprefix(prefixes[1]): t for n, t in tensors.items()}

    def normed(self, states: Tensor, name: str) -> Tensor:
        mean = states.pow(2).mean(-1, keepdim=True)
        return states * (mean + self.layer["rms_norm_eps"]).rsqrt() * self.w[f"{name}.weight"]

    def rotated(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotated halves, [n, heads, size], by ``positions`` [3, n]; only relative positions matter."""
        radians, scale = frequencies(self.layer, self.rope)
        sections = self.rope.get("mrope_section", [len(radians), 0, 0])
        each = positions[..., None] * radians
        angles = torch.cat([part[axis] for axis, part in enumerate(each.split(sections, -1))], -1)
        if self.rope.get("mrope_interleaved"):
            angles = each[0].clone()
            for axis in (1, 2):
                angles[:, axis : 3 * sections[axis] : 3] = each[axis][:, axis : 3 * sections[axis] : 3]
        cos, sin = scale * angles.cos()[:, None], scale * angles.sin()[:, None]
        first, second = states.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def states(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        normed = self.normed(features, "hidden_norm")
        rows = torch.cat([self.normed(embeddings, "input_layernorm"), normed], -1)
        size, num_groups = head_size(self.layer), self.layer["num_key_value_heads"]
        query, key, value = (
            (rows @ self.w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)) for name in "qkv"
        )
        query, key = self.rotated(query, positions), self.rotated(key, positions)
        heads = []
        for head in range(query.shape[1]):
            group = head // (query.shape[1] // num_groups)
            scores = query[:, head] @ key[:, group].T / size**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ value[:, group])
        stream = normed if self.config.get("norm_before_residual") else features
        stream = stream + torch.cat(heads, -1) @ self.w["self_attn.o_proj.weight"].T
        inner = self.normed(stream, "post_attention_layernorm")
        gated = torch.nn.functional.silu(inner @ self.w["mlp.gate_proj.weight"].T) * (
            inner @ self.w["mlp.up_proj.weight"].T
        )
        return stream + gated @ self.w["mlp.down_proj.weight"].T

    def logprobs_after(self, inputs: Inputs, committed: list[int], path: list[int], kept: list[int]) -> Tensor:
        """Over the target's vocabulary, after ``kept`` tokens of the prompt, committed tokens and a path of drafted
        ones.
        """
        ids = torch.cat([inputs["input_ids"], torch.tensor([committed], dtype=torch.long)], 1)
        extra = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask")}
        if "mm_token_type_ids" in extra:
            extra["mm_token_type_ids"] = pad(extra["mm_token_type_ids"], (0, len(committed)))
        hidden = self.model(input_ids=ids, **extra, output_hidden_states=True).hidden_states
        layers = self.config[LAYERS] or ([1, 2, 3] if "eagle_config" in self.config else [2, 2, 1])
        features = torch.cat([hidden[layer][0] for layer in layers], -1)[:-1] @ self.w["fc.weight"].T
        embed = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        is_visual = (ids[0] == self.model.config.image_token_id)[:, None]
        embeddings = torch.where(is_visual, hidden[0][0], embed[ids[0]])[1:]
        positions = torch.arange(ids.shape[1]).expand(3, -1)
        if "mrope_section" in self.rope:
            del extra["pixel_values"]
            positions = self.model.model.get_rope_index(ids, **extra)[0][:, 0]
        rows = [row for row in range(len(features)) if row + 1 in kept or row + 1 >= inputs["input_ids"].shape[1]]
        embeddings, features, positions = embeddings[rows], features[rows], positions[:, rows]
        for token in [*path, None]:
            states = self.states(embeddings, features, positions)
            if token is not None:
                embeddings = torch.cat([embeddings, embed[token][None]])
                features = torch.cat([features, states[-1:]])
                positions = torch.cat([positions, positions[:, -1:] + 1], 1)
        logits = self.normed(states[-1], "norm") @ self.w["lm_head.weight"].T
        whole = torch.full((self.layer["vocab_size"],), -torch.inf)
        whole[self.w["t2d"]] = logits.log_softmax(-1)
        return whole


def target_type(name: str) -> str:
    return str(PUBLISHED[name].get("target_model_type"))


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_published_heads_propose_as_in_the_code_that_trained_them(
    pair: Pair, prompts: dict[str, Inputs], qwens: Qwens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the target's three position axes where the config has their sections, with pruned visual tokens, and
    captured.
    """
    model, inputs = qwens.get(target_type(name), (pair.target, prompts["image"]))
    target, length = Target(model), inputs["input_ids"].shape[1]
    folder = write_head(tmp_path / "head", name, target)
    answer = Decoder(target).generate(**inputs, max_new_tokens=12).sequences[0, length:].tolist()
    reference, kept = Reference(folder, model), list[Tensor]()
    given = lambda *args: kept.append(kept_tokens(*args)) or kept[-1]  # noqa: E731
    monkeypatch.setattr("autotune.drafters.feature_draft.kept_tokens", given)
    for options in [{}, {"mode": "fixed", "visual_keep": 0.5}][: 1 + (target_type(name) in qwens)]:
        draft = load_draft(str(folder), target)
        seen: list[Seen] = []
        # The first token is not in the cache.
        count = with_true_tokens(draft, answer, lambda: draft.length + 1 - len(kept[-1]), seen)  # noqa: B023
        monkeypatch.setattr(draft, "propose", count)
        out = Decoder(target, draft, tree=TREE, **options).generate(**inputs, max_new_tokens=12)
        assert out.sequences[0, length:].tolist() == answer and (len(kept[-1]) < length) == ("visual_keep" in options)
        for committed, path, tokens, logprobs in seen:
            expected = reference.logprobs_after(inputs, answer[:committed], path[1:], kept[-1].tolist())
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


@pytest.mark.parametrize("name", ["SpecForge/qwen3-235B-A22B", "speculators/qwen3-8b", QWEN3_VL])
def test_decoding_is_lossless_and_replayed(
    pair: Pair, prompts: dict[str, Inputs], qwens: Qwens, tmp_path: Path, name: str
) -> None:
    model, inputs = qwens.get(target_type(name), (pair.target, None))
    target = Target(model)
    draft = load_draft(str(write_head(tmp_path / "head", name, target)), target)
    assert isinstance(draft, FeatureDraft) and draft.subnet == Subnet()
    assert_lossless_and_replayed(target, draft, prompts if inputs is None else {"image": inputs})


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_heads_that_do_not_fit_are_refused(pair: Pair, tmp_path: Path) -> None:
    target = Target(pair.target)
    for number, (change, damage, message) in enumerate(
        (
            ({LAYERS: [1, 2]}, None, r"reads 96 numbers a token; .* have 2 x 32"),
            ({LAYERS: [1, 2, 9]}, None, "layers 1, 2, 9 of this one"),
            ({}, ("fc.", "projection."), "an EAGLE-3 head has the tensor fc.weight; this file has"),
            ({}, ("q_proj", "qu_proj"), "not the tensors of the EAGLE-3 head that config.json describes"),
            ({"intermediate_size": 40}, None, "not the tensors of the EAGLE-3 head"),
            ({"rope_scaling": {"type": "su"}}, None, r"config.json: rope types are default, mrope, .*; got 'su'; "),
            ({"rope_scaling": {"rope_type": "linear"}}, None, r"config.json: Missing required keys .* {'factor'}; "),
            ({"rope_scaling": {"type": "mrope"}}, None, "cannot load it"),
            ({"rope_parameters": {"mrope_section": [2, 3, 3]}}, None, "cannot load it"),
        )
    ):
        folder = write_head(tmp_path / str(number), "SpecForge/llama3-8B", **change)
        if damage is not None:
            rename(folder, *damage)
        with refused(message):
            load_draft(str(folder), target)
    folder = write_head(tmp_path / "layer", "SpecForge/llama3-8B")
    with refused("reads the layers 2, 2, 1 together; got injection_layer 3"):
        load_draft(str(folder), target, Subnet(injection_layer=3))
    with refused("only a star draft has heads to choose"):
        load_draft(str(folder), target, Subnet(heads=0.5))
    tensors = load_file(folder / "model.safetensors")
    for shift in (200, -200):
        save_file({**tensors, "d2t": tensors["d2t"] + shift}, folder / "model.safetensors")
        with refused("must share one vocabulary; the target has 300 tokens"):
            load_draft(str(folder), target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with refused(r"pytorch_model\.bin: no tensors can be read from it"):
        load_draft(str(folder), target)
    (folder / "pytorch_model.bin").unlink()
    with refused(r"layer: an EAGLE-3 head is read from model\.safetensors or pytorch_model\.bin; there is none"):
        load_draft(str(folder), target)
    tensors["d2t"] -= tensors["d2t"]
    torch.save(tensors, folder / "pytorch_model.bin")  # a pickle alone, as EAGLE's own heads are
    assert load_draft(str(folder), target).kind == "eagle3"
    torch.save({"fc.weight": Path("code")}, folder / "pytorch_model.bin")
    with refused(r"pytorch_model\.bin: no tensors can be read from it .*Weights only load failed"):
        load_draft(str(folder), target)
