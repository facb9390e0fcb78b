"""One compiled decoder layer for all layers, with merged products, gives the outputs of the layers as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.documents.execution import FIXED
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.feature_draft import FeatureDraft
from autotune.modeling.compiled_layers import CompiledLayers, UncompiledNotice, merged_products, replaced_attributes
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.decoder import Decoder
from tests.drafters.test_feature_draft import SIZES as DRAFT_SIZES
from tests.families import FAMILIES, HYBRIDS

pytestmark = pytest.mark.filterwarnings(f"error::{UncompiledNotice.__module__}.UncompiledNotice")

NUM_LAYERS, NUM_PROMPT = 4, 20
MOST_GRAPHS = 6
SIZES = [(8, 64), (16, 64), (1, 64), (5, 64), (1, 128), (64, 128), (40, 256)]  # tokens of steps, columns of their masks
QUICK = ("gemma3_text", "qwen2_5_vl")
INJECTION = {"star": 2, "dream": 4, "specvlm": NUM_LAYERS}
OTHER_NETWORKS = [("mtp", 5), *((kind, 0) for kind in INJECTION)]
SEVERAL_SHAPES = ("gemma4_text", "gemma4_text_large", "gemma4", "gemma4_large", "gemma4_unified")
TRACED_ONCE = ("gemma3_text",)  # by dynamo alone, whose graphs are counted; the others by AOT autograd too
FAMILY = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in QUICK)) for name in FAMILIES]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.inference_mode():
        yield
    torch._dynamo.reset()


def new_model(name: str) -> TreeModel:
    """A model after a prompt, whose steps run over fixed buffers."""
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = TreeModel(FAMILIES[name].model(NUM_LAYERS))
    model.output_layers = (1, NUM_LAYERS)
    tokens = torch.arange(NUM_PROMPT)
    model.prefill_prompt(EncodedPrompt(tokens, torch.zeros_like(tokens, dtype=torch.bool)))
    model.use_mode(FIXED)
    return model


def new_tree(model: TreeModel, size: int) -> Step:
    """Tokens that see some of those before them."""
    rng = np.random.default_rng(size)
    sees = np.tril(rng.random((size, size)) < 0.5) | np.eye(size, dtype=np.bool_)
    tree_mask = np.where(sees, np.float32(0), np.float32(model.mask_value))
    return Step(rng.integers(0, model.vocab_size, size), sees.sum(1) - 1, tree_mask)


def outputs(model: TreeModel, size: int, num_columns: int = 64) -> list[Tensor]:
    """Logits of a step, and the outputs of layers."""
    model.least_columns = num_columns
    logits = model.forward(new_tree(model, size))
    return [logits, *(states[:size].clone() for states in model.features.layers.values())]


def all_outputs(model: TreeModel) -> list[Tensor]:
    return [output for size in SIZES for output in outputs(model, *size)]


def compile_steps(model: TreeModel, **options: Any) -> CompiledLayers:
    """Let the model's steps run with compiled layers, as a capture does."""
    layers, forward = CompiledLayers.of(model.text, **options), model._forward_over_buffers
    vars(model)["_forward_over_buffers"] = lambda *given: layers.run(partial(forward, *given))
    return layers


def attributes(model: TreeModel) -> dict[torch.nn.Module, tuple[dict[str, Any], list[int]]]:
    """Attributes of each module of the text model, and its hooks."""
    return {module: (dict(vars(module)), [*module._forward_hooks]) for module in model.text.module.modules()}


@pytest.mark.parametrize("name", FAMILY)
def test_one_function_runs_all_layers(name: str) -> None:
    """In few graphs, whatever the numbers of tokens and columns, and as long as the cache grows."""
    model = new_model(name)
    expected = all_outputs(model)
    if name in SEVERAL_SHAPES:
        with pytest.warns(UncompiledNotice, match="do not cache keys and values of one shape"):
            compile_steps(model, backend="aot_eager")
        torch.testing.assert_close(all_outputs(model), expected, rtol=0, atol=0)
        assert counters["stats"]["unique_graphs"] == 0
        return
    layers, before = compile_steps(model, backend="eager" if name in TRACED_ONCE else "aot_eager"), attributes(model)
    torch.testing.assert_close(all_outputs(model), expected)
    assert attributes(model) == before
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert layers.why_uncompiled is None


@pytest.mark.nightly
def test_a_layer_is_four_products_and_writes_keys_and_values_in_place() -> None:
    """A copy of the cache would hide in the generated code."""
    model = new_model("qwen2")  # with biases
    expected = all_outputs(model)
    compile_steps(model)
    found, codes = run_and_get_code(all_outputs, model)
    torch.testing.assert_close(found, expected)
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS and codes
    for code in codes:
        body = code.split("def call(")[1]
        assert body.count("extern_kernels.mm(") + body.count("extern_kernels.addmm(") == 4
        assert f"{model.cache.capacity}, 8)" in body, "the cache is an input"
        assert not [line for line in body.splitlines() if "= empty" in line and f" {model.cache.capacity}," in line]


@pytest.mark.parametrize(
    ("kind", "num_merged"), [("eagle3", 5), *(pytest.param(*one, marks=pytest.mark.nightly) for one in OTHER_NETWORKS)]
)
def test_a_draft_network_is_one_layer(kind: str, num_merged: int) -> None:
    """It proposes what it proposes as it is."""
    with torch.inference_mode(False), torch.no_grad():
        target = Target(FAMILIES["llama"].model(NUM_LAYERS).eval())
        sizes = {"layers": [1, 2, 3]} if kind == "eagle3" else {}
        network = NETWORKS[kind].new({} if kind == "mtp" else {**DRAFT_SIZES, **sizes}, target, source="test").eval()
    draft = FeatureDraft(network, Subnet(injection_layer=INJECTION.get(kind)))
    draft.attach(target)
    decoder = Decoder(target.model, draft, mode=FIXED, tree={"policy": "eagle2", "depth": 3, "k": 2, "budget": 6})
    settings = {"input_ids": torch.arange(40, 52)[None], "max_new_tokens": 12}
    expected = decoder.generate(**settings)
    layers, forward = CompiledLayers([network], description="a draft", backend="aot_eager"), draft._forward_over_buffers
    vars(draft)["_forward_over_buffers"] = lambda *given: layers.run(partial(forward, *given))
    found = decoder.generate(**settings)
    assert torch.equal(found.sequences, expected.sequences) and found.stats.rounds == expected.stats.rounds
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert layers.why_uncompiled is None and len(layers._merged) == num_merged


# -------- fallbacks


def failing(*given: Any) -> Any:
    raise ValueError("no compiler\nfound")


def test_what_cannot_be_compiled_runs_as_it_is() -> None:
    """The reason is told once; nothing is left behind."""
    model = new_model("llama")
    expected, layers = outputs(model, 4), compile_steps(model, backend=failing)
    before = attributes(model)
    with pytest.warns(
        UncompiledNotice, match=r"a model of type llama are not compiled \(BackendCompilerFailed"
    ) as told:
        torch.testing.assert_close(outputs(model, 4), expected)
    torch.testing.assert_close(outputs(model, 4), expected, rtol=0, atol=0)
    assert len(told) == 1 and attributes(model) == before
    assert layers.why_uncompiled is not None and layers.why_uncompiled in str(told[0].message)


def without_attention_functions(model: TreeModel) -> None:
    vars(model.text.module)["_supports_attention_backend"] = False


def replaced_forward(model: TreeModel) -> None:
    vars(model.text.layers[1])["forward"] = model.text.layers[1].forward


def quantized(model: TreeModel) -> None:
    model.text = replace(model.text, quantization="gptq 4-bit")


def on_several_devices(model: TreeModel) -> None:
    model.text = replace(model.text, device=torch.device("meta"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_attention_functions, "its layers do not call an attention function by its name"),
        (replaced_forward, "the forward pass of its layers was replaced"),
        (quantized, "it is quantized with gptq 4-bit"),
        (on_several_devices, "it is spread over several devices"),
    ],
)
def test_some_models_are_not_compiled(change: Callable[[TreeModel], None], reason: str) -> None:
    model = new_model("llama")
    change(model)
    before = [weight.data_ptr() for weight in model.text.module.parameters()]
    with pytest.warns(UncompiledNotice, match=reason):
        layers = CompiledLayers.of(model.text)
    assert layers.why_uncompiled == reason
    assert [weight.data_ptr() for weight in model.text.module.parameters()] == before


def test_models_with_states_are_not_compiled() -> None:
    model = TreeModel(next(iter(HYBRIDS.values())).model(NUM_LAYERS))
    with pytest.warns(UncompiledNotice, match="its layers keep recurrent or convolution states"):
        CompiledLayers.of(model.text)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_only_errors_before_a_capture_lead_to_another_run(is_capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that failed cannot be continued; ``GraphRunner`` says why and goes on eagerly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    layers = CompiledLayers.of(new_model("llama").text)
    errors: list[Exception] = [torch.OutOfMemoryError("out of memory"), ValueError("no")]

    def step() -> tuple[Tensor, ...]:
        if errors:
            raise errors.pop(0)
        return ()

    with pytest.raises(torch.OutOfMemoryError):  # of which the memory of captures is told
        layers.run(step)
    if is_capturing:
        with pytest.raises(ValueError, match="no"):
            layers.run(step)
        return
    with pytest.warns(UncompiledNotice, match="ValueError: no"):
        assert layers.run(step) == ()
    with warnings.catch_warnings(action="error"):
        assert layers.run(step) == ()


# -------- merged products


TWO_LAYERS = 2
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    num_products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += function.overloadpacket in PRODUCTS
        return function(*args, **(kwargs or {}))


def run_counted(model: Any) -> tuple[Tensor, int]:
    """Hidden states, and the number of matrix products of a layer."""
    with torch.inference_mode(), Counted() as counted:
        hidden = model(input_ids=torch.arange(40, 47)[None], use_cache=False).last_hidden_state
    assert counted.num_products % TWO_LAYERS == 0
    return hidden, counted.num_products // TWO_LAYERS


@pytest.mark.parametrize("name", ["llama", "llama_rope_scaled", "qwen2", "gemma3_text"])
def test_merged_products_are_those_of_the_layers(name: str) -> None:
    """Bit for bit on some CPUs, which no BLAS promises. The weights keep their values and are in memory
    once; outside of the context nothing differs.
    """
    torch.manual_seed(0)
    model = FAMILIES[name].model(TWO_LAYERS).eval().get_decoder()
    (expected, num_products), weights = run_counted(model), {name: w.clone() for name, w in model.state_dict().items()}
    before = {module: dict(vars(module)) for module in model.modules()}
    merged = merged_products(model.layers)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == sum(weight.nbytes for weight in model.parameters())
    addresses = [weight.data_ptr() for weight in model.parameters()]
    with replaced_attributes(merged):
        found, num_merged = run_counted(model)
    torch.testing.assert_close(found, expected)
    assert (num_products, num_merged) == (7, 4)
    assert {module: dict(vars(module)) for module in model.modules()} == before
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(run_counted(model)[0], expected)
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
    model = FAMILIES["qwen2"].model(TWO_LAYERS).get_decoder()
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
    model = TreeModel(FAMILIES["llama"].model(TWO_LAYERS))
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
