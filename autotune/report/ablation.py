"""What each dimension of the search is worth: the best with it at its default against the best with it free. All predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.documents.configuration import PUBLISHED_DEFAULTS, Configuration
from autotune.report.sources import Sources
from autotune.search.evaluator import Candidate
from autotune.study.records import ScreenedSubnet


@dataclass(frozen=True)
class Ablation:
    """What is lost if one dimension stays at its default while all others are free."""

    dimension: str
    fixed_at: str
    fixed_ms: float | None
    """Predicted ms a token of the best then; None: nothing of that kind was tried."""
    free_ms: float
    """Of the best of all, in the same stage."""
    stage: str

    @property
    def gain(self) -> float | None:
        """Share of decoding time that the freedom saves."""
        return None if self.fixed_ms is None else 1 - self.free_ms / self.fixed_ms


SCREENING, TREES = "chains of screening", "trees by replay"


def default_subnet(sources: Sources, draft: str) -> tuple[tuple[float, ...], int | None, float]:
    """Heads, layer and visual tokens of the draft's paper: all heads, the last layer that it can read, and the share of
    visual tokens of its published default; where that was not screened, the largest that was.
    """
    of_draft = [one.subnet for one in sources.screened if one.draft == draft]
    keeps = {subnet.visual_keep for subnet in of_draft}
    published = PUBLISHED_DEFAULTS.get(
        sources.kinds.get(draft, ""), Configuration(tree={"policy": "chain"})
    ).visual_keep
    layers = [subnet.injection_layer for subnet in of_draft if subnet.injection_layer is not None]
    keep = published if published in keeps else max(keeps)
    return max(subnet.head_shares for subnet in of_draft), max(layers, default=None), keep


def dimension_worth(sources: Sources) -> list[Ablation]:
    """Each dimension fixed at its default in turn: those of subnets over the chains of screening, draft and tree over the
    trees of the subnets that went on. All of it is predicted.
    """
    found: list[Ablation] = []
    screened = sources.screened
    if screened:
        defaults = {draft: default_subnet(sources, draft) for draft in {one.draft for one in screened}}
        is_default: dict[str, Callable[[ScreenedSubnet], bool]] = {
            "heads": lambda one: one.subnet.head_shares == defaults[one.draft][0],
            "injection layer": lambda one: one.subnet.injection_layer == defaults[one.draft][1],
            "visual tokens": lambda one: one.subnet.visual_keep == defaults[one.draft][2],
        }
        said = {
            "heads": "all heads",
            "injection layer": "the last layer",
            "visual tokens": " or ".join(f"{100 * keep:g} %" for keep in sorted({d[2] for d in defaults.values()})),
        }
        free = min(one.ms_per_token for one in screened)
        for dimension, at_default in is_default.items():
            kept = [one for one in screened if at_default(one)]
            if len(kept) < len(screened):
                best = min((one.ms_per_token for one in kept), default=None)
                found.append(Ablation(dimension, said[dimension], best, free, SCREENING))
    if sources.candidates:
        free = sources.candidates[0].ms_per_token
        first = sources.drafts[0] if sources.drafts else None
        if len({one.configuration.draft for one in sources.candidates}) > 1 and first is not None:
            best = min((c.ms_per_token for c in sources.candidates if c.configuration.draft == first), default=None)
            found.append(Ablation("draft", first, best, free, TREES))
        published = published_trees(sources)
        if published:
            name, best = min(published.items(), key=lambda one: one[1])
            found.append(Ablation("tree", f"the best published default, {name}", best, free, TREES))
    return sorted(found, key=lambda one: -(one.gain or 0.0))


def published_trees(sources: Sources) -> dict[str, float]:
    """Predicted ms a token of each published default tree, at the best of the subnets that went on; those that the traces
    hold.
    """
    if sources.evaluator is None:
        return {}
    found: dict[str, float] = {}
    for name, default in PUBLISHED_DEFAULTS.items():
        of_places = [Configuration(tree=default.tree, draft=d, subnet=s) for d, s in sources.evaluator.traces]
        able = [one for one in of_places if sources.evaluator.can_replay(one)]
        if able:
            found[name] = min(sources.evaluator.evaluate(one).ms_per_token for one in able)
    return found


@dataclass(frozen=True)
class Rung:
    """The best with so many dimensions free."""

    label: str
    best: ScreenedSubnet


def ladder(sources: Sources) -> list[Rung]:
    """From the whole draft that the user named first, one dimension after the other is set free; with its best chain. Rungs
    at which there is nothing more to choose from are left out.
    """
    if not sources.screened:
        return []
    first = next((d for d in sources.drafts if any(one.draft == d for one in sources.screened)), None)
    if first is None:
        return []
    heads, layer, keep = default_subnet(sources, first)
    free: list[tuple[str, Callable[[ScreenedSubnet], bool]]] = [
        (f"{first}, chain alone", lambda one: one.subnet.visual_keep == keep),
        ("+ visual tokens", lambda one: one.subnet.head_shares == heads),
        ("+ heads", lambda one: one.subnet.injection_layer == layer),
        ("+ injection layer", lambda one: one.draft == first),
        ("+ draft", lambda one: True),
    ]
    rungs: list[Rung] = []
    num_before = 0
    for number, (label, _) in enumerate(free):
        allowed = [one for one in sources.screened if all(still(one) for _, still in free[number:])]
        if len(allowed) > num_before:
            rungs.append(Rung(label, min(allowed, key=lambda one: one.ms_per_token)))
            num_before = len(allowed)
    return rungs


@dataclass(frozen=True)
class PolicyBest:
    """The fastest tree of a policy, and the policy's published default beside it."""

    policy: str
    best: Candidate
    default_ms: float | None
    """At the same subnet; None: there is none, or the trace does not hold it."""


def policies(sources: Sources) -> list[PolicyBest]:
    """A row for each policy, the fastest first."""
    best: dict[str, Candidate] = {}
    for candidate in sources.candidates:
        best.setdefault(candidate.policy, candidate)
    found = []
    for policy, candidate in best.items():
        default_ms = None
        if policy in PUBLISHED_DEFAULTS and sources.evaluator is not None:
            default = candidate.configuration.model_copy(update={"tree": PUBLISHED_DEFAULTS[policy].tree})
            if sources.evaluator.can_replay(default):
                default_ms = sources.evaluator.evaluate(default).ms_per_token
        found.append(PolicyBest(policy, candidate, default_ms))
    return found
