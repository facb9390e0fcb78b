"""The divergence of a draft from the target, and its compiled form."""

from __future__ import annotations

import functools

import pytest
import torch

from autotune.drafters.divergence import DivergenceName, divergence, lk_divergence, make_divergence


def test_divergence_is_that_of_the_distributions() -> None:
    """Against the definition, and zero of equal distributions."""
    logits, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    found, agrees = divergence(logits, teacher.log_softmax(-1))
    draft_share, share = logits.softmax(-1), teacher.softmax(-1)
    torch.testing.assert_close(found, (share * (share / draft_share).log()).sum(-1))
    assert agrees.tolist() == [float(a == b) for a, b in zip(logits.argmax(-1), teacher.argmax(-1), strict=True)]
    same, all_agree = divergence(teacher, teacher.log_softmax(-1))
    assert same.abs().max() < 1e-6 and all_agree.all()


def test_the_hybrid_loss_weighs_the_acceptance_rate_more_the_higher_it_is() -> None:
    """Against the definition; the weight has no gradient, and a draft far from the target learns by KL nearly alone."""
    logits, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    given = logits.clone().requires_grad_()
    found, agrees = lk_divergence(given, teacher.log_softmax(-1))
    _, expected_agrees = divergence(logits, teacher.log_softmax(-1))
    reference = logits.clone().requires_grad_()
    overlap = torch.minimum(reference.softmax(-1), teacher.softmax(-1)).sum(-1)
    weight = float((-3 * overlap.detach().mean()).exp())
    expected = weight * divergence(reference, teacher.log_softmax(-1))[0] + (1 - weight) * (1 - overlap)
    torch.testing.assert_close(found, expected)
    assert torch.equal(agrees, expected_agrees)
    for loss in (found, expected):
        loss.sum().backward()
    torch.testing.assert_close(given.grad, reference.grad)
    far = torch.full((1, 7), -30.0).index_fill(1, torch.tensor([0]), 0.0)
    other = torch.full((1, 7), -30.0).index_fill(1, torch.tensor([1]), 0.0).log_softmax(-1)
    torch.testing.assert_close(lk_divergence(far, other)[0], divergence(far, other)[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["kl", "lk"])
def test_compiled_divergence_has_the_same_values_and_gradients(
    backend: str, name: DivergenceName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of tokens."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain, compiled = make_divergence(name, compiled=False), make_divergence(name, compiled=True)
    assert compiled is not plain and plain is {"kl": divergence, "lk": lk_divergence}[name]
    for num_tokens in (3, 8):
        teacher = torch.randn(num_tokens, 11).log_softmax(-1)
        logits = torch.randn(num_tokens, 11)
        results = []
        for compare in (plain, compiled):
            given = logits.clone().requires_grad_()
            found, agrees = compare(given, teacher)
            found.mean().backward()
            results.append((found.detach(), agrees, given.grad))
        for expected, same in zip(*results, strict=True):
            torch.testing.assert_close(same, expected, atol=1e-6, rtol=1e-5)
