"""Vision's share of the prefill: tower and projector only."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.modeling.prompt import num_patches
from autotune.modeling.target import Target
from autotune.modeling.vision_timing import timed_vision, vision_layers, vision_parts
from tests.families import FAMILIES, random_inputs
from tests.tiny_models import Inputs, Pair


def test_encoding_a_prompt_measures_vision(pair: Pair, text_pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Images alone take time, and hooks are removed, after an error too."""
    target, tower = Target(pair.target), pair.target.model.vision_tower
    with torch.inference_mode():
        assert target.encode(prompts["image"]).vision_ms > 0 == target.encode(prompts["text"]).vision_ms
        text = {"input_ids": prompts["text"]["input_ids"]}
        assert vision_parts(text_pair.target) == [] and Target(text_pair.target).encode(text).vision_ms == 0
    with pytest.raises(KeyError), timed_vision(pair.target):
        assert tower._forward_hooks
        raise KeyError
    assert not tower._forward_hooks and not tower._forward_pre_hooks


def test_vision_parts_have_family_specific_names() -> None:
    """LLaVA has a projector beside its tower, Qwen inside it. A None attribute does not count."""
    tower, projector = torch.nn.Identity(), torch.nn.Identity()
    llava = SimpleNamespace(model=SimpleNamespace(vision_tower=tower, multi_modal_projector=projector))
    qwen = SimpleNamespace(model=SimpleNamespace(visual=tower, vision_tower=None))
    assert vision_parts(llava) == [tower, projector] and vision_parts(qwen) == [tower]


@pytest.mark.parametrize("name", ["llava_pixtral", "llava_next_llama", "llava_onevision", "qwen2_5_vl", "gemma3"])
def test_patches_are_those_that_the_tower_embeds(name: str) -> None:
    """Several images: tiles, resolutions of their own, videos of Qwen, whose patches span two frames."""
    family = FAMILIES[name]
    model, processor, rng = family.model(1).eval(), family.processor(), np.random.default_rng(0)
    assert vision_layers(model) == 2
    embedded: list[int] = []
    for module in vision_parts(model)[0].modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(lambda conv, _, out: embedded.append(out.numel() // conv.out_channels))
    for sight in family.sees:
        inputs = random_inputs(family, processor, rng, sight=sight)
        Target(model).encode(dict(inputs))
        assert num_patches(model.config, inputs) == sum(embedded) > 0
        embedded.clear()
    assert num_patches(model.config, {"input_ids": inputs["input_ids"]}) == 0
