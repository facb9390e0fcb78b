"""A clock that only forward passes advance, by costs that a test sets, so that times are exact sums."""

from __future__ import annotations

from typing import Any


class Abacus:
    """Inside the context, every forward pass of a module advances the clock by its cost."""

    def __init__(self, costs_ms: dict[Any, int]) -> None:
        self.costs_ms = costs_ms
        self.ms = 0.0
        self.num_forwards = dict.fromkeys(costs_ms, 0)

    def now_ms(self, _device: Any) -> float:
        return self.ms

    def __enter__(self) -> Abacus:
        # Registered before the hooks of the code under test, so that time has passed when those read the clock.
        self.handles = [module.register_forward_hook(self._pass_time) for module in self.costs_ms]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _pass_time(self, module: Any, *_: Any) -> None:
        self.ms += self.costs_ms[module]
        self.num_forwards[module] += 1
