"""``independent``: any smaller Hugging Face model with the target's vocabulary, text-only or not. Training-free.

The visual tokens that the target's last layer attends to least never enter the draft's cache (SAGE, section 5.1; STAR,
eq. 2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.drafters.cached_draft import CachedDraft
from autotune.drafters.draft import AnswerToRecord, FeatureSource, check_vocabulary, kept_tokens, notify
from autotune.drafters.forests import PathForestGrower
from autotune.errors import UserError
from autotune.modeling.prompt import EncodedPrompt, placeholders_of, token_rows, visual_tokens
from autotune.modeling.quantization import num_parameters, weight_bytes
from autotune.modeling.self_check import check_tree_decoding
from autotune.modeling.step import Evaluated, Step
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.replay.trace import Forest
from autotune.trees.tree import Ints, Tree


class IndependentDraft(CachedDraft, TreeModel):
    """Drafts with a separate model. After a round, the only accepted node that it has not evaluated may be a leaf.

    A draft of the target's model type, whose vision tower gives as many features, sees images, because the target's
    processor made the pixels for it too. Any other draft gets the prompt without image placeholders. Tokens that the
    draft does not have are read as token 0.

    Raises:
        UserError: a model that trees cannot decode (see ``text_model_of`` and ``check_tree_decoding``).
    """

    kind = "independent"
    usual_pending = 2

    def __init__(self, model: Any, *, visual_keep: float = 1.0, tokenizer: Any = None) -> None:
        CachedDraft.__init__(self)
        TreeModel.__init__(self, model)
        self.tokenizer, self.standalone_model = tokenizer, model
        self.visual_keep = visual_keep
        self.sees_images = True  # whether the target's pixels are also the draft's
        self._placeholders = placeholders_of(model.config)
        self.max_context = self.text.max_context
        self._num_common = self.target_vocab_size = self.vocab_size  # vocabulary shared with the target
        self._renamed: Tensor | None = None  # tokens that are others of the target, [n]
        self._attached: Callable[[], Target | None] = lambda: None
        check_tree_decoding(self)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    def forest(self, answer: AnswerToRecord) -> Forest:
        forest = PathForestGrower(self, answer).grow_all() if self.has_states else super().forest(answer)
        beyond = slice(max(0, int(self.max_context) - answer.first_position), max(0, len(answer.tokens) - 1))
        for found, nothing in ((forest.child_token, -1), (forest.child_logprob, -np.inf), (forest.child_node, -1)):
            found[beyond] = nothing  # a request that is longer than the draft's context goes on without it
        return forest

    def attach(self, target: Target) -> None:
        if self._attached() is target:
            return
        renamed = check_vocabulary(target, self.vocab_size, self.tokenizer)
        self._attached = weakref.ref(target)
        self._num_common = min(self.vocab_size, target.vocab_size)
        self.target_vocab_size = target.vocab_size
        self._renamed = torch.tensor(renamed, device=self.device) if renamed else None
        if self.max_context < target.max_context:
            notify(
                f"the draft's context has {self.max_context} tokens, the target's {target.max_context}: longer requests go on "
                "without a draft from there"
            )
        ours, theirs = self.model.config, target.model.config
        self._placeholders = placeholders_of(theirs)
        self.sees_images = ours.model_type == theirs.model_type and placeholders_of(ours) == self._placeholders
        is_known = all(token < self.vocab_size or token >= target.vocab_size for token in self._placeholders)
        if self.sees_images and not is_known:
            self._read_text_only()

    def _read_text_only(self) -> None:
        self.sees_images = False
        notify(
            "the draft's vision tower does not give the target's number of features for an image: it reads text only"
        )

    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[EncodedPrompt] = ()) -> Sequence[EncodedPrompt]:
        """The rows of a batch, encoded by the draft's own vision tower or without visual tokens."""
        if self.sees_images:
            try:
                return self.encode({**inputs, "input_ids": self._known(inputs["input_ids"])}).prompts
            except UserError:
                if not target_prompts:
                    raise
                self._read_text_only()  # the target has read the same inputs
        return [self._text_of(row.to(self.device)) for row in token_rows(inputs)]

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens with 0 in place of those that the draft does not have."""
        return tokens.where((tokens < self.vocab_size) | visual_tokens(self.model.config, tokens), 0)

    def _text_of(self, tokens: Tensor) -> EncodedPrompt:
        is_text = torch.ones_like(tokens, dtype=torch.bool)
        for placeholder in self._placeholders:
            is_text &= tokens != placeholder
        is_text[-1] = True  # the prompt must not be empty
        tokens = self._known(tokens[is_text])
        return EncodedPrompt(tokens, torch.zeros_like(tokens, dtype=torch.bool))

    def prefill(self, prompt: EncodedPrompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        self.reserve(capacity)
        self._pending = []
        kept = kept_tokens(prompt.is_visual, visual_scores, self.visual_keep)
        if len(kept) == len(prompt):
            self.prefill_prompt(prompt)
        else:
            self.prefill_prompt(prompt.keep(kept), full_prompt=prompt)

    def _append(self, token: int) -> None:
        self._pending.append(token)

    def evaluate_step(self, step: Step, source: FeatureSource | None = None) -> Evaluated:  # type: ignore[override]
        """Logits [n, shared vocabulary]. Features are not read."""
        # Ids in the padding of the target's vocabulary are unknown.
        return TreeModel.evaluate_step(
            self, step._replace(tokens=np.where(step.tokens < self.vocab_size, step.tokens, 0))
        )

    def _logits(self, final: Tensor) -> Tensor:
        logits = super()._logits(final)[:, : self._num_common]
        return logits if self._renamed is None else logits.index_fill(1, self._renamed, -torch.inf)

    def _pending_source(self) -> FeatureSource:
        return {}

    def _commit_pending(self, count: int) -> None:
        self.cache.advance(count)

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        self._make_room_for_pending(len(path) + 1)
        # KV slots of the expanded nodes, which precede the others of the path.
        evaluated = [int(slot) for slot in tree.kv_slot[path] if slot >= 0]
        self.cache.keep(evaluated)
        self._pending += [*tree.token[path][len(evaluated) :].tolist(), next_token]
