"""One request on a target and a draft that it shares with other requests: prefill, then rounds or plain steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from autotune.drafters.draft import Draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling.host import host_ms, limited_threads, now_ms
from autotune.modeling.target import Prefilled
from autotune.runtime.generate_args import Request
from autotune.runtime.ownership import Ownership
from autotune.runtime.points import LoadedPoint
from autotune.runtime.rounds import Round
from autotune.trees.policy import NOTHING


class Session:
    """Decodes one request: ``prefill``, then ``advance`` until the request is finished, then ``close``.

    The target and the draft are configured for the request by ``prefill`` and restored by ``close``.

    Args:
        ownership: of the target and the draft; taking them over closes the session.
        point: the operating point that decodes the request.
        capacity: KV cache length that the request can reach, trees included.
        threads: CPU threads after the prefill; None: as many as torch uses.
        prefill_threads: CPU threads of prefills.
    """

    def __init__(
        self,
        request: Request,
        point: LoadedPoint,
        *,
        rounds: Round,
        ownership: Ownership,
        capacity: int,
        threads: int | None,
        prefill_threads: int | None = None,
    ) -> None:
        self.request = request
        self.point = point
        self.target = rounds.target
        self.draft: Draft | None = None  # the point's, once the session is open
        self.capacity, self.threads, self.prefill_threads = capacity, threads, prefill_threads
        self._rounds, self._ownership = rounds, ownership
        self._prefilled: Prefilled | None = None
        self._retrieval: RetrievalDraft | None = None  # of trees that use it
        self._retrieved = NOTHING  # what it finds after the last emitted token
        self._cleanup = ExitStack()

    def prefill(self) -> list[int]:
        """Open the session and prefill the target; returns the first new token."""
        request, stats = self.request, self.request.stats
        with self._ownership.running(), torch.inference_mode(), limited_threads(self.prefill_threads):
            started = now_ms(self.target.device)
            self._open()
            self.target.reserve(self.capacity)
            rankings = [self.point.visual_ranking] if self.draft is not None and self.point.visual_keep < 1.0 else []
            self._prefilled = self.target.prefill(request.prompt, visual_rankings=rankings)
            token = request.sampler.token(self._prefilled.logits, len(request.prompt))
            emitted = request.emit([token])
            stats.prompt_tokens, stats.new_tokens = len(request.prompt), 1
            stats.target_prefill_ms += now_ms(self.target.device) - started
        self._leave_draft_behind()
        return emitted

    def _leave_draft_behind(self) -> None:
        """Go on without the draft, once the request is longer than its context."""
        if self.draft is not None and len(self.request.prompt) + len(self.request.tokens) > self.draft.max_context:
            self.draft = None

    def close(self) -> None:
        """Restore target and draft. Closing twice does nothing."""
        self._cleanup.close()

    def _open(self) -> None:
        point = self.point
        self._ownership.close_request = self.close
        if point.draft is not None:
            point.draft.attach(self.target)  # another decoder with this draft may have its own target
        if point.policy.uses_retrieval:
            self._retrieval = self._rounds.retrieval
            self._retrieval.attach(self.target)
        point.grower.reset()
        point.fallback.begin_request()
        draft = self.draft = point.draft
        self._configure(self.target, output_layers=() if draft is None else draft.aux_layers)
        if draft is not None:
            self._configure(draft, visual_keep=point.visual_keep, capture_sizes=self._rounds.capture_sizes)

    def _configure(self, model: Any, **settings: Any) -> None:
        """Set the mode and other attributes of a model until the session is closed."""
        self._cleanup.callback(model.use_mode, model.mode)
        model.use_mode(self._rounds.mode)
        for name, value in settings.items():
            self._cleanup.callback(setattr, model, name, getattr(model, name))
            setattr(model, name, value)

    def advance(self) -> list[int]:
        """Run a round, or a plain step where there is no draft or rounds do not pay at present; returns its tokens."""
        stats = self.request.stats
        with self._ownership.running(), torch.inference_mode():
            started = host_ms()  # the round or prefill before ended with a transfer
            if stats.rounds == 0 and self.draft is not None:
                self._prefill_draft(self.draft)
                stats.draft_prefill_ms = now_ms(self.target.device) - started
            with limited_threads(self.threads):
                tokens = self._plain_step() if self.draft is None or self.point.fallback.is_plain else self._round()
            emitted = self.request.emit(tokens)
            stats.accepted_lengths.append(min(len(tokens) - 1, len(emitted)))
            stats.new_tokens += len(emitted)
            stats.decode_ms += host_ms() - started
        self._leave_draft_behind()
        return emitted

    def _prefill_draft(self, draft: Draft) -> None:
        """Prefill the draft: not before the first new token is out, which it does not delay."""
        assert self._prefilled is not None
        scores = self._prefilled.visual_scores.get(self.point.visual_ranking)
        with limited_threads(self.prefill_threads):  # a draft with an image encoder of its own runs it for its prompt
            prompt = self.request.call.draft_prompt(draft, self.request.row)
            draft.prefill(prompt, scores, capacity=self.capacity)
        draft.append(self.request.tokens[-1])
        if self._retrieval is not None:
            text = self.request.call.draft_prompt(self._retrieval, self.request.row)
            self._retrieval.prefill(text, None, capacity=self.capacity)
            self._retrieve([self.request.tokens[-1]])

    def _retrieve(self, tokens: Sequence[int]) -> None:
        """Give emitted tokens to the retrieval, where the tree uses it."""
        if self._retrieval is not None:
            self._retrieval.extend(tokens)
            self._retrieved = self._retrieval.continuation()

    def _plain_step(self) -> list[int]:
        token, stats = self._rounds.plain_step(self.request), self.request.stats
        stats.target_forwards += 1
        stats.plain_steps += 1
        stats.verified_nodes.append(0)
        if self.draft is not None:
            self.draft.append(token)
            self._retrieve([token])
            self.point.fallback.count_plain_step()
        return [token]

    def _round(self) -> list[int]:
        point, stats = self.point, self.request.stats
        path, next_token, draft_forwards = self._rounds.run(self.request, point, self._retrieved)
        tree = point.grower.tree
        num_nodes = int(tree.size[0]) - 1
        stats.draft_forwards += draft_forwards
        stats.target_forwards += 1
        stats.verified_nodes.append(num_nodes)
        stats.acceptance_counts.observe(tree, path)
        point.fallback.update(draft_forwards=draft_forwards, nodes=num_nodes, accepted=len(path))
        tokens = [*tree.token[path].tolist(), next_token]
        point.grower.update(len(path), tokens[0])
        self._retrieve(tokens)
        return tokens
