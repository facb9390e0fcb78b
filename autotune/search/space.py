"""Search spaces: YAML files in Optuna's own words, and the configurations they hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from autotune.documents.subnet import Subnet
from autotune.errors import UserError, nearest
from autotune.files import Document, content_key, data_root

if TYPE_CHECKING:
    import optuna

    from autotune.documents.configuration import Tree
    from autotune.trees.policy import Policy


MAX_ENUMERATED = 3000
# What static trees are searched by: Sequoia's dynamic programme makes a tree of them.
LARGEST_STATIC = {"budget": 128, "depth": 24}
STATIC_FIELDS = tuple(LARGEST_STATIC)


class Dimension(Document):
    """Values of one hyperparameter: ``choices``, or a range with ``low``, ``high`` and perhaps ``step`` or ``log``."""

    choices: list[Any] | None = Field(default=None, min_length=1)
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> Dimension:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.step is not None or self.log:
                raise ValueError("choices stand alone; give either choices, or low and high")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give either choices, or low and high")
        if self.low > self.high:
            raise ValueError(f"low must be at most high, which is {self.high}")
        if self.step is not None and self.step <= 0:
            raise ValueError("step must be above 0")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs a low above 0, and no step")
        return self

    @property
    def values(self) -> list[Any] | None:
        """All values of a finite dimension; None of a continuous one."""
        if self.choices is not None:
            return self.choices
        if isinstance(self.low, int) and isinstance(self.high, int):
            return list(range(self.low, self.high + 1, int(self.step or 1)))
        return None

    def at(self, share: float) -> Any:
        """The value at a share, in [0, 1), of the way through: equal stretches for equally many values, of the logarithm
        where ``log``.
        """
        if self.choices is not None:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None and self.high is not None
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        if self.step is not None:
            value = self.low + self.step * int(share * (1 + (self.high - self.low) // self.step))
        else:
            low, high = float(self.low), float(self.high) + is_whole
            value = low * (high / low) ** share if self.log else low + share * (high - low)
        return int(value) if is_whole else float(value)

    @property
    def distribution(self) -> Any:
        """In Optuna's words."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices is not None:
            return CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, step=int(self.step or 1), log=self.log)
        return FloatDistribution(self.low, self.high, step=self.step, log=self.log)

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """A value, by Optuna's sampler."""
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, step=int(self.step or 1), log=self.log)
        assert self.low is not None and self.high is not None
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


class SearchSpace(Document, kind="search-space"):
    """Which configurations a search may choose: subnets of its drafts, and trees. ``static`` is searched by the budget and
    depth of Sequoia's trees, the other policies by their hyperparameters.
    """

    name: str
    description: str = ""
    heads: list[float | tuple[float, float, float]] = Field(default=[1.0], min_length=1)
    """Shares of heads that supernets keep: in all blocks, or in each."""
    injection_layers: Literal["last", "all"] | list[int] = "last"
    """Layers of the target that supernets read: of those they can, or these."""
    visual_keep: Dimension
    survivors: int = Field(default=4, ge=1)
    """So many subnets have their trees searched: the best of a screening by chains, if there are more."""
    trees: dict[str, dict[str, Dimension]] = Field(min_length=1)

    def subnets(self, draft: str, own: Subnet, readable: Sequence[int]) -> list[Subnet]:
        """All subnets of a draft. ``own`` is the whole of it; the layers of the target that a supernet can read are
        ``readable``, none for other drafts.

        Raises:
            UserError: a layer that the draft cannot read.
        """
        if not readable:
            return [own.model_copy(update={"visual_keep": keep}) for keep in self.visual_keep.values or []]
        if isinstance(self.injection_layers, list):
            for layer in self.injection_layers:
                if layer not in readable:
                    known = ", ".join(map(str, readable))
                    raise UserError(
                        f"space {self.name}: {draft} can read the target's layers {known}; got {layer}; name one of them, or all"
                    )
            layers: Sequence[int] = self.injection_layers
        else:
            layers = readable if self.injection_layers == "all" else readable[-1:]
        return [
            Subnet(
                heads=None if Subnet(heads=share).head_shares == (1.0, 1.0, 1.0) else share,  # the whole has one name
                visual_keep=keep,
                injection_layer=layer,
            )
            for share, layer, keep in itertools.product(self.heads, layers, self.visual_keep.values or [])
        ]

    def enumerated(self, policy: str) -> list[Tree] | None:
        """All trees of a policy with few of them, or None. Replaying one costs less than sampling one."""
        axes = [dimension.values for dimension in self.trees[policy].values()]
        if any(axis is None for axis in axes) or math.prod(len(axis or ()) for axis in axes) > MAX_ENUMERATED:
            return None
        names = list(self.trees[policy])
        found = [
            ordered(policy, dict(zip(names, values, strict=True)))
            for values in itertools.product(*(axis for axis in axes if axis is not None))
        ]
        return list({content_key(tree): tree for tree in found}.values())

    def sweep(self, policy: str, count: int, seed: int, *, first: int = 0) -> list[Tree]:
        """Trees of a policy that fill the space evenly: those of a scrambled Sobol sequence from the ``first`` on."""
        from scipy.stats import qmc

        names = list(self.trees[policy])
        sequence = qmc.Sobol(len(names), rng=seed)
        if first > 0:
            sequence.fast_forward(first)
        return [
            ordered(policy, {n: self.trees[policy][n].at(float(share)) for n, share in zip(names, shares, strict=True)})
            for shares in sequence.random(count)
        ]

    def suggest(self, trial: optuna.Trial, policies: list[str]) -> Tree:
        """A tree of one of the policies, by Optuna's sampler."""
        policy = trial.suggest_categorical("policy", policies)
        values = {name: dimension.suggest(trial, f"{policy}.{name}") for name, dimension in self.trees[policy].items()}
        return ordered(policy, values)

    def parameters(self, tree: Tree) -> dict[str, Any]:
        """Those of which ``suggest`` makes a tree."""
        policy = tree["policy"]
        return {"policy": policy} | {f"{policy}.{name}": tree[name] for name in self.trees[policy]}


def ordered(policy: str, values: dict[str, Any]) -> Tree:
    """A tree whose ordered pairs of hyperparameters, sampled freely, are put in order."""
    from autotune.trees.policy import POLICIES

    values = dict(values)
    for low, high in POLICIES[policy].ordered:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            values[low], values[high] = values[high], values[low]
    return {"policy": policy, **values}


def space_path(name: str) -> Path:
    """The YAML file of a shipped search space, or the file of that name.

    Raises:
        UserError: neither exists.
    """
    shipped = {path.stem: path for path in (data_root() / "search_spaces").glob("*.yaml")}
    path = shipped.get(name, Path(name))
    if name not in shipped and not path.suffix:
        raise UserError(f"unknown search space {name!r}; {nearest(name, shipped)}")
    if not path.exists():
        raise UserError(f"{path}: no such file; check the path")
    return path


def load_space(name: str) -> SearchSpace:
    """A shipped search space by name, or a YAML file.

    Raises:
        UserError: no such space; a policy or hyperparameter that does not exist.
    """
    from autotune.trees.policy import POLICIES, parse_policy

    path = space_path(name)
    space = SearchSpace.load(path)
    if space.visual_keep.values is None:
        raise UserError(f"{path}: visual_keep must list its choices, for each is recorded; give choices")
    for keep in space.visual_keep.values:
        if not isinstance(keep, int | float) or not 0.0 < keep <= 1.0:
            raise UserError(f"{path}: visual_keep is a share above 0 and at most 1; got {keep!r}; mend its choices")
    for policy, dimensions in space.trees.items():
        if policy not in POLICIES:
            raise UserError(f"{path}: unknown tree policy {policy!r}; {nearest(policy, POLICIES)}")
        fields = [field for field in POLICIES[policy].model_fields if field != "policy"]
        if policy == "static":
            _check_static(dimensions, path)
            continue
        for dimension in dimensions:
            if dimension not in fields:
                raise UserError(f"{path}: {policy} has no hyperparameter {dimension!r}; {nearest(dimension, fields)}")
        for field, values in dimensions.items():
            for value in values.choices or [values.low, values.high]:
                tree = ordered(policy, {**_widest(dimensions), field: value})
                parse_policy(tree, source=f"{path}: {policy}")
    return space


def _check_static(dimensions: dict[str, Dimension], path: Path) -> None:
    for name in (*dimensions, *STATIC_FIELDS):
        if name not in STATIC_FIELDS:
            raise UserError(f"{path}: static trees have no {name!r} to search; {nearest(name, STATIC_FIELDS)}")
        values = dimensions[name].values if name in dimensions else None
        if not values or not all(isinstance(v, int) and 1 <= v <= LARGEST_STATIC[name] for v in values):
            raise UserError(
                f"{path}: static needs {name}, whole numbers from 1 to {LARGEST_STATIC[name]}; give it low and high, or choices"
            )


def _widest(dimensions: dict[str, Dimension]) -> dict[str, Any]:
    """One value of every dimension: the upper end, or the last choice."""
    return {name: d.choices[-1] if d.choices is not None else d.high for name, d in dimensions.items()}


def largest_policies(space: SearchSpace) -> Iterator[Policy]:
    """For each policy of the space, the one with every hyperparameter at its upper end."""
    from autotune.trees.policy import parse_policy
    from autotune.trees.static import StaticPolicy

    for policy, dimensions in space.trees.items():
        widest = _widest(dimensions)
        if policy == "static":  # the deepest chain, and then some children of the root
            chain = [(0,) * depth for depth in range(1, min(widest["depth"], widest["budget"]) + 1)]
            paths = chain + [(rank,) for rank in range(1, min(10, 1 + widest["budget"] - len(chain)))]
            yield StaticPolicy(paths=tuple(paths))
        else:
            yield parse_policy(ordered(policy, widest))
