"""Attention in blocks of queries against torch's kernel and in a model of Hugging Face."""

from __future__ import annotations

import torch
from torch.nn import functional

from autotune.training.causal_attention import causal_attention, causal_blocks
from tests.tiny_models import new_llama


def test_blocks_equal_the_kernel_of_torch() -> None:
    """Outputs and gradients, whether or not the last block is whole, with and without grouped queries."""
    torch.manual_seed(0)
    for length, block, kv_heads in ((12, 4, 1), (13, 4, 2), (3, 8, 6)):
        tensors = [torch.randn(2, heads, length, 8, requires_grad=True) for heads in (6, kv_heads, kv_heads)]
        query, key, value = tensors
        expected = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.3, enable_gqa=kv_heads < 6
        )
        found = causal_attention(query, key, value, scale=0.3, block=block)
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(expected)
        for ours, theirs in zip(
            *(torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_a_model_reads_the_same_rows_with_blocks() -> None:
    model = new_llama(2)
    ids = torch.arange(2 * 20).reshape(2, 20) % model.config.vocab_size
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with causal_blocks(model.config):
            found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected)
    assert model.config._attn_implementation == "sdpa"
