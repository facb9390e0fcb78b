"""The arguments of a call of ``generate``: Hugging Face prepares them, and what trees cannot honour is refused."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria

from autotune.drafters.draft import Draft
from autotune.errors import UserError
from autotune.modeling.prompt import EncodedPrompt, visual_tokens
from autotune.modeling.target import Target
from autotune.runtime.points import LoadedPoint
from autotune.runtime.stats import DecodingStats
from autotune.runtime.token_sampler import AT_ONCE, TokenSampler, check_sampling

P = ParamSpec("P")
T = TypeVar("T")
DEFAULT_MAX_NEW_TOKENS = 256

# Prepared by generate for its own loop; the decoding loop has its own.
_OF_GENERATE_LOOP = ("past_key_values", "use_cache", "logits_to_keep", "position_ids", "cache_position")
# Stopping criteria that ``Request.emit`` implements itself.
_COUNTED_STOPS = ("MaxLengthCriteria", "EosTokenCriteria")
_NO_TOKEN = torch.iinfo(torch.long).max  # before the text, for stopping criteria
# Criteria and processors that treat each row independently, so that rows may be decoded one by one.
_ROWWISE_STOPS = (*_COUNTED_STOPS, "StopStringCriteria", "MaxTimeCriteria")
_OTHER_ROWWISE = ("NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor")
_ROWWISE_PROCESSORS = {*AT_ONCE, *_OTHER_ROWWISE}
_VISION_INPUTS = (
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_sizes", "image_grid_thw", "video_grid_thw"),
    *("image_position_ids", "video_position_ids", "num_frames_per_video", "batch_num_images", "vision_aspect_ratio"),
    *("vision_feature_layer", "vision_feature_select_strategy"),
)
_TOKEN_TYPES = (torch.int64, torch.int32)
# Settings of generate that decoding one sequence in rounds has not, with the values at which they change nothing: other
# ones are refused in a call, and set aside where a model's own generation config has them. The first ones change the
# answer.
_OTHER_SEARCHES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences"), (1,)),
    **{"penalty_alpha": (0.0,), "dola_layers": (None,)},
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **_OTHER_SEARCHES,
    **{"num_beam_groups": (1,), "prompt_lookup_num_tokens": (None,), "assistant_early_exit": (None,)},
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), (False,)),
    **{"use_cache": (True, False), "cache_implementation": ("dynamic", "static", "sliding_window", "hybrid")},
}


@dataclass
class Call:
    """A call of ``generate`` as Hugging Face prepared it: a batch of prompts and the settings of all of them."""

    inputs: dict[str, Any]
    max_new_tokens: int
    """Counted from the length of the padded prompts."""
    eos_token_ids: frozenset[int] = frozenset()
    pad_token_id: int = 0
    temperature: float = 0.0
    seed: int = 0
    """Row r is decoded with ``seed + r``, so that equal prompts give different samples."""
    processors: Sequence[Any] = ()
    stops: Sequence[Any] = ()
    returns_dict: bool = False
    prompts: Sequence[EncodedPrompt] = ()
    """The rows as the target reads them."""
    _draft_prompts: dict[Draft, Sequence[Any]] = field(default_factory=dict)

    def sampler(self, row: int, device: torch.device) -> TokenSampler:
        """The sampler of a row."""
        return TokenSampler(
            temperature=self.temperature,
            processors=processors_of_row(self.processors, row),
            prefix=self.inputs["input_ids"][row : row + 1].to(device),
            seed=self.seed + row,
            device=device,
        )

    def draft_prompt(self, draft: Draft, row: int) -> Any:
        """A row as a draft reads it. The whole batch is prepared when its first row is asked for."""
        if draft not in self._draft_prompts:
            self._draft_prompts[draft] = draft.prompts(self.inputs, self.prompts)
        return self._draft_prompts[draft][row]


@dataclass
class Request:
    """One row of a call: its prompt, when it stops, and the tokens and statistics so far."""

    call: Call
    sampler: TokenSampler
    prompt: EncodedPrompt
    prefix: Tensor
    """The row with its padding, [1, tokens]: logits processors read it, and it is returned before the new tokens."""
    row: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    tokens: list[int] = field(default_factory=list)
    """New tokens."""
    is_finished: bool = False

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens until the request is finished; returns those appended."""
        end = self.call.max_new_tokens - len(self.tokens)
        end = next((n for n, token in enumerate(tokens[:end], 1) if token in self.call.eos_token_ids), end)
        if self.call.stops:
            end = self._num_before_stop(tokens[:end]) or end
        self.tokens += tokens[:end]
        self.is_finished = len(tokens) >= end
        return tokens[:end]

    def _num_before_stop(self, tokens: list[int]) -> int:
        """The number of tokens up to the one at which a stopping criterion ends the text; 0 if none does.

        Criteria that treat rows independently read a row for each token, on the host. Others are asked token by token.
        """
        rowwise = [stop for stop in self.call.stops if type(stop).__name__ in _ROWWISE_STOPS]
        width = max((getattr(stop, "maximum_token_len", 1) for stop in rowwise), default=1)
        text = torch.tensor([*[_NO_TOKEN] * width, *self._prompt_tokens[-width:], *self.tokens[-width:], *tokens])
        rows = text.unfold(0, width, 1)[-len(tokens) :]  # row n ends with token n
        is_end = torch.stack([rows[:, 0] < 0, *(stop(rows, None) for stop in rowwise)]).any(0).tolist()
        others = [stop for stop in self.call.stops if stop not in rowwise]
        whole = self.sequence(tokens) if others else rows
        for number, ends in enumerate(is_end, 1):
            so_far = whole[:, : whole.shape[1] - len(tokens) + number]
            if ends or any(bool(stop(so_far, None).all()) for stop in others):
                return number
        return 0

    @functools.cached_property
    def _prompt_tokens(self) -> list[int]:
        return self.prefix[0].tolist()  # type: ignore[no-any-return]

    def sequence(self, more: Sequence[int] = ()) -> Tensor:
        """Prefix, new tokens and ``more``, [1, tokens]."""
        new = torch.tensor([[*self.tokens, *more]], dtype=torch.long, device=self.prefix.device)
        return torch.cat([self.prefix, new], dim=1)


def new_request(call: Call, prompt: EncodedPrompt, row: int, target: Target, point: LoadedPoint) -> Request:
    """The request of an encoded row.

    Raises:
        UserError: no room for a token, or processors that the point's verification cannot honour.
    """
    if len(prompt) + call.max_new_tokens > target.max_context:
        raise UserError(
            f"prompt and answer must fit the target's context of {target.max_context} tokens; "
            f"got {len(prompt)} + {call.max_new_tokens}; shorten the prompt or lower max_new_tokens"
        )
    sampler = call.sampler(row, target.device)
    if sampler.one_by_one and not point.verification.is_lossless and point.draft is not None:
        raise UserError(
            f"{point.verification.kind} verification supports no logits processors that read the order of the prefix; "
            f"drop {', '.join(sampler.one_by_one)}, or verify losslessly"
        )
    return Request(call, sampler, prompt, sampler.prefix, row)


def takes_vision_inputs(method: Callable[P, T]) -> Callable[P, T]:
    """Name the inputs of image encoders in the signature of a custom decoding method, so that generate passes them on
    unencoded: the target's visual features are of no use to the draft, and positions are computed from the grids.
    """
    signature = inspect.signature(method)
    *first, rest = signature.parameters.values()
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _VISION_INPUTS]
    method.__signature__ = signature.replace(parameters=[*first, *named, rest])  # type: ignore[attr-defined]
    return method


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse tokens and masks of wrong types, which fail far from here or mean something else to torch."""
    tokens, mask = values["input_ids"], values.get("attention_mask")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype not in _TOKEN_TYPES:
        raise UserError(
            f"input_ids are integers [prompts, tokens], at least one of each; got {_shown(tokens)}; "
            "pass return_tensors='pt' to the processor"
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape or not bool(mask.bool().any(1).all()):
        raise UserError(
            f"attention_mask is as large as input_ids, {list(tokens.shape)}, and shows a token of every prompt; "
            f"got {_shown(mask)}; give another"
        )


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_tokens(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse tokens that the model does not have, on which an accelerator ends the process, and positions that do not
    count them.
    """
    tokens, size = inputs["input_ids"], len(model.get_input_embeddings().weight)
    unknown = ((tokens < 0) | (tokens >= size)) & ~visual_tokens(model.config, tokens)
    if bool(unknown.any()):
        first = int(tokens[unknown][0])
        raise UserError(f"tokens of a prompt are from 0 to {size - 1}; got {first}; use the target's own tokenizer")
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is not None and getattr(positions, "ndim", 0) < 3:
        mask = torch.ones_like(tokens) if mask is None else mask  # generate leaves one out that shows all
        is_row = isinstance(positions, Tensor) and positions.shape in (tokens.shape, tokens[:1].shape)
        if not is_row or bool(((positions != mask.long().cumsum(1) - 1) & (mask != 0)).any()):
            raise UserError("positions count the tokens of attention_mask; got other position_ids; leave them out")


def generation_settings(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Translate the arguments of ``Decoder.generate`` to those of Hugging Face's; None leaves a setting to the
    config.
    """
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    settings = {name: value for name, value in arguments.items() if name not in names}
    if settings.get("generation_config") is None:
        settings = _usable_settings(config, asked=settings) | settings
    max_new_tokens, temperature, top_k, top_p = (arguments.get(name) for name in names)
    if max_new_tokens is None and not {"max_length", "generation_config"} & set(settings):
        max_new_tokens = None if config.max_new_tokens or config.max_length else DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    check_sampling(1.0 if temperature is None else temperature, top_k or 0, 1.0 if top_p is None else top_p)
    if temperature is not None:
        settings["do_sample"] = temperature > 0
    if temperature is not None and temperature > 0:
        # With a temperature, the call alone says how the distribution is cut; the config's top-k and top-p do not
        # apply.
        settings |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    elif temperature is None:
        settings |= {name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None}
    return settings


def _usable_settings(config: Any, *, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in place of those of a model's own generation config that trees cannot honour, or transformers refuses,
    where the call asks for none; warns of those that change the answer.
    """
    given = {name: getattr(config, name, None) for name in _NEUTRAL if asked.get(name) is None}
    odd = {name: value for name, value in given.items() if value is not None and value != _NEUTRAL[name][0]}
    usable = {name: _NEUTRAL[name][0] for name in odd}
    if others := [f"{name} {value}" for name, value in odd.items() if name in _OTHER_SEARCHES]:
        warnings.warn(
            f"the model's generation config has {', '.join(others)}; one sequence is decoded, token by token",
            stacklevel=5,
        )
    if config.temperature == 0:  # as vLLM reads it
        usable["do_sample"] = False
    if (config.top_k or 0) < 0:
        usable["top_k"] = 0
    return usable


def prepare_call(
    model: Any, method: Callable[..., Call], processor: Any, inputs: dict[str, Any], **options: Any
) -> Any:
    """Let ``model.generate`` prepare a call for a decoding method, without decoding; ``options`` go to the method."""
    config = inputs.get("generation_config") or model.generation_config
    if stop_strings := inputs.pop("stop_strings", None) or config.stop_strings:
        tokenizer = getattr(processor, "tokenizer", processor)
        if tokenizer is None:
            raise UserError("stop_strings need the tokenizer; load the decoder with processor=")
        # Generate would ask for the tokenizer, which it does not accept together with a custom method.
        stops = [*(inputs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        inputs |= {"stopping_criteria": StoppingCriteriaList(stops), "stop_strings": None}
    prepare = functools.partial(method, prepare_only=True)
    try:
        return model.generate(**inputs, custom_generate=prepare, **options)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, ImportError) as error:
        raise UserError(f"generate refuses the call: {' '.join(str(error).split())}") from None


def prepared_call(
    config: Any, inputs: dict[str, Any], processors: Sequence[Any], stops: Sequence[Any], *, seed: int | None
) -> Call:
    """Make a ``Call`` from what generate passes to a custom method. Sampling without a seed draws one from torch."""
    _check_call(config, inputs, processors, stops)
    check_values(inputs)
    if not inputs.get("mm_encoder_outputs"):  # generate adds an empty one
        inputs.pop("mm_encoder_outputs", None)
    eos = config.eos_token_id
    eos_ids = [] if eos is None else eos if isinstance(eos, Sequence) else [eos]
    pad = config.pad_token_id
    if config.do_sample and seed is None:
        seed = int(torch.randint(2**31, ()).item())
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return Call(
        inputs={k: value for k, value in inputs.items() if value is not None and k not in _OF_GENERATE_LOOP},
        max_new_tokens=config.max_length - inputs["input_ids"].shape[1],
        eos_token_ids=frozenset(int(token) for token in eos_ids),
        pad_token_id=int(pad if pad is not None else (eos_ids or [0])[0]),
        temperature=temperature if config.do_sample else 0.0,
        seed=int(seed or 0),
        processors=processors,  # temperature, top-k and top-p among them
        stops=[stop for stop in stops if type(stop).__name__ not in _COUNTED_STOPS],
        returns_dict=bool(config.return_dict_in_generate),
    )


def _check_call(config: Any, inputs: dict[str, Any], processors: Iterable[Any], stops: Iterable[Any]) -> None:
    """Refuse what decoding in rounds cannot honour."""
    given = {name: getattr(config, name, None) for name in _NEUTRAL}
    refused = {name: value for name, value in given.items() if value is not None and value not in _NEUTRAL[name]}
    cache = inputs.get("past_key_values")
    if cache is not None and (not hasattr(cache, "get_seq_length") or int(cache.get_seq_length()) > 0):
        refused["past_key_values"] = type(cache).__name__
    if inputs.get("inputs_embeds") is not None:
        refused["inputs_embeds"] = _shown(inputs["inputs_embeds"])
    for name, value in refused.items():
        raise UserError(f"decoding in rounds has no {name}; got {value}; leave {name} out")
    input_ids = inputs["input_ids"]
    if isinstance(input_ids, Tensor) and len(input_ids) > 1:
        for hooks, rowwise in ((processors, _ROWWISE_PROCESSORS), (stops, _ROWWISE_STOPS)):
            for name in (type(hook).__name__ for hook in hooks):
                if name not in rowwise:
                    raise UserError(
                        f"rows of a batch are decoded one by one, and {name} may read all rows together; "
                        "decode single prompts"
                    )


def processors_of_row(processors: Iterable[Any], row: int) -> list[Any]:
    """The processors for one row of a batch: the repetition penalty stores how much of each row is padding."""
    of_row = []
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = int(processor.prompt_ignore_length[row])
        of_row.append(processor)
    return of_row
