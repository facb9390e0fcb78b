"""The interface of a draft, and helpers that drafts share."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.cost.table import ModelShape
from autotune.documents.execution import EAGER
from autotune.documents.subnet import Operator, Subnet
from autotune.errors import UserError
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Draw
from autotune.modeling.target import Target
from autotune.replay.trace import Forest, ForestBounds
from autotune.trees.limits import MAX_STEP
from autotune.trees.tree import Ints, Tree

Proposals = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Tokens and log-probabilities, each [nodes, proposals], most probable first."""


class Coupling(NamedTuple):
    """Coupled sampling of the children of n nodes."""

    scores: Callable[[Tensor], Tensor]
    """From a draft's logits to the scores that take their place, both [n, target's vocabulary]: the logits, processed
    as the request asks, plus the noise with which the target's token at the children's position is drawn
    (``TokenSampler.proposal_scores``).
    """
    draw: Draw | None = None
    """None: a captured step cannot compute the scores."""


FeatureSource = Ints | Mapping[int, Tensor]
"""Where a draft that reads features takes those of a step's tokens from. Tree nodes: KV slots of their parents among
the uncommitted tokens, [n]; -1 is the last token of the prefix. Committed tokens: outputs of each of ``aux_layers`` for
the token before, [n, hidden].
"""


ROOTS_AT_ONCE = 24  # limit on the positions whose forests grow together,
NODES_AT_ONCE = 800  # and on their nodes: every node's mask has a column for each of the others
LEAST_SHARED = 0.9
"""Share of the larger vocabulary that the smaller one has at least, where they cannot be compared token by token."""


class DraftNotice(UserWarning):
    """A draft that fits its target nearly, and what of it is not used. Tokens are the target's all the same."""


@dataclass(frozen=True)
class AnswerToRecord:
    """An answer of the target, along which a draft's forest is grown."""

    tokens: Ints
    first_position: int
    """Position of the first token in the target's sequence."""
    bounds: ForestBounds
    hidden: Mapping[int, Tensor]
    """The target's outputs before each token, by layer, [tokens, hidden]; empty for a draft that reads none."""
    coupling_at: Callable[[Ints], Coupling] | None = None
    """``TokenSampler.coupling`` of the answer; None for greedy answers."""
    shares_tokens: bool = True
    """False evaluates every node of every forest, as a draft that reads features must."""

    def coupling(self, offsets: Ints) -> Coupling | None:
        """The coupling of proposals for the tokens ``offsets`` [n] after the first one."""
        return None if self.coupling_at is None else self.coupling_at(self.first_position + offsets)

    @property
    def most_roots(self) -> int:
        """Limit on the roots whose forests grow together."""
        num_roots = ROOTS_AT_ONCE * (1 + self.shares_tokens)  # about half of the nodes are evaluated
        return min(MAX_STEP, max(num_roots, NODES_AT_ONCE // max(1, self.bounds.largest)))

    @property
    def num_slots(self) -> int:
        """KV slots that the answer and the forests after it take."""
        return len(self.tokens) + self.most_roots * self.bounds.largest + MAX_STEP


class Dimensions(NamedTuple):
    """The parts of a draft that a search may choose, without its visual tokens."""

    injection_layers: tuple[int, ...] = ()
    """Layers of the target that a supernet can read; empty for drafts that are no supernet."""
    operators: tuple[Operator, ...] = ()
    """Operators that compress visual tokens."""
    has_vocabularies: bool = False
    """Whether the vocabulary can be cut by token frequencies."""
    has_float8: bool | None = None
    """Whether the device multiplies weights in float8, so that a search offers them; None: the draft cannot have them.
    """


class Draft(ABC):
    """Drafts for one request at a time.

    The calls of a request: ``prompts`` of a batch, ``prefill`` of one of them, ``append`` of the first token, then
    rounds of ``propose`` (once per level) and ``commit``.
    """

    kind: str
    vocab_size: int
    """The target's, after ``attach``."""
    device: torch.device
    visual_keep: float = 1.0
    """Share of visual tokens that the draft sees."""
    aux_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs the draft reads (``TreeModel.output_layers``)."""
    capture_sizes: tuple[int, ...] = ()
    """Token counts that forward passes are padded to; empty: no padding."""
    sees_images: bool = True
    """Whether the draft has visual tokens, of which a search may choose a share."""
    max_context: float = math.inf
    """Longest sequence that the draft can read, in tokens; a longer request goes on without it."""
    standalone_model: Any | None = None
    """The Hugging Face model, of a draft that is one by itself."""

    @property
    def description(self) -> str:
        """The draft, for messages."""
        return f"a {self.kind} draft"

    @property
    def subnet(self) -> Subnet:
        """The part of a supernet that this draft is."""
        return Subnet(visual_keep=self.visual_keep)

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions that a search may choose."""
        return Dimensions()

    @property
    def has_states(self) -> bool:
        """Whether it keeps recurrent or convolution states, which follow one path, so that it drafts chains only."""
        return False

    @property
    def shape(self) -> ModelShape:
        """Sizes, for estimates of latency."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """Bytes of the draft's own weights."""
        return 0

    @property
    def length(self) -> int:
        """Tokens of the request that were read."""
        raise NotImplementedError

    @property
    def mode(self) -> str:
        """How forward passes run (``autotune.documents.execution.MODES``)."""
        return EAGER

    def use_mode(self, name: str) -> None:  # noqa: B027
        """Set ``mode``; a draft without forward passes has one."""

    @abstractmethod
    def forest(self, answer: AnswerToRecord) -> Forest:
        """The proposals along an answer, after ``prefill`` of its prompt."""

    @abstractmethod
    def attach(self, target: Target) -> None:
        """Set the target, before the first prompt.

        Raises:
            UserError: a target with another vocabulary.
        """

    @abstractmethod
    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[EncodedPrompt]) -> Sequence[Any]:
        """The draft's prompt for each row of a batch, without padding, from the outputs of the target's processor and
        the target's prompts for the same rows.
        """

    @abstractmethod
    def prefill(self, prompt: Any, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Evaluate one of ``prompts``. ``visual_scores`` [visual tokens] rank the visual tokens, and may be None if all
        are kept; ``capacity`` is the KV length that the request can reach, trees included.
        """

    @abstractmethod
    def append(self, token: int) -> None:
        """Add a committed token, which is evaluated with the next root."""

    @abstractmethod
    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """The most probable children of the frontier's nodes, which have one depth. Each round begins with the root.

        Drafts with a KV cache set ``tree.kv_slot`` of the nodes. ``coupling`` gives the scores whose log-softmax ranks
        children; None, as at temperature 0: that of the logits.
        """

    @abstractmethod
    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: commit the accepted nodes and the target's own token after them. In a round without
        ``propose`` the draft has read none of the nodes.
        """


def check_vocabulary(target: Target, vocab_size: int, tokenizer: Any = None) -> list[int]:
    """Compare the vocabularies of target and draft. The ids that both have must be the same tokens, added tokens
    excepted: fine-tunes rename reserved ones. Either may have more tokens, because models pad their vocabularies and
    VLMs add tokens. Where a tokenizer is unknown, the sizes must be nearly the same. A ``DraftNotice`` says what
    differs.

    Returns:
        The ids that the draft must not propose, because they are other tokens of the target.

    Raises:
        UserError: other ordinary tokens, or other sizes if a tokenizer is unknown.
    """
    refusal = "target and draft must share one vocabulary; {}; use a draft made for this target"
    smaller, larger = sorted((vocab_size, target.vocab_size))
    if tokenizer is None or target.tokenizer is None:
        sizes = f"the target has {target.vocab_size} tokens, the draft {vocab_size}"
        if smaller < LEAST_SHARED * larger:
            raise UserError(refusal.format(sizes))
        if smaller < larger:
            notify(f"{sizes}, and a tokenizer is not known: the first {smaller} are taken for the same tokens")
        return []
    known = tokenizer, target.tokenizer
    ours, theirs = ({number: token for token, number in one.get_vocab().items()} for one in known)
    common = [number for number in sorted(ours.keys() & theirs.keys()) if number < smaller]
    renamed = [number for number in common if ours[number] != theirs[number]]
    added = {number for one in known for number in getattr(one, "added_tokens_decoder", ())}  # special ones too
    if ordinary := [number for number in renamed if number not in added]:
        example = f"token {ordinary[0]} is {theirs[ordinary[0]]!r} and {ours[ordinary[0]]!r}"
        raise UserError(
            refusal.format(f"their tokenizers differ in {len(ordinary)} of {len(common)} tokens ({example})")
        )
    if renamed:
        names = ", ".join(repr(theirs[number]) for number in renamed[:4])
        notify(
            f"{len(renamed)} added tokens of the target have other names in the draft, which does not propose them: "
            f"{names}{', ...' if len(renamed) > 4 else ''}"
        )
    return renamed


def notify(message: str) -> None:
    """Issue a ``DraftNotice``."""
    warnings.warn(message, DraftNotice, stacklevel=4)


def num_kept(visual_keep: float, num_visual_tokens: int) -> int:
    """Number of visual tokens that enter a draft's cache: at least 1 if there are any."""
    return max(1, round(visual_keep * num_visual_tokens)) if num_visual_tokens else 0


def kept_tokens(is_visual: Tensor, visual_scores: Tensor | None, visual_keep: float) -> Tensor:
    """Indices of the prompt tokens that enter a draft's cache, ascending: all that are not ``is_visual`` [n], and the
    visual ones of the highest ``visual_scores`` [visual tokens].
    """
    everything = torch.arange(len(is_visual), device=is_visual.device)
    if visual_scores is None or not is_visual.any():  # a draft that does not see the image
        return everything
    if (number := num_kept(visual_keep, len(visual_scores))) == len(visual_scores):
        return everything
    best = visual_scores.to(is_visual.device).nan_to_num(nan=-torch.inf).topk(number).indices
    is_kept = ~is_visual
    is_kept[is_visual.nonzero()[:, 0][best]] = True
    return everything[is_kept]


def top_proposals(logits: Tensor, num_proposals: int) -> tuple[Tensor, Tensor]:
    """The best tokens of each row and their log-probabilities in float32, on the device of the logits."""
    top = logits.float().log_softmax(-1).topk(num_proposals)
    return top.indices, top.values


CUT_TOKENS = 1024  # that top-k and top-p look at


def cut_scores(scores: Tensor, top_k: int | Tensor, top_p: float | Tensor) -> Tensor:
    """Scores [n, vocabulary] with -inf in place of what top-k and top-p exclude. Rows of which they keep more than the
    ``CUT_TOKENS`` best are not cut: which tokens are proposed does not change those that are emitted.
    """
    best = scores.log_softmax(-1).topk(min(CUT_TOKENS, scores.shape[-1]))
    probability = best.values.exp()
    is_kept = (probability.cumsum(-1) - probability < top_p) | (top_p >= 1.0)
    is_kept &= torch.arange(is_kept.shape[-1], device=scores.device) < top_k
    last = scores.gather(-1, best.indices).masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill((scores < last) & ~is_kept.all(-1, keepdim=True), -torch.inf)
