"""Search spaces: YAML files with Optuna's parameter names, and the subnets and trees that they contain."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from autotune.documents.subnet import OPERATORS_WITH_RATIO, HeadShares, Operator, Share, Subnet, VisualRanking, Weights
from autotune.errors import UserError, nearest
from autotune.files import Document, content_key
from autotune.strict_parsing import parse_yaml

if TYPE_CHECKING:
    import optuna

    from autotune.documents.configuration import Tree

MAX_ENUMERATED = 3000
MAX_VALUES = 100_000
NAMES = {
    "heads": "heads",
    "injection-layer": "injection_layers",
    "operator": "operators",
    "operator-ratio": "operator_ratios",
    "vocabulary": "vocabularies",
    "weights": "weights",
    "keep": "visual_keep",
    "ranking": "visual_rankings",
}
"""Names of the choices of a draft in ``--set NAME=VALUE``, and the keys of a space that they set."""


def _listed(value: Any) -> Any:
    """A list of values, from a file that may have one value alone; lists in it are tuples. The names of all layers or
    the last one stay as they are.
    """
    if isinstance(value, list):
        return [tuple(item) if isinstance(item, list) else item for item in value]
    return value if value in ("last", "all") else [value]


Several = BeforeValidator(_listed)


class Dimension(Document):
    """Values of one hyperparameter: ``choices``, or a range from ``low`` to ``high`` with an optional ``step`` or
    ``log``. In a file, a value alone is the only choice, and a list has the choices.
    """

    choices: list[Any] | None = Field(default=None, min_length=1)
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = Field(default=None, gt=0)
    log: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_choices(cls, content: Any) -> Any:
        return content if isinstance(content, dict | Dimension) else {"choices": _listed(content)}

    @model_validator(mode="after")
    def _has_one_form(self) -> Dimension:
        others = self.model_dump(exclude={"choices"}, exclude_defaults=True)
        if self.choices is not None and not others:
            return self
        if self.choices is not None or self.low is None or self.high is None:
            raise ValueError("give either choices, or low and high")
        span, step = self.high - self.low, self.step or 1
        rules = (
            (span < 0, f"low must be at most high, which is {self.high}"),
            (self._is_integer and step % 1 > 0, "step must be an integer where low and high are"),
            (self._is_integer and span > MAX_VALUES * step, f"a range of integers has at most {MAX_VALUES} values"),
            (self.log and (self.low <= 0 or self.step is not None), "log needs a low above 0, and no step"),
        )
        for is_broken, rule in rules:
            if is_broken:
                raise ValueError(rule)
        return self

    @property
    def _is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def values(self) -> list[Any] | None:
        """All values of a finite dimension; None for a continuous one."""
        if self.choices is not None:
            return self.choices
        if isinstance(self.low, int) and isinstance(self.high, int):
            return list(range(self.low, self.high + 1, int(self.step or 1)))
        return None

    @property
    def largest(self) -> Any:
        """The upper end of a range, or the last choice."""
        return self.choices[-1] if self.choices is not None else self.high

    def quantile(self, share: float) -> Any:
        """The value at a share, in [0, 1), of the dimension: every value has the same part of it; on a logarithmic
        scale if ``log``.
        """
        if self.choices is not None:
            return self.choices[int(share * len(self.choices))]
        assert self.low is not None and self.high is not None
        if self.step is not None:
            value = self.low + self.step * int(share * (1 + (self.high - self.low) // self.step))
        else:
            low, high = float(self.low), float(self.high) + self._is_integer
            value = low * (high / low) ** share if self.log else low + share * (high - low)
        return int(value) if self._is_integer else float(value)

    def suggest(self, trial: optuna.trial.BaseTrial, name: str) -> Any:
        """A value drawn by Optuna's sampler."""
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)
        if self._is_integer:
            return trial.suggest_int(name, self.low, self.high, step=int(self.step or 1), log=self.log)
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


class SearchSpace(Document, kind="search-space"):
    """The configurations that a search may choose: subnets of its drafts, and trees.

    Trees have the dimensions of their policy's hyperparameters, or its ``template_sizes``.
    """

    name: str
    description: str = ""
    heads: Annotated[list[HeadShares], Several] = Field(default=[1.0], min_length=1)
    """Shares of heads that supernets keep: in all blocks, or in each block."""
    injection_layers: Annotated[Literal["last", "all"] | list[int], Several] = "last"
    """Target layers that supernets read: the last or all of those that they can read, or these."""
    operators: Annotated[list[Literal["gate"] | Operator], Several] = Field(default=["gate"], min_length=1)
    """Operators of the compressor of ``specvlm`` drafts; ``gate``: the choice of the draft's gate."""
    operator_ratios: Annotated[list[Annotated[int, Field(ge=1)]], Several] = Field(default_factory=list)
    """Ratios of ``prune`` and ``pool``; empty: the ratio of the draft's training."""
    vocabularies: Annotated[list[Share], Several] = Field(default=[1.0], min_length=1)
    """Shares of the target's vocabulary that drafts with token frequencies propose."""
    weights: Annotated[list[Literal["unchanged"] | Weights], Several] = Field(default=["unchanged"], min_length=1)
    """Data types of the weights of drafts that read the target's features; ``unchanged``: the target's. Of several,
    those are searched that the device multiplies.
    """
    visual_keep: Annotated[list[Share], Several] = Field(min_length=1)
    """Shares of visual tokens that drafts see."""
    visual_rankings: Annotated[list[VisualRanking], Several] = Field(default=["text_after_image"], min_length=1)
    """Rankings by which visual tokens are kept, where not all of them are."""
    survivors: int = Field(default=4, ge=1)
    """Number of subnets whose trees are searched; where there are more subnets, screening selects them."""
    trees: dict[str, dict[str, Dimension]] = Field(min_length=1)

    def changed(self, changes: Sequence[str]) -> SearchSpace:
        """The space with other values of some dimensions.

        Args:
            changes: ``NAME=VALUE`` or ``NAME=A,B``, or any value of YAML. A name is one of ``NAMES``, ``policy``, a
                hyperparameter of the space's trees, such as ``d_max``, or that of one policy, ``sage.d_max``.

        Raises:
            UserError: the space has no dimension of that name, or the value is out of its range.
        """
        content = json.loads(self.dump())
        for change in changes:
            name, _, text = change.partition("=")
            policy, _, parameter = name.rpartition(".")
            owners = [tree for kind, tree in content["trees"].items() if policy in ("", kind) and parameter in tree]
            if not owners and name not in (*NAMES, "policy"):
                of_trees = {key for kind, tree in self.trees.items() for key in (*tree, *(f"{kind}.{k}" for k in tree))}
                raise UserError(
                    f"--set {change}: space {self.name} has no dimension {name!r}; {nearest(name, of_trees | {*NAMES, 'policy'})}"
                )
            value = _value(text, change)
            for tree in owners:
                tree[parameter] = value
            if name in NAMES:
                content[NAMES[name]] = value
            elif name == "policy":
                for kind in _listed(value):
                    if kind not in content["trees"]:
                        raise UserError(
                            f"--set {change}: no policy {kind!r} in it; {nearest(str(kind), content['trees'])}"
                        )
                content["trees"] = {kind: content["trees"][kind] for kind in _listed(value)}
        return SearchSpace.parse(content, source=f"--set {' '.join(changes)}")

    def subnets(
        self,
        draft: str,
        full: Subnet,
        readable: Sequence[int],
        operators: Sequence[Operator] = (),
        has_vocabularies: bool = False,
        has_float8: bool | None = None,
    ) -> list[Subnet]:
        """All subnets of the draft with this id.

        Args:
            full: the subnet of the full draft.
            readable: target layers that a supernet can read; empty for other drafts.
            operators: the operators of the draft's compressor; empty for drafts without one.
            has_vocabularies: whether the draft's vocabulary can be cut.
            has_float8: as in ``Dimensions``.

        Raises:
            UserError: the space names a layer or an operator that the draft does not have.
        """
        vocabularies = self.vocabularies if has_vocabularies else [1.0]
        may_choose = has_float8 or (has_float8 is False and "unchanged" not in self.weights)
        common = [
            {
                "visual_keep": keep,
                "visual_ranking": ranking,
                "vocabulary": None if share == 1.0 else share,
                "weights": None if data_type == "unchanged" else data_type,
            }
            for data_type in (self.weights if may_choose else ["unchanged"])
            for share in vocabularies
            for keep in self.visual_keep
            for ranking in (self.visual_rankings if keep < 1.0 else ("text_after_image",))
        ]
        whole = common[0]
        heads, layers = (self.heads, self._layers(draft, readable)) if readable else ([None], [full.injection_layer])
        choices = itertools.product(heads, layers, common, self._operator_choices(draft, operators))
        return [
            full.model_copy(
                update={
                    "heads": _one_name(share),
                    "injection_layer": layer,
                    "operator": operator,
                    "operator_ratio": ratio,
                    **choice,
                }
            )
            for share, layer, choice, (operator, ratio) in choices
            if operator != "text_only" or choice is whole  # which drops the visual tokens that are kept
        ]

    def without_images(self) -> SearchSpace:
        """The space for prompts without images, where choices about visual tokens make no difference."""
        return self.model_copy(update={"visual_keep": [1.0], "operators": ["gate"], "operator_ratios": []})

    def chains(self) -> SearchSpace:
        """The part of the space whose trees are chains, ``as_chain`` of their policies.

        Raises:
            UserError: there is none.
        """
        from autotune.trees.policy import POLICIES

        trees = {}
        for policy, fixed in [(name, POLICIES[name].as_chain) for name in self.trees]:
            if fixed is not None:
                only = {name: Dimension(choices=[value]) for name, value in fixed.items() if value is not None}
                trees[policy] = {name: d for name, d in self.trees[policy].items() if name not in fixed} | only
        if not trees:
            policies = " or ".join(name for name, kind in POLICIES.items() if kind.as_chain is not None)
            raise UserError(
                f"space {self.name}: the target or a draft keeps recurrent or convolution states, which follow one path: it decodes "
                f"chains, not trees; name a space with the policy {policies}"
            )
        return self.model_copy(update={"trees": trees})

    def _layers(self, draft: str, readable: Sequence[int]) -> Sequence[int]:
        """The target layers that a supernet reads, of those that it can read."""
        if not isinstance(self.injection_layers, list):
            return readable if self.injection_layers == "all" else readable[-1:]
        if unknown := [layer for layer in self.injection_layers if layer not in readable]:
            raise UserError(
                f"space {self.name}: {draft} can read the target's layers {', '.join(map(str, readable))}; "
                f"got {unknown[0]}; name one of them, or all"
            )
        return self.injection_layers

    def _operator_choices(self, draft: str, known: Sequence[Operator]) -> list[tuple[Operator | None, int | None]]:
        """Operators of a draft's compressor (None: the gate's choice), each with its ratio (None: the training's)."""
        choices: list[tuple[Operator | None, int | None]] = []
        for name in self.operators if known else ():
            if name == "gate":
                choices.append((None, None))
            elif name not in known:
                raise UserError(
                    f"space {self.name}: the compressor of {draft} has the operators {', '.join(known)}; got {name}; "
                    "name one of them, or gate"
                )
            else:
                choices += [(name, r) for r in self.operator_ratios if name in OPERATORS_WITH_RATIO] or [(name, None)]
        return choices or [(None, None)]

    def values(self, policy: str) -> dict[str, list[Any]]:
        """The values of a policy's finite dimensions."""
        return {name: values for name, d in self.trees[policy].items() if (values := d.values) is not None}

    def enumerated(self, policy: str) -> list[Tree] | None:
        """All trees of a policy, or None where there are too many: replaying a tree costs less than sampling one."""
        axes = self.values(policy)
        if len(axes) < len(self.trees[policy]) or math.prod(map(len, axes.values())) > MAX_ENUMERATED:
            return None
        trees = [ordered(policy, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
        return list({content_key(tree): tree for tree in trees}.values())

    def sweep(self, policy: str, count: int, seed: int, *, first: int = 0) -> list[Tree]:
        """``count`` trees of a policy that fill the space evenly: points of a scrambled Sobol sequence from index
        ``first``.
        """
        from scipy.stats import qmc

        names, dimensions = self.trees[policy].keys(), self.trees[policy].values()
        sequence = qmc.Sobol(len(dimensions), rng=seed)
        if first > 0:
            sequence.fast_forward(first)
        points = ([d.quantile(float(x)) for d, x in zip(dimensions, p, strict=True)] for p in sequence.random(count))
        return [ordered(policy, dict(zip(names, point, strict=True))) for point in points]

    def suggest(self, trial: optuna.trial.BaseTrial, policies: list[str]) -> Tree:
        """A tree of one of the policies, drawn by Optuna's sampler."""
        policy = trial.suggest_categorical("policy", policies)
        values = {name: dimension.suggest(trial, f"{policy}.{name}") for name, dimension in self.trees[policy].items()}
        return ordered(policy, values)

    def parameters(self, tree: Tree) -> dict[str, Any]:
        """The parameters of an Optuna trial for which ``suggest`` returns ``tree``."""
        policy = tree["policy"]
        return {"policy": policy} | {f"{policy}.{name}": tree[name] for name in self.trees[policy]}


def _one_name(heads: float | tuple[float, float, float] | None) -> float | tuple[float, float, float] | None:
    """Shares of heads as a subnet names them: one number if all blocks have the same share, None for all heads."""
    shares = set(Subnet(heads=heads).head_shares)
    equal = shares.pop() if len(shares) == 1 else None
    return heads if equal is None else None if equal == 1.0 else equal


def ordered(policy: str, values: dict[str, Any]) -> Tree:
    """A tree of these hyperparameters, with ordered pairs swapped where needed: they are drawn independently."""
    from autotune.trees.policy import POLICIES

    values = dict(values)
    for low, high in POLICIES[policy].ordered:
        is_pair = isinstance(values.get(low), int | float) and isinstance(values.get(high), int | float)
        if is_pair and values[low] > values[high]:
            values[low], values[high] = values[high], values[low]
    return {"policy": policy, **values}


def _value(text: str, change: str) -> Any:
    """The value of a change, as a space file has it; ``a,b`` is a list."""
    try:
        value = parse_yaml(text)
        return [parse_yaml(part) for part in text.split(",")] if isinstance(value, str) and "," in text else value
    except ValueError as error:
        raise UserError(f"--set {change}: no value of YAML ({error}); give for example heads=1.0,0.5") from None


def subnets_of_drafts(changes: Sequence[str] = ()) -> SearchSpace:
    """The space of the drafts as they are, with the changes of ``SearchSpace.changed``, and without trees."""
    return SearchSpace(name="of this draft", visual_keep=[1.0], trees={"chain": {}}).changed(changes)
