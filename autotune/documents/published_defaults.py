"""The configurations of ``published_settings.py``."""

from __future__ import annotations

from autotune.documents.configuration import Configuration
from autotune.documents.published_settings import ABLATIONS, DEFAULTS, Published
from autotune.documents.subnet import Subnet
from autotune.trees.verification import LosslessVerification, WetapVerification


def _configuration(published: Published) -> Configuration:
    threshold = published.threshold
    return Configuration(
        tree=published.tree,
        subnet=Subnet(visual_keep=published.visual_keep),
        verification=LosslessVerification() if threshold is None else WetapVerification(threshold=threshold),
    )


PUBLISHED_DEFAULTS = {name: _configuration(published) for name, published in DEFAULTS.items()}
"""Every published default by name."""

COMPARED_DEFAULTS = {name: PUBLISHED_DEFAULTS[name] for name, published in DEFAULTS.items() if published.is_compared}
"""The published defaults with which every search and ``autotune bench`` compare unasked."""

NAMED = PUBLISHED_DEFAULTS | {name: _configuration(published) for name, published in ABLATIONS.items()}
"""Every configuration that ``autotune bench --against`` knows by name."""
