"""Trees, sampling settings and reference outputs that the tests of decoding share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from autotune.runtime.decoder import Decoder
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 20
TREES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "depth": 4},
    "sage": {"policy": "sage"},
    "sage-wide": {
        **{"policy": "sage", "confidence": "current", "w_min": 6, "w_max": 16, "k": 16},
        **{"d_min": 1, "n_max": 100, "depth_cap": 12, "window": 3},
    },
    "sage-tight": {"policy": "sage", "n_max": 5},  # full trees: leaves that the draft has not read are accepted
    "eagle2": {"policy": "eagle2"},
    "eagle2-tight": {"policy": "eagle2", "depth": 5, "k": 4, "budget": 6},  # of what the draft read, most is pruned
    "wetap": {"policy": "wetap"},
    "wetap-tight": {"policy": "wetap", "w_min": 3, "w_max": 9, "alpha": 0.2, "budget": 7},
    "static": {
        "policy": "static",
        "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]],
    },
}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    {"temperature": 1.3, "top_k": 5, "seed": 4},
]

Greedy = Callable[..., Tensor]


@pytest.fixture(scope="session")
def greedy(pair: Pair, prompts: dict[str, Inputs]) -> Greedy:
    """Hugging Face's own greedy decoding of a prompt."""

    @functools.cache
    def generate(prompt: str, **settings: Any) -> Tensor:
        return pair.target.generate(**prompts[prompt], do_sample=False, **{"max_new_tokens": NEW_TOKENS, **settings})

    return generate


@pytest.fixture(scope="session")
def sampled_plainly(pair: Pair, prompts: dict[str, Inputs]) -> Callable[[str, int], Tensor]:
    """Plain (AR) decoding of a prompt with the n-th of the SAMPLED settings."""
    plain = Decoder(pair.target)

    @functools.cache
    def generate(prompt: str, setting: int) -> Tensor:
        return plain.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS, **SAMPLED[setting]).sequences

    return generate


@pytest.fixture
def decoder(pair: Pair) -> Decoder:
    return Decoder(pair.target, pair.draft, tree=TREES["sage"], visual_keep=0.5)


def new_tokens(sequences: Tensor, inputs: Inputs) -> list[int]:
    return sequences[0, inputs["input_ids"].shape[1] :].tolist()


def deciding_at_once(pair: Pair) -> Decoder:
    """Decides all tokens of a round together, as on a device."""
    decoder = Decoder(pair.target, pair.draft, tree=TREES["sage"])
    decoder.rounds.decides_at_once = True
    return decoder
