"""``retrieval``: proposes what followed earlier occurrences of the last tokens in prompt and output, and, if asked for, in
earlier answers. Needs no model. Prompt lookup is its setting with matches of at most three tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autotune.acceptance.trace import Forest
from autotune.cost.draft_costs import ModelShape
from autotune.documents.subnet import Subnet
from autotune.drafters.draft import Coupling, Dimensions, Proposals
from autotune.drafters.forests import AnswerToRecord, ForestGrower
from autotune.drafters.suffix_index import SEPARATOR, Bools, Float32s, Int32s, SuffixIndex
from autotune.errors import UserError
from autotune.execution import EAGER
from autotune.modeling.prompt import EncodedPrompt, placeholders_of, token_rows
from autotune.trees.tree import ROOT, Ints, Retrieved, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target

MAX_MATCH = 16  # tokens
TIMED_PERIOD = 48  # tokens after which the text repeats whose lookups are timed


class RetrievalDraft:
    """Proposes the followers of the longest match of the context's last tokens in the tokens before.

    A follower's probability is its share of the occurrences of that match; ties go to the most recent one. Placeholders of
    images are never proposed. Where nothing matches, nothing is proposed, and a round is a plain step.

    Args:
        min_match: tokens of the shortest match that counts.
        max_match: tokens that are compared.
        corpus_tokens: limit on the earlier answers of this draft that are searched too, in tokens. The oldest answers leave
            first. 0: only the request's own prompt and output are searched, so that proposals depend on nothing else.

    Raises:
        UserError: a value out of range.
    """

    kind = "retrieval"
    description = "a retrieval draft"
    sees_images = False
    reads_placeholders: bool | None = None
    reads_target_cache = False
    has_states = False
    mode = EAGER
    graph_runner = None
    weight_bytes = num_parameters = kv_bytes_per_token = 0
    standalone_model: Any | None = None
    dimensions = Dimensions()
    shape = ModelShape(
        num_layers=0, hidden_size=0, text_parameters=0, vision_parameters=0, kv_bytes_per_token=0, bytes_per_parameter=0
    )
    visual_keep = 1.0  # no effect
    aux_layers: tuple[int, ...] = ()
    capture_sizes: tuple[int, ...] = ()  # no effect
    device = torch.device("cpu")
    vocab_size = 0  # the target's, after ``attach``

    def __init__(self, *, min_match: int = 1, max_match: int = MAX_MATCH, corpus_tokens: int = 0) -> None:
        if not 1 <= min_match <= max_match:
            raise UserError(f"min_match must be from 1 to max_match, {max_match}; got {min_match}; fix that value")
        if corpus_tokens < 0:
            raise UserError(f"corpus_tokens must be at least 0; got {corpus_tokens}; 0 searches no earlier answers")
        self.min_match, self.max_match, self.corpus_tokens = min_match, max_match, corpus_tokens
        self.match_length = 0
        """Length of the match of the root's context in the latest round, in tokens; 0: none."""
        self._target: Target | None = None
        self._answers: deque[Int32s] = deque()  # of earlier requests; the index holds them before the request
        self._request_start = self._answer_start = 0  # of the request and of its output in the index

    def attach(self, target: Target) -> None:
        """See ``Draft``. Any vocabulary will do: only tokens that occurred are proposed."""
        if self._target is target:
            return
        is_excluded: Bools = np.zeros(target.vocab_size, np.bool_)
        is_excluded[[token for token in placeholders_of(target.model.config) if token < target.vocab_size]] = True
        self._target, self.vocab_size = target, target.vocab_size
        self._index = SuffixIndex(min_match=self.min_match, max_match=self.max_match, is_excluded=is_excluded)
        self._answers.clear()
        self._request_start = self._answer_start = 0

    @property
    def subnet(self) -> Subnet:
        return Subnet(visual_keep=self.visual_keep)

    def use_mode(self, name: str) -> None:
        """Nothing changes: there are no forward passes."""

    @property
    def length(self) -> int:
        """Tokens of the request that are indexed."""
        return self._index.length - self._request_start

    def prompts(self, inputs: dict[str, Any], target_prompts: Sequence[EncodedPrompt] = ()) -> list[Ints]:
        return [row.cpu().numpy().astype(np.int64) for row in token_rows(inputs)]

    def prefill(self, prompt: Ints, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Index a prompt. The output of the request before enters the corpus, if there is one."""
        answer = self._index.tokens[self._answer_start :].copy()
        self._index.truncate(self._request_start)
        if self.corpus_tokens > 0 and len(answer) > 0:
            self._add_answer(answer[-self.corpus_tokens :])
        self._index.append(prompt.astype(np.int32))
        self._answer_start = self._index.length

    def _add_answer(self, answer: Int32s) -> None:
        """Put an answer at the end of the corpus; the oldest answers leave it."""
        num_tokens = sum(map(len, self._answers)) + len(answer)
        self._answers.append(answer)
        added = [answer]
        while num_tokens > self.corpus_tokens:
            num_tokens -= len(self._answers.popleft())
            self._index.truncate(0)
            added = [*self._answers]
        for one in added:
            self._index.append(np.append(one, np.int32(SEPARATOR)))
        self._request_start = self._index.length

    def append(self, token: int) -> None:
        self.extend([token])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        self._index.append(np.array(tokens, np.int32))

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int, coupling: Coupling | None = None) -> Proposals:
        """See ``Draft``. Shares of occurrences are not coupled to the target's sampling."""
        num_visible = np.full(len(frontier), self.length)
        found = self.followers(tree.token, tree.parent, frontier, num_visible, num_proposals)
        if frontier[0] == ROOT:
            self.match_length = int(found[2][0])
        return found[:2]

    def followers(
        self, token: Ints, parent: Ints, nodes: Ints, num_visible: Ints, num_proposals: int
    ) -> tuple[Int32s, Float32s, Int32s]:
        """See ``SuffixIndex.followers``; ``num_visible`` counts the tokens of the request."""
        return self._index.followers(token, parent, nodes, self._request_start + num_visible, num_proposals)

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        self.extend([*tree.token[path].tolist(), next_token])

    def continuation(self) -> Retrieved:
        """Continuation of the longest match of the request's last tokens, as one branch of ``MAX_RETRIEVED`` tokens."""
        return self._index.continuation()

    def forest(self, answer: AnswerToRecord) -> Forest:
        return RetrievalForestGrower(self, answer).grow_all()

    def reserve(self, num_tokens: int) -> None:
        """Remove the request's tokens. The index grows when it must."""
        self._index.truncate(self._request_start)
        self._answer_start = self._index.length

    def num_pending_after(self, num_committed: int) -> int:
        """See ``CachedDraft``. It has no effect on the time of a proposal."""
        return num_committed

    def prepare_step(self, kv_length: int, *, num_pending: int = 0) -> None:
        """Index a text of ``kv_length`` tokens that repeats itself, so that a timed lookup finds matches. No token is pending."""
        if self.length != kv_length:
            self.reserve(kv_length)
            self._index.append(np.arange(-kv_length, 0, dtype=np.int32) % min(TIMED_PERIOD, self.vocab_size))
            self._answer_start = self._index.length


class RetrievalForestGrower(ForestGrower):
    """Reads the whole answer; a root sees it up to itself. Every node is evaluated: what two roots see differs."""

    def __init__(self, draft: RetrievalDraft, answer: AnswerToRecord) -> None:
        super().__init__(answer)
        self.draft, self.prompt_length = draft, draft.length
        draft.extend(self.tokens.tolist())
        # Of all evaluated tokens; the first ones are the roots.
        self._token = self.tokens[: self.num_roots].astype(np.int64)
        self._parent = np.full(self.num_roots, -1)
        self._evaluate(np.arange(self.num_roots), last_answer=np.arange(self.num_roots))

    def _evaluate(self, nodes: Ints, last_answer: Ints) -> None:
        num_visible = self.prompt_length + last_answer + 1
        found = self.draft.followers(self._token, self._parent, nodes, num_visible, self.bounds.num_proposals)
        self.evaluated.add(found[0].astype(np.int64), found[1], last_answer, np.zeros((len(nodes), 0), np.int64))

    def _evaluate_children(self, parents: Ints, ranks: Ints, num_before: int) -> Ints:
        evaluated = self.evaluated
        nodes = evaluated.size + np.arange(len(parents))
        self._token = np.concatenate([self._token, evaluated.child_token[parents, ranks]])
        self._parent = np.concatenate([self._parent, parents])
        self._evaluate(nodes, evaluated.last_answer[parents])
        return nodes
