"""Transformers' plan of tensor parallelism for a model: which of its weights are divided among devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DIVIDING = "wise"  # the styles colwise, rowwise and those derived from them; other styles keep a weight whole


def divided_parameters(model: Any) -> list[nn.Parameter]:
    """The parameters that the plan divides: projections of attention and MLP, the embedding and the output head, each
    where the model's class or config names it. Norms and vision towers are whole on every device. Empty for a model
    without a plan.
    """
    plan = getattr(model, "tp_plan", None) or {}
    dividing = {name for name, style in plan.items() if DIVIDING in style}
    parameters = [(re.sub(r"\.\d+(?=\.)", ".*", name), parameter) for name, parameter in model.named_parameters()]
    return [parameter for name, parameter in parameters if dividing & {name, name.rpartition(".")[0]}]
