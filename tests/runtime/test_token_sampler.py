"""The token sampler draws from the right distribution, with noise that depends on seed and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import TopKLogitsWarper, TopPLogitsWarper

from autotune.runtime import token_sampler
from autotune.runtime.answer_batch import drawn_tokens
from autotune.runtime.token_sampler import TokenSampler, candidate_logprobs
from autotune.trees.policy import TreeGrower
from autotune.trees.wetap import WetapPolicy

LOGITS = [2.0, 1.5, 1.0, 0.0, -0.5, -2.0]


def test_log_probabilities_are_the_models_own_but_for_excluded_tokens() -> None:
    """Eq. 9 of WETAP compares them with a draft's own, so that they do not depend on the temperature."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 30)
    rows, tokens = np.repeat(np.arange(40), 30), np.tile(np.arange(30), 40)
    own = logits.log_softmax(-1).double().reshape(-1).numpy()
    for temperature in (0.0, 0.3, 1.0, 2.0):
        scores = TokenSampler(temperature=temperature).scores(logits, np.arange(40))
        found = candidate_logprobs(logits, scores, rows, tokens)
        assert found[0] == 0.0 and (found[1:] == own).all()
    scores = TokenSampler(temperature=0.7, processors=[TopKLogitsWarper(8), TopPLogitsWarper(0.9)]).scores(
        logits, np.arange(40)
    )
    found = candidate_logprobs(logits, scores, rows, tokens)[1:]
    cut = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(8)(None, logits / 0.7))
    excluded = (cut == -torch.inf).reshape(-1).numpy()
    assert (found[excluded] == -np.inf).all() and (found[~excluded] == own[~excluded]).all()
    assert 22 / 30 < excluded.mean() < 29 / 30


def test_a_nucleus_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sorting, but for rows whose nucleus is large. Transformers keeps any of equal scores of which it keeps a
    part.
    """
    monkeypatch.setattr(token_sampler, "NUCLEUS_TOKENS", 16)
    torch.manual_seed(2)
    logits = torch.rand(300, 1) * 6 * torch.randn(300, 60)
    for warper in (TopPLogitsWarper(0.9), TopPLogitsWarper(0.3, min_tokens_to_keep=5)):
        for scores in (logits, logits.bfloat16().float()):
            expected, (found, is_unsure) = warper(None, scores), token_sampler.nucleus(scores, warper)
            sure = ~is_unsure
            assert (
                torch.equal(found.sort().values[sure], expected.sort().values[sure]) and 0.5 < sure.float().mean() < 1
            )
            assert torch.equal(found[found > -torch.inf], scores[found > -torch.inf])
        assert torch.equal(token_sampler.nucleus(logits, warper)[0][sure], warper(None, logits)[sure])
    sampler, positions = TokenSampler(temperature=1.0, processors=[TopPLogitsWarper(0.9)], seed=3), np.arange(300)
    expected = TopPLogitsWarper(0.9)(None, logits) + sampler.noise(positions.tolist(), 60)
    assert sampler.tokens(logits, positions).tolist() == expected.argmax(-1).tolist()


def test_wetap_takes_the_candidates_that_transformers_warpers_leave() -> None:
    torch.manual_seed(1)
    for number in range(100):
        logprobs = (4 * torch.rand(()) * torch.randn(40)).log_softmax(-1).sort(descending=True).values
        top_k, top_p = int(torch.randint(1, 17, ())), float(torch.rand(()).clamp(0.05, 0.95))
        kept = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logprobs[None])) > -torch.inf
        grower = TreeGrower(WetapPolicy(length=1, w_min=16, w_max=16, top_k=top_k, top_p=top_p))
        grower.set_root(0)
        grower.grow(np.arange(top_k, dtype=np.int32)[None], logprobs[None, :top_k].numpy())
        assert int(grower.tree.size[0]) - 1 == int(kept.sum()), number


def test_noise_does_not_depend_on_the_order_or_company_of_calls() -> None:
    """Plain decoding samples position by position, verification many positions at once and some twice."""
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    positions = np.random.default_rng(0).integers(0, 10, 40)
    at_once = TokenSampler(temperature=1.0, seed=5).tokens(logits, positions)
    sampler, one_by_one = TokenSampler(temperature=1.0, seed=5), np.zeros(40, np.int64)
    for node in reversed(range(40)):
        one_by_one[node] = sampler.token(logits[node], int(positions[node]))
    assert at_once.tolist() == one_by_one.tolist()
    assert at_once.tolist() != TokenSampler(temperature=1.0, seed=6).tokens(logits, positions).tolist()


def noise_of(seed: int, positions: range, vocabulary: int = 8) -> NDArray[np.float64]:
    sampler = TokenSampler(temperature=1.0, seed=seed)
    return sampler.noise(positions, vocabulary).double().numpy()


def test_noise_of_neighbours_is_uncorrelated() -> None:
    """Neighbouring positions of one seed, and one position under neighbouring seeds. 16,000 pairs: a standard error of
    0.008.
    """
    noise = noise_of(1, range(2001))

    def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])

    assert abs(correlation(noise[:-1], noise[1:])) < 0.03
    assert abs(correlation(noise[:-2], noise[2:])) < 0.03
    assert abs(correlation(noise[:-1, :-1], noise[1:, 1:])) < 0.03
    assert abs(correlation(noise, noise_of(2, range(2001)))) < 0.03
    assert abs(correlation(noise[1:], noise_of(2, range(2000)))) < 0.03, "a seed must not be another seed, shifted"


def test_noise_is_standard_gumbel() -> None:
    """Its mean is Euler's constant, its variance pi squared / 6."""
    noise = noise_of(4, range(4000))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.03)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.08)


def test_a_batch_is_drawn_from_the_distributions_of_its_rows() -> None:
    """4,000 draws of each row: a standard error of at most 0.008. A row's token depends on its seed and
    position alone.
    """
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    samplers = [TokenSampler(temperature=temperature, seed=7) for temperature in (0.0, 0.5, 1.0)]
    drawn = np.array([drawn_tokens(samplers, logits, [position] * 3) for position in range(4000)])
    assert (drawn[:, 0] == int(logits[0].argmax())).all()
    for row in (1, 2):
        shares = np.bincount(drawn[:, row], minlength=8) / 4000
        assert shares == pytest.approx((logits[row] / samplers[row].temperature).softmax(-1).numpy(), abs=0.03)
    assert drawn_tokens(samplers[1:], logits[1:], [9, 9]) == drawn[9, 1:].tolist()


class Forbid:
    """A logits processor that forbids repeating the last token, and records the prefixes that it reads."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(input_ids[0].tolist())
        scores[:, input_ids[0, -1]] = -torch.inf  # in place, as some of transformers' own do
        return scores


def test_processors_see_the_prefix_and_leave_the_logits_alone() -> None:
    processor, logits = Forbid(), torch.tensor(LOGITS)
    sampler = TokenSampler(processors=[processor], prefix=torch.tensor([[4, 4, 0]]))
    assert sampler.reads_prefix and not TokenSampler().reads_prefix
    assert sampler.token(logits, 3) == 1 and sampler.token(logits, 4) == 0
    assert processor.prefixes == [[4, 4, 0], [4, 4, 0, 1]]
    assert logits.tolist() == LOGITS, "other nodes of the tree read them"
