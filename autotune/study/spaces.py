"""Search spaces by name: shipped YAML files and those of users, checked against the tree policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cost.table import TOKENS
from autotune.documents.search_space import Dimension, SearchSpace, ordered
from autotune.errors import UserError, nearest
from autotune.files import data_root

if TYPE_CHECKING:
    from autotune.replay.trace import ForestBounds


def space_path(name: str) -> Path:
    """The YAML file of a shipped search space, or the file of that name.

    Raises:
        UserError: the name is that of neither.
    """
    shipped = {path.stem: path for path in (data_root() / "search_spaces").glob("*.yaml")}
    path = shipped.get(name, Path(name))
    if name not in shipped and not path.suffix:
        raise UserError(f"unknown search space {name!r}; {nearest(name, shipped)}")
    return path


def load_space(name: str, changes: Sequence[str] = ()) -> SearchSpace:
    """A shipped search space by name, or a YAML file, with the changes of ``SearchSpace.changed``.

    Raises:
        UserError: no such space, an unknown policy or hyperparameter, or a value out of range.
    """
    from autotune.trees.policy import POLICIES, parse_policy

    path = space_path(name)
    space = SearchSpace.load(path).changed(changes)
    for policy, dimensions in space.trees.items():
        if policy not in POLICIES:
            raise UserError(f"{path}: unknown tree policy {policy!r}; {nearest(policy, POLICIES)}")
        if POLICIES[policy].template_sizes:
            _check_template(policy, POLICIES[policy].template_sizes, dimensions, path)
            continue
        for name, dimension in dimensions.items():
            for value in dimension.choices or [dimension.low, dimension.high]:
                parse_policy(ordered(policy, {**_largest(dimensions), name: value}), source=f"{path}: {policy}")
    return space


def _check_template(policy: str, sizes: Mapping[str, int], dimensions: dict[str, Dimension], path: Path) -> None:
    for name in (*dimensions, *sizes):
        values = dimensions[name].values if name in dimensions else None
        if not values or not all(isinstance(value, int) and 1 <= value <= sizes.get(name, 0) for value in values):
            ranges = " and ".join(f"{size} from 1 to {largest}" for size, largest in sizes.items())
            raise UserError(f"{path}: {policy} needs integers: {ranges}; give each low and high, or choices")


def _largest(dimensions: dict[str, Dimension]) -> dict[str, Any]:
    return {name: dimension.largest for name, dimension in dimensions.items()}


def bounds_of(space: SearchSpace, max_tokens: int = TOKENS[-1]) -> ForestBounds:
    """Bounds of the forests that traces need for a space: of each policy with all hyperparameters at their upper ends.

    Raises:
        UserError: the space has trees with steps of more than ``max_tokens`` tokens, which the cost table does not
            price.
    """
    from autotune.replay.trace import bounds_for
    from autotune.trees.policy import POLICIES, parse_policy

    largest = {name: POLICIES[name].largest(_largest(dimensions)) for name, dimensions in space.trees.items()}
    policies = [parse_policy(ordered(name, values)) for name, values in largest.items()]
    for policy in policies:
        if policy.max_step > max_tokens:
            raise UserError(
                f"space {space.name}: steps are priced up to {max_tokens} tokens; {policy.policy} verifies up to "
                f"{policy.size.nodes + 1} and drafts up to {policy.size.width} at once; narrow the space"
            )
    return bounds_for(policies)
