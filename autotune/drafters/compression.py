"""The elastic compressor, which replaces the rows of visual tokens by fewer ones (SpecVLM, section 3.4).

Its operators are ``prune`` (keep some tokens), ``pool`` (mean of neighbours), ``convolve`` (learned mix of neighbours),
``resample`` (cross-attention of learned queries) and ``text_only`` (keep no visual token). A gate that reads the question
selects one of them or weighs those with one ratio; or their outputs are concatenated.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from autotune.files import Document

GateMode = Literal["select", "weigh", "concatenate", "none"]
WEIGHED = ("prune", "pool", "convolve")
CONCATENATED = ("prune", "pool", "convolve", "resample")
SELECTED = (*CONCATENATED, "text_only")


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
    """Temperature of the Gumbel-softmax in training."""

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that the gate combines."""
        return {"select": SELECTED, "weigh": WEIGHED, "concatenate": CONCATENATED, "none": ()}[self.gate]


class Compressor(nn.Module):
    """Compresses the rows of one prompt's visual tokens."""

    def __init__(self, config: CompressionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.ratios = {"prune": config.prune_ratio, "pool": config.pool_ratio, "convolve": config.convolve_ratio}
        if config.gate == "weigh":
            self.ratios = dict.fromkeys(self.ratios, config.weigh_ratio)
        ratio = self.ratios["convolve"]
        operators = config.operators
        self.convolution = nn.Conv1d(hidden_size, hidden_size, ratio, stride=ratio) if "convolve" in operators else None
        self.queries = nn.Parameter(torch.randn(config.num_queries, hidden_size)) if "resample" in operators else None
        self.keys_values = nn.Linear(hidden_size, 2 * hidden_size, bias=False) if "resample" in operators else None
        self.gate = nn.Linear(hidden_size, len(operators)) if config.gate in ("select", "weigh") else None

    def forward(
        self, rows: Tensor, positions: Tensor, question: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compress ``rows`` [n, hidden] to [m, hidden]; returns them with their positions, ascending.

        Args:
            question: normalized features of the prompt's last token, [hidden].
            generator: source of Gumbel noise and pruned tokens in training. None: the gate's best operator and evenly
                spaced tokens.
        """
        config = self.config
        if config.gate == "none":
            return rows, positions
        if self.gate is None:
            parts = [self.operate(name, rows, positions, generator) for name in config.operators]
            stream, kept = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            order = kept.argsort(stable=True)
            return stream[order], kept[order]
        scores = self.gate(question).float()
        if config.gate == "weigh":
            parts = [self.operate(name, rows, positions, generator) for name in config.operators]
            weights = scores.softmax(-1).to(rows.dtype)
            return torch.stack([part[0] for part in parts], -1) @ weights, parts[1][1]
        if generator is not None:
            noise = -torch.empty(scores.shape).exponential_(generator=generator).log().to(scores.device)
            shares = ((scores + noise) / config.temperature).softmax(-1)
            chosen = int(shares.argmax())
            stream, kept = self.operate(config.operators[chosen], rows, positions, generator)
            # Straight-through estimator: the factor is 1 in the forward pass and has the share's gradient.
            return stream * (1 + shares[chosen] - shares[chosen].detach()).to(stream.dtype), kept
        return self.operate(config.operators[int(scores.argmax())], rows, positions, None)

    def operate(
        self, name: str, rows: Tensor, positions: Tensor, generator: torch.Generator | None
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
