"""Times forward passes, above all those of the vision tower and the projector of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.nn import ModuleList

from autotune.modeling.host import now_ms

# Attribute names in transformers' model classes; the first one found counts. Qwen's ``visual`` includes its projector.
_TOWERS = ("vision_tower", "visual", "vision_model")
_PROJECTORS = ("multi_modal_projector", "connector")


@dataclass
class ForwardClock:
    """Times measured inside ``timed_forwards``."""

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


def vision_layers(model: Any) -> int:
    """Layers of the vision tower: the longest list of modules in it; 0 for text models."""
    modules = (module for part in vision_parts(model) for module in part.modules())
    return max((len(module) for module in modules if isinstance(module, ModuleList)), default=0)


def timed_vision(model: Any) -> AbstractContextManager[ForwardClock]:
    """Add up the wall-clock time of the forward passes of tower and projector, each synchronized before and after."""
    return timed_forwards(vision_parts(model), model.device)


@contextmanager
def timed_forwards(parts: list[Any], device: Any, *, first_only: bool = False) -> Iterator[ForwardClock]:
    """Count the forward passes of modules and add up their times; ``first_only`` times, and synchronizes, the first
    alone.
    """
    clock = ForwardClock()

    def begin(*_: Any) -> None:
        if not (first_only and clock.num_forwards):
            clock._started_ms.append(now_ms(device))

    def end(*_: Any) -> None:
        if clock._started_ms:
            clock.ms += now_ms(device) - clock._started_ms.pop()
        clock.num_forwards += 1

    with ExitStack() as hooks:
        for part in parts:
            for handle in (part.register_forward_pre_hook(begin), part.register_forward_hook(end)):
                hooks.callback(handle.remove)
        yield clock
