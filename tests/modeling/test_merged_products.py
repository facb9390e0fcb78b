"""Products of one input are computed as one, over the weights that the model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.documents.execution import FIXED
from autotune.modeling.compiled_layers import merged_products, replaced_attributes
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.step import Step
from autotune.modeling.tree_model import TreeModel
from tests.families import FAMILIES

NUM_LAYERS = 2
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    num_products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += function.overloadpacket in PRODUCTS
        return function(*args, **(kwargs or {}))


def run(model: Any) -> tuple[Tensor, int]:
    """Hidden states, and the number of matrix products of a layer."""
    with torch.inference_mode(), Counted() as counted:
        hidden = model(input_ids=torch.arange(40, 47)[None], use_cache=False).last_hidden_state
    assert counted.num_products % NUM_LAYERS == 0
    return hidden, counted.num_products // NUM_LAYERS


@pytest.mark.parametrize("name", ["llama", "llama_rope_scaled", "qwen2", "gemma3_text"])
def test_merged_products_are_those_of_the_layers(name: str) -> None:
    """Bit for bit on some CPUs, which no BLAS promises. The weights keep their values and are in memory
    once; outside of the context nothing differs.
    """
    torch.manual_seed(0)
    model = FAMILIES[name].model(NUM_LAYERS).eval().get_decoder()
    (expected, num_products), weights = run(model), {name: w.clone() for name, w in model.state_dict().items()}
    before = {module: dict(vars(module)) for module in model.modules()}
    merged = merged_products(model.layers)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in model.parameters())
    addresses = [weight.data_ptr() for weight in model.parameters()]
    with replaced_attributes(merged):
        found, num_merged = run(model)
    torch.testing.assert_close(found, expected)
    assert (num_products, num_merged) == (7, 4)
    assert {module: dict(vars(module)) for module in model.modules()} == before
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(run(model)[0], expected)
    with pytest.raises(ValueError, match="within"), replaced_attributes(merged_products(model.layers)):
        raise ValueError("within")
    assert {module: dict(vars(module)) for module in model.modules()} == before
    assert [weight.data_ptr() for weight in model.parameters()] == addresses, "they were joined already"


class Quantized(nn.Linear):
    """A layer with another product, as of a quantization or an adapter."""


def other_class(attention: Any) -> None:
    attention.k_proj.__class__ = Quantized


def other_type(attention: Any) -> None:
    attention.k_proj.double()


def other_bias(attention: Any) -> None:
    attention.k_proj.bias = None


def none(attention: Any) -> None:
    attention.v_proj = None


def other_weight(attention: Any) -> None:
    """A weight with a representation of its own, as of torchao."""

    class Packed(nn.Parameter):
        pass

    attention.q_proj.weight.__class__ = Packed


@pytest.mark.parametrize("change", [other_class, other_type, other_bias, none, other_weight])
def test_layers_that_differ_are_left_out(change: Any) -> None:
    model = FAMILIES["qwen2"].model(NUM_LAYERS).get_decoder()
    first, second = (layer.self_attn for layer in model.layers)
    change(first)
    address = first.q_proj.weight.data_ptr()
    merged = merged_products(model.layers)
    assert not {first.q_proj, first.k_proj, first.v_proj} & merged.keys()
    assert {second.q_proj, second.k_proj, second.v_proj} < merged.keys() and len(merged) == 3 + 2 * 2
    assert first.q_proj.weight.data_ptr() == address


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0)])
def test_the_first_layer_that_is_called_computes_all(order: tuple[int, ...]) -> None:
    """Whichever it is, also after a pass that did not call all."""
    attention = nn.Module()
    names = ("q_proj", "k_proj", "v_proj")
    for number, name in enumerate(names):
        attention.add_module(name, nn.Linear(8, 4 + number))
    merged = merged_products([attention])
    for inputs in torch.randn(3, 5, 8):
        expected = [attention.get_submodule(names[number])(inputs) for number in order]
        with replaced_attributes(merged), Counted() as counted:
            found = [attention.get_submodule(names[number])(inputs) for number in order]
        torch.testing.assert_close(found, expected)
        assert counted.num_products == 1


def test_captures_that_read_the_weights_elsewhere_are_dropped() -> None:
    """They are prepared again when they are needed. Weights that are in place drop nothing."""
    model = TreeModel(FAMILIES["llama"].model(NUM_LAYERS))
    model.set_length(0)
    model.use_mode(FIXED)
    memory = graph_memory(model.device)
    with torch.inference_mode():
        expected = model.forward(Step.single(40))
        before = len(memory)
        merged_products(model.text.layers)
        assert (before > 0, len(memory)) == (True, 0)
        torch.testing.assert_close(model.forward(Step.single(40)), expected)
        merged_products(model.text.layers)
        assert len(memory) == 1
