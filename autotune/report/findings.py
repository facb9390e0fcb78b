"""Numbers out of a study's records: Pareto fronts, the grid of subnets, importance of hyperparameters. Nothing here draws,
and nothing needs a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.documents.configuration import DraftVariant
from autotune.report.sources import Sources
from autotune.search.evaluator import Candidate
from autotune.study.records import ScreenedSubnet
from autotune.trees.policy import parse_policy

# ------------------------------------------------------------------------------------------------------------ Pareto fronts


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other one beats in both predicted time and nodes a round: from the smallest trees to the fastest."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.nodes_per_round, *one.rank)):
        if not found or candidate.ms_per_token < found[-1].ms_per_token:
            found.append(candidate)
    return found


def fastest_by_size(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Of each policy the fastest at every whole number of nodes a round, smallest trees first."""
    found: dict[str, dict[int, Candidate]] = {}
    for candidate in candidates:  # the fastest first
        found.setdefault(candidate.policy, {}).setdefault(round(candidate.nodes_per_round), candidate)
    return {policy: [of_size[size] for size in sorted(of_size)] for policy, of_size in sorted(found.items())}


@dataclass(frozen=True)
class PlaceBest:
    """The fastest configuration of a draft and subnet."""

    best: Candidate
    draft_mib: float | None
    """Memory of the draft and its cache; None where the cost table does not say."""
    is_on_front: bool
    """No subnet is both faster and smaller."""


def fastest_by_place(sources: Sources) -> list[PlaceBest]:
    """Of every draft and subnet, the smallest draft first."""
    best: dict[DraftVariant, Candidate] = {}
    for candidate in sources.candidates:  # the fastest first
        c = candidate.configuration
        best.setdefault((c.draft or "", c.subnet), candidate)
    sizes: dict[DraftVariant, float | None] = {}
    for place, candidate in best.items():
        known = sources.evaluator is not None and place in sources.evaluator.traces
        policy = parse_policy(candidate.configuration.tree)
        sizes[place] = sources.evaluator.draft_mib(place, policy) if sources.evaluator and known else None
    found = []
    fastest_ms = float("inf")
    for place in sorted(best, key=lambda one: (sizes[one] is None, sizes[one] or 0.0, best[one].rank)):
        is_on_front = sizes[place] is not None and best[place].ms_per_token < fastest_ms
        fastest_ms = min(fastest_ms, best[place].ms_per_token)
        found.append(PlaceBest(best[place], sizes[place], is_on_front))
    return found


# ----------------------------------------------------------------------------------------------------------------- subnets


@dataclass(frozen=True)
class Grid:
    """Screened subnets of one draft that read one layer: predicted speedups by heads (rows) and visual tokens."""

    draft: str
    layer: int | None
    heads: list[tuple[float, ...]]
    keeps: list[float]
    speedup: list[list[float | None]]


def grids(screened: Sequence[ScreenedSubnet]) -> list[Grid]:
    """A grid for every draft and layer, layers in their order."""
    found = []
    keeps = sorted({one.subnet.visual_keep for one in screened})
    for draft, layer in sorted(
        {(one.draft, one.subnet.injection_layer) for one in screened}, key=lambda place: (place[0], place[1] or 0)
    ):
        known = {
            (one.subnet.head_shares, one.subnet.visual_keep): one.speedup
            for one in screened
            if (one.draft, one.subnet.injection_layer) == (draft, layer)
        }
        heads = sorted({shares for shares, _ in known}, reverse=True)
        found.append(Grid(draft, layer, [*heads], keeps, [[known.get((h, keep)) for keep in keeps] for h in heads]))
    return found


# --------------------------------------------------------------------------------------------------------------- importance


@dataclass(frozen=True)
class Importance:
    """Of one group of trials: which parameters their predicted times depend on."""

    group: str
    num_trials: int
    shares: dict[str, dict[str, float]]
    """By evaluator, then parameter, the most important of the first one first."""


def importance(trials: Sequence[Any], *, min_trials: int = 20, seed: int = 0) -> list[Importance]:
    """By Optuna's fANOVA and PED-ANOVA. The groups are the trials of each policy, whose hyperparameters only they have, and,
    where there are several policies, all trials by the parameters that they have in common; groups of fewer than
    ``min_trials`` are left out.
    """
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator, get_param_importances

    groups: dict[str, list[Any]] = {}
    for trial in trials:
        groups.setdefault(str(trial.params.get("policy")), []).append(trial)
    if len(groups) > 1:
        groups = {"all trials": list(trials), **groups}
    found = []
    for group, of_group in groups.items():
        if len(of_group) < min_trials:
            continue
        common = set.intersection(*(set(trial.params) for trial in of_group))
        varied = sorted(name for name in common if len({repr(trial.params[name]) for trial in of_group}) > 1)
        if not varied:
            continue
        study = optuna.create_study()
        study.add_trials(of_group)
        evaluators = {"fANOVA": FanovaImportanceEvaluator(seed=seed), "PED-ANOVA": PedAnovaImportanceEvaluator()}
        shares = {
            name: get_param_importances(study, evaluator=evaluator, params=varied)
            for name, evaluator in evaluators.items()
        }
        order = sorted(varied, key=lambda name: -shares["fANOVA"][name])
        of_kind = {kind: {name: float(known[name]) for name in order} for kind, known in shares.items()}
        found.append(Importance(group, len(of_group), of_kind))
    return found
