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


def _text(num_layers: int, **options: Any) -> dict[str, Any]:
    """Options of all text configs: four query heads and two key-value heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": token_id(PAD), "bos_token_id": token_id(BOS), "eos_token_id": token_id(EOS)}
    common = {"num_hidden_layers": num_layers, "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 4096}
    return {**sizes, **special, **common, **options}


def _alternating(num_layers: int) -> list[str]:
    """Layer types; a draft of two layers has both."""
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


def _llama(num_layers: int, **options: Any) -> hf.LlamaConfig:
    return hf.LlamaConfig(**_text(num_layers, **options))


def _mistral(num_layers: int, **options: Any) -> hf.MistralConfig:
    return hf.MistralConfig(**_text(num_layers, **{"sliding_window": None, **options}))


def _gemma3_text(num_layers: int, **options: Any) -> hf.Gemma3TextConfig:
    sizes = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
    return hf.Gemma3TextConfig(**_text(num_layers, **sizes, layer_types=_alternating(num_layers), **options))


def _gemma4_text(num_layers: int, **options: Any) -> hf.Gemma4TextConfig:
    """Heads of full layers are larger, tokens have an embedding for every layer, and the target's last two layers read
    the keys and values of the two before.
    """
    sizes = {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": _alternating(num_layers)}
    embeddings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY_SIZE}
    shared = {"num_kv_shared_layers": num_layers - DRAFT_LAYERS}
    return hf.Gemma4TextConfig(**_text(num_layers, **sizes, **{**embeddings, **shared, **options}))


GEMMA4_LARGE = {
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}
"""Keys of full layers are their values, and feed-forward layers have experts."""
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": 64},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _clip() -> hf.CLIPVisionConfig:
    return hf.CLIPVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH)


def _llava(num_layers: int) -> PreTrainedModel:
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=_clip(),
            text_config=_llama(num_layers),
            image_token_id=token_id("<image>"),
            image_seq_length=(SIDE // PATCH) ** 2,
        )
    )


def _on_pixtral(model: Any, config: Any, num_layers: int, **options: Any) -> PreTrainedModel:
    text, vision = _mistral(num_layers, head_dim=16), hf.PixtralVisionConfig(**TOWER, image_size=64, patch_size=PATCH)
    return model(config(vision_config=vision, text_config=text, image_token_id=token_id("[IMG]"), **options))


def _llava_pixtral(num_layers: int) -> PreTrainedModel:
    options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _on_pixtral(hf.LlavaForConditionalGeneration, hf.LlavaConfig, num_layers, **options)


def _mistral3(num_layers: int) -> PreTrainedModel:
    options = {"spatial_merge_size": 2, "tie_word_embeddings": False}
    return _on_pixtral(hf.Mistral3ForConditionalGeneration, hf.Mistral3Config, num_layers, **options)


def _llava_next(text: Any) -> PreTrainedModel:
    return hf.LlavaNextForConditionalGeneration(
        hf.LlavaNextConfig(
            vision_config=_clip(),
            text_config=text,
            image_token_id=token_id("<image>"),
            image_grid_pinpoints=TILINGS,
            tie_word_embeddings=text.tie_word_embeddings,
        )
    )


def _onevision(num_layers: int) -> PreTrainedModel:
    return hf.LlavaOnevisionForConditionalGeneration(
        hf.LlavaOnevisionConfig(
            vision_config=hf.SiglipVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH, vision_use_head=False),
            text_config=hf.Qwen2Config(**_text(num_layers, tie_word_embeddings=True)),
            image_token_id=token_id("<image>"),
            video_token_id=token_id("<video>"),
            image_grid_pinpoints=[[SIDE, SIDE], *TILINGS],
            tie_word_embeddings=True,
        )
    )


def _qwen_vl(model: Any, config: Any, text: Mapping[str, Any], vision: Mapping[str, Any], *, tied: bool) -> Any:
    """A model of the Qwen-VL family."""
    return model(
        config(
            text_config={**text, "tie_word_embeddings": tied},
            # Patches are merged in pairs of rows, columns, frames.
            vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, **vision},
            **{f"{name}_token_id": token_id(f"<|{name}_pad|>") for name in ("image", "video")},
            **{f"{name}_token_id": token_id(f"<|{name}|>") for name in ("vision_start", "vision_end")},
            tie_word_embeddings=tied,
        )
    )


def _qwen2_vl(num_layers: int) -> PreTrainedModel:
    text = _text(num_layers, rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]})
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return _qwen_vl(hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLConfig, text, vision, tied=True)


def _qwen2_5_vl(num_layers: int) -> PreTrainedModel:
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {
        **{"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 48},
        **{"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},  # pixels: 2 x 2 merged patches
    }
    text = _text(num_layers, **sizes, rope_parameters=rope)
    return _qwen_vl(hf.Qwen2_5_VLForConditionalGeneration, hf.Qwen2_5_VLConfig, text, vision, tied=False)


QWEN3_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],  # both layers' features are added to the first two text layers
}


def _qwen3_vl(num_layers: int) -> PreTrainedModel:
    text = _text(num_layers, head_dim=16, rope_parameters=QWEN3_ROPE)
    return _qwen_vl(hf.Qwen3VLForConditionalGeneration, hf.Qwen3VLConfig, text, QWEN3_VISION, tied=True)


def _qwen3_vl_moe(num_layers: int) -> PreTrainedModel:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = _text(num_layers, head_dim=16, rope_parameters=QWEN3_ROPE, **experts)
    return _qwen_vl(hf.Qwen3VLMoeForConditionalGeneration, hf.Qwen3VLMoeConfig, text, QWEN3_VISION, tied=False)


def _idefics3(model: Any, config: Any, num_layers: int, *, tied: bool = False, **options: Any) -> PreTrainedModel:
    text = _llama(num_layers, tie_word_embeddings=tied, **options)
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    tokens = {"image_token_id": token_id("<image>"), "pad_token_id": token_id(PAD)}
    return model(config(vision_config=vision, text_config=text, scale_factor=2, tie_word_embeddings=tied, **tokens))


def _gemma3(num_layers: int) -> PreTrainedModel:
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            vision_config=hf.SiglipVisionConfig(**TOWER, image_size=32, patch_size=4, vision_use_head=False),
            text_config=_gemma3_text(num_layers),
            mm_tokens_per_image=16,  # with bidirectional attention, and more than the window
            image_token_id=token_id("<image_soft_token>"),
            boi_token_id=token_id("<start_of_image>"),
            eoi_token_id=token_id("<end_of_image>"),
        )
    )


def _gemma4(num_layers: int, **options: Any) -> PreTrainedModel:
    tower = {**TOWER, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 256}
    text = _gemma4_text(num_layers, final_logit_softcapping=12.0, **options)
    vision = hf.Gemma4VisionConfig(**tower)
    return hf.Gemma4ForConditionalGeneration(
        hf.Gemma4Config(vision_config=vision, text_config=text, audio_config=None, **_gemma4_tokens())
    )


def _gemma4_unified(num_layers: int) -> PreTrainedModel:
    """Without a vision tower: patches are projected."""
    sizes = {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": _alternating(num_layers)}
    keys = {"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    text = hf.Gemma4UnifiedTextConfig(**_text(num_layers, **sizes, **keys, final_logit_softcapping=12.0))
    vision = hf.Gemma4UnifiedVisionConfig(patch_size=4, mm_embed_dim=32, mm_posemb_size=128, output_proj_dims=32)
    return hf.Gemma4UnifiedForConditionalGeneration(
        hf.Gemma4UnifiedConfig(vision_config=vision, text_config=text, audio_config=None, **_gemma4_tokens())
    )


def _gemma4_tokens() -> dict[str, int]:
    tokens = {"image": "<|image|>", "video": "<|video|>", "boi": "<|image>", "eoi": "<image|>"}
    return {f"{name}_token_id": token_id(token) for name, token in tokens.items()}


# -------- families


@dataclass(frozen=True)
class Family:
    """``model``: makes random weights with that many text layers. ``placeholders``: text for an image or a video in a
    prompt. ``processor_class``: class whose ``from_pretrained`` loads the processor.
    """

    name: str
    model: Callable[[int], PreTrainedModel]
    processor: Callable[[], Any] = new_tokenizer
    processor_class: Callable[[], Any] = lambda: hf.AutoTokenizer
    placeholders: Mapping[str, str] = field(default_factory=dict)
    several_images: bool = False  # whether one prompt may hold several

    @property
    def sees(self) -> tuple[str, ...]:
        return tuple(self.placeholders)


def _vision(
    name: str,
    model: Callable[[int], PreTrainedModel],
    processor: Callable[[], Any],
    processor_class: Callable[[], Any] = lambda: hf.AutoProcessor,
    *,
    image: str = "<image>",
    video: str | None = None,
) -> Family:
    placeholders = {"image": image} if video is None else {"image": image, "video": video}
    return Family(name, model, processor, processor_class, placeholders, several_images=True)


def _qwen(name: str, model: Callable[[int], PreTrainedModel], processor: Any) -> Family:
    image, video = (f"<|vision_start|><|{sight}_pad|><|vision_end|>" for sight in ("image", "video"))
    return _vision(name, model, lambda: _qwen_processor(processor), lambda: processor, image=image, video=video)


_ALL = (
    Family("llama", lambda n: hf.LlamaForCausalLM(_llama(n))),
    Family(
        "llama_rope_scaled",
        lambda n: hf.LlamaForCausalLM(
            _llama(n, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        ),
    ),
    Family("mistral", lambda n: hf.MistralForCausalLM(_mistral(n, head_dim=16))),
    Family("mistral_window", lambda n: hf.MistralForCausalLM(_mistral(n, sliding_window=WINDOW))),
    Family("qwen2", lambda n: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_text(n, tie_word_embeddings=True)))),
    Family(
        "qwen2_window",
        lambda n: hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**_text(n, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1))
        ),
    ),
    Family("qwen3", lambda n: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_text(n, head_dim=16)))),
    Family("gemma3_text", lambda n: hf.Gemma3ForCausalLM(_gemma3_text(n, final_logit_softcapping=12.0))),
    Family("gemma4_text", lambda n: hf.Gemma4ForCausalLM(_gemma4_text(n, final_logit_softcapping=12.0))),
    Family("gemma4_text_large", lambda n: hf.Gemma4ForCausalLM(_gemma4_text(n, **GEMMA4_LARGE))),
    _vision("llava", _llava, _llava_processor),
    _vision("llava_pixtral", _llava_pixtral, lambda: _new_pixtral_processor(48, 1), pixtral_processor, image="[IMG]"),
    _vision("llava_next_llama", lambda n: _llava_next(_llama(n)), LLAVA_NEXT_PROCESSOR),
    _vision("llava_next_mistral", lambda n: _llava_next(_mistral(n, tie_word_embeddings=True)), LLAVA_NEXT_PROCESSOR),
    _vision("llava_onevision", _onevision, _onevision_processor, lambda: ONEVISION_PROCESSOR, video="<video>"),
    _qwen("qwen2_vl", _qwen2_vl, QWEN2_VL_PROCESSOR),
    _qwen("qwen2_5_vl", _qwen2_5_vl, QWEN2_5_VL_PROCESSOR),
    _qwen("qwen3_vl", _qwen3_vl, QWEN3_VL_PROCESSOR),
    _qwen("qwen3_vl_moe", _qwen3_vl_moe, QWEN3_VL_PROCESSOR),
    _vision(
        "idefics3",
        partial(_idefics3, hf.Idefics3ForConditionalGeneration, hf.Idefics3Config),
        lambda: _idefics3_processor(hf.Idefics3Processor, hf.Idefics3ImageProcessorPil),
    ),
    _vision(
        "smolvlm",
        partial(_idefics3, hf.SmolVLMForConditionalGeneration, hf.SmolVLMConfig, num_key_value_heads=4, tied=True),
        lambda: _idefics3_processor(SMOLVLM_PROCESSOR, hf.SmolVLMImageProcessorPil, video_processor=None),
        lambda: SMOLVLM_PROCESSOR,
    ),
    _vision("mistral3", _mistral3, lambda: _new_pixtral_processor(64, 2), pixtral_processor, image="[IMG]"),
    _vision("gemma3", _gemma3, _gemma3_processor, image="<start_of_image>"),
    _vision("gemma4", _gemma4, lambda: _new_gemma4_processor(patch_size=4), _gemma4_processor, image="<|image|>"),
    _vision(
        "gemma4_large",
        lambda n: _gemma4(n, **GEMMA4_LARGE, use_bidirectional_attention="vision"),
        lambda: _new_gemma4_processor(patch_size=4),
        _gemma4_processor,
        image="<|image|>",
    ),
    _vision(
        "gemma4_unified",
        _gemma4_unified,
        lambda: _new_gemma4_processor(patch_size=12, pooling_kernel_size=1),  # 3 x 3 merged patches of 4 pixels
        _gemma4_processor,
        image="<|image|>",
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
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
        images = [_random_image(rng) for _ in range(_num_images(family, rng))] if sight == "image" else []
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


def _num_images(family: Family, rng: np.random.Generator) -> int:
    return int(rng.integers(*NUM_IMAGES, endpoint=True)) if family.several_images else 1


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
