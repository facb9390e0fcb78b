"""Hugging Face's ``generate``, plain and assisted by a draft, with the same statistics as ``Decoder.generate``."""

from __future__ import annotations

from typing import Any

import torch

from autotune.modeling.host import now_ms
from autotune.modeling.vision_timing import timed_forwards, timed_vision
from autotune.runtime.stats import DecodingStats
from autotune.runtime.token_sampler import not_finite


class _TokenClock:
    """A streamer that records time and number of tokens: first of the prompt, then of every step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_ms: list[float] = []
        self.num_tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.at_ms.append(now_ms(self.device))
        self.num_tokens.append(value.numel())

    def end(self) -> None:
        pass


def hf_generate(
    model: Any,
    inputs: dict[str, Any],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    assistant: Any | None = None,
) -> tuple[list[int], DecodingStats]:
    """Call ``model.generate`` on one prompt, with ``assistant`` as its ``assistant_model``; returns the new tokens.

    Without an assistant, decoding time runs from the first token to the last. With one, the draft runs before the
    target has read the prompt, and the target reads prompt and first candidates in one forward. That forward is the
    prefill, and all other time until the last token is decoding. Time inside the two models is not measured.

    Raises:
        UserError: logits of a sampled prompt are not finite.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    settings = sampling if temperature > 0 else {"do_sample": False}
    assisted = {} if assistant is None else {"assistant_model": assistant}
    clock, drafts = _TokenClock(model.device), [] if assistant is None else [assistant]
    torch.manual_seed(seed)
    with (
        torch.inference_mode(),
        timed_vision(model) as vision,
        timed_forwards([model], model.device, first_only=True) as target,
        timed_forwards(drafts, model.device, first_only=True) as draft,
    ):
        started_ms = now_ms(model.device)
        try:
            sequences = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=clock, **settings, **assisted)
        except RuntimeError as error:  # torch draws no token
            if "probability tensor" not in str(error):
                raise
            raise not_finite(sum(clock.num_tokens), model.dtype) from None
    length = inputs["input_ids"].shape[1]
    prompt_ms, first_ms, last_ms = clock.at_ms[0], clock.at_ms[1], clock.at_ms[-1]
    if assistant is None:
        prefill_ms, decode_ms = first_ms - started_ms, last_ms - first_ms
        rounds = clock.num_tokens[2:]  # without the prompt and the token that the prefill emits
    else:
        prefill_ms = prompt_ms - started_ms + target.ms
        decode_ms = last_ms - prompt_ms - target.ms
        rounds = clock.num_tokens[1:]
    tokens = sequences[0, length:].tolist()
    return tokens, DecodingStats(
        prompt_tokens=length,
        new_tokens=len(tokens),
        accepted_lengths=[number - 1 for number in rounds],
        target_forwards=target.num_forwards - (assistant is None),
        draft_forwards=draft.num_forwards,
        target_prefill_ms=prefill_ms,
        vision_ms=vision.ms,
        draft_prefill_ms=draft.ms,
        decode_ms=decode_ms,
    )
