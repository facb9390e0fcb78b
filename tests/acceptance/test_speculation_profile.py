"""``speculation_profile.json`` as NVIDIA's specdec_bench writes it: rates by hand, round trips, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.acceptance.rounds import rounds
from autotune.acceptance.speculation_profile import Counted, as_trace, build, of_trace, read, save
from autotune.errors import UserError
from autotune.search.chain_predictions import predict_chains
from autotune.trees.chain import ChainPolicy
from tests.sample_documents import DRAFT, TARGET, cost_table, random_trace

KEYS = (
    *(
        "schema_version",
        "measured",
        "method",
        "draft_checkpoint",
        "target_model",
        "num_speculative_tokens",
        "block_size",
    ),
    *("max_supported_k", "verification_method", "conditional_accept_rates", "marginal_accept_rates"),
    *("mean_accept_length", "mean_accept_length_per_request", "accept_length_model", "accept_length_by_k"),
    *("acceptance_length_histogram", "per_category", "measurement_conditions", "validation"),
)


def profile_of(*requests: Counted, k: int = 3) -> dict[str, Any]:
    return build(
        requests, num_speculative_tokens=k, method="eagle3", draft="/data/o/draft", target="o/target", conditions={}
    )


def accepted(histogram: dict[int, int]) -> list[int]:
    """Accepted lengths of rounds whose emitted tokens have this histogram."""
    return [emitted - 1 for emitted, count in histogram.items() for _ in range(count)]


def test_rates_by_hand() -> None:
    """The examples of specdec_bench's own tests. A length that never occurs does not end the marginal rates."""
    found = profile_of(Counted("qa", accepted({1: 40, 2: 30, 3: 30})))
    assert set(found) == set(KEYS)
    assert found["marginal_accept_rates"] == [0.6, 0.3, 0.0] and found["conditional_accept_rates"] == [0.6, 0.5, 0.0]
    assert found["mean_accept_length"] == 1.9 and found["accept_length_by_k"] == {"3": 1.9}
    assert found["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 30}
    assert found["validation"]["mean_consistency"]["passed"] and found["accept_length_model"] == "chain_analytic"
    assert found["draft_checkpoint"] == {"id": "o/draft"}, "no path of this machine is published"
    assert profile_of(Counted("qa", accepted({1: 50, 3: 50})))["marginal_accept_rates"] == [0.5, 0.5, 0.0]
    cut = profile_of(Counted("qa", accepted({1: 10, 2: 10, 3: 10, 4: 10, 5: 10})), k=2)
    assert not cut["validation"]["mean_consistency"]["passed"], "longer rounds than the profile has rates for"


def test_categories_and_requests_have_means_of_their_own() -> None:
    found = profile_of(Counted("qa", [1, 1, 1, 1]), Counted("chat", [0, 0]), Counted("qa", [3]), Counted("chat", []))
    assert found["mean_accept_length"] == round((4 * 2 + 2 * 1 + 4) / 7, 6)
    assert found["mean_accept_length_per_request"] == round((2 + 1 + 4) / 3, 6)
    assert found["per_category"]["chat"]["mean_accept_length"] == 1.0
    assert found["per_category"]["qa"]["marginal_accept_rates"] == [1.0, 0.2, 0.2]
    with pytest.raises(UserError, match="needs rounds that draft; got none"):
        profile_of(Counted("qa", []))


def test_profile_of_a_trace_has_the_rounds_of_its_chains() -> None:
    trace = random_trace(0, num_prompts=6, num_tokens=40)
    found = of_trace(trace, depth=3, method="draft_model")
    lengths = [len(one.path) for p in range(6) for one in rounds(trace, p, ChainPolicy(depth=3))]
    assert found["mean_accept_length"] == pytest.approx(1 + np.mean(lengths), abs=1e-6)
    assert found["marginal_accept_rates"] == pytest.approx([np.mean(np.array(lengths) > i) for i in range(3)], abs=1e-6)
    assert found["marginal_accept_rates"][2] > 0 and found["measurement_conditions"]["num_requests"] == 6
    with pytest.raises(UserError, match="record a larger one"):
        of_trace(trace, depth=9, method="draft_model")


def test_round_trip_through_a_file_and_a_trace(tmp_path: Path) -> None:
    """The chains of the drawn trace are accepted at the rates of the file, for its length and all shorter ones."""
    path = tmp_path / "speculation_profile.json"
    save(path, profile_of(Counted("qa", accepted({1: 300, 2: 250, 3: 250, 4: 200}))))
    profile = read(path)
    assert profile.rates == json.loads(path.read_text())["conditional_accept_rates"] == [0.7, 0.642857, 0.444444]
    trace = as_trace(profile, DRAFT, TARGET, num_prompts=20, answer_tokens=400)
    for depth in (1, 2, 3):
        again = of_trace(trace, depth=depth, method="eagle3")
        assert again["conditional_accept_rates"] == pytest.approx(profile.rates[:depth], abs=0.03)
    same = as_trace(profile, DRAFT, TARGET, num_prompts=20, answer_tokens=400)
    assert np.array_equal(same.forest.child_token, trace.forest.child_token), "the draws are seeded"


def test_predicted_chains_emit_the_tokens_of_the_profile(tmp_path: Path) -> None:
    """And a chain that is accepted more often is predicted to be faster, whatever the price."""
    speedups = []
    for histogram in ({1: 40, 2: 30, 3: 30}, {1: 10, 2: 20, 3: 70}):
        save(tmp_path / "s.json", profile_of(Counted("qa", accepted(histogram)), k=2))
        profile = read(tmp_path / "s.json")
        candidates = predict_chains(profile, cost_table())
        marginal = np.cumprod(profile.rates)
        assert [one.tokens_per_round for one in candidates] == pytest.approx((1 + marginal.cumsum()).tolist(), rel=0.02)
        speedups.append([one.speedup for one in candidates])
    assert all(low < high for low, high in zip(*speedups, strict=True))


VALID = profile_of(Counted("qa", accepted({1: 40, 2: 30, 3: 30})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": "2.0"}, "schema_version: this program reads 1.0; got '2.0'; update autotune"),
        ({"measured": False}, "measured: the file is a placeholder without a measurement"),
        ({"verification_method": "block"}, "verification_method: .*'longest_prefix' alone; got 'block'"),
        ({"conditional_accept_rates": None}, "verification_method: rates by position"),
        (
            {"conditional_accept_rates": [0.6, 1.5, 0.0]},
            r"conditional_accept_rates\.1: .*less than or equal to 1; got 1\.5",
        ),
        ({"conditional_accept_rates": [0.6, 0.5]}, "conditional_accept_rates: one rate for each of the 3 .*; got 2"),
        (
            {"marginal_accept_rates": [0.6, 0.6, 0.0]},
            r"marginal_accept_rates: the products .*\[0\.6, 0\.3, 0\.0\]; got",
        ),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens: .*valid integer"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "speculation_profile.json"
    save(path, {**VALID, **changes})
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
