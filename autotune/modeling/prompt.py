"""Prompts as inputs of the text model's first layer, after embedding, vision tower and projector.

They are intercepted in the model's own forward pass, so that every family merges images and computes positions with its
own code.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError, first_line
from autotune.modeling.kv_cache import new_cache
from autotune.modeling.text_model import TextModel
from autotune.modeling.vision_timing import timed_vision

# By modality: the name of the pixels among the inputs, and of the placeholder token in the config.
_MODALITIES = {"image": ("pixel_values", "image_token_id"), "video": ("pixel_values_videos", "video_token_id")}
USUAL_PATCH = 14  # pixels of its height and width
# Models that take one of these silently treat visual tokens as text without it.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
# Inputs that the prefill sets itself.
_IGNORED = ("past_key_values", "use_cache", "logits_to_keep", "position_ids", "return_dict", "output_hidden_states")

Mask = Tensor | dict[str, Tensor | None] | None


@dataclass(frozen=True)
class EncodedPrompt:
    """One row of the inputs, without padding."""

    tokens: Tensor  # [n]
    is_visual: Tensor  # whether each token is a placeholder for an image or video feature, bool [n]
    embeddings: Tensor | None = None  # [1, n, hidden]; None for a text model, which looks them up itself
    positions: Tensor | None = None  # [1, n], or [3, 1, n] (time, height, width) for M-RoPE; None: 0 to n - 1
    mask: Mask = None  # the model's own mask; None: causal
    # Inputs of the layers: Qwen3-VL's deepstack features, Gemma 4's own embeddings.
    extra: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_visual_tokens(self) -> int:
        return int(self.is_visual.sum())

    @property
    def rope_delta(self) -> NDArray[np.int64]:
        """Position minus index in the sequence, for tokens after the prompt: [1], or [3] (time, height, width). As in
        ``generate``, positions continue after those of the prompt's last token on every axis.
        """
        if self.positions is None:
            return np.zeros(1, np.int64)
        return self.positions[..., -1].flatten().cpu().numpy() + 1 - len(self)

    def chunks(self, size: int) -> Iterator[EncodedPrompt]:
        """Consecutive parts of up to ``size`` tokens, which keep their positions, of a prompt without a mask and
        ``extra``.
        """
        for part in torch.arange(len(self), device=self.tokens.device).split(size):
            yield self.keep(part)

    @property
    def own_positions(self) -> Tensor:
        """``positions``, counted from 0 if there are none."""
        if self.positions is not None:
            return self.positions
        return torch.arange(len(self), device=self.tokens.device)[None]

    def keep(self, kept: Tensor) -> EncodedPrompt:
        """The prompt with only the tokens ``kept`` (indices in ascending order), which keep their positions."""
        return _select(self, kept, self.own_positions)


def _select(prompt: EncodedPrompt, kept: Tensor, positions: Tensor | None) -> EncodedPrompt:
    embeddings, extra = prompt.embeddings, dict(prompt.extra)
    if "visual_pos_masks" in extra:
        extra["visual_pos_masks"] = extra["visual_pos_masks"][:, kept]
        kept_visual = (prompt.is_visual.cumsum(0) - 1)[kept][prompt.is_visual[kept]]
        extra["deepstack_visual_embeds"] = [features[kept_visual] for features in extra["deepstack_visual_embeds"]]
    if "per_layer_inputs" in extra:
        extra["per_layer_inputs"] = extra["per_layer_inputs"][:, kept]
    return EncodedPrompt(
        tokens=prompt.tokens[kept],
        is_visual=prompt.is_visual[kept],
        embeddings=None if embeddings is None else embeddings[:, kept],
        positions=None if positions is None else positions[..., kept],
        mask=_each(prompt.mask, lambda mask: mask[:, :, kept][:, :, :, kept]),
        extra=extra,
    )


def _each(mask: Mask, change: Callable[[Tensor], Tensor]) -> Mask:
    """Change a mask, or those of all layer types."""
    if isinstance(mask, dict):
        return {layer_type: None if one is None else change(one) for layer_type, one in mask.items()}
    return None if mask is None else change(mask)


@dataclass(frozen=True)
class Encoded:
    """The rows of a batch, and the time that vision tower and projector took for all of them."""

    prompts: list[EncodedPrompt]
    vision_ms: float


class _TextModelReached(Exception):
    """Ends a forward pass at the text model."""


def encode(model: Any, text: TextModel, inputs: dict[str, Any]) -> Encoded:
    """Encode a batch from the Hugging Face processor, padded on either side.

    Raises:
        UserError: images without image tokens or the reverse.
    """
    inputs = {
        name: _to(value, text.device, model.dtype if name.startswith("pixel_values") else None)
        for name, value in inputs.items()
        if name not in _IGNORED and value is not None
    }
    input_ids = inputs["input_ids"]
    is_visual = visual_tokens(model.config, input_ids)
    _check_modalities(model, inputs)
    if text.is_text_only:
        return Encoded([EncodedPrompt(row, visual_tokens(model.config, row)) for row in token_rows(inputs)], 0.0)
    attended = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids, dtype=torch.bool) if attended is None else attended.bool()
    if bool(attended.all()):
        inputs.pop("attention_mask", None)
    with timed_vision(model) as vision:
        text_inputs = _text_inputs(model, text, inputs)
    prompts = []
    for row in range(len(input_ids)):
        prompt = _row(text_inputs, input_ids, is_visual, row)
        if not bool(attended[row].all()):
            prompt = _select(prompt, attended[row].nonzero()[:, 0], prompt.positions)
        prompts.append(prompt)
    return Encoded(prompts, vision.ms)


def has_pixels(inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs hold images or videos."""
    return any(inputs.get(pixels) is not None for pixels, _ in _MODALITIES.values())


def num_patches(config: Any, inputs: Mapping[str, Any]) -> int:
    """Patches that a vision tower reads of the images and videos in the inputs; 0 without any. Of a tower without
    patches, squares of ``USUAL_PATCH`` pixels are counted.
    """
    vision = getattr(config, "vision_config", None)
    height, width = np.broadcast_to(getattr(vision, "patch_size", USUAL_PATCH), 2).tolist()
    values = 3 * height * width * (getattr(vision, "temporal_patch_size", 1) or 1)
    pixels = (inputs.get(name) for name, _ in _MODALITIES.values())
    return round(sum(of_modality.numel() for of_modality in pixels if of_modality is not None) / values)


def placeholders_of(config: Any) -> frozenset[int]:
    """The placeholder tokens of image and video features."""
    tokens = (getattr(config, name, None) for _, name in _MODALITIES.values())
    return frozenset(int(token) for token in tokens if token is not None)


def visual_tokens(config: Any, input_ids: Tensor) -> Tensor:
    """Whether each token is a placeholder for an image or video feature, bool of the same shape."""
    is_visual = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in placeholders_of(config):
        is_visual |= input_ids == token
    return is_visual


def token_rows(inputs: dict[str, Any]) -> list[Tensor]:
    """The tokens of each row without padding, [n] each."""
    input_ids, attended = inputs["input_ids"], inputs.get("attention_mask")
    return list(input_ids) if attended is None else [r[a.bool()] for r, a in zip(input_ids, attended, strict=True)]


def _row(text_inputs: dict[str, Any], input_ids: Tensor, is_visual: Tensor, row: int) -> EncodedPrompt:
    """One row of a batch, with padding."""
    rows = slice(row, row + 1)
    positions, mask = text_inputs.get("position_ids"), text_inputs.get("attention_mask")
    if positions is not None and positions.ndim == 2:  # with one axis, tokens count from 0 once padding is removed
        positions = None
    if isinstance(mask, Tensor) and mask.ndim == 2:  # [batch, tokens] marks padding, which is removed
        mask = None
    extra: dict[str, Any] = {}
    if text_inputs.get("visual_pos_masks") is not None:  # features of the visual tokens of all rows, concatenated
        begin, number = int(is_visual[:row].sum()), int(is_visual[row].sum())
        extra["visual_pos_masks"] = text_inputs["visual_pos_masks"][rows]
        extra["deepstack_visual_embeds"] = [f[begin : begin + number] for f in text_inputs["deepstack_visual_embeds"]]
    if text_inputs.get("per_layer_inputs") is not None:  # [rows, tokens, layers, size]
        extra["per_layer_inputs"] = text_inputs["per_layer_inputs"][rows]
    return EncodedPrompt(
        tokens=input_ids[row],
        is_visual=is_visual[row],
        embeddings=text_inputs["inputs_embeds"][rows],
        positions=None if positions is None else positions[..., rows, :],
        mask=_each(mask, lambda mask: mask[rows]),
        extra=extra,
    )


def _text_inputs(model: Any, text: TextModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that the model's own forward pass gives to its text model, which is not run."""
    text_inputs: dict[str, Any] = {}
    thread = threading.get_ident()

    def stop(_module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != thread:  # another one runs the user's model
            return
        text_inputs.update(kwargs)
        raise _TextModelReached

    # Without an empty cache, the model takes positions that restart for several packed sequences.
    cache = new_cache(text, 0)
    hook = text.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _TextModelReached:
        return text_inputs
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"the prompt's tokens and pixels cannot be read ({first_line(error)}); pass all outputs of one call of the processor"
        ) from error
    finally:
        hook.remove()
    raise AssertionError("the model's forward did not call its text model")


def _check_modalities(model: Any, inputs: dict[str, Any]) -> None:
    config = model.config
    encoded = inputs.get("mm_encoder_outputs") or {}
    for modality, (pixels, placeholder) in _MODALITIES.items():
        token = getattr(config, placeholder, None)
        number = 0 if token is None else int((inputs["input_ids"] == token).sum())
        has_pixels = inputs.get(pixels) is not None or encoded.get(modality) is not None
        if number > 0 and not has_pixels:
            raise UserError(
                f"the prompt has {number} {modality} tokens but no {pixels}; pass the {modality} to the processor, or drop the tokens"
            )
        if has_pixels and number == 0:
            raise UserError(f"{pixels} came without {modality} tokens in the prompt; let the processor make both")
        for name in _TOKEN_TYPES:
            if number > 0 and inputs.get(name) is None and name in inspect.signature(model.forward).parameters:
                raise UserError(
                    f"a prompt with {modality} tokens needs {name}, by which {config.model_type!r} tells them from text; "
                    "pass all outputs of its processor"
                )


def _to(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move a tensor; ``dtype`` is for floating-point pixels, which few model classes cast themselves."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)
