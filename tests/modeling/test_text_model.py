"""Properties derived from a model, and models that are refused by name or by the self-check."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from autotune.errors import UserError
from autotune.modeling.self_check import SelfCheckNotice
from autotune.modeling.text_model import KNOWN_TEXT_TYPES, KNOWN_VISION_TYPES, _max_context, text_model_of
from autotune.runtime.decoder import Decoder
from tests.families import FAMILIES, HYBRIDS, load, load_processor, random_inputs, save
from tests.tiny_models import DRAFT_LAYERS

SIZES: dict[str, Any] = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None},
}
TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10}


def test_every_known_type_is_tested() -> None:
    """``tests/families.py`` or ``tests/hybrids.py`` has a model of each type."""
    models = [family.model(2) for family in {**FAMILIES, **HYBRIDS}.values()]
    assert {model.config.model_type for model in models if model.config is not model.config.get_text_config()} == set(
        KNOWN_VISION_TYPES
    )
    assert {model.config.get_text_config().model_type for model in models} == set(KNOWN_TEXT_TYPES)


def test_the_decoder_names_all_inputs_of_image_encoders() -> None:
    """``generate`` encodes or drops inputs that a custom method does not name."""
    named = set(inspect.signature(Decoder.__call__).parameters)
    for family in FAMILIES.values():
        for sight in family.sees:
            method = getattr(family.model(DRAFT_LAYERS).base_model, f"get_{sight}_features")
            assert set(inspect.signature(method).parameters) - {"kwargs"} <= named, family.name


# -------- unlisted families


def gemma2() -> Any:
    """Alternating windows, soft-capped attention and logits."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=9, **caps))


def mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4))


def gpt2() -> Any:
    """Learned positions and other attribute names."""
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None)
    )


def granite() -> Any:
    """A head that divides its logits."""
    return hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=4.0))


def cohere() -> Any:
    """A head that multiplies its logits; attention and MLP in parallel."""
    return hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=0.5))


def built(build: Any) -> Any:
    """A model whose random weights keep a signal's size, so that its tokens vary."""
    torch.manual_seed(0)
    model = build().eval()
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("build", [gemma2, mixtral, gpt2, granite, cohere])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unlisted_text_model_that_passes_the_self_check_is_decoded(build: Any, dtype: torch.dtype) -> None:
    """With a notice that it is not in the test suite."""
    model = built(build).to(dtype)
    with pytest.warns(SelfCheckNotice, match=rf"'{model.config.model_type}'; this one passed the self-check"):
        decoder = Decoder(model, model, tree=TREE)
    if dtype is torch.float32:
        inputs = {"input_ids": torch.arange(20, 40)[None]}
        expected = model.generate(**inputs, max_new_tokens=30, do_sample=False)
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=30).sequences, expected)


ALTERNATING = ["linear_attention", "full_attention"]
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}


def bamba() -> Any:
    """Mamba-2; a model that counts positions from 0 in every forward pass unless it is told them."""
    return hf.BambaForCausalLM(hf.BambaConfig(**SIZES, **MAMBA2, attn_layer_indices=[1]))


def olmo_hybrid() -> Any:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**SIZES, layer_types=ALTERNATING, **sizes))


def lfm2_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    return hf.Lfm2MoeForCausalLM(hf.Lfm2MoeConfig(**SIZES, layer_types=["conv", "full_attention"], **experts))


@pytest.mark.parametrize("build", [bamba, olmo_hybrid, lfm2_moe])
def test_an_unlisted_hybrid_that_passes_the_self_check_is_decoded_in_chains(build: Any) -> None:
    model = built(build)
    with pytest.warns(SelfCheckNotice, match=rf"'{model.config.model_type}'; this one passed .*allowed: 0.0001"):
        decoder = Decoder(model, model, tree={"policy": "chain", "depth": 3})
    inputs = {"input_ids": torch.arange(20, 40)[None]}
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=20).sequences, expected)


def zamba2() -> Any:
    sizes = {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1}
    types = ["linear_attention", "hybrid"]
    return hf.Zamba2ForCausalLM(hf.Zamba2Config(**SIZES, **sizes, layers_block_type=types))


def jamba() -> Any:
    """Passes over several tokens forget the state."""
    sizes = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
    return hf.JambaForCausalLM(hf.JambaConfig(**SIZES, **sizes, use_mamba_kernels=False))


def minimax() -> Any:
    return hf.MiniMaxForCausalLM(hf.MiniMaxConfig(**SIZES, layer_types=ALTERNATING, num_local_experts=2))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (zamba2, "'zamba2' .* its time steps are limited in passes over several tokens, but not in single steps"),
        (jamba, "'jamba' .* the self-check failed, a tree's logits differ from token-by-token ones"),
        (minimax, "'minimax' .* 0 modules of a layer with a state have a convolution, not one"),
    ],
)
def test_a_hybrid_whose_states_cannot_be_taken_back_is_refused(build: Any, reason: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=f"{reason}.*; known: llama, mistral"):
        Decoder(build().eval())


def test_a_hybrid_whose_single_steps_are_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding and verification would emit different tokens, although a chain agrees with uncached forward
    passes.
    """
    torch.manual_seed(0)
    model = olmo_hybrid().eval()
    layer = model.model.layers[0]
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda hidden, **given: (1.0 + 0.1 * (hidden.shape[1] == 1)) * forward(hidden, **given)
    )
    with pytest.raises(UserError, match="single steps of transformers differ from its passes over several tokens by"):
        Decoder(model)


def bloom() -> Any:
    """ALiBi positions, computed from its own mask."""
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4))


def mpt() -> Any:
    """ALiBi too, but it runs; siblings would get different positions."""
    return hf.MptForCausalLM(hf.MptConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4))


def test_a_text_model_that_fails_the_self_check_is_refused() -> None:
    known = f"known: {', '.join(KNOWN_TEXT_TYPES)}; use one of these"
    for build, reason in ((bloom, "a tree does not run"), (mpt, "a tree's logits differ from token-by-token ones by")):
        torch.manual_seed(0)
        refused = f"type '{build.__name__}' cannot be decoded with trees: the self-check failed, {reason}"
        with pytest.raises(UserError, match=f"{refused} .*{known}"):
            Decoder(build())


def gpt_neo(window: int) -> Any:
    """Counts its windows in cache slots, by a mask of its own, so that siblings of a tree see other tokens."""
    sizes = {"num_layers": 2, "num_heads": 4, "max_position_embeddings": 8192}
    local = {"attention_types": [[["global", "local"], 1]], "window_size": window}
    return hf.GPTNeoForCausalLM(hf.GPTNeoConfig(vocab_size=300, hidden_size=32, **sizes, **local))


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (48, "a tree's logits differ"),
        (256, "a tree's logits differ"),
        (5000, "it reads 4,096 tokens, and window_size of the config is 5,000"),
    ],
)
def test_the_self_check_reads_past_windows_of_any_name(window: int, reason: str) -> None:
    with pytest.raises(UserError, match=f"'gpt_neo' .*the self-check failed, {reason}"):
        Decoder(built(lambda: gpt_neo(window)))


def long_window() -> Any:
    return hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**SIZES, sliding_window=4096))


@pytest.mark.filterwarnings("ignore::autotune.modeling.self_check.SelfCheckNotice")
def test_the_self_check_shortens_a_window_that_it_cannot_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for its duration."""
    model = built(long_window)
    target = Decoder(model).target
    assert (model.config.sliding_window, target.text.windows) == (4096, {"sliding_attention": 4096})
    assert target.cache.layers[0].window == 4096
    monkeypatch.setattr("autotune.modeling.kv_cache.first_visible", lambda length, window: 0)
    with pytest.raises(UserError, match="the self-check failed"):  # whose masks beyond the window are wrong
        Decoder(built(long_window))


@pytest.mark.filterwarnings("ignore::autotune.modeling.self_check.SelfCheckNotice")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_calls_attention_by_names_is_decoded(attention: str) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 32}
    sizes |= {"num_dense_layers": 1, "sliding_window": 9, "head_dim": 8}
    config = hf.AfmoeConfig(**SIZES, **sizes, attn_implementation=attention)
    model = built(lambda: hf.AfmoeForCausalLM(config))
    inputs = {"input_ids": torch.arange(20, 40)[None]}
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(Decoder(model, model, tree=TREE).generate(**inputs, max_new_tokens=20).sequences, expected)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4)), "layers of type"),
        (lambda: hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, intermediate_size_mlp=64, num_local_experts=2)), "'chunked_attention', whose cache cannot drop rejected tokens"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_compacted(build: Any, reason: str) -> None:
    with pytest.raises(UserError, match=f"{reason}.*; known: llama, mistral"):
        Decoder(build())


def test_an_unknown_vision_family() -> None:
    config = hf.PaliGemmaConfig(
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        text_config={**SIZES, "model_type": "gemma", "head_dim": 8},
        projection_dim=32,
    )  # fmt: skip
    with pytest.raises(UserError) as caught:
        Decoder(hf.PaliGemmaForConditionalGeneration(config))
    assert "models of type 'paligemma' cannot be decoded with trees yet; known: llava, llava_next" in str(caught.value)


def test_attention_without_a_mask() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attn_implementation="flex_attention"))
    with pytest.raises(UserError, match="trees need attention that takes a mask: sdpa or eager; the model runs 'flex_"):
        Decoder(model)


# -------- derived properties


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, "original_max_position_embeddings": 64}, 64),
    ],
)  # fmt: skip
def test_the_context_ends_where_rotary_frequencies_change(rope: dict[str, Any], longest: int) -> None:
    """Frequencies that depend on the sequence length would be those of the longest branch for a whole tree. The last
    tree reaches past the limit and must not change any token.
    """
    config = hf.LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, **rope})
    model = built(lambda: hf.LlamaForCausalLM(config))
    assert text_model_of(model).max_context == longest
    decoder = Decoder(model, model, tree={"policy": "chain", "depth": 9})
    inputs = {"input_ids": torch.arange(longest - 31)[None] % 280 + 20}
    expected = model.generate(**inputs, max_new_tokens=31, do_sample=False)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=31).sequences, expected)
    with pytest.raises(UserError, match=f"must fit the target's context of {longest} tokens"):
        decoder.generate(**inputs, max_new_tokens=32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_parameters": YARN | {"factor": 1.5, "original_max_position_embeddings": 64}}, 256),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 1024),
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 128}}, 256),  # as Llama 3.2
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 256}}, 8192),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 1024),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 256),  # as Gemma 3
        ({"max_sequence_length": 128}, 128),
        ({"model_max_length": 4096}, 4096),  # as Command R
    ],
)
def test_the_context_is_stated_before_or_after_scaling(settings: dict[str, Any], longest: int) -> None:
    """As in vLLM."""
    config = hf.LlamaConfig(**{"max_position_embeddings": 256} | settings)
    assert _max_context(config) == longest


@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "gemma3"])
def test_models_with_offloaded_layers(name: str, tmp_path: Path) -> None:
    """Accelerate's hooks load half of the layers from disk for each forward pass."""
    family = FAMILIES[name]
    save(family, tmp_path)
    processor = load_processor(family, tmp_path / "target")
    whole = load(tmp_path / "target")
    text = "model.language_model" if family.sees else "model"
    names = {name.rsplit(".", 1)[0] for name, _ in whole.named_parameters()}
    offsets = {name: "disk" if name.startswith((f"{text}.layers.1.", f"{text}.layers.3.")) else "cpu" for name in names}
    auto = hf.AutoModelForImageTextToText if family.sees else hf.AutoModelForCausalLM
    for device_map in ({"": "cpu"}, {**offsets, "lm_head": "cpu"}):
        spread = auto.from_pretrained(
            tmp_path / "target", device_map=device_map, offload_folder=tmp_path / "offload"
        ).eval()
        if "disk" in device_map.values():
            assert next(spread.get_decoder().layers[1].parameters()).device.type == "meta", "nothing was offloaded"
        decoder = Decoder(spread, load(tmp_path / "draft"), tree=TREE, visual_keep=0.5)
        rng = np.random.default_rng(0)
        for sight in (None, *family.sees):
            inputs = random_inputs(family, processor, rng, sight=sight)
            expected = whole.generate(**inputs, max_new_tokens=16, do_sample=False)
            assert torch.equal(decoder.generate(**inputs, max_new_tokens=16).sequences, expected)
