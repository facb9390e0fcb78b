"""The interface between the training loop and the models that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor, nn

from autotune.training.recipe import Stage


class Task(ABC):
    """A module to train, and its loss at every step. The loss is a function of the recipe and the step alone."""

    module: nn.Module
    """Holds exactly the trained parameters."""

    @abstractmethod
    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare a stage and return the parameters that it trains."""

    def grow(self, previous: Stage, stage: Stage) -> None:  # noqa: B027
        """Called once between two stages, before the second one begins."""

    def prepare(self, stage: Stage, number: int) -> None:  # noqa: B027
        """Called once before the first step of a stage, and not when the stage is resumed."""

    @abstractmethod
    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and metrics to display."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the trained model."""

    def check_memory(self, *, half_precision: bool) -> str | None:
        """Estimated memory and disk use of all stages as one line, or None if unknown.

        Raises:
            UserError: more than is available.
        """
        return None

    def evaluate(self) -> dict[str, float]:
        """Metrics on held-out examples, if there are any."""
        return {}

    def after_backward(self) -> None:  # noqa: B027
        """Called when the gradients of a step have been computed."""
