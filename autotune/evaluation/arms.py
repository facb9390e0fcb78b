"""Arms: ways to decode that are compared on the same prompts. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.documents.decoded import Decoded
from autotune.workloads.prompt import WorkloadPrompt


class Arm(Protocol):
    """A way to decode prompts: a decoder, Hugging Face's generate, a server of an engine, another process.

    ``decode`` raises ``ArmFailed`` if the arm cannot decode any more: a race goes on without it.
    """

    name: str
    """Unique within a race."""
    key: str
    """Identifies the arm in ledgers: equal for equal arms, whatever their names."""
    keeps_state: bool = False
    """Whether answers depend on earlier requests. No run is then repeated, and a resumed race decodes the known prompts
    again, untimed, before new ones.
    """

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        """Decode one prompt. What is not to be timed, such as a warm-up, comes before."""
        ...

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Get ready for a block of a race.

        Args:
            prompts: all that are left in the race, those of the block first.
        """
