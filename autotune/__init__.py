"""Tunes speculative decoding of vision-language models to the machine at hand, and decodes with the result.

Importing this package loads nothing else: the names below import their modules when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.errors import UserError
    from autotune.runtime.decoder import Decoder
    from autotune.runtime.load import load
    from autotune.runtime.metrics import PrometheusMetrics
    from autotune.runtime.stats import DecodingOutput, DecodingStats

__all__ = ["Decoder", "DecodingOutput", "DecodingStats", "PrometheusMetrics", "UserError", "load"]

_MODULES = {
    "Decoder": "autotune.runtime.decoder",
    "DecodingOutput": "autotune.runtime.stats",
    "DecodingStats": "autotune.runtime.stats",
    "PrometheusMetrics": "autotune.runtime.metrics",
    "UserError": "autotune.errors",
    "load": "autotune.runtime.load",
}


def __getattr__(name: str) -> Any:
    import importlib

    from autotune.errors import explained

    if name not in _MODULES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise explained(error) from None
