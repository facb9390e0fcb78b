"""A prompt as the text model reads it: behind the embedding, the vision tower and the projector, before the first
layer.

It is taken from the model's own forward, so that every family merges images and lays out positions by its own code.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.modeling.kv_cache import SlabCache
from autotune.modeling.text_model import TextModel
from autotune.modeling.vision_timing import timed_vision

# By what the text tokens of a prompt stand for: the pixels' name among the inputs, and the placeholder's in the config.
_MODALITIES = {"image": ("pixel_values", "image_token_id"), "video": ("pixel_values_videos", "video_token_id")}
# What some processors make beside pixels: their models fail without it, each in its own way.
_BESIDE_PIXELS = {
    "pixel_values": ("image_sizes", "image_grid_thw", "batch_num_images"),
    "pixel_values_videos": ("video_grid_thw",),
}
# Without them, models that take them silently place or mask visual tokens as text.
_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
# What the prefill decides by itself.
_OWN = ("past_key_values", "use_cache", "logits_to_keep", "position_ids", "return_dict", "output_hidden_states")

Mask = Tensor | dict[str, Tensor | None] | None


@dataclass(frozen=True)
class Prompt:
    """One row of the inputs without its padding."""

    tokens: Tensor
    """[n]"""
    is_visual: Tensor
    """Which tokens stand for image or video features, bool [n]."""
    embeddings: Tensor | None = None
    """[1, n, hidden]; None of a text model, which looks them up itself."""
    positions: Tensor | None = None
    """[1, n], or [3, 1, n] of models that place visual tokens in time, height and width (M-RoPE); None: 0 to n - 1."""
    mask: Mask = None
    """As the model made it; None: causal."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else goes into the layers: Qwen3-VL's deepstack features."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_visual_tokens(self) -> int:
        return int(self.is_visual.sum())

    @property
    def visual_embeddings(self) -> Tensor:
        """Projected features of the visual tokens, [visual tokens, hidden].

        Raises:
            ValueError: a text model's prompt has none.
        """
        if self.embeddings is None:
            raise ValueError("a text model looks its embeddings up itself: there are no visual ones")
        return self.embeddings[0, self.is_visual]

    @property
    def shift(self) -> NDArray[np.int64]:
        """Of the positions of the tokens behind the prompt against their places in the sequence, [1], or [3] in time,
        height and width. As in ``generate``, positions go on from those of the prompt's last token, on every axis.
        """
        if self.positions is None:
            return np.zeros(1, np.int64)
        return self.positions[..., -1].flatten().cpu().numpy() + 1 - len(self)

    def keep(self, kept: Tensor) -> Prompt:
        """The prompt without the tokens that are not among ``kept`` (indices in ascending order); the others stay where
        they stood.
        """
        positions = self.positions if self.positions is not None else torch.arange(len(self), device=kept.device)[None]
        return _cut(self, kept, positions)


def _cut(prompt: Prompt, kept: Tensor, positions: Tensor | None) -> Prompt:
    embeddings, mask, extra = prompt.embeddings, prompt.mask, dict(prompt.extra)
    if isinstance(mask, dict):
        mask = {kind: _cut_mask(one, kept) for kind, one in mask.items()}
    elif mask is not None:
        mask = _cut_mask(mask, kept)
    if "visual_pos_masks" in extra:
        extra["visual_pos_masks"] = extra["visual_pos_masks"][:, kept]
        among_visual = (prompt.is_visual.cumsum(0) - 1)[kept][prompt.is_visual[kept]]
        extra["deepstack_visual_embeds"] = [features[among_visual] for features in extra["deepstack_visual_embeds"]]
    return Prompt(
        tokens=prompt.tokens[kept],
        is_visual=prompt.is_visual[kept],
        embeddings=None if embeddings is None else embeddings[:, kept],
        positions=None if positions is None else positions[..., kept],
        mask=mask,
        extra=extra,
    )


def _cut_mask(mask: Tensor | None, kept: Tensor) -> Tensor | None:
    return None if mask is None else mask[:, :, kept][:, :, :, kept]


@dataclass(frozen=True)
class Encoded:
    """The rows of a batch, and how long the vision tower and its projector took for all of them."""

    prompts: list[Prompt]
    vision_ms: float


class _Reached(Exception):
    """The forward has come to the text model."""


def encode(model: Any, text: TextModel, inputs: dict[str, Any]) -> Encoded:
    """All rows of a batch as the Hugging Face processor made it, padded on either side.

    Raises:
        UserError: images without image tokens or the reverse.
    """
    inputs = {
        name: _on(value, text.device, model.dtype if name.startswith("pixel_values") else None)
        for name, value in inputs.items()
        if name not in _OWN and value is not None
    }
    input_ids = inputs["input_ids"]
    is_visual = visual_tokens(model.config, input_ids)
    _check_sight(model, inputs)
    if text.is_alone:
        return Encoded([Prompt(row, visual_tokens(model.config, row)) for row in rows_of(inputs)], 0.0)
    attended = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids, dtype=torch.bool) if attended is None else attended.bool()
    if bool(attended.all()):
        inputs.pop("attention_mask", None)
    with timed_vision(model) as vision:
        reached = _text_inputs(model, text, inputs)
    prompts = []
    for row in range(len(input_ids)):
        prompt = _row(reached, input_ids, is_visual, row)
        if not bool(attended[row].all()):
            prompt = _cut(prompt, attended[row].nonzero()[:, 0], prompt.positions)
        prompts.append(prompt)
    return Encoded(prompts, vision.ms)


def placeholders_of(config: Any) -> frozenset[int]:
    """The tokens that stand for image or video features."""
    tokens = (getattr(config, name, None) for _, name in _MODALITIES.values())
    return frozenset(int(token) for token in tokens if token is not None)


def visual_tokens(config: Any, input_ids: Tensor) -> Tensor:
    """Which tokens stand for image or video features, bool of the same shape."""
    found = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in placeholders_of(config):
        found |= input_ids == token
    return found


def rows_of(inputs: dict[str, Any]) -> list[Tensor]:
    """The tokens of each row, [n], without its padding."""
    input_ids, attended = inputs["input_ids"], inputs.get("attention_mask")
    return list(input_ids) if attended is None else [r[a.bool()] for r, a in zip(input_ids, attended, strict=True)]


def _row(reached: dict[str, Any], input_ids: Tensor, is_visual: Tensor, row: int) -> Prompt:
    """One row with its padding."""
    at = slice(row, row + 1)
    positions, mask = reached.get("position_ids"), reached.get("attention_mask")
    if isinstance(mask, dict):
        mask = {kind: one if one is None else one[at] for kind, one in mask.items()}
    elif mask is not None:  # [batch, tokens] says what is padding: cut away with it
        mask = mask[at] if mask.ndim == 4 else None
    extra: dict[str, Any] = {}
    if reached.get("visual_pos_masks") is not None:  # features of all rows' visual tokens, one row after the other
        begin, number = int(is_visual[:row].sum()), int(is_visual[row].sum())
        extra["visual_pos_masks"] = reached["visual_pos_masks"][at]
        extra["deepstack_visual_embeds"] = [f[begin : begin + number] for f in reached["deepstack_visual_embeds"]]
    return Prompt(
        tokens=input_ids[row],
        is_visual=is_visual[row],
        embeddings=reached["inputs_embeds"][at],
        positions=None if positions is None else positions[..., at, :],
        mask=mask,
        extra=extra,
    )


def _text_inputs(model: Any, text: TextModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model's own forward hands to its text model, which is not run."""
    reached: dict[str, Any] = {}

    def stop(_module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached.update(kwargs)
        raise _Reached

    # An empty cache tells the model that the prompt is a prompt: without one, positions that restart are taken for
    # several sequences in a row.
    cache = SlabCache(text.layer_windows, [text.device] * len(text.layers), 0)
    hook = text.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _Reached:
        return reached
    except ValueError as error:
        raise UserError(
            f"the prompt's image or video tokens do not fit its pixels ({str(error).strip().splitlines()[0]}); "
            "let the processor make both from one text"
        ) from None
    except (TypeError, AttributeError, RuntimeError) as error:
        taken = inspect.signature(model.forward).parameters
        wanted = [name for pixels, names in _BESIDE_PIXELS.items() if pixels in inputs for name in names]
        missing = [name for name in wanted if name in taken and name not in inputs]
        if not missing:
            raise
        raise UserError(
            f"the prompt's pixels cannot be read without {' or '.join(missing)} ({type(error).__name__}); "
            "pass everything that the processor made"
        ) from error
    finally:
        hook.remove()
    raise AssertionError("the model's forward did not call its text model")


def _check_sight(model: Any, inputs: dict[str, Any]) -> None:
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
            raise UserError(
                f"{pixels} came without {modality} tokens in the prompt; let the processor make both from one text"
            )
        for name in _KINDS_OF_TOKENS:
            if number > 0 and inputs.get(name) is None and name in inspect.signature(model.forward).parameters:
                raise UserError(
                    f"a prompt with {modality} tokens needs {name}, by which {config.model_type!r} tells them from text; "
                    "pass everything that its processor made"
                )


def _on(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Pixels take the model's precision, as few classes give it to them."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)
