"""Statistics of runs are those that a reader would compute."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.documents.decoded import runs_dataframe
from autotune.documents.decoding_profile import AR
from autotune.errors import UserError
from autotune.evaluation.summary import (
    bootstrap_product,
    bootstrap_ratio,
    in_one_clock,
    is_significantly_slower,
    speedup,
    summarize,
)
from tests.evaluation.sample_runs import run


def test_a_table_of_runs_has_a_row_for_every_run() -> None:
    runs = {"ar": [run(2.0, task="read"), run(3.0)], "tuned": [run(1.0, rounds=4)]}
    frame = runs_dataframe(runs)
    assert frame[["arm", "number", "accepted_tokens", "decode_ms"]].to_numpy().tolist() == [
        ["ar", 0, 5, 2.0],
        ["ar", 1, 5, 3.0],
        ["tuned", 0, 4, 1.0],
    ]
    assert frame.task.isna().tolist() == [False, True, True]
    as_json = {name: [one.model_dump(mode="json") for one in arm_runs] for name, arm_runs in runs.items()}
    assert runs_dataframe(as_json).equals(frame)


def test_the_rest_of_a_decoding_is_outside_the_models() -> None:
    """40 ms, of which 2.5 and 5 ms are the draft's and 20 ms verification; generate measures no parts."""
    frame = runs_dataframe(
        {"tuned": [run(40.0, draft_prefill_ms=2.5, draft_ms=5.0, verify_ms=20.0)], "hf": [run(40.0, verify_ms=0.0)]}
    )
    assert frame.rest_ms[0] == 12.5 and frame.rest_ms.isna().tolist() == [False, True]


def test_intervals_are_those_of_a_percentile_bootstrap() -> None:
    """Against resampling written out, to within the noise of 2000 resamples. Pairs stay together."""
    constant = np.array([1.0, 10.0, 100.0, 3.0])
    assert bootstrap_ratio(2.5 * constant, constant) == pytest.approx((2.5, 2.5))
    assert bootstrap_ratio(np.array([3.0]), np.array([2.0])) == (1.5, 1.5), "a single pair has no spread"
    rng = np.random.default_rng(0)
    for count in (5, 24, 200):
        below, above_units = rng.uniform(1, 2, (2, count))
        above = below * rng.normal(2, 0.3, count)
        draws = rng.integers(count, size=(20_000, count))
        ratios = above[draws].sum(1) / below[draws].sum(1)
        expected = np.quantile(ratios, [0.025, 0.975])
        assert bootstrap_ratio(above, below) == pytest.approx(expected, abs=0.06 * np.ptp(expected))
        ratios *= below[draws].sum(1) / above_units[draws].sum(1)
        expected = np.quantile(ratios, [0.025, 0.975])
        found = bootstrap_product([above, below], [below, above_units])
        assert found == pytest.approx(expected, abs=0.06 * np.ptp(expected))


def test_a_summary_by_hand() -> None:
    """Times and tokens are summed before they are divided: 400 / 150, not the mean of 2 and 3."""
    runs = [run(50.0, tokens=11, rounds=5), run(100.0, tokens=21, rounds=5, output="other")]
    baseline = [run(100.0, tokens=11, rounds=10), run(300.0, tokens=21, rounds=20)]
    found = summarize("tuned", runs, baseline)
    assert (found.name, found.num_prompts, found.num_tokens) == ("tuned", 2, 30)
    assert found.speedup == speedup(runs, baseline) == pytest.approx(400 / 150)
    assert found.ci95 == pytest.approx((2.0, 3.0))
    assert found.tokens_per_second == pytest.approx(1000 * 30 / 150)
    assert found.tokens_per_round == 3.0
    assert found.identical_outputs == 1
    assert summarize(AR, [run(1.0, rounds=0)], [run(1.0)]).tokens_per_round is None


def test_a_lossy_arm_is_compared_per_token() -> None:
    """An arm that stops after half of the tokens at the same speed gains nothing, neither pooled nor per prompt."""
    baseline = [run(100.0, tokens=11), run(300.0, tokens=31)]
    found = summarize("lossy", [run(50.0, tokens=6, output="a"), run(150.0, tokens=16, output="a")], baseline)
    assert (found.speedup, found.ci95) == (pytest.approx(1.0), pytest.approx((1.0, 1.0)))
    # Twice the speed at 15 instead of 40 tokens: (400 / 40) / (75 / 15).
    assert speedup([run(25.0, tokens=6), run(50.0, tokens=11)], baseline) == pytest.approx(2.0)


def test_answers_of_one_token_do_not_count() -> None:
    """Their only token is the prefill's."""
    baseline, runs = [run(100.0), run(0.0, tokens=1, rounds=0)], [run(50.0), run(0.0, tokens=1, rounds=0)]
    found = summarize("tuned", runs, baseline)
    assert (found.speedup, found.ci95) == (2.0, (2.0, 2.0)) and found.num_prompts == 2
    # Nor does an answer that is longer where plain decoding's has one token.
    assert speedup([run(50.0), run(7.0)], baseline) == 2.0
    with pytest.raises(UserError, match=r"every answer has one token, so nothing was decoded .* raise max_new_tokens"):
        summarize("tuned", runs[1:], baseline[1:])
    assert np.isnan(speedup(runs[1:], baseline[1:]))


def slower(ms: np.ndarray, than: np.ndarray, risk: float) -> bool:
    first, second = ([run(float(x), prompt_sha256=f"{n}") for n, x in enumerate(times)] for times in (ms, than))
    return is_significantly_slower(first, second, risk=risk)


def test_the_test_is_a_paired_t_test_of_log_ratios() -> None:
    """Against SciPy's."""
    from scipy.stats import ttest_rel

    rng = np.random.default_rng(2)
    for count in (2, 8, 40):
        ms, than = rng.normal(1.02, 0.05, count), rng.normal(1, 0.05, count)
        p_value = ttest_rel(np.log(ms), np.log(than), alternative="greater").pvalue
        assert slower(ms, than, risk=p_value * 1.000001)
        assert not slower(ms, than, risk=p_value * 0.999999)
    assert slower(np.full(4, 2.0), np.ones(4), risk=0.001), "without a variance"
    assert not slower(np.ones(4), np.ones(4), risk=0.5)
    assert not slower(np.full(1, 2.0), np.ones(1), risk=0.5), "a single prompt proves nothing"


def test_repeated_runs_of_a_prompt_count_once() -> None:
    """As their mean: two prompts that are decoded eight times prove no more than two prompts."""
    rng = np.random.default_rng(3)
    ms, than = rng.normal(1.1, 0.02, 16), np.ones(16)
    first, second = ([run(float(x), prompt_sha256=f"{n % 2}") for n, x in enumerate(times)] for times in (ms, than))
    means = np.exp(np.log(ms.reshape(8, 2)).mean(0))
    for risk in (1e-3, 1e-2, 0.1):
        assert is_significantly_slower(first, second, risk=risk) == slower(means, np.ones(2), risk)
    assert slower(ms, than, 0.01) and not is_significantly_slower(first, second, risk=1e-6)
    numbered = [run(float(x), prompt_sha256=f"{n}") for n, x in enumerate(ms)]
    plain = [run(1.0, prompt_sha256=f"{n}") for n in range(16)]
    assert not is_significantly_slower(numbered, plain, risk=0.5, tolerance=0.15), "within what is tolerated"


@pytest.mark.parametrize(("cpu_ms", "clock"), [(50.0, "wall"), (40.0, "cpu"), (0.0, "wall")])
def test_the_clock_is_the_cpu_where_other_processes_used_the_machine(cpu_ms: float, clock: str) -> None:
    """Where both are measured, and the speedup is another one by CPU time."""
    runs = {"ar": [run(100.0, cpu_ms=100.0)] * 4, "tuned": [run(50.0, cpu_ms=cpu_ms)] * 4}
    found = in_one_clock(runs)
    assert speedup(found["tuned"], found["ar"]) == (2.5 if clock == "cpu" else 2.0)
    assert in_one_clock({}) == {}


def test_times_are_per_token() -> None:
    """A shorter answer is no gain, and a prompt for which nothing was decoded does not count."""
    short = [run(10.0, tokens=6, prompt_sha256=f"{n}") for n in range(8)]
    long = [run(15.0, tokens=11, prompt_sha256=f"{n}") for n in range(8)]
    assert is_significantly_slower(short, long, risk=0.01) and not is_significantly_slower(long, short, risk=0.5)
    nothing = [run(0.0, tokens=1)] * 8
    assert not is_significantly_slower([*short, *nothing], [*short, *nothing], risk=0.5)
    assert not is_significantly_slower(nothing, long, risk=0.5)
