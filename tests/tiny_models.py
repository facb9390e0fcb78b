"""Tiny random models of real Hugging Face classes that disagree as a trained target and draft do.

The classes, configs, tokenizer and processor are those that ``drafts.digits.make.build`` makes for the bundled pair;
only the sizes are small. Random weights as transformers initialises them are useless here: their distributions over 300
tokens are almost flat, so no child of the root exceeds SAGE's threshold ``0.1 l / D`` and every tree stays empty. The
weights are therefore scaled (``sharpen``); ``test_decoder.py`` checks that trees branch and that several tokens of a
round are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from drafts.digits.make import build

torch.set_num_threads(1)  # a second thread gains nothing for models this small, and makes run times vary

IMAGE_SIZE, PATCH_SIZE = 32, 8  # pixels: 4 x 4 patches
NUM_VISUAL_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
VOCABULARY_SIZE = 300  # 256 bytes, 4 special tokens, 40 merges
TARGET_LAYERS, DRAFT_LAYERS = 4, 2

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A target and a draft loaded by ``from_pretrained``. Session-wide: tests change them through
    ``monkeypatch`` only.
    """

    target: Any
    draft: Any
    target_folder: Path
    draft_folder: Path


def _llava(num_layers: int, tokenizer: Any) -> Any:
    # Two queries share a key-value head, so that code which forgets about grouped queries fails.
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    text = {**sizes, "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {
        **sizes,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    return build.build_model(text, vision, tokenizer)


def on_device(pair: Pair, device: str) -> Pair:
    """Copies of both models on a device."""
    return replace(pair, target=deepcopy(pair.target).to(device), draft=deepcopy(pair.draft).to(device))


def inputs_on(inputs: Inputs, device: str) -> Inputs:
    """A prompt whose tensors are on a device."""
    return {name: value.to(device) for name, value in inputs.items()}


@torch.no_grad()
def sharpen(model: Any, layers: Any, num_strong_layers: int) -> None:
    """Scale random weights so that distributions are peaked, outputs long and varied, and the first layers decisive.

    * Embeddings of standard deviation 0.7 in 32 dimensions, tied to the output head, give logits of standard deviation
      4: the best token has a probability of 10 to 90 %.
    * Layer outputs outweigh the embedding that they are added to; otherwise a tied head repeats the input token.
    * Late layers add little: the draft is the target without them and agrees with it on about two tokens of three.

    Still larger weights would enlarge the rounding errors of float32, which the tests must tell from mistakes.
    """
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, 2.0 / weight.shape[1] ** 0.5)
    for layer in layers[num_strong_layers:]:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3
    model.get_input_embeddings().weight.normal_(0.0, 0.7)


def copy_common_weights(source: Any, destination: Any) -> None:
    """Copy the weights that the smaller model shares with the larger one. Those of all layers in one tensor are cut."""
    weights, sizes = source.state_dict(), {name: weight.shape for name, weight in destination.state_dict().items()}
    cut = {name: weight[tuple(map(slice, sizes[name]))] for name, weight in weights.items() if name in sizes}
    assert not destination.load_state_dict(cut, strict=False).missing_keys


def new_tokenizer() -> Any:
    """The bundled target's tokenizer, trained on one text instead of 12,000 (each of which would draw an image)."""
    text = SimpleNamespace(
        prompt="Read the digits row by row.",
        answer="Row 1 reads 3, 1, 4. Row 2 reads 1, 5, 9. That makes 6 digits in all.",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_example", lambda split, task, index: text)
        patch.setattr(build, "TASKS", ("read",))
        return build.train_tokenizer(VOCABULARY_SIZE)


def vision_pair(folder: Path) -> Pair:
    """Save and load a LLaVA and a draft that also reads images. The processor is saved next to the target."""
    tokenizer = new_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "IMAGE_SIZE", IMAGE_SIZE)  # images are scaled to 32 pixels instead of 192
        processor = build.build_processor(tokenizer, PATCH_SIZE)
    torch.manual_seed(0)
    target, draft = _llava(TARGET_LAYERS, tokenizer), _llava(DRAFT_LAYERS, tokenizer)
    sharpen(target, target.model.language_model.layers, DRAFT_LAYERS)
    processor.save_pretrained(folder / "target")
    return _saved(target, draft, folder, AutoModelForImageTextToText.from_pretrained)


def llama_pair(folder: Path, **config: Any) -> Pair:
    """Save and load a text-only Llama and its draft, with the vocabulary of ``vision_pair``. The tokenizer, which has a
    chat template and no token for images, is saved next to the target.
    """
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=new_tokenizer().backend_tokenizer, **special)
    tokenizer.chat_template = build.CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(1)
    target, draft = (new_llama(num_layers, **config) for num_layers in (TARGET_LAYERS, DRAFT_LAYERS))
    sharpen(target, target.model.layers, DRAFT_LAYERS)
    return _saved(target, draft, folder, AutoModelForCausalLM.from_pretrained)


def _saved(target: Any, draft: Any, folder: Path, load: Callable[[Path], Any]) -> Pair:
    copy_common_weights(target, draft)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return Pair(load(folder / "target").eval(), load(folder / "draft").eval(), folder / "target", folder / "draft")


def new_llama(num_layers: int, *, vocabulary_size: int = VOCABULARY_SIZE, **config: Any) -> LlamaForCausalLM:
    """A text model with random weights, without an end-of-sequence token unless one is given."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    options: dict[str, Any] = {**sizes, **special, "tie_word_embeddings": True, **config}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary_size, num_hidden_layers=num_layers, **options)).eval()


def example_prompts(processor: Any) -> dict[str, Inputs]:
    """Processor outputs for a prompt without an image, one with an image, and one with long text after the image."""
    rng = np.random.default_rng(0)

    def image() -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8))

    def make(text: str, images: list[Image.Image] | None) -> Inputs:
        return dict(processor(text=text, images=images, return_tensors="pt"))

    return {
        "text": make("USER: Count to ten, then stop. ASSISTANT:", None),
        "image": make("USER: <image> Read the digits row by row. ASSISTANT:", [image()]),
        "long": make(
            "USER: <image> " + "Row 1 reads 3, 1, 4. That makes 3 digits in all. " * 6 + "And row 2? ASSISTANT:",
            [image()],
        ),
    }
