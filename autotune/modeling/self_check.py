"""Whether a text model of a type that nobody has tried decodes trees as it decodes tokens one by one."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from autotune.errors import UserError
from autotune.modeling.prompt import Prompt
from autotune.modeling.text_model import KNOWN_TEXT_TYPES

if TYPE_CHECKING:
    from autotune.modeling.tree_model import TreeModel

# A tree of 3 levels by parents: two branches of different depth, and the second path is the one that is kept, so that a
# wrong mask, position or compaction shows.
_PARENTS = (-1, 0, 0, 1, 1, 2, 2, 5, 6, 6)
_KEPT = (0, 2, 6, 9)
_PROMPT_TOKENS = 24
_LONGEST_PROMPT = 512
_SLACK = 4.0
"""Times the noise between two of transformers' own ways to compute the same logits."""
_LEAST_NOISE = 1e-4
_LEAST_NOISE_EPS = 8.0
"""What is allowed of the logits' deviation where those two ways agree to the last bit: so much, or so many units of the
precision.
"""


class SelfCheckNotice(UserWarning):
    """A model of an unlisted type was found to decode trees correctly."""


@torch.inference_mode()
def check_tree_decoding(runner: TreeModel) -> None:
    """Compare two rounds of a tree, the first committed in part, with transformers' own forwards, token by token. Types
    that tests have tried are not tried again.

    Raises:
        UserError: the logits differ by more than transformers' do among themselves, or the model does not run.
    """
    kind = runner.text.config.model_type
    if runner.text.is_known:
        return
    try:
        difference, noise = _compare(runner)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        raise _refusal(kind, f"a tree does not run ({reason})") from error
    allowed = max(_SLACK * noise, _LEAST_NOISE, _LEAST_NOISE_EPS * torch.finfo(runner.dtype).eps)
    if not difference <= allowed:
        raise _refusal(kind, f"a tree's logits differ from step-by-step ones by {difference:.2g} of their deviation")
    warnings.warn(
        f"text models of type {kind!r} are not among those that autotune is tested with; this one passed the self-check: a "
        f"tree's logits equal step-by-step ones to {difference:.1g} of their deviation (allowed: {allowed:.1g})",
        SelfCheckNotice,
        stacklevel=4,
    )


def _refusal(kind: str, reason: str) -> UserError:
    return UserError(
        f"text models of type {kind!r} cannot be decoded with trees: the self-check failed, {reason}; known: "
        f"{', '.join(KNOWN_TEXT_TYPES)}; use one of these"
    )


def _compare(runner: TreeModel) -> tuple[float, float]:
    """The largest difference of a tree's logits, and that of cached from uncached stock forwards, both in units of the
    logits' deviation.
    """
    windows = [window for window in runner.text.windows.values() if window is not None]
    num_tokens = min(max([_PROMPT_TOKENS, *(window + 8 for window in windows)]), _LONGEST_PROMPT)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, runner.vocab_size, (num_tokens + 2 * len(_PARENTS),), generator=generator)
    prompt, trees = drawn[:num_tokens].tolist(), drawn[num_tokens:].reshape(2, -1).tolist()

    runner.reserve(num_tokens + 2 * len(_PARENTS))
    tokens = torch.tensor(prompt, device=runner.device)
    logits = [runner.read(Prompt(tokens, torch.zeros_like(tokens, dtype=torch.bool)))]
    texts = [prompt]
    committed = prompt
    for tree in trees:
        paths = [_path(node) for node in range(len(tree))]
        tree_mask = np.full((len(tree), len(tree)), runner.mask_value, np.float32)
        for node, path in enumerate(paths):
            tree_mask[node, path] = 0.0
        offsets = np.array([len(path) - 1 for path in paths])
        logits.extend(runner.forward(np.array(tree), offsets, tree_mask))
        texts += [committed + [tree[node] for node in path] for path in paths]
        runner.cache.keep(list(_KEPT))
        committed = committed + [tree[node] for node in _KEPT]
    runner.cache.clear()

    expected = torch.stack([_uncached(runner, text) for text in texts])
    deviation = float(expected.std())
    difference = float((torch.stack(logits).float() - expected).abs().max()) / deviation
    stepwise = _cached(runner, texts[-1], num_tokens)
    noise = float((stepwise - expected[-1]).abs().max()) / deviation
    return difference, noise


def _path(node: int) -> list[int]:
    return [node] if node == 0 else [*_path(_PARENTS[node]), node]


def _uncached(runner: TreeModel, text: list[int]) -> Tensor:
    ids = torch.tensor([text], device=runner.device)
    return runner.model(input_ids=ids, use_cache=False).logits[0, -1].float()  # type: ignore[no-any-return]


def _cached(runner: TreeModel, text: list[int], num_prompt: int) -> Tensor:
    """The logits after the text, its end fed token by token through the cache that the model makes."""
    ids = torch.tensor([text], device=runner.device)
    out = runner.model(input_ids=ids[:, :num_prompt], use_cache=True)
    for at in range(num_prompt, len(text)):
        out = runner.model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
    return out.logits[0, -1].float()  # type: ignore[no-any-return]
