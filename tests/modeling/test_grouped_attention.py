"""Attention of grouped queries equals attention over repeated keys and values, and models use it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.modeling.grouped_attention import grouped_attention
from autotune.modeling.kv_cache import SlabLayer
from autotune.modeling.target import observed_attention
from autotune.modeling.text_model import text_model_of
from autotune.runtime.decoder import Decoder
from tests.tiny_models import Pair


def inputs(
    generator: torch.Generator, *, batch: int, heads: int, kv_heads: int, n: int, m: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values are slices of a longer cache, as in decoding."""
    query = torch.randn(batch, n, heads, 8, generator=generator, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, kv_heads, m + 5, 8, generator=generator, dtype=dtype)[:, :, :, :m]
    mask = torch.zeros(1, 1, n, m, dtype=dtype)
    mask.masked_fill_(torch.rand(n, m, generator=generator) < 0.4, torch.finfo(dtype).min)
    return query, key, value, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_attention_over_repeated_keys_and_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for batch, heads, kv_heads in ((1, 8, 2), (1, 6, 3), (1, 4, 1), (1, 4, 4), (2, 8, 2)):
        for n, m in ((1, 7), (5, 9), (33, 80)):
            shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "n": n, "m": m}
            query, key, value, mask = inputs(generator, **shape, dtype=dtype)
            groups = heads // kv_heads
            repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            for masked in (mask, None):
                expected = scaled_dot_product_attention(query, *repeated, attn_mask=masked, scale=0.3)
                found = grouped_attention(query, key, value, masked, scale=0.3)
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("mode", ["eager", "fixed"])
def test_decoding_repeats_no_keys_and_leaves_the_config_as_it_was(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifications of trees, and the drafting of a model of the same kind. transformers alone repeats keys in every
    layer.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).eval()
    calls: list[int] = []
    repeat_kv = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda x, n: (calls.append(n), repeat_kv(x, n))[1])
    prompt = torch.randint(64, (1, 12))
    tree = {"policy": "eagle2", "depth": 3, "k": 3, "budget": 8}
    with torch.inference_mode():
        found = Decoder(model, model, tree=tree, mode=mode).generate(input_ids=prompt, max_new_tokens=20)
        assert not calls and found.stats.rounds < 19
        assert model.config._attn_implementation == "sdpa"
        expected = model.generate(input_ids=prompt, max_new_tokens=20, do_sample=False)
        assert torch.equal(found.sequences, expected)
        mask = torch.zeros(1, 1, 3, 3)
        model(input_ids=prompt[:, :3], attention_mask=mask)
    assert len(calls) == 2 * 2, "keys and values of two layers"


def test_attention_functions_have_the_names_of_transformers(text_pair: Pair) -> None:
    """Some classes call them by name."""
    expected = list(inspect.signature(sdpa_attention.sdpa_attention_forward).parameters)[:5]
    functions = [ALL_ATTENTION_FUNCTIONS["autotune_grouped_sdpa"]]
    text = text_model_of(text_pair.target)
    with observed_attention(text, lambda attention: None):
        functions.append(ALL_ATTENTION_FUNCTIONS[text.config._attn_implementation])
    for function in functions:
        parameters = inspect.signature(function).parameters
        assert [*parameters][:5] == expected and parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    slab, layer = (inspect.signature(each.update).parameters for each in (SlabLayer, DynamicLayer))
    assert [*slab][:3] == [*layer][:3], "key_states and value_states"
