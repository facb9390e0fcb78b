"""``independent``: any smaller Hugging Face model with the target's vocabulary, with or without sight. Training-free.

Visual tokens that the target's last layer attended to least never enter the draft's cache (SAGE section 5.1; STAR eq.
2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.drafters.cached_draft import CachedDraft
from autotune.drafters.draft import check_vocabulary, kept_tokens
from autotune.modeling.graph_runner import DeviceStep
from autotune.modeling.masks import TreeMask
from autotune.modeling.prompt import Prompt, placeholders_of, rows_of
from autotune.modeling.self_check import check_tree_decoding
from autotune.modeling.tree_model import TreeModel
from autotune.trees.tree import Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class IndependentDraft(CachedDraft, TreeModel):
    """Drafts with a whole model of its own (see ``CachedDraft``). Of the accepted nodes only a leaf has not been read.

    It looks at images if it is of the target's family, for whose processor the pixels were made. Any other draft,
    text-only or not, reads the prompt without the tokens that stand for images.

    Raises:
        UserError: a model that trees cannot decode: see ``text_model_of`` and ``check_tree_decoding``.
    """

    kind = "independent"

    def __init__(self, model: Any, *, visual_keep: float = 1.0, tokenizer: Any = None) -> None:
        CachedDraft.__init__(self)
        TreeModel.__init__(self, model)
        self.tokenizer = tokenizer
        self.visual_keep = visual_keep
        self.sees = True
        """Whether it is of the target's family; a text model's draft sees what there is, nothing."""
        self._placeholders = placeholders_of(model.config)
        self._num_common = self.vocab_size  # tokens that the target has as well
        check_tree_decoding(self)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def attach(self, target: Target) -> None:
        """Learn whether pixels made for this target fit.

        Raises:
            UserError: a draft of another vocabulary.
        """
        check_vocabulary(target, self.vocab_size, self.tokenizer)
        self._num_common = min(self.vocab_size, target.vocab_size)
        ours, theirs = self.model.config, target.model.config
        self._placeholders = placeholders_of(theirs)
        self.sees = ours.model_type == theirs.model_type and placeholders_of(ours) == self._placeholders

    def prompts(self, inputs: dict[str, Any], read: Sequence[Prompt] = ()) -> Sequence[Prompt]:
        """The rows of a batch as it reads them, padding left out: through its own vision tower, or without visual
        tokens.
        """
        if self.sees:
            return self.encode(inputs).prompts
        return [self._text_of(row.to(self.device)) for row in rows_of(inputs)]

    def _text_of(self, tokens: Tensor) -> Prompt:
        is_text = torch.ones_like(tokens, dtype=torch.bool)
        for placeholder in self._placeholders:
            is_text &= tokens != placeholder
        is_text[-1] = True  # something must be read
        tokens = tokens[is_text]
        return Prompt(tokens, torch.zeros_like(tokens, dtype=torch.bool))

    def prefill(self, prompt: Prompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read the prompt. ``visual_scores`` [visual tokens] ranks them; it may be None where all are kept.

        ``capacity`` counts the tokens that the request can reach, the prompt and the trees included.
        """
        self.reserve(capacity)
        self._pending = []
        kept = kept_tokens(prompt.is_visual, visual_scores, self.visual_keep)
        if kept is None:
            self.read(prompt)
        else:  # dropped before the first layer, visual tokens cost nothing from now on; the others keep their positions
            self.read(prompt.keep(kept), whole=prompt)

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""
        self._pending.append(token)

    def forward(
        self,
        tokens: NDArray[np.int64],
        offsets: Ints,
        tree_mask: TreeMask,
        *,
        num_uncommitted: int = 0,
        parents: Ints | None = None,
        hidden: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Logits [n, vocabulary in common with the target]; it needs to know no parents and no features."""
        tokens = np.where(tokens < self.vocab_size, tokens, 0)  # a token of the target's padding, if it ever says one
        logits = TreeModel.forward(self, tokens, offsets, tree_mask, num_uncommitted=num_uncommitted)
        return logits[:, : self._num_common]

    def read_on_device(
        self, step: DeviceStep, *, parents: Tensor | None = None, hidden: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """See ``CachedDraft``."""
        tokens = step.tokens.masked_fill(step.tokens >= self.vocab_size, 0)
        return self.forward_on_device(step._replace(tokens=tokens))[:, : self._num_common]

    def _pending_hidden(self) -> None:
        return None

    def _pending_committed(self, count: int) -> None:
        self.cache.advance(count)

    def compact_on_device(self, prefix_state: Tensor, slots: Tensor) -> None:
        """See ``CachedDraft``."""
        self.cache.compact(prefix_state[0], slots.clamp(min=0))

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them are committed, everything else is
        forgotten.
        """
        self.cache.keep(self._places_read(tree, path))
        self._wait_for(tree, path, next_token)

    def end_device_round(self, tree: Tree, path: Ints, next_token: int, hidden: Sequence[Tensor]) -> None:
        """See ``CachedDraft``."""
        self.cache.advance(len(self._pending) + len(self._places_read(tree, path)))
        self._wait_for(tree, path, next_token)

    def _places_read(self, tree: Tree, path: Ints) -> list[int]:
        """Only nodes that were expanded have been read: all of the path but perhaps its last node."""
        return [int(place) for place in tree.kv_slot[path] if place >= 0]

    def _wait_for(self, tree: Tree, path: Ints, next_token: int) -> None:
        self._pending = [*tree.token[path][len(self._places_read(tree, path)) :].tolist(), next_token]
