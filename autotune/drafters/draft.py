"""What the decoding loop asks of a draft, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.trees.tree import Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.prompt import Prompt
    from autotune.modeling.target import Target

Proposals = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Tokens and log-probabilities, each [nodes, proposals], most probable first."""


class Draft(Protocol):
    """A draft of one request at a time: ``prompts`` of its inputs, ``prefill`` of one of them, ``append`` the first token, then
    rounds of ``propose``, level by level, and ``commit``.
    """

    kind: str
    vocab_size: int
    visual_keep: float
    """Share of visual tokens that it sees."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose outputs it needs of every forward, as ``TreeModel.output_layers``."""
    capture_sizes: tuple[int, ...]
    """Sizes that its forwards are rounded up to; none: every size as it is."""

    @property
    def mode(self) -> str:
        """How its forward passes run (``autotune.execution.MODES``)."""

    def attach(self, target: Target) -> None:
        """Learn for which target it drafts, before the first prompt.

        Raises:
            UserError: a draft of another vocabulary.
        """

    def use_mode(self, name: str) -> None:
        """How its forwards run from now on (``graphs.MODES``)."""

    def prompts(self, inputs: dict[str, Any], read: Sequence[Prompt]) -> Sequence[Any]:
        """What it reads of each row of a batch, made as the target's processor made it, padding left out. ``read`` is what
        the target reads of them.
        """

    def prefill(self, prompt: Any, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read one of ``prompts``. ``visual_scores`` [visual tokens] ranks them; None where all are kept.

        ``capacity`` counts the tokens that the request can reach, trees included.
        """

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most probable children of the frontier's nodes, all of one level. The root's come first in every round.

        Where it reads nodes it notes their places in ``tree.kv_slot``.
        """

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them are committed."""


def check_vocabulary(target: Target, vocab_size: int, tokenizer: Any = None) -> None:
    """Refuse a draft of another vocabulary. Models pad theirs to different sizes, and those that see add tokens to it:
    where both tokenizers are known, one may have tokens more than the other.

    Raises:
        UserError: a token that means something else to the other, or other sizes of models of which no more is known.
    """
    if tokenizer is not None and target.tokenizer is not None:
        smaller, larger = sorted((tokenizer.get_vocab(), target.tokenizer.get_vocab()), key=len)
        if not smaller.items() <= larger.items():
            raise UserError(
                "target and draft must share one vocabulary; their tokenizers differ; use a draft made for this target"
            )
    elif vocab_size != target.vocab_size:
        raise UserError(
            f"target and draft must share one vocabulary; the target has {target.vocab_size} tokens, the draft {vocab_size}; "
            "use a draft made for this target"
        )


def num_kept(visual_keep: float, num_visual_tokens: int) -> int:
    """Visual tokens that enter a draft's cache: at least one of any."""
    return max(1, round(visual_keep * num_visual_tokens)) if num_visual_tokens else 0


def kept_tokens(is_visual: Tensor, visual_scores: Tensor | None, visual_keep: float) -> Tensor | None:
    """Which tokens of a prompt a draft reads, in order: all text, and the best of those that ``is_visual`` [n] says are
    visual, by ``visual_scores`` [visual tokens]; None: all of them.
    """
    if visual_scores is None or not is_visual.any():  # an image that a draft without sight is not shown
        return None
    if (number := num_kept(visual_keep, len(visual_scores))) == len(visual_scores):
        return None
    best = visual_scores.to(is_visual.device).topk(number).indices
    is_kept = ~is_visual
    is_kept[is_visual.nonzero()[:, 0][best]] = True
    return is_kept.nonzero()[:, 0]


def top_proposals(logits: Tensor, num_proposals: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each row and their log-probabilities in float32, left where the logits are."""
    top = logits.float().log_softmax(-1).topk(num_proposals)
    return top.indices, top.values
