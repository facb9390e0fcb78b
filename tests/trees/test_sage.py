"""SAGE against examples worked by hand from the paper's equations, and against a plain implementation of them."""

from __future__ import annotations

from typing import Any

from tests.trees.drafts import TreeSession, same_everywhere


def sage(**tree: Any) -> TreeSession:
    """Candidates below the threshold are dropped unless ``below_threshold`` is given."""
    return TreeSession("sage", **{"below_threshold": "drop", **tree})


SURE = same_everywhere(1.0)  # a single candidate: confidence 1, and every level passes its threshold


# -------- worked examples


# -------- history


def depth_limit(session: TreeSession) -> int:
    """The depth of a tree of confidence 1, which is the limit: D = D_min + 1 (limit - D_min)."""
    return max(len(path) for path in session.grow(SURE))


def test_reset_clears_confidence_and_history() -> None:
    session, draft = sage(), same_everywhere(0.6, 0.3, 0.1)
    fresh = session.grow(draft)
    session.grow(SURE)
    session.update(*[0] * 20)
    assert session.grow(draft) != fresh
    session.grower.reset()
    assert session.grow(draft) == fresh
    session = sage(confidence="current")
    session.update(*[0] * 9)
    session.grower.reset()
    session.update(*[0] * 9)
    assert depth_limit(session) == 8, "the window must fill again"


# -------- budget


def test_a_full_tree_asks_for_no_more_proposals() -> None:
    """Only the root is expanded: proposals for a full tree could not be used."""
    session = sage(n_max=4)
    session.grow(same_everywhere(0.4, 0.3, 0.2, 0.1))
    assert session.expanded == [[()]]


# -------- validation
