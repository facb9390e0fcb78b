"""The elastic compressor, which replaces the rows of visual tokens by fewer ones (SpecVLM, section 3.4).

Its operators are ``prune`` (keep some tokens), ``pool`` (mean of neighbours), ``convolve`` (learned mix of neighbours),
``resample`` (cross-attention of learned queries) and ``text_only`` (keep no visual token). A gate that reads the
question selects one of them or weighs those with one ratio; or their outputs are concatenated.

The rows of a selected operator do not depend on the gate's scores, so they have no gradient for it. ``expected_cost``
trains it instead (``drafters/specvlm.py``).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from autotune.documents.subnet import OPERATORS_WITH_RATIO, Operator
from autotune.errors import UserError
from autotune.files import Document

GateMode = Literal["select", "weigh", "concatenate", "none"]
WEIGHED: tuple[Operator, ...] = ("prune", "pool", "convolve")
CONCATENATED: tuple[Operator, ...] = ("prune", "pool", "convolve", "resample")
SELECTED: tuple[Operator, ...] = (*CONCATENATED, "text_only")
EXPLORED = 0.5  # share of the training examples that are compressed by any operator with the same chance


class CompressionConfig(Document):
    """Settings of the compressor. Defaults are the paper's (section 3.4)."""

    gate: GateMode = "select"
    """``none`` leaves visual tokens unchanged (the paper's EagleVLM)."""
    prune_ratio: int = Field(default=20, ge=1)
    pool_ratio: int = Field(default=20, ge=1)
    convolve_ratio: int = Field(default=3, ge=1)
    num_queries: int = Field(default=2, ge=1)
    weigh_ratio: int = Field(default=3, ge=1)
    """Ratio of all operators with ``gate: weigh``, which adds their rows."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the gate's shares in training."""

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Operators that the gate combines."""
        modes: dict[GateMode, tuple[Operator, ...]]
        modes = {"select": SELECTED, "weigh": WEIGHED, "concatenate": CONCATENATED, "none": ()}
        return modes[self.gate]


class Compressor(nn.Module):
    """Compresses the rows of one prompt's visual tokens."""

    def __init__(self, config: CompressionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.operator: Operator | None = None
        """The operator of every prompt; None for the gate's choice."""
        self.ratios: dict[str, int] = {
            "prune": config.prune_ratio,
            "pool": config.pool_ratio,
            "convolve": config.convolve_ratio,
        }
        if config.gate == "weigh":
            self.ratios = dict.fromkeys(self.ratios, config.weigh_ratio)
        ratio = self.ratios["convolve"]
        operators = config.operators
        self.convolution = nn.Conv1d(hidden_size, hidden_size, ratio, stride=ratio) if "convolve" in operators else None
        self.queries = nn.Parameter(torch.randn(config.num_queries, hidden_size)) if "resample" in operators else None
        self.keys_values = nn.Linear(hidden_size, 2 * hidden_size, bias=False) if "resample" in operators else None
        self.gate = nn.Linear(hidden_size, len(operators)) if config.gate in ("select", "weigh") else None

    def fix(self, operator: Operator | None, ratio: int | None = None) -> None:
        """Compress every prompt with one operator.

        Args:
            operator: None for the gate's choice.
            ratio: visual tokens for each row of ``prune`` or ``pool``; None for the ratio of the training.

        Raises:
            UserError: an operator that the gate does not combine, or a ratio of an operator whose ratio is fixed.
        """
        operators = self.config.operators
        if operator is not None and operator not in operators:
            known = f"combines {', '.join(operators)}" if operators else "does not compress visual tokens"
            raise UserError(
                f"this draft (gate: {self.config.gate}) {known}; got operator {operator}; choose another one"
            )
        if ratio is not None:
            if operator not in OPERATORS_WITH_RATIO:
                names, other = " and ".join(OPERATORS_WITH_RATIO), operator or "the gate's choice"
                raise UserError(f"only {names} have a ratio to choose; got {ratio} for {other}; leave the ratio out")
            self.ratios[operator] = ratio
        self.operator = operator

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        question: Tensor,
        generator: torch.Generator | None = None,
        operator: Operator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compress ``rows`` [n, hidden] to [m, hidden]; returns them with their positions, ascending.

        Args:
            question: normalized features of the prompt's last token, [hidden].
            generator: source of drawn operators and pruned tokens in training. None: the gate's best operator and
                evenly spaced tokens.
            operator: compress with this operator; None: with ``self.operator``, or as the gate decides.
        """
        config = self.config
        operator = operator or self.operator
        if operator is None and config.gate == "select":
            operator = self.choice(question) if generator is None else self.draw(question, generator)
        if operator is not None:
            return self.operate(operator, rows, positions, generator)
        if config.gate == "none":
            return rows, positions
        parts = [self.operate(name, rows, positions, generator) for name in config.operators]
        if config.gate == "weigh":
            weights = self.scores(question).softmax(-1).to(rows.dtype)
            return torch.stack([part[0] for part in parts], -1) @ weights, parts[1][1]
        stream, kept = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        order = kept.argsort(stable=True)
        return stream[order], kept[order]

    def scores(self, question: Tensor) -> Tensor:
        """The gate's score of each operator in float32, [..., operators]."""
        assert self.gate is not None
        return self.gate(question).float()  # type: ignore[no-any-return]

    def choice(self, question: Tensor) -> Operator:
        """The operator with the highest score."""
        return self.config.operators[int(self.scores(question).argmax())]

    def draw(self, question: Tensor, generator: torch.Generator) -> Operator:
        """An operator for one training example. Half of the examples draw it by the gate's shares (Gumbel-max), the
        others draw all operators with the same chance, so that each of them stays trained.
        """
        operators = self.config.operators
        explores = float(torch.rand((), generator=generator)) < EXPLORED
        noise = -torch.empty(len(operators)).exponential_(generator=generator).log()
        if not explores:
            noise = noise + self.scores(question).detach().cpu() / self.config.temperature
        return operators[int(noise.argmax())]

    def expected_cost(self, questions: Tensor, costs: Tensor, entropy_weight: float) -> Tensor:
        """The gate's loss: the mean cost of the operators that ``draw`` draws by the gate's shares, minus
        ``entropy_weight`` of their entropy, which keeps the shares of operators with similar costs similar.

        Args:
            questions: [examples, hidden].
            costs: cost of each operator, [examples, operators].
        """
        logprobs = (self.scores(questions) / self.config.temperature).log_softmax(-1)
        return (logprobs.exp() * (costs + entropy_weight * logprobs)).sum(-1).mean()

    def operate(
        self, name: Operator, rows: Tensor, positions: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The output of one operator. The row of a group has the position of the group's last token."""
        count = len(rows)
        if name == "text_only":
            return rows[:0], positions[:0]
        if name == "resample":
            assert self.queries is not None and self.keys_values is not None
            keys, values = self.keys_values(rows).chunk(2, -1)
            rows = functional.scaled_dot_product_attention(self.queries[None], keys[None], values[None])[0]
            return rows, positions[-1:].expand(len(rows))
        ratio = min(self.ratios[name], count)
        groups = -(-count // ratio)
        last = (torch.arange(1, groups + 1, device=rows.device) * ratio - 1).clamp(max=count - 1)
        if name == "prune":
            if generator is None:
                chosen = last
            else:
                chosen = torch.randperm(count, generator=generator)[:groups].sort().values.to(rows.device)
            return rows[chosen], positions[chosen]
        filled = torch.cat([rows, rows[-1:].expand(groups * ratio - count, -1)])  # repeat the last token
        if name == "pool":
            return filled.unflatten(0, (groups, ratio)).mean(1), positions[last]
        assert self.convolution is not None
        if ratio < self.ratios[name]:  # fewer tokens than the kernel is wide
            filled = torch.cat([filled, filled[-1:].expand(self.ratios[name] - ratio, -1)])
        return self.convolution(filled.t()[None])[0].t(), positions[last]
