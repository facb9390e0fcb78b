"""Settings that papers and engines publish as their defaults, variants of them, and their configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR, HF
from autotune.documents.subnet import Subnet
from autotune.trees.verification import LosslessVerification, WetapVerification


class PublishedDefault(NamedTuple):
    """A published setting."""

    tree: dict[str, Any]
    """The tree policy with its hyperparameters."""
    source: str
    """Paper, section or table; engine and version."""
    visual_keep: float = 1.0
    """Share of the visual tokens that the draft reads."""
    threshold: float | None = None
    """Threshold of WETAP's lossy verification; None: lossless."""
    is_compared: bool = True
    """Whether every search and ``autotune bench`` compare with it unasked. Others can be named."""


EAGLE_LEVELS = "0 1 2 3", "00 01 02 10 11 20 21 30", "000 001 002 010 011 020 021 100", "0000 0001 0002", "00000 00001"
# EAGLE's released code counts otherwise than its papers: ``depth`` levels follow the first, ``total_token`` counts the
# root.
DEFAULTS: dict[str, PublishedDefault] = {
    "chain": PublishedDefault(
        {"policy": "chain", "depth": 5},
        "vLLM 0.14, documentation of speculative decoding with a draft model: num_speculative_tokens 5; "
        "SGLang, documentation of EAGLE decoding: speculative_num_steps 5",
    ),
    "sd-tree": PublishedDefault(
        {"policy": "static", "paths": [[*map(int, path)] for level in EAGLE_LEVELS for path in level.split()]},
        "SD-Tree of SAGE, section 5.1; its tree follows Ji et al., whose code has EAGLE-1's, mc_sim_7b_63: 25 draft nodes",
        is_compared=False,
    ),
    "star": PublishedDefault({"policy": "chain", "depth": 6}, "STAR, table 5: draft window 6 in the main experiments"),
    "eagle2": PublishedDefault(
        {"policy": "eagle2", "depth": 6, "k": 10, "budget": 60},
        "EAGLE-2, settings for 7B and 8B models (EAGLE-3 repeats them in its appendix): 60 draft tokens, depth 6, 10 nodes",
    ),
    "eagle2-release": PublishedDefault(
        {"policy": "eagle2", "depth": 8, "k": 10, "budget": 59},
        "EAGLE's released code with total_token 60, depth 7, top_k 10: 8 levels and 59 draft nodes",
        is_compared=False,
    ),
    "specvlm": PublishedDefault(
        {"policy": "eagle2", "depth": 7, "k": 10, "budget": 60},
        "SpecVLM, section 4.1: top-K 10, 60 tokens, depth 7, as the paper names them",
        is_compared=False,
    ),
    "dream": PublishedDefault(
        {"policy": "eagle2", "depth": 6, "k": 4, "budget": 32},
        "DREAM, evaluation settings: k 4, depth 6, 32 draft tokens, 75 % of the visual tokens",
        visual_keep=0.75,
    ),
    "dream-release": PublishedDefault(
        {"policy": "eagle2", "depth": 7, "k": 4, "budget": 31},
        "DREAM's released code, which counts as EAGLE's, with the paper's settings (total-token 32, depth 6): 7 levels and "
        "31 draft nodes",
        is_compared=False,
        visual_keep=0.75,
    ),
    "sage": PublishedDefault(
        {"policy": "sage"}, "SAGE, section 5.1, image tasks: 80 % of the visual tokens pruned", visual_keep=0.2
    ),
    "sage-video": PublishedDefault(
        {"policy": "sage"},
        "SAGE, section 5.1, video tasks: 90 % of the visual tokens pruned",
        is_compared=False,
        visual_keep=0.1,
    ),
    "wetap": PublishedDefault(
        {"policy": "wetap"},
        "WETAP, sections 4.4.1 to 4.4.3 and appendix B.4: widths 16 to 128, gamma 1.2, alpha 0.6, 64 tokens, "
        "length 8, top-K 10, top-P 0.9",
    ),
}

ABLATIONS: dict[str, PublishedDefault] = {
    "wetap-fixed-width": PublishedDefault(
        {"policy": "wetap", "w_min": 128, "w_max": 128},
        "WETAP, table 2, without dynamic width: every level has the largest width, 128",
        is_compared=False,
    ),
    "wetap-probability": PublishedDefault(
        {"policy": "wetap", "alpha": 1.0},
        "WETAP, table 2, without pruning by probability and length: pruned by probability alone",
        is_compared=False,
    ),
    "wetap-lossy": PublishedDefault(
        {"policy": "wetap"},
        "WETAP, section 3.3: acceptance from deep to shallow levels by eq. 9, whose threshold the paper does not give; "
        "the output is not the target's own",
        threshold=1.0,
        is_compared=False,
    ),
}
"""Variants of a paper's default: those that the paper compares it with, and those with its own lossy acceptance."""


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
"""Every configuration that ``autotune bench --arms`` knows by name."""

HF_ASSISTED, PROMPT_LOOKUP = "hf-assisted", "prompt_lookup"
ARM_NAMES = (AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *NAMED)
"""Every arm of ``autotune bench --arms``."""
COMPARED = (AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *COMPARED_DEFAULTS)
"""The arms that a profile is compared with unasked: all of them keep the target's own output."""
