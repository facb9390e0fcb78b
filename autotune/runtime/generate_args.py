"""What Hugging Face's ``generate`` prepares for a decoding method of one's own, and what trees cannot honour of it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from autotune.errors import UserError, nearest
from autotune.runtime.request import Call
from autotune.runtime.token_sampler import PREFIX_FREE, check_sampling

DEFAULT_MAX_NEW_TOKENS = 256

# Prepared for its own loop; the decoding loop makes its own.
_MADE_BY_GENERATE = ("past_key_values", "use_cache", "logits_to_keep", "position_ids", "cache_position")
# Stopping criteria that the loop counts by itself.
_COUNTED_STOPS = ("MaxLengthCriteria", "EosTokenCriteria")
# Those that look at every row for itself, so that rows may be shown to them one by one.
_ROWWISE_STOPS = (*_COUNTED_STOPS, "StopStringCriteria", "MaxTimeCriteria")
_ROWWISE_PROCESSORS = {
    *PREFIX_FREE,
    *("ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor"),
    "SuppressTokensAtBeginLogitsProcessor",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_ARGUMENTS = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def check_names(model: Any, given: Iterable[str]) -> None:
    """What is no setting must be an input of the model: transformers would drop a misspelt one in silence.

    Raises:
        UserError: a name that is neither.
    """
    known = _known_names(model.__class__)
    for name in given:
        if name not in known:
            raise UserError(f"generate takes no {name!r}; {nearest(name, [*known, 'seed', 'streamer', 'workload'])}")


@functools.cache
def _known_names(model_class: Any) -> tuple[str, ...]:
    settings = [name for name in GenerationConfig().to_dict() if name != "transformers_version"]
    inputs = [name for name in inspect.signature(model_class.forward).parameters if name != "self"]
    return (*inputs, *settings, *_ARGUMENTS)


def generation_settings(
    config: Any,
    given: dict[str, Any],
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> dict[str, Any]:
    """What our own arguments mean in generate's words; ``given`` is what else was passed. None says nothing.

    Raises:
        UserError: settings out of range.
    """
    settings: dict[str, Any] = {}
    if max_new_tokens is None and not {"max_length", "generation_config"} & set(given):
        max_new_tokens = None if config.max_new_tokens or config.max_length else DEFAULT_MAX_NEW_TOKENS
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1; got {max_new_tokens}; ask for a token")
        settings["max_new_tokens"] = max_new_tokens
    check_sampling(1.0 if temperature is None else temperature, top_k or 0, 1.0 if top_p is None else top_p)
    if temperature is not None:
        settings["do_sample"] = temperature > 0
    if temperature is not None and temperature > 0:  # from the whole distribution but for what the call says
        settings |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    elif temperature is None:
        settings |= {name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None}
    return settings


def hf_call(model: Any, method: Callable[..., Any], processor: Any, inputs: dict[str, Any], **of_method: Any) -> Any:
    """What ``method``, with arguments of its own, makes of a call that ``model.generate`` has prepared, without decoding.

    Raises:
        UserError: what generate itself refuses; stop strings without a tokenizer.
    """
    config = inputs.get("generation_config") or model.generation_config
    if stop_strings := inputs.pop("stop_strings", None) or config.stop_strings:
        tokenizer = getattr(processor, "tokenizer", processor)
        if tokenizer is None:
            raise UserError("stop_strings need the tokenizer; load the decoder with processor=")
        # Generate would ask for the tokenizer, which it does not take beside a method of one's own.
        stops = [*(inputs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stop_strings)]
        inputs |= {"stopping_criteria": StoppingCriteriaList(stops), "stop_strings": None}
    _check_cache(inputs.get("cache_implementation") or config.cache_implementation)
    prepare = functools.partial(method, prepare_only=True)
    try:
        return model.generate(**inputs, custom_generate=prepare, **of_method)
    except ValueError as error:
        raise UserError(f"generate refuses the call: {' '.join(str(error).split())}") from None


def prepared_call(
    config: Any,
    given: dict[str, Any],
    processors: Sequence[Any],
    stops: Sequence[Any],
    *,
    seed: int | None,
    workload: str | None,
) -> Call:
    """What generate has prepared for a decoding method, as the loop takes it. Without a seed, one is drawn where tokens are.

    Raises:
        UserError: what trees cannot honour.
    """
    _check_call(config, given, processors, stops)
    if not given.get("mm_encoder_outputs"):  # generate adds an empty one
        given.pop("mm_encoder_outputs", None)
    eos = config.eos_token_id
    eos_ids = [] if eos is None else eos if isinstance(eos, Sequence) else [eos]
    pad = config.pad_token_id
    if config.do_sample and seed is None:
        seed = int(torch.randint(2**31, ()).item())
    sampled_at = 1.0 if config.temperature is None else float(config.temperature)
    return Call(
        inputs={name: value for name, value in given.items() if value is not None and name not in _MADE_BY_GENERATE},
        max_new_tokens=config.max_length - given["input_ids"].shape[1],
        eos_token_ids=frozenset(int(token) for token in eos_ids),
        pad_token_id=int(pad if pad is not None else (eos_ids or [0])[0]),
        temperature=sampled_at if config.do_sample else 0.0,
        seed=seed or 0,
        # Temperature, top-k and top-p are among the processors that generate prepared.
        processors=processors,
        stops=[stop for stop in stops if type(stop).__name__ not in _COUNTED_STOPS],
        returns_dict=bool(config.return_dict_in_generate),
        workload=workload,
    )


def _check_call(config: Any, inputs: dict[str, Any], processors: Iterable[Any], stops: Iterable[Any]) -> None:
    """Refuse what trees cannot honour, rather than ignore it.

    Raises:
        UserError: several beams or sequences, a cache of the caller's, outputs of every step, or a batch with
            processors or criteria that look at all rows together.
    """
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        raise UserError("trees decode one sequence: num_beams and num_return_sequences must be 1; set them to 1")
    for name in _OUTPUTS:
        if getattr(config, name, False):
            raise UserError(f"decoding with trees keeps no outputs of single steps; {name} must be off; leave it out")
    _check_cache(config.cache_implementation)
    cache = inputs.get("past_key_values")
    if cache is not None and (not hasattr(cache, "get_seq_length") or int(cache.get_seq_length()) > 0):
        raise UserError(
            f"the decoder keeps a cache of its own: a filled {type(cache).__name__} cannot be compacted after a tree; "
            "pass the whole prompt without past_key_values"
        )
    if inputs.get("inputs_embeds") is not None:
        raise UserError("prompts are decoded from input_ids; inputs_embeds are not taken; pass the tokens")
    input_ids = inputs["input_ids"]
    if isinstance(input_ids, torch.Tensor) and len(input_ids) > 1:
        for one in processors:
            if type(one).__name__ not in _ROWWISE_PROCESSORS:
                raise UserError(
                    f"rows of a batch are decoded one by one, and {type(one).__name__} may look at all of them; decode single prompts"
                )
        for one in stops:
            if type(one).__name__ not in _ROWWISE_STOPS:
                raise UserError(
                    f"rows of a batch are decoded one by one, and {type(one).__name__} may look at all of them; decode single prompts"
                )


def processors_of_row(processors: Iterable[Any], row: int) -> list[Any]:
    """Those of one row of a batch: the repetition penalty knows how much of each row is padding."""
    found = []
    for one in processors:
        if isinstance(getattr(one, "prompt_ignore_length", None), torch.Tensor):
            one = copy.copy(one)
            one.prompt_ignore_length = one.prompt_ignore_length[row : row + 1]
        found.append(one)
    return found


def _check_cache(kind: str | None) -> None:
    if kind in ("quantized", "offloaded", "offloaded_static"):
        raise UserError(f"a cache of type {kind!r} cannot be compacted after a tree; leave cache_implementation out")
