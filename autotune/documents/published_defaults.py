"""The configurations of ``published_settings.py``."""

from __future__ import annotations

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR, HF
from autotune.documents.published_settings import ABLATIONS, DEFAULTS, PublishedDefault
from autotune.documents.subnet import Subnet
from autotune.trees.verification import LosslessVerification, WetapVerification


def _configuration(published: PublishedDefault) -> Configuration:
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

HF_ASSISTED, PROMPT_LOOKUP = "hf-assisted", "prompt_lookup"
ARM_NAMES = (AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *NAMED)
"""Every arm of ``autotune bench --against``."""
COMPARED = (AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *COMPARED_DEFAULTS)
"""The arms that a profile is compared with unasked: all of them keep the target's own output."""
LOSSY_SWEEP = ("wetap", "wetap-lossy", "wetap-lossy-0.5", "wetap-lossy-0.1")
"""WETAP with lossless verification, and with its own at falling thresholds."""
