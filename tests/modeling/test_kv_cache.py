"""The slab cache: dropping rejected nodes against a gather, and a tree in one forward pass against its branches."""

from __future__ import annotations

import pytest
import torch

from autotune.modeling.kv_cache import SlabCache
from autotune.modeling.target import Target
from tests.tiny_models import Pair

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 3, 2, 4
CPU = torch.device("cpu")


def new_cache(num_layers: int = NUM_LAYERS, capacity: int = 32) -> SlabCache:
    return SlabCache([None] * num_layers, [CPU] * num_layers, capacity)


def write(cache: SlabCache, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Update the cache like a forward pass; returns the keys and values of each layer."""
    states = [
        (torch.randn(1, NUM_HEADS, num_tokens, HEAD_SIZE), torch.randn(1, NUM_HEADS, num_tokens, HEAD_SIZE))
        for _ in range(NUM_LAYERS)
    ]
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        shown = layer.update(keys, values)
        assert [tensor.shape[2] for tensor in shown] == [cache.length + num_tokens] * 2
        assert layer.get_mask_sizes(num_tokens) == (cache.length + num_tokens, 0)
    return states


@pytest.mark.parametrize("slots", [[], [0], [0, 1, 2], [4], [0, 2, 5], [1, 2, 3], [0, 1, 2, 3, 4, 5]])
def test_keep_moves_the_kept_tokens_after_the_committed_ones(slots: list[int]) -> None:
    torch.manual_seed(0)
    cache = new_cache()
    prefix = write(cache, 7)
    cache.advance(7)
    tree = write(cache, 6)
    cache.keep(slots)
    following = write(cache, 2)
    assert cache.length == 7 + len(slots)
    for layer in range(NUM_LAYERS):
        for which, shown in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            expected = torch.cat([prefix[layer][which], tree[layer][which][:, :, slots], following[layer][which]], 2)
            assert torch.equal(shown[:, :, : expected.shape[2]], expected)


@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_sliding_layer_shows_the_tokens_in_its_window(window: int) -> None:
    """From the first token that the next token sees to the last one written."""
    torch.manual_seed(0)
    cache = SlabCache([None, window], [CPU] * 2, 32)
    assert cache.is_sliding == [False, True]
    everything = torch.zeros(1, NUM_HEADS, 0, HEAD_SIZE)
    for number in (5, 1, 3, 1, 7):
        states = torch.randn(1, NUM_HEADS, number, HEAD_SIZE)
        everything = torch.cat([everything, states], 2)
        first = max(0, cache.length - window + 1)
        for layer, expected in zip(cache.layers, (everything, everything[:, :, first:]), strict=True):
            assert layer.get_mask_sizes(number) == (expected.shape[2], everything.shape[2] - expected.shape[2])
            assert all(torch.equal(shown, expected) for shown in layer.update(states, states))
        cache.advance(number)


def test_layers_on_two_devices_have_slabs_of_their_own() -> None:
    """Each device is compacted. A meta tensor serves as the second device."""
    cache = SlabCache([None] * 3, [CPU, torch.device("meta"), CPU], 16)
    torch.manual_seed(0)
    states = [torch.randn(1, 2, 4, 3, device=device) for device in ("cpu", "meta", "cpu")]
    for layer, tensor in zip(cache.layers, states, strict=True):
        layer.update(tensor, tensor)
    cache.keep([0, 2, 3])
    assert cache.layers[1].keys is not None and cache.layers[1].keys.device.type == "meta"
    for layer, tensor in ((cache.layers[0], states[0]), (cache.layers[2], states[2])):
        assert layer.keys is not None and torch.equal(layer.keys[:, :, :3], tensor[:, :, [0, 2, 3]])


@torch.inference_mode()
def test_a_larger_request_gets_a_larger_cache(text_pair: Pair) -> None:
    target = Target(text_pair.target)
    target.reserve(target.cache.capacity)
    cache = target.cache
    target.reserve(cache.capacity + 1)
    assert target.cache is not cache and target.cache.capacity > cache.capacity
    cache = target.cache
    target.reserve(10)
    assert target.cache is cache
