"""Multi-token prediction heads in both published layouts: tiny checkpoints against transformers' own ``MtpLayer``."""

from __future__ import annotations

import itertools
import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.mtp import MtpNetwork, own_name
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.drafters.test_eagle3 import assert_lossless_and_replayed
from tests.obvious import Seen, refused, with_true_tokens
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
TEXT = {"input_ids": torch.arange(20, 38)[None]}
FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_5")


def new_model(family: str) -> Any:
    """A target whose heads are published in its checkpoint: with latent attention and experts, with experts and rotary
    factors of a part of a head, and with gated attention and norms that add 1 to their weights.
    """
    torch.manual_seed(3)
    if family == "deepseek_v3":
        config = hf.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **EXPERTS, **LATENT)
        model: Any = hf.DeepseekV3ForCausalLM(config)
    elif family == "glm4_moe":
        model = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES, **EXPERTS, use_qk_norm=True))
    else:
        # Its recurrent layers are left out: the head is of the other kind.
        sizes = {**SIZES, "layer_types": ["full_attention"] * LAYERS, "mtp_num_hidden_layers": 1}
        model = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**sizes))
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)


def new_head(model: Any) -> MtpLayer:
    """A head of transformers with random weights. All norms differ."""
    torch.manual_seed(4)
    layer = model.model.layers[-1]
    config, index = deepcopy(model.config), LAYERS
    config._attn_implementation = "eager"
    if getattr(config, "layer_types", None):
        config.layer_types, index = ["full_attention"], 0
    head = MtpLayer(config, type(layer), type(layer.input_layernorm), index)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


def published(head: MtpLayer, family: str) -> dict[str, Tensor]:
    """The head's tensors by the names of published checkpoints, where experts are stored one by one."""
    prefix, renamed = f"model.layers.{LAYERS}.", {"post_norm": "shared_head.norm"}
    inner = prefix
    if family == "qwen3_5":
        prefix, inner = "mtp.", "mtp.layers.0."
        renamed = {
            "post_norm": "norm",
            "eh_proj": "fc",
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
        }
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if name.startswith("mtp_block."):
            name = inner + name.removeprefix("mtp_block.")
        else:
            stem, _, kind = name.rpartition(".")
            name = f"{prefix}{renamed.get(stem, stem)}.{kind}"
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(number)
                tensors |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            tensors |= {f"{stem}{number}.down_proj.weight": expert for number, expert in enumerate(tensor)}
        else:
            tensors[name] = tensor
    # Copies of the target's embedding and head, and a second head, which are not read.
    copies = {f"{prefix}embed_tokens.weight": torch.zeros(2, 2), f"{prefix}shared_head.head.weight": torch.zeros(2, 2)}
    second = "mtp.layers.1." if family == "qwen3_5" else f"model.layers.{LAYERS + 1}."
    return {**tensors, **copies, f"{second}input_layernorm.weight": torch.zeros(2)}


def write_checkpoint(folder: Path, model: Any, tensors: dict[str, Tensor]) -> Path:
    """The model's checkpoint with further tensors."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    both = {**load_file(path), **tensors}
    save_file({name: tensor.contiguous().clone() for name, tensor in both.items()}, path, {"format": "pt"})
    return folder


class Reference:
    """The head over a whole text, without cache or tree, and without the first token."""

    def __init__(self, model: Any, head: MtpLayer) -> None:
        self.model, self.head = model, head

    def logits_after(self, ids: Tensor, path: list[int]) -> Tensor:
        """After the tokens [n] and a path of drafted ones."""
        model = self.model
        features = model(ids[None], output_hidden_states=True).hidden_states[-1][:, :-1]
        tokens = ids[1:]
        for token in [*path, None]:
            embeddings = model.get_input_embeddings()(tokens)[None]
            positions = torch.arange(1, len(tokens) + 1)[None]
            mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
            states = self.head(
                embeddings,
                features,
                position_embeddings=model.model.rotary_emb(embeddings, positions),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=None,
            )
            if token is not None:
                tokens = torch.cat([tokens, torch.tensor([token])])
                features = torch.cat([features, states[:, -1:]], 1)
        logits: Tensor = model.lm_head(states[0, -1])
        return logits


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_published_head_drafts_as_transformers_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """At every level of every round, and the output is that of ``generate``."""
    model = new_model(family)
    head = new_head(model)
    folder = write_checkpoint(tmp_path / family, model, published(head, family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that the suite does not list
        target = Target(model)
    draft = load_draft(f"{folder}:mtp", target)
    assert isinstance(draft, FeatureDraft) and draft.kind == "mtp" and draft.aux_layers == (LAYERS,)
    check = Reference(model, head)
    length = TEXT["input_ids"].shape[1]
    answer = model.generate(**TEXT, max_new_tokens=12, do_sample=False)[0, length:].tolist()
    seen: list[Seen] = []
    # The first token is not in the cache.
    monkeypatch.setattr(draft, "propose", with_true_tokens(draft, answer, lambda: draft.length + 1 - length, seen))
    out = Decoder(target, draft, tree=TREE).generate(**TEXT, max_new_tokens=12)
    assert out.sequences[0, length:].tolist() == answer
    for committed, path, tokens, logprobs in seen:
        ids = torch.tensor([*TEXT["input_ids"][0].tolist(), *answer[:committed]])
        expected = check.logits_after(ids, path[1:]).log_softmax(-1)
        torch.testing.assert_close(logprobs, expected[torch.from_numpy(tokens).long()], atol=1e-3, rtol=0)
    assert len(seen) > 10 and max(out.stats.accepted_lengths) > 0


def random_head(target: Target) -> MtpNetwork:
    torch.manual_seed(5)
    network = MtpNetwork.new({}, target, source="test")
    for parameter in network.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return network.eval().requires_grad_(False)


def random_draft(target: Target) -> FeatureDraft:
    draft = FeatureDraft(random_head(target))
    draft.attach(target)
    return draft


def test_a_saved_head_decodes_losslessly_and_is_replayed(
    pair: Pair, prompts: dict[str, Inputs], tmp_path: Path
) -> None:
    """On a VLM, with captured and eager forward passes, greedy and sampled."""
    target = Target(pair.target)
    random_head(target).save(tmp_path)
    draft = load_draft(str(tmp_path), target)
    assert isinstance(draft, FeatureDraft) and draft.network.config.kind == "mtp"
    assert_lossless_and_replayed(target, draft, prompts)
    for inputs, temperature in itertools.product(prompts.values(), (0.0, 0.8)):
        request = {**inputs, "max_new_tokens": 16, "temperature": temperature, "seed": 1}
        fixed = Decoder(target, draft, tree=TREE, mode="fixed", visual_keep=0.5).generate(**request)
        assert torch.equal(fixed.sequences, Decoder(target).generate(**request).sequences)


def test_a_new_head_begins_as_the_targets_last_layer(pair: Pair) -> None:
    network, layer = MtpNetwork.new({}, Target(pair.target), source="test"), pair.target.model.language_model.layers[-1]
    for name, tensor in network.layer.state_dict().items():
        assert torch.equal(tensor, layer.state_dict()[name])
        assert tensor is not layer.state_dict()[name], "a copy"
    assert torch.equal(network.norm.weight, pair.target.model.language_model.norm.weight)


def test_the_first_head_of_a_checkpoint_is_read() -> None:
    """By the names of both layouts; all other tensors belong to the target, to later heads, or are shared with the
    target.
    """
    names = {
        "model.layers.61.eh_proj.weight": "eh_proj.weight",
        "model.language_model.layers.61.shared_head.norm.weight": "norm.weight",
        "model.layers.61.self_attn.o_proj.weight": "layer.self_attn.o_proj.weight",
        "model.layers.61.shared_head.head.weight": None,
        "model.layers.62.eh_proj.weight": None,
        "model.layers.6.self_attn.o_proj.weight": None,
        "model.visual.layers.61.norm.weight": None,
        "mtp.fc.weight": "eh_proj.weight",
        "mtp.layers.0.mlp.down_proj.weight": "layer.mlp.down_proj.weight",
        "mtp.layers.1.mlp.down_proj.weight": None,
        "lm_head.weight": None,
    }
    assert {name: own_name(name, 61) for name in names} == names


def test_heads_that_do_not_fit_are_refused(pair: Pair, tmp_path: Path) -> None:
    target = Target(pair.target)
    with refused(r"no mtp head, no tensors model.layers.4.\* or mtp.\*, .*train a head with autotune"):
        load_draft(f"{pair.target_folder}:mtp", target)
    model = new_model("glm4_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        promising = Target(model)
    folder = write_checkpoint(tmp_path / "other", model, {"model.layers.3.eh_proj.weight": torch.zeros(8, 16)})
    with refused(r"other:mtp: not the tensors of an mtp head for this target .*use a head made") as caught:
        load_draft(f"{folder}:mtp", promising)
    assert "\n" not in str(caught.value)
    random_head(target).save(tmp_path / "saved")
    with refused(r"saved.*: not the tensors of the mtp draft that config.json describes .*for this target"):
        load_draft(str(tmp_path / "saved"), promising)
    with refused("only a star draft has heads to choose"):
        load_draft(str(tmp_path / "saved"), target, Subnet(heads=0.5))
    with refused("mtp reads the output of one of the target's layers 4; got injection_layer 2"):
        load_draft(str(tmp_path / "saved"), target, Subnet(injection_layer=2))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**config, "widht": 2}))
    with refused("unknown key 'widht'"):
        load_draft(str(tmp_path / "saved"), target)


def test_a_checkpoints_own_head_has_the_hash_of_the_checkpoint(pair: Pair) -> None:
    own, whole = reference(f"{pair.target_folder}:mtp"), reference(str(pair.target_folder))
    assert own.sha256 == whole.sha256 != "" and own.id == f"{whole.id}:mtp"
