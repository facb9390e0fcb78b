"""Every model family that must decode exactly: tiny random models of the real classes with the family's real processor.

A contract test runs over ``FAMILIES``: it saves a target and a draft (``save``), loads them as users do (``load``,
``load_processor``) and decodes random prompts (``random_inputs``, ``random_batch``). The random weights are scaled as
in ``tiny_models.sharpen``, for peaked distributions, long varied outputs and a draft that often agrees.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import string
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.video_utils import make_batched_metadata, make_batched_videos

from autotune.modeling.processors import pixtral_processor, without_videos
from tests.tiny_models import DRAFT_LAYERS, TARGET_LAYERS, copy_common_weights

WINDOW = 12  # tokens; shorter than most prompts, so that a cache that drops or keeps too much shows
IMAGE_SIDES = (10, 80)  # pixels, smallest and largest side of a random image: narrow, wide, small and large ones
TEXT_LENGTHS = (3, 60)  # tokens of text in a random prompt, without visual tokens
NUM_IMAGES = (1, 3)
NUM_FRAMES = (2, 5)  # an odd number is padded to whole temporal patches

Inputs = dict[str, Tensor]


# -------- tokenizer

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VISUAL_TOKENS = [
    *("<image>", "<video>"),  # LLaVA, Idefics3
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),  # Pixtral
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),  # Qwen-VL
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),  # Idefics3, SmolVLM
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),  # Gemma 3
    *("<|image>", "<image|>", "<|image|>", "<|video|>"),  # Gemma 4
]
VOCABULARY_SIZE = 352  # 256 bytes, 26 special tokens, 70 merges
CORPUS = (
    "The quick brown fox reads a table row by row, and then the answer to each question follows from the picture.",
    "What is shown in this image? There are three boats on the water; two of them are painted red.",
    "def area(width, height): return width * height  # square metres",
    "Frame 12 of the video shows the same street one second later, at 0.5 seconds before the light turns green.",
)


@cache
def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits are split as in Qwen's tokenizers, because AutoTokenizer loads a Qwen2 folder as one of them.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, EOS, *VISUAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    return tokenizer


def token_id(token: str) -> int:
    """Ids are the same in all families."""
    return _trained().token_to_id(token)


def new_tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """A copy, because processors add tokens. ``named``: attributes under which a processor finds its special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=PAD,  # never needed; without one, Qwen2's class adds a token that the model has no embedding for
        extra_special_tokens=named,
        model_max_length=4096,
    )


# -------- processors


@dataclass(frozen=True)
class VideoFrames:
    """Replaces the video processors of Qwen-VL and LLaVA-OneVision, which need torchvision: all frames, scaled and
    normalized like the family's images. ``test_families.py`` compares the two if torchvision is installed.
    """

    images: Any  # the family's image processor

    @property
    def merge_size(self) -> int:
        return self.images.merge_size

    @property
    def temporal_patch_size(self) -> int:
        return self.images.temporal_patch_size

    def __call__(self, videos: Any, *, video_metadata: Any = None, **options: Any) -> BatchFeature:
        """``videos``: arrays [frames, height, width, 3], which may be nested."""
        videos = make_batched_videos(videos)
        frames = [np.stack([self._frame(frame) for frame in video]) for video in videos]
        if hasattr(self.images, "temporal_patch_size"):  # Qwen-VL
            patches, grids = zip(*map(self._patches, frames), strict=True)
            data = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        else:
            data = {"pixel_values_videos": torch.from_numpy(np.stack(frames))}
        return BatchFeature({**data, "video_metadata": make_batched_metadata(videos, video_metadata)})

    def _frame(self, frame: np.ndarray) -> np.ndarray:
        """[3, height, width]"""
        height, width = self.images.size.height, self.images.size.width
        if height is None:  # Qwen-VL keeps the shape, in whole merged patches
            factor = self.images.patch_size * self.merge_size
            height, width = (max(round(side / factor), 1) * factor for side in frame.shape[:2])
        scaled = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
        normalised = (np.asarray(scaled, np.float32) / 255 - self.images.image_mean) / self.images.image_std
        return normalised.astype(np.float32).transpose(2, 0, 1)

    def _patches(self, frames: np.ndarray) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches [time x rows x columns, pixels], ordered so that merged ones are adjacent, and their grid."""
        time, patch, merge = self.images.temporal_patch_size, self.images.patch_size, self.images.merge_size
        frames = np.concatenate([frames, *[frames[-1:]] * (-len(frames) % time)])
        grid = (len(frames) // time, frames.shape[2] // patch, frames.shape[3] // patch)
        split = torch.from_numpy(frames).view(
            grid[0], time, 3, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch
        )
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1), grid


class _WithoutTorchvision:
    """A processor whose video processor is ``VideoFrames``."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    @property
    def video_processor(self) -> VideoFrames:
        return VideoFrames(self.image_processor)


def _without_torchvision(processor: type) -> Any:
    """A subclass with the same name, so that the saved files are those of the real class."""
    return type(processor.__name__, (_WithoutTorchvision, processor), {})


@cache
def _gemma4_processor() -> Any:
    """Reads text and images: extractors of audio, which no test has, and of video are left out."""
    module = importlib.import_module("transformers.models.gemma4.processing_gemma4")

    class Gemma4Processor(_WithoutTorchvision, module.Gemma4Processor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
            self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id
            self.boi_token, self.eoi_token = tokenizer.boi_token, tokenizer.eoi_token
            self.video_token, self.video_token_id = "<|video|>", token_id("<|video|>")
            self.audio_token = self.audio_token_id = None
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

        def validate_inputs(self, *args: Any, **kwargs: Any) -> None:
            """The class asks for tokens of audio in any prompt."""

    return Gemma4Processor


GEMMA4_PROCESSOR = _gemma4_processor()
ONEVISION_PROCESSOR = _without_torchvision(hf.LlavaOnevisionProcessor)
QWEN2_VL_PROCESSOR = _without_torchvision(hf.Qwen2VLProcessor)
QWEN2_5_VL_PROCESSOR = _without_torchvision(hf.Qwen2_5_VLProcessor)
QWEN3_VL_PROCESSOR = _without_torchvision(hf.Qwen3VLProcessor)
SMOLVLM_PROCESSOR = without_videos(hf.SmolVLMProcessor)  # as the product loads it where torchvision is missing

SIDE, PATCH = 24, 8  # pixels: 3 x 3 patches of a fixed-size tower's image
TILINGS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]  # height and width of LLaVA-NeXT's large images


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _llava_processor(processor: Any = hf.LlavaProcessor, images: Any = hf.CLIPImageProcessorPil, **options: Any) -> Any:
    return processor(
        image_processor=images(size={"shortest_edge": SIDE}, crop_size=_square(SIDE), **options),
        tokenizer=new_tokenizer(image_token="<image>"),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token, which "default" drops again
    )


LLAVA_NEXT_PROCESSOR = partial(
    _llava_processor, hf.LlavaNextProcessor, hf.LlavaNextImageProcessorPil, image_grid_pinpoints=TILINGS
)


def _new_pixtral_processor(longest_edge: int, spatial_merge_size: int) -> Any:
    return pixtral_processor()(
        image_processor=hf.PixtralImageProcessorPil(size={"longest_edge": longest_edge}, patch_size=_square(PATCH)),
        tokenizer=new_tokenizer(),
        patch_size=PATCH,
        spatial_merge_size=spatial_merge_size,
    )


def _onevision_processor() -> Any:
    return ONEVISION_PROCESSOR(
        image_processor=hf.LlavaOnevisionImageProcessorPil(
            size=_square(SIDE), image_grid_pinpoints=[[SIDE, SIDE], *TILINGS]
        ),
        tokenizer=new_tokenizer(image_token="<image>", video_token="<video>"),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
    )


def _qwen_processor(processor: Any) -> Any:
    return processor(
        image_processor=hf.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 16 * 16, "longest_edge": 48 * 48},  # areas, whatever they are called
            patch_size=4,
        ),
        tokenizer=new_tokenizer(),
    )


def _idefics3_processor(processor: Any, images: Any, **options: Any) -> Any:
    images = images(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return processor(image_processor=images, tokenizer=new_tokenizer(), image_seq_len=4, **options)


def _gemma3_processor() -> Any:
    return hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessorPil(size=_square(32)),
        tokenizer=new_tokenizer(
            image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
        ),
        image_seq_length=16,
    )


def _new_gemma4_processor(**sizes: int) -> Any:
    return GEMMA4_PROCESSOR(
        image_processor=hf.Gemma4ImageProcessorPil(max_soft_tokens=70, **sizes),
        tokenizer=new_tokenizer(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>"),
    )


# -------- models

TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES = {"image_size": SIDE, "patch_size": PATCH}
SLIDING = ("sliding_attention", "full_attention")
LINEAR = ("linear_attention", "full_attention")
"""Kinds of layers that alternate: a draft of two layers has both."""
GATED_DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},  # two share a key head
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": LINEAR},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "mamba_chunk_size": 8,  # tokens; a chain may span several
}
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN3_5_TEXT = {"head_dim": 32, "rope_parameters": {**QWEN3_ROPE, "partial_rotary_factor": 0.5}, **GATED_DELTA_NET}
"""A quarter of a head is rotated."""
QWEN_TOWER = {"depth": 2, "num_heads": 4, "patch_size": 4}  # patches are merged in pairs of rows, columns, frames
QWEN3_TOWER = {
    **{**QWEN_TOWER, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32},
    "num_position_embeddings": 36,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}  # both layers' features are added to the first two text layers
SIGLIP = {**TOWER, "vision_use_head": False}
GEMMA4_SIZES = {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": SLIDING}
"""Heads of full layers are larger."""
SOFTCAPPED = {"final_logit_softcapping": 12.0}
LARGE = {
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}
"""The large form of Gemma 4: keys of full layers are their values, and feed-forward layers have experts."""
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": 64},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
SMALL: dict[type, dict[str, Any]] = {
    hf.MistralConfig: {"sliding_window": None},
    hf.Qwen3Config: {"head_dim": 16},
    hf.Gemma3TextConfig: {
        **{"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": SLIDING}
    },
    hf.Gemma4TextConfig: {  # an embedding of every token for every layer
        **{**GEMMA4_SIZES, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY_SIZE},
        "num_kv_shared_layers": True,
    },
    hf.Gemma4UnifiedTextConfig: {
        **{**GEMMA4_SIZES, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    },
    hf.Qwen2VLTextConfig: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}},
    hf.Qwen2_5_VLTextConfig: {
        **{"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    },
    hf.Qwen3VLTextConfig: {"head_dim": 16, "rope_parameters": QWEN3_ROPE},
    hf.Qwen3VLMoeTextConfig: {"head_dim": 16, "rope_parameters": QWEN3_ROPE, **EXPERTS},
    hf.Qwen3NextConfig: {"head_dim": 16, **GATED_DELTA_NET, **SHARED_EXPERT},
    hf.Qwen3_5TextConfig: QWEN3_5_TEXT,
    hf.Qwen3_5MoeTextConfig: {**QWEN3_5_TEXT, **SHARED_EXPERT},
    hf.Lfm2Config: {"layer_types": ("conv", "full_attention"), "tie_word_embeddings": False},
    hf.GraniteMoeHybridConfig: {
        **{**MAMBA2, "layer_types": LINEAR, "shared_intermediate_size": 64, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "logits_scaling": 0.5, "embedding_multiplier": 1.5, "tie_word_embeddings": False},
    },
    hf.FalconH1Config: {  # a state and attention in every layer
        **{**MAMBA2, "head_dim": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "tie_word_embeddings": False}
    },
    hf.CLIPVisionConfig: {**TOWER, **PATCHES},
    hf.PixtralVisionConfig: {**TOWER, "image_size": 64, "patch_size": PATCH},
    hf.Gemma4VisionConfig: {
        **{**TOWER, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 256}
    },
    hf.Gemma4UnifiedVisionConfig: {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 128, "output_proj_dims": 32},
    hf.LlavaNextConfig: {"image_grid_pinpoints": TILINGS},
    hf.LlavaOnevisionConfig: {"image_grid_pinpoints": [[SIDE, SIDE], *TILINGS]},
    hf.Mistral3Config: {"spatial_merge_size": 2},
    hf.Idefics3Config: {"scale_factor": 2},
    hf.SmolVLMConfig: {"scale_factor": 2},
    hf.Gemma3Config: {"mm_tokens_per_image": 16},  # with bidirectional attention, and more than the window
    hf.Gemma4Config: {"audio_config": None},
    hf.Gemma4UnifiedConfig: {"audio_config": None},
}
"""Small sizes of a config's class, beside those of all text models."""


def text_sizes(num_layers: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a text config: four query heads and two key-value heads, unless ``options`` say otherwise.

    Its ``layer_types`` are repeated; ``num_kv_shared_layers`` says that the layers which only a target has read the
    keys and values of the layers before.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": token_id(PAD), "bos_token_id": token_id(BOS), "eos_token_id": token_id(EOS)}
    common = {"num_hidden_layers": num_layers, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 4096}
    chosen = {**sizes, **special, **common, **options}
    if "layer_types" in chosen:
        chosen["layer_types"] = list(itertools.islice(itertools.cycle(chosen["layer_types"]), num_layers))
    if chosen.get("num_kv_shared_layers"):
        chosen["num_kv_shared_layers"] = num_layers - DRAFT_LAYERS
    return chosen


# -------- families


@dataclass(frozen=True)
class Family:
    """Random models of one class, their processor and what a prompt may hold."""

    name: str
    text: type
    """Class of the text model's config."""
    text_options: Mapping[str, Any] = field(default_factory=dict)
    """Beside those of ``SMALL``."""
    processor: Callable[[], Any] = new_tokenizer
    processor_class: Callable[[], Any] = lambda: hf.AutoTokenizer
    """Class whose ``from_pretrained`` loads the processor."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Text for an image or a video in a prompt."""
    config: type | None = None
    """Class of the config of a vision-language model."""
    vision: type | None = None
    """Class of the vision tower's config; None for one that the config chooses."""
    vision_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=lambda: {"image": "<image>"})
    """Special tokens by the beginning of the option that has their id."""

    @property
    def sees(self) -> tuple[str, ...]:
        return tuple(self.placeholders)

    def model(self, num_layers: int) -> PreTrainedModel:
        """Random weights with that many text layers."""
        tied = {name: value for name, value in self.options.items() if name == "tie_word_embeddings"}
        text = self.text(**text_sizes(num_layers, {**SMALL.get(self.text, {}), **self.text_options, **tied}))
        if self.config is None:
            return hf.AutoModelForCausalLM.from_config(text)
        vision = {**SMALL.get(self.vision, {}), **self.vision_options}
        tokens = {f"{name}_token_id": token_id(token) for name, token in self.tokens.items()}
        config = self.config(
            text_config=text,
            vision_config=self.vision(**vision) if self.vision else vision,
            **{**SMALL.get(self.config, {}), **tokens, **self.options},
        )
        return hf.AutoModelForImageTextToText.from_config(config)


def _auto_processor() -> Any:
    return hf.AutoProcessor


IMAGE: dict[str, Any] = {"processor_class": _auto_processor, "placeholders": {"image": "<image>"}}
IDEFICS3: dict[str, Any] = {
    **{"vision_options": {**TOWER, "image_size": 32, "patch_size": 8}, "placeholders": {"image": "<image>"}},
    **{"tokens": {"image": "<image>", "pad": PAD}},
}
PIXTRAL: dict[str, Any] = {
    **{"text_options": {"head_dim": 16}, "vision": hf.PixtralVisionConfig, "processor_class": pixtral_processor},
    **{"tokens": {"image": "[IMG]"}, "placeholders": {"image": "[IMG]"}},
}
LLAVA_NEXT: dict[str, Any] = {
    **{**IMAGE, "processor": LLAVA_NEXT_PROCESSOR, "config": hf.LlavaNextConfig, "vision": hf.CLIPVisionConfig}
}
GEMMA4: dict[str, Any] = {
    **{"processor_class": _gemma4_processor, "placeholders": {"image": "<|image|>"}},
    "tokens": {"image": "<|image|>", "video": "<|video|>", "boi": "<|image>", "eoi": "<image|>"},
}


def _qwen(name: str, text: type, config: type, processor: Any, vision: Mapping[str, Any], *, tied: bool) -> Family:
    """A model of the Qwen-VL family."""
    pads = {sight: f"<|{sight}_pad|>" for sight in ("image", "video")}
    return Family(
        name,
        text,
        processor=partial(_qwen_processor, processor),
        processor_class=lambda: processor,
        placeholders={sight: f"<|vision_start|>{pad}<|vision_end|>" for sight, pad in pads.items()},
        config=config,
        vision_options=vision,
        options={"tie_word_embeddings": tied},
        tokens={**pads, "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"},
    )


QWEN2_TOWER = {**QWEN_TOWER, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
QWEN2_5_TOWER = {
    **{**QWEN_TOWER, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48},
    **{"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},  # pixels: 2 x 2 merged patches
}
_ALL = (
    Family("llama", hf.LlamaConfig),
    Family(
        "llama_rope_scaled",
        hf.LlamaConfig,
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Family("mistral", hf.MistralConfig, {"head_dim": 16}),
    Family("mistral_window", hf.MistralConfig, {"sliding_window": WINDOW}),
    Family("qwen2", hf.Qwen2Config, {"tie_word_embeddings": True}),
    Family(
        "qwen2_window", hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    Family("qwen3", hf.Qwen3Config),
    Family("gemma3_text", hf.Gemma3TextConfig, SOFTCAPPED),
    Family("gemma4_text", hf.Gemma4TextConfig, SOFTCAPPED),
    Family("gemma4_text_large", hf.Gemma4TextConfig, LARGE),
    Family(
        "llava",
        hf.LlamaConfig,
        processor=_llava_processor,
        config=hf.LlavaConfig,
        vision=hf.CLIPVisionConfig,
        options={"image_seq_length": (SIDE // PATCH) ** 2},
        **IMAGE,
    ),
    Family(
        "llava_pixtral",
        hf.MistralConfig,
        processor=lambda: _new_pixtral_processor(48, 1),
        config=hf.LlavaConfig,
        options={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        **PIXTRAL,
    ),
    Family("llava_next_llama", hf.LlamaConfig, options={"tie_word_embeddings": False}, **LLAVA_NEXT),
    Family("llava_next_mistral", hf.MistralConfig, options={"tie_word_embeddings": True}, **LLAVA_NEXT),
    Family(
        "llava_onevision",
        hf.Qwen2Config,
        processor=_onevision_processor,
        processor_class=lambda: ONEVISION_PROCESSOR,
        placeholders={"image": "<image>", "video": "<video>"},
        config=hf.LlavaOnevisionConfig,
        vision=hf.SiglipVisionConfig,
        vision_options={**SIGLIP, **PATCHES},
        options={"tie_word_embeddings": True},
        tokens={"image": "<image>", "video": "<video>"},
    ),
    _qwen("qwen2_vl", hf.Qwen2VLTextConfig, hf.Qwen2VLConfig, QWEN2_VL_PROCESSOR, QWEN2_TOWER, tied=True),
    _qwen("qwen2_5_vl", hf.Qwen2_5_VLTextConfig, hf.Qwen2_5_VLConfig, QWEN2_5_VL_PROCESSOR, QWEN2_5_TOWER, tied=False),
    *(
        _qwen(name, text, config, QWEN3_VL_PROCESSOR, {**QWEN3_TOWER, **DEEPSTACK}, tied=tied)
        for name, text, config, tied in (
            ("qwen3_vl", hf.Qwen3VLTextConfig, hf.Qwen3VLConfig, True),
            ("qwen3_vl_moe", hf.Qwen3VLMoeTextConfig, hf.Qwen3VLMoeConfig, False),
        )
    ),
    Family(
        "idefics3",
        hf.LlamaConfig,
        processor=lambda: _idefics3_processor(hf.Idefics3Processor, hf.Idefics3ImageProcessorPil),
        processor_class=_auto_processor,
        config=hf.Idefics3Config,
        options={"tie_word_embeddings": False},
        **IDEFICS3,
    ),
    Family(
        "smolvlm",
        hf.LlamaConfig,
        {"num_key_value_heads": 4},
        processor=lambda: _idefics3_processor(SMOLVLM_PROCESSOR, hf.SmolVLMImageProcessorPil, video_processor=None),
        processor_class=lambda: SMOLVLM_PROCESSOR,
        config=hf.SmolVLMConfig,
        options={"tie_word_embeddings": True},
        **IDEFICS3,
    ),
    Family(
        "mistral3",
        hf.MistralConfig,
        processor=lambda: _new_pixtral_processor(64, 2),
        config=hf.Mistral3Config,
        options={"tie_word_embeddings": False},
        **PIXTRAL,
    ),
    Family(
        "gemma3",
        hf.Gemma3TextConfig,
        processor=_gemma3_processor,
        processor_class=_auto_processor,
        placeholders={"image": "<start_of_image>"},
        config=hf.Gemma3Config,
        vision=hf.SiglipVisionConfig,
        vision_options={**SIGLIP, "image_size": 32, "patch_size": 4},
        tokens={"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"},
    ),
    *(
        Family(
            name,
            hf.Gemma4TextConfig,
            {**SOFTCAPPED, **more},
            processor=lambda: _new_gemma4_processor(patch_size=4),
            config=hf.Gemma4Config,
            vision=hf.Gemma4VisionConfig,
            **GEMMA4,
        )
        for name, more in (("gemma4", {}), ("gemma4_large", {**LARGE, "use_bidirectional_attention": "vision"}))
    ),
    Family(
        "gemma4_unified",  # without a vision tower: patches are projected
        hf.Gemma4UnifiedTextConfig,
        SOFTCAPPED,
        processor=lambda: _new_gemma4_processor(patch_size=12, pooling_kernel_size=1),  # 3 x 3 merged patches
        config=hf.Gemma4UnifiedConfig,
        vision=hf.Gemma4UnifiedVisionConfig,
        **GEMMA4,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
_WITH_STATES = (
    Family("qwen3_next", hf.Qwen3NextConfig),
    Family("qwen3_5_text", hf.Qwen3_5TextConfig),
    _qwen("qwen3_5", hf.Qwen3_5TextConfig, hf.Qwen3_5Config, QWEN3_VL_PROCESSOR, QWEN3_TOWER, tied=False),
    _qwen("qwen3_5_moe", hf.Qwen3_5MoeTextConfig, hf.Qwen3_5MoeConfig, QWEN3_VL_PROCESSOR, QWEN3_TOWER, tied=False),
    Family("lfm2", hf.Lfm2Config),
    Family("granite4", hf.GraniteMoeHybridConfig),
    Family("falcon_h1", hf.FalconH1Config),
)
HYBRIDS: dict[str, Family] = {family.name: family for family in _WITH_STATES}
"""Families some of whose layers keep a recurrent or convolution state: they decode chains only."""
NIGHTLY = {
    *("llama_rope_scaled", "mistral", "qwen2", "gemma4_text_large", "llava_pixtral", "llava_next_mistral"),
    *("qwen3_vl_moe", "smolvlm", "gemma4_large", "qwen3_5", "qwen3_5_moe"),
}
"""Families whose layers and processors are those of others, in another combination: every change tests those."""


def params_of(families: Iterable[str]) -> list[Any]:
    """Parameters of a fixture, a name each."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in families]


# -------- weights

EMBEDDING = 0.7  # standard deviation of embeddings at the first layer's input, and of visual features
LOGITS = 4.0  # standard deviation of the logits: best tokens have 10 to 90 %
LAYER_OUTPUTS = (
    *("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"),
    *("output_linear.weight", "w2.weight"),  # of Granite and LFM2
)  # suffixes of the weights that produce what a layer adds
# Suffixes of the weights that produce the visual features.
PROJECTIONS = (
    *("multi_modal_projector.linear_2.weight", "multi_modal_projector.mm_input_projection_weight"),
    *("modality_projection.proj.weight", "merger.mlp.2.weight", "merger.linear_fc2.weight"),
    "embed_vision.embedding_projection.weight",
)


@torch.no_grad()
def sharpen(model: PreTrainedModel, image_inputs: Inputs | None) -> None:
    """``tiny_models.sharpen`` for every family: weights of twice the size that keeps a signal's size, decisive first
    layers, late layers that add little, logits of deviation 4, and visual features as large as embeddings.
    """
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            inputs = weight.shape[-1] if weight.dim() <= 3 else weight[0].numel()  # 3: experts, 4 and 5: convolutions
            weight.normal_(0.0, 2.0 / inputs**0.5)
        elif name.endswith("bias") and "norm" not in name:
            weight.normal_(0.0, 0.3)
    text = model.get_decoder()
    for index, layer in enumerate(text.layers):
        if hasattr(getattr(layer, "self_attn", None), "q_norm"):
            # Attention scores of standard deviation 4, as without this norm. Gemma 4's scores are not scaled.
            attention = layer.self_attn
            attention.q_norm.weight += 4.0 / (attention.scaling * attention.head_dim**0.5) - 1.0
        gain = 1.0 if index < DRAFT_LAYERS else 0.3
        if hasattr(layer, "post_feedforward_layernorm"):  # Gemma normalizes the output of each sublayer
            added = [layer.post_attention_layernorm, layer.post_feedforward_layernorm]
            added += [layer.post_per_layer_input_norm] if hasattr(layer, "post_per_layer_input_norm") else []
            for norm in added:
                norm.weight += 4.0 * gain - 1.0
            continue
        for name, weight in layer.named_parameters():
            if name.endswith(LAYER_OUTPUTS):
                weight *= gain
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    width = embeddings.weight.shape[1]
    embeddings.weight.normal_(0.0, EMBEDDING / getattr(embeddings, "scalar_embed_scale", 1.0))
    if head.weight is embeddings.weight:
        # Added, because Gemma's gain is 1 + weight.
        norm = text.embedding_norm if hasattr(text, "embedding_norm") else text.norm  # LFM2's name
        norm.weight += LOGITS / (embeddings.weight.std() * width**0.5) - 1.0
    else:
        head.weight.normal_(0.0, LOGITS / width**0.5)
    # As in trained models, tokens that only a processor inserts are hardly ever generated.
    head.weight[[token_id(PAD), token_id(BOS), *map(token_id, VISUAL_TOKENS)]] *= 0.3
    if image_inputs is not None:
        gain = EMBEDDING / visual_features(model, image_inputs).std()
        for name, weight in model.named_parameters():
            if name.endswith(PROJECTIONS):
                weight *= gain


def visual_features(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The text model's inputs for image tokens, [tokens, hidden]."""
    seen: list[Tensor] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, arguments, options: seen.append(options["inputs_embeds"]), with_kwargs=True
    )
    model(**inputs)
    hook.remove()
    return seen[0][inputs["input_ids"] == model.config.image_token_id]


def save(family: Family, folder: Path) -> None:
    """Save ``folder/target`` and ``folder/draft``, the target without its last layers, each with a processor."""
    seed = zlib.crc32(family.name.encode())  # not one seed for all, which would make families alike
    torch.manual_seed(seed)
    processor = family.processor()
    target, draft = family.model(TARGET_LAYERS), family.model(DRAFT_LAYERS)
    image = random_inputs(family, processor, np.random.default_rng(seed), sight="image") if family.sees else None
    sharpen(target.eval(), image)
    copy_common_weights(target, draft)
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.pad_token_id = token_id(PAD)
        model.generation_config.bos_token_id = token_id(BOS)
        model.generation_config.eos_token_id = token_id(EOS)
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)


def load(folder: Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """Load ``target`` or ``draft`` as users do."""
    vision = "vision_config" in json.loads((folder / "config.json").read_text())
    auto = hf.AutoModelForImageTextToText if vision else hf.AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


def load_processor(family: Family, folder: Path) -> Any:
    """The family's processor or tokenizer, by its class where ``AutoProcessor`` needs torchvision."""
    return family.processor_class().from_pretrained(folder)


# -------- prompts


@dataclass(frozen=True)
class Prompt:
    """``text`` has a placeholder for each image or video. A video is frames [frames, height, width, 3] and metadata."""

    text: str
    images: Sequence[Image.Image] = ()
    videos: Sequence[tuple[np.ndarray, dict[str, Any]]] = ()


def random_prompts(
    family: Family, processor: Any, rng: np.random.Generator, sights: Sequence[str | None]
) -> list[Prompt]:
    """Random text with random images ("image": up to three), a "video", or neither (None) at random positions."""
    tokenizer = getattr(processor, "tokenizer", processor)
    num_frames = int(rng.integers(*NUM_FRAMES, endpoint=True))  # of all videos, because LLaVA-OneVision stacks them
    prompts = []
    for sight in sights:
        images = (
            [_random_image(rng) for _ in range(rng.integers(*NUM_IMAGES, endpoint=True))] if sight == "image" else []
        )
        videos = [_random_video(rng, num_frames)] if sight == "video" else []
        placeholders = [family.placeholders[sight]] * (len(images) + len(videos)) if sight else []
        prompts.append(Prompt(_random_text(tokenizer, rng, placeholders), images, videos))
    return prompts


def encode(processor: Any, prompts: Sequence[Prompt], *, padding_side: str = "left") -> Inputs:
    """The processor's outputs for the prompts, padded to one length."""
    call: dict[str, Any] = {"text": [prompt.text for prompt in prompts]}
    if any(prompt.images for prompt in prompts):
        call["images"] = [list(prompt.images) for prompt in prompts]
    videos = [video for prompt in prompts for video in prompt.videos]
    if videos:
        call["videos"], call["video_metadata"] = map(list, zip(*videos, strict=True))
    return dict(processor(**call, padding=True, padding_side=padding_side, return_tensors="pt"))


def random_inputs(family: Family, processor: Any, rng: np.random.Generator, *, sight: str | None) -> Inputs:
    """One random prompt."""
    return encode(processor, random_prompts(family, processor, rng, [sight]))


def _random_text(tokenizer: Any, rng: np.random.Generator, placeholders: Sequence[str]) -> str:
    """Text of a random length (log-uniform), with the placeholders at random positions."""
    length = round(math.exp(rng.uniform(*np.log(TEXT_LENGTHS))))
    words = " ".join(CORPUS).split()
    random_words = ("".join(rng.choice(list(string.printable[:94]), rng.integers(1, 8))) for _ in range(length))
    text = " ".join(str(rng.choice(words)) if rng.random() < 0.5 else word for word in random_words)
    ids = tokenizer(text)["input_ids"][:length]
    cuts = [0, *sorted(rng.integers(0, length, len(placeholders))), length]
    pieces = [tokenizer.decode(ids[start:end]) for start, end in itertools.pairwise(cuts)]
    return pieces[0] + "".join(a + b for a, b in zip(placeholders, pieces[1:], strict=True))


def random_picture(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A few blended colours; finer noise would turn grey when the processor scales it."""
    return Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)


def _random_image(rng: np.random.Generator) -> Image.Image:
    return random_picture(rng, tuple(rng.integers(*IMAGE_SIDES, size=2, endpoint=True).tolist()))


def _random_video(rng: np.random.Generator, num_frames: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames [frames, height, width, 3] of one size, and metadata."""
    size = tuple(rng.integers(16, 33, 2).tolist())
    frames = np.stack([np.asarray(random_picture(rng, size)) for _ in range(num_frames)])
    fps = float(rng.choice([0.5, 1.0, 2.0, 24.0]))
    return frames, {"total_num_frames": num_frames, "fps": fps, "frames_indices": list(range(num_frames))}
