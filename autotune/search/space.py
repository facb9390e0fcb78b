"""Search spaces: YAML files in Optuna's own words, and the configurations they hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from autotune.errors import UserError, nearest
from autotune.files import Document, content_key, data_root, parse, read_yaml
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import POLICIES, Policy, parse_policy
from autotune.trees.static import StaticPolicy
from autotune.trees.verification import LosslessVerification, Verification

if TYPE_CHECKING:
    import optuna

MAX_ENUMERATED = 3000
# What static trees are searched by: Sequoia's dynamic programme makes a tree of them.
LARGEST_STATIC = {"budget": 128, "depth": 24}
STATIC_FIELDS = tuple(LARGEST_STATIC)
# Pairs of hyperparameters of which the second must not be below the first: sampled freely, then put in order.
_ORDERED = (("d_min", "d_max"), ("d_min", "depth_cap"), ("w_min", "w_max"), ("lower", "upper"))


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

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """A value, by Optuna's sampler."""
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, step=int(self.step or 1), log=self.log)
        assert self.low is not None and self.high is not None
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


class Configuration(Document):
    """One way to decode: a tree policy with its hyperparameters, and the share of visual tokens that the draft sees."""

    tree: dict[str, Any]
    visual_keep: float
    verification: Verification = Field(default_factory=LosslessVerification)
    fallback: RoundPrice | None = None

    @property
    def key(self) -> str:
        """Content hash: equal configurations have equal keys."""
        fallback = None if self.fallback is None else self.fallback.model_dump()
        return content_key(
            [parse_policy(self.tree).model_dump(), self.visual_keep, self.verification.model_dump(), fallback]
        )

    @property
    def label(self) -> str:
        """For people: the policy with what differs from its defaults."""
        policy = parse_policy(self.tree)
        defaults = type(policy)()
        changed = {
            n: v
            for n, v in policy.model_dump().items()
            if n != "policy" and (v != getattr(defaults, n) or policy.policy == "chain")
        }
        words = [f"{n}={v:.2f}" if isinstance(v, float) else f"{n}={v}" for n, v in changed.items()]
        if isinstance(policy, StaticPolicy):
            words = [f"nodes={policy.max_nodes}", f"depth={policy.max_depth}"]
        if not self.verification.is_lossless:
            words.append("LOSSY")
        return f"{policy.policy}({', '.join(words)}) keep={self.visual_keep:g}"


class SearchSpace(Document):
    """Which configurations a search may choose. ``static`` is searched by the budget and depth of Sequoia's trees, the
    other policies by their hyperparameters.
    """

    name: str
    description: str = ""
    visual_keep: Dimension
    trees: dict[str, dict[str, Dimension]] = Field(min_length=1)

    def enumerated(self, policy: str) -> Iterator[Configuration] | None:
        """All configurations of a policy with few of them, or None. Replaying one costs less than sampling one."""
        axes = [dimension.values for dimension in self.trees[policy].values()]
        keeps = self.visual_keep.values
        if keeps is None or any(axis is None for axis in axes):
            return None
        size = len(keeps)
        for axis in axes:
            size *= len(axis or ())
        if size > MAX_ENUMERATED:
            return None
        names = list(self.trees[policy])
        return (
            configuration(policy, dict(zip(names, values, strict=True)), keep)
            for keep in keeps
            for values in itertools.product(*(axis for axis in axes if axis is not None))
        )

    def sweep(self, policy: str, count: int, seed: int) -> Iterator[tuple[Configuration, dict[str, Any]]]:
        """Configurations of a policy that fill the space evenly, by a scrambled Sobol sequence; each with the parameters of
        which ``suggest`` would make it.
        """
        from scipy.stats import qmc

        names = list(self.trees[policy])
        dimensions = [*self.trees[policy].values(), self.visual_keep]
        sequence = qmc.Sobol(len(dimensions), rng=seed)
        for shares in sequence.random(count):
            values = [dimension.at(float(share)) for dimension, share in zip(dimensions, shares, strict=True)]
            of_tree, keep = dict(zip(names, values[:-1], strict=True)), values[-1]
            parameters = {"policy": policy, "visual_keep": keep} | {f"{policy}.{n}": v for n, v in of_tree.items()}
            yield configuration(policy, of_tree, keep), parameters

    def suggest(self, trial: optuna.Trial, policies: list[str]) -> Configuration:
        """A configuration of one of the policies, by Optuna's sampler."""
        policy = trial.suggest_categorical("policy", policies)
        values = {name: dimension.suggest(trial, f"{policy}.{name}") for name, dimension in self.trees[policy].items()}
        return configuration(policy, values, self.visual_keep.suggest(trial, "visual_keep"))


def configuration(policy: str, values: dict[str, Any], visual_keep: float) -> Configuration:
    """A configuration with its ordered pairs put in order."""
    values = dict(values)
    for low, high in _ORDERED:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            values[low], values[high] = values[high], values[low]
    return Configuration(tree={"policy": policy, **values}, visual_keep=visual_keep)


def load_space(name: str) -> SearchSpace:
    """A shipped search space by name, or a YAML file.

    Raises:
        UserError: no such space; a policy or hyperparameter that does not exist.
    """
    shipped = {path.stem: path for path in (data_root() / "search_spaces").glob("*.yaml")}
    path = shipped.get(name, Path(name))
    if name not in shipped and not path.suffix:
        raise UserError(f"unknown search space {name!r}; {nearest(name, shipped)}")
    space = parse(SearchSpace, "search-space", read_yaml(path), source=path)
    for keep in space.visual_keep.values or []:
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
                tree = configuration(policy, {**_widest(dimensions), field: value}, 1.0).tree
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
    for policy, dimensions in space.trees.items():
        widest = _widest(dimensions)
        if policy == "static":  # the deepest chain, and then some children of the root
            chain = [(0,) * depth for depth in range(1, min(widest["depth"], widest["budget"]) + 1)]
            paths = chain + [(rank,) for rank in range(1, min(10, 1 + widest["budget"] - len(chain)))]
            yield StaticPolicy(paths=tuple(paths))
        else:
            yield parse_policy(configuration(policy, widest, 1.0).tree)


# What users run today (shared defaults of serving engines and papers): every search compares its winner with these.
PUBLISHED_DEFAULTS: dict[str, Configuration] = {
    "chain": Configuration(tree={"policy": "chain", "depth": 5}, visual_keep=1.0),
    "star": Configuration(tree={"policy": "chain", "depth": 6}, visual_keep=1.0),
    "eagle2": Configuration(tree={"policy": "eagle2"}, visual_keep=1.0),
    "dream": Configuration(tree={"policy": "eagle2", "depth": 6, "k": 4, "budget": 32}, visual_keep=0.75),
    "sage": Configuration(tree={"policy": "sage"}, visual_keep=0.2),
    "wetap": Configuration(tree={"policy": "wetap"}, visual_keep=1.0),
}
