"""One way to decode: who drafts, which trees grow, how they are verified, and when it does not pay."""

from __future__ import annotations

from typing import Any

from autotune.documents.condition import Condition
from autotune.drafters.draft import Draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.trees.fallback import Fallback, RoundPrice
from autotune.trees.policy import TreeGrower, parse_policy
from autotune.trees.verification import parse_verification


class LoadedPoint:
    """An operating point at work. Everything it needs is made here, so that switching to it between requests costs nothing;
    several ways may share a draft. Its arguments are those of ``Decoder``.

    Args:
        when: the requests that are decoded so.

    Raises:
        UserError: an unknown tree policy, hyperparameter or verification, a share out of range.
    """

    def __init__(
        self,
        draft: Any | None,
        *,
        tree: Any = None,
        visual_keep: float = 1.0,
        verification: Any = None,
        fallback: RoundPrice | None = None,
        when: Condition | None = None,
    ) -> None:
        if not 0.0 < visual_keep <= 1.0:
            raise UserError(f"visual_keep must be above 0 and at most 1; got {visual_keep}; 1 keeps every visual token")
        self.when = when or Condition()
        self.draft = as_draft(draft)
        self.policy = parse_policy({"policy": "chain"} if tree is None else tree)
        self.grower = TreeGrower(self.policy)
        self.visual_keep = visual_keep
        self.verification = parse_verification(verification)
        self.fallback = Fallback(fallback)
        """With a memory of its own requests."""


def as_draft(draft: Any | None) -> Draft | None:
    """A Hugging Face model drafts independently; a draft stays what it is."""
    return draft if draft is None or hasattr(draft, "propose") else IndependentDraft(draft)
