"""Times the vision tower and the projector of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autotune.modeling.clock import now_ms

# Attribute names in transformers' model classes; the first one found counts. Qwen's ``visual`` includes its projector.
_TOWERS = ("vision_tower", "visual", "vision_model")
_PROJECTORS = ("multi_modal_projector", "connector")


@dataclass
class VisionClock:
    """Times measured inside ``timed_vision``."""

    ms: float = 0.0
    num_forwards: int = 0
    _started_ms: list[float] = field(default_factory=list)


def vision_parts(model: Any) -> list[Any]:
    """Vision tower and projector; empty for text models."""
    parts = (
        next((getattr(model.model, name) for name in names if getattr(model.model, name, None) is not None), None)
        for names in (_TOWERS, _PROJECTORS)
    )
    return [part for part in parts if part is not None]


@contextmanager
def timed_vision(model: Any) -> Iterator[VisionClock]:
    """Add up the wall-clock time of the forward passes of tower and projector, each synchronized before and after."""
    clock = VisionClock()

    def begin(*_: Any) -> None:
        clock._started_ms.append(now_ms(model.device))

    def end(*_: Any) -> None:
        clock.ms += now_ms(model.device) - clock._started_ms.pop()
        clock.num_forwards += 1

    handles = []
    for part in vision_parts(model):
        handles += [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()
