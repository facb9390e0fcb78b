"""Self-tests: tree decoding of unlisted text models must agree with token-by-token decoding, and captured steps with
eager ones.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from autotune.documents.captured_steps import CapturedSteps
from autotune.documents.execution import CUDA_GRAPH, EAGER
from autotune.errors import first_line
from autotune.modeling.graph_runner import EagerNotice
from autotune.modeling.near_ties import flips
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Step
from autotune.modeling.text_model import undecodable
from autotune.modeling.tree_model import TreeModel

# Parents of a tree with 3 levels and two branches of different depth. The second path is kept, so that a wrong mask,
# position or compaction shows.
_PARENTS = (-1, 0, 0, 1, 1, 2, 2, 5, 6, 6)
_KEPT = (0, 2, 6, 9)
# For models with states, which follow one path.
_CHAIN = tuple(range(-1, 9))
_KEPT_OF_CHAIN = (0, 1, 2, 3)
# Of captured steps: 16 nodes, a capture size, so that decoding needs the captures of the test.
_CAPTURED_PARENTS = (*_PARENTS, 0, 0, 0, 0, 0, 0)
CAPTURED_TOKENS = 33  # after 32 steps
_NOT_A_NUMBER = 1e9  # a difference from logits that are no numbers
_PROMPT_TOKENS = 24
_CAPTURED_PROMPT_TOKENS = 320  # more than one part of the keys, which the attention of captured steps splits
_MARGIN = 8  # tokens of the prompt beyond what a window reaches
_LONGEST_WINDOW = 500
"""Longer windows that masks alone make are shortened to ``_SHORT_WINDOW`` tokens for a self-test."""
_SHORT_WINDOW = 16
_LONGEST_REACH = 4096
"""Tokens that the self-test of trees can afford to read."""
# Names of numbers of tokens, of a config, beyond which a layer computes something else, and parts of other names.
_REACH = re.compile(r"window|chunk|block|local|top_?k|stride|span|segment|distance|extent|compress|sparse")
_NO_REACH = re.compile(r"layer|expert|moe|head|group|pattern|feed_forward|num_|_of$|step|mamba")
_SLACK = 4.0
"""Allowed difference, in multiples of the noise between cached and uncached forward passes of transformers."""
_LEAST_NOISE = 1e-4
_LEAST_NOISE_EPS = 8.0
"""Allowed difference where that noise is 0, in standard deviations of the logits: this much, or this many units of the
precision.
"""
_MOST_NOISE = 1e-3
_MOST_NOISE_EPS = 32.0
"""Likewise the largest noise of models with states, which update them by other formulas in single steps than in passes
over several tokens.
"""


class SelfCheckNotice(UserWarning):
    """A model of an unlisted type passed the self-test."""


@torch.inference_mode()
def check_tree_decoding(model: TreeModel) -> None:
    """Compare two rounds of a tree (with states: a chain), the first committed in part, with transformers' own forward
    passes. Model types that the test suite covers are not checked again.

    Raises:
        UserError: the logits differ by more than those of transformers' own forward passes, or the model does not run.
    """
    model_type = model.text.config.model_type
    if model.text.is_tested:
        return
    name, reach = _furthest_reach(model)
    if reach > _LONGEST_REACH:
        reason = f"it reads {_LONGEST_REACH:,} tokens, and {name} of the config is {reach:,}"
        raise undecodable(model.text.config, f"the self-check failed, {reason}")
    try:
        with _short_windows(model):
            difference, noise = compare_tree_decoding(model)
    except Exception as error:
        raise undecodable(
            model.text.config, f"the self-check failed, a tree does not run ({first_line(error)})"
        ) from error
    allowed = allowed_difference(model, noise)
    if model.has_states and not noise <= max(_MOST_NOISE, _MOST_NOISE_EPS * torch.finfo(model.dtype).eps):
        reason = f"single steps of transformers differ from its passes over several tokens by {noise:.2g} standard deviations"
        raise undecodable(model.text.config, f"the self-check failed, {reason}")
    if not difference <= allowed:
        reason = f"a tree's logits differ from token-by-token ones by {difference:.2g} standard deviations"
        raise undecodable(model.text.config, f"the self-check failed, {reason}")
    warnings.warn(
        f"autotune is not tested with text models of type {model_type!r}; this one passed the self-check: a tree's logits "
        f"equal token-by-token ones within {difference:.1g} standard deviations (allowed: {allowed:.1g})",
        SelfCheckNotice,
        stacklevel=4,
    )


def allowed_difference(model: TreeModel, noise: float) -> float:
    """The largest difference of a tree's logits that rounding explains; see ``compare_tree_decoding``."""
    return max(_SLACK * noise, _LEAST_NOISE, _LEAST_NOISE_EPS * torch.finfo(model.dtype).eps)


@torch.inference_mode()
def compare_tree_decoding(model: TreeModel) -> tuple[float, float]:
    """Largest difference between a tree's logits and transformers' uncached ones, and between transformers' cached and
    uncached ones, both in standard deviations of the logits.
    """
    parents, kept = (_CHAIN, _KEPT_OF_CHAIN) if model.has_states else (_PARENTS, _KEPT)
    prompt, further = _random_text(model, 2 * len(parents), _furthest_reach(model)[1])
    num_tokens = len(prompt)
    trees = np.array(further).reshape(2, -1).tolist()

    model.reserve(num_tokens + 2 * len(parents))
    logits = [model.prefill_prompt(_encoded(model, prompt))]
    expected = [_uncached(model, prompt, 1)[0]]
    committed = prompt
    for tree in trees:
        logits.extend(model.forward(_tree_step(parents, tree, model.mask_value)))
        of_nodes: dict[int, Tensor] = {}
        for leaf in sorted(set(range(len(tree))).difference(parents)):
            path = _path(parents, leaf)
            text = committed + [tree[node] for node in path]
            of_nodes.update(zip(path, _uncached(model, text, len(path)), strict=True))
        expected += [of_nodes[node] for node in range(len(tree))]
        model.cache.keep(list(kept))
        committed = committed + [tree[node] for node in kept]
    model.cache.clear()

    deviation = float(torch.stack(expected).std())
    difference = float((torch.stack(logits).float() - torch.stack(expected)).abs().max()) / deviation
    single = _cached(model, text, num_tokens)
    noise = float((single - _uncached(model, text, len(single))).abs().max()) / deviation
    return difference, noise


def _uncached(model: TreeModel, text: list[int], number: int) -> Tensor:
    """Logits after the last tokens of a text, [number, vocabulary], in one forward pass of transformers."""
    logits: Tensor = model.model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits
    return logits[0, -number:].float()


def _furthest_reach(model: TreeModel) -> tuple[str, int]:
    """The largest number of tokens in the config beyond which layers may compute something else, and its name. Windows
    that masks make are not among them, nor numbers that no sequence exceeds.
    """
    text, reaches = model.text, {"": 0}
    for name, digits in re.findall(r'"(\w+)": (\d+)\b(?!\.)', json.dumps(text.config.to_dict(), default=str)):
        is_window = name == "sliding_window" and int(digits) in text.windows.values()
        is_reach = _REACH.search(name) is not None and _NO_REACH.search(name) is None
        if is_reach and not is_window and int(digits) < text.max_context:
            reaches[name] = max(int(digits), reaches.get(name, 0))
    return max(reaches.items(), key=lambda item: item[1])


@contextmanager
def _short_windows(model: TreeModel) -> Iterator[None]:
    """Within the context, long attention windows have few tokens, so that a short text reaches past them. Masks alone
    make these windows, in transformers as here.
    """
    text, config = model.text, model.text.config
    if max((window or 0 for window in text.windows.values()), default=0) <= _LONGEST_WINDOW:
        yield
        return
    before, config.sliding_window = config.sliding_window, _SHORT_WINDOW
    short = {name: None if window is None else _SHORT_WINDOW for name, window in text.windows.items()}
    try:
        model.use_text(replace(text, windows=short))
        yield
    finally:
        config.sliding_window = before
        model.use_text(text)


def _random_text(model: TreeModel, num_further: int, reach: int = 0) -> tuple[list[int], list[int]]:
    """A prompt of random tokens, longer than the windows of layers and than ``reach``, and further tokens."""
    windows = [window for window in model.text.windows.values() if window is not None]
    longest = max(_PROMPT_TOKENS, *(window + _MARGIN for window in (reach, *windows)))
    num_tokens = max(1, min(longest, model.text.max_context - num_further))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (num_tokens + num_further,), generator=generator).tolist()
    return tokens[:num_tokens], tokens[num_tokens:]


def _encoded(model: TreeModel, text: list[int]) -> EncodedPrompt:
    tokens = torch.tensor(text, device=model.device)
    return EncodedPrompt(tokens, torch.zeros_like(tokens, dtype=torch.bool))


def _tree_step(parents: Sequence[int], tokens: Sequence[int], mask_value: float) -> Step:
    """A verification of a tree."""
    paths = [_path(parents, node) for node in range(len(parents))]
    tree_mask = np.full((len(parents), len(parents)), mask_value, np.float32)
    for node, path in enumerate(paths):
        tree_mask[node, path] = 0.0
    return Step(np.array(tokens), np.array([len(path) - 1 for path in paths]), tree_mask)


def _path(parents: Sequence[int], node: int) -> list[int]:
    return [node] if node == 0 else [*_path(parents, parents[node]), node]


def _cached(model: TreeModel, text: list[int], num_prompt: int) -> Tensor:
    """Logits after each token of the text's end, which is decoded token by token with the model's own cache."""
    ids = torch.tensor([text], device=model.device)
    out = model.model(input_ids=ids[:, :num_prompt], use_cache=True)
    takes_positions = "position_ids" in inspect.signature(model.model.forward).parameters
    logits = []
    for index in range(num_prompt, len(text)):
        # As generate does; some models count positions from 0 otherwise.
        positions = {"position_ids": torch.tensor([[index]], device=model.device)} if takes_positions else {}
        out = model.model(
            input_ids=ids[:, index : index + 1], past_key_values=out.past_key_values, use_cache=True, **positions
        )
        logits.append(out.logits[0, -1].float())
    return torch.stack(logits)


@torch.inference_mode()
def compare_captured_steps(target: TreeModel) -> CapturedSteps:
    """Compare captured plain steps and a captured verification with eager ones, at the tokens of a greedy answer. If
    mode ``auto`` must not capture, an ``EagerNotice`` says why.

    The noise of the precision is the difference between eager steps and one eager forward pass over the same tokens.
    """
    with _short_windows(target):
        return _compare_captured_steps(target)


def _compare_captured_steps(target: TreeModel) -> CapturedSteps:
    text, tree = _random_text(target, len(_CAPTURED_PARENTS) + CAPTURED_TOKENS, _CAPTURED_PROMPT_TOKENS)
    prompt, verification = (
        _encoded(target, text),
        _tree_step(_CAPTURED_PARENTS, tree[: len(_CAPTURED_PARENTS)], target.mask_value),
    )
    tokens, eager = target.single_steps(prompt, CAPTURED_TOKENS, then=verification)
    _, at_once = target.single_steps(prompt, 1, then=Step.causal(np.array(tokens[:-1]), target.mask_value))
    target.use_mode(CUDA_GRAPH)
    runner = target.graph_runner
    assert runner is not None
    try:
        _, captured = target.single_steps(prompt, CAPTURED_TOKENS, mode=CUDA_GRAPH, tokens=tokens, then=verification)
        found = _compared(target, eager.float(), at_once.float(), captured.float())
    except Exception as error:
        found = CapturedSteps(why_eager=f"captured steps do not run ({first_line(error)})")
    target.use_mode(EAGER)
    target.cache.clear()
    if runner.why_eager is not None:  # of which the runner has warned
        found = CapturedSteps(why_eager=runner.why_eager)
    elif found.why_eager is not None:
        warnings.warn(f"{target.description} runs eagerly in mode auto: {found.why_eager}", EagerNotice, stacklevel=4)
    if found.why_eager is not None:
        runner.reset()
    return found


def _compared(target: TreeModel, eager: Tensor, at_once: Tensor, captured: Tensor) -> CapturedSteps:
    """Compare logits [tokens, vocabulary]; ``at_once`` are those of the first tokens in one forward pass."""
    deviation = float(eager.std())
    allowed = allowed_difference(target, float((eager[: len(at_once)] - at_once).abs().max()) / deviation)
    apart = torch.where(captured == eager, 0.0, (captured - eager).abs()).nan_to_num(nan=_NOT_A_NUMBER)
    difference = float(apart.max()) / deviation
    why = f"captured steps give logits that differ by {difference:.2g} standard deviations; rounding explains {allowed:.2g}"
    return CapturedSteps(
        num_tokens=len(eager),
        num_near_ties=len(flips(eager, captured, allowed * deviation)),
        difference=difference,
        allowed=allowed,
        why_eager=why if difference > allowed else None,
    )
