"""The target behind one generic adapter: prefill through the whole model, everything after it through its text model
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotune.errors import UserError
from autotune.runtime.attention import capture_visual_attention
from autotune.runtime.kv_cache import SlabCache
from autotune.runtime.vision import timed_vision

SUPPORTED_TEXT_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DEFAULT_CAPACITY = 1024  # tokens; the cache grows when a request needs more


@dataclass(frozen=True)
class Prefilled:
    """What the prefill left behind. ``logits`` [vocabulary] follow the prompt's last token."""

    logits: Tensor
    prompt_length: int
    num_visual_tokens: int
    visual_scores: Tensor | None
    """Mean last-layer attention to each visual token, [visual tokens], where it was asked for."""
    vision_ms: float = 0.0
    """Of the prefill's time, that of the vision tower and its projector; 0 without an image."""


def text_model_of(model: Any) -> Any:
    """The decoder stack of a text model or VLM.

    Raises:
        UserError: the model's text type is not among those that trees are known to decode.
    """
    text_type = model.config.get_text_config().model_type
    if text_type not in SUPPORTED_TEXT_TYPES:
        raise UserError(
            f"text models of type {text_type!r} cannot be decoded with trees yet; known: {', '.join(SUPPORTED_TEXT_TYPES)}; use one of these"
        )
    inner = model.model
    for name in ("language_model", "text_model"):
        if hasattr(inner, name):
            return getattr(inner, name)
    return inner


class Target:
    """A transformers model as the decoding loop uses it. Its weights, config and classes are untouched."""

    def __init__(self, model: Any) -> None:
        if getattr(model.config.get_text_config(), "sliding_window", None):
            raise UserError(
                "models with sliding-window attention cannot be decoded with trees yet; use a model without a window"
            )
        self.model = model.eval()
        self.text_model = text_model_of(model)
        self.head = model.get_output_embeddings()
        self.text_config = model.config.get_text_config()
        self.image_token_id: int | None = getattr(model.config, "image_token_id", None)
        self.vocab_size: int = self.text_config.vocab_size
        self.max_context: int = self.text_config.max_position_embeddings
        self.device: torch.device = self.text_model.device
        self.dtype: torch.dtype = self.text_model.dtype
        self.cache = SlabCache(self.text_config.num_hidden_layers, DEFAULT_CAPACITY)
        self.owner: object = None  # the request whose tokens the cache holds

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self.cache.length

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens."""
        if num_tokens > self.cache.capacity:
            self.cache = SlabCache(self.text_config.num_hidden_layers, -(-num_tokens // 256) * 256)
        self.cache.clear()

    def prefill(self, inputs: dict[str, Any], *, rank_visual_tokens: bool = False) -> Prefilled:
        """Run the prompt, as the processor made it, through the whole model into the empty cache.

        Raises:
            UserError: more than one row, image tokens without an image or the reverse.
        """
        input_ids = inputs["input_ids"]
        if input_ids.shape[0] != 1:
            raise UserError(
                f"one prompt at a time: input_ids must have one row; got {input_ids.shape[0]}; call generate once per prompt"
            )
        is_visual = self.is_visual(input_ids[0])
        num_visual = int(is_visual.sum())
        has_pixels = inputs.get("pixel_values") is not None or inputs.get("mm_encoder_outputs") is not None
        if num_visual > 0 and not has_pixels:
            raise UserError(
                f"the prompt has {num_visual} image tokens but no pixel_values; pass the image to the processor, or drop the tokens"
            )
        if has_pixels and num_visual == 0:
            raise UserError(
                "pixel_values came without image tokens in the prompt; let the processor make both from one text"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise UserError(
                "a single prompt needs no padding: attention_mask must be all ones; pass the prompt unpadded"
            )
        keep_off = ("attention_mask", "past_key_values", "use_cache", "logits_to_keep", "position_ids", "return_dict")
        extra = {key: value for key, value in inputs.items() if key not in keep_off}

        def forward() -> Tensor:
            out = self.model(**extra, past_key_values=self.cache, use_cache=True, logits_to_keep=1, return_dict=True)
            return out.logits[0, -1]  # type: ignore[no-any-return]

        scores = None
        with timed_vision(self.model) as vision:
            if rank_visual_tokens and num_visual > 0:
                with capture_visual_attention(
                    self.text_config, self.text_model.layers[-1].self_attn, is_visual
                ) as captured:
                    logits = forward()
                scores = captured.scores
                assert scores is not None, "the last layer did not go through the attention interface"
            else:
                logits = forward()
        self.cache.advance(input_ids.shape[1])
        return Prefilled(logits, input_ids.shape[1], num_visual, scores, vision.ms)

    def is_visual(self, input_ids: Tensor) -> Tensor:
        """Which of the prompt's tokens stand for image features, bool [tokens]."""
        if self.image_token_id is None:
            return torch.zeros_like(input_ids, dtype=torch.bool)
        return input_ids == self.image_token_id

    def step(self, token: int) -> Tensor:
        """Append one token (plain decoding); returns the logits after it, [vocabulary]."""
        logits = self.forward(
            torch.tensor([[token]], device=self.device), torch.tensor([[self.length]], device=self.device), None
        )
        self.cache.advance(1)
        return logits[0]

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [n, vocabulary] of n tokens behind the cache; nothing is committed.

        ``tokens`` and ``positions`` are [1, n]; ``mask`` is additive float [1, 1, n, length + n], or None for a single
        token.
        """
        hidden = self.text_model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).last_hidden_state
        return self.head(hidden[0])  # type: ignore[no-any-return]
