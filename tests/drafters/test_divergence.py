"""The divergence of a draft from the target, and its compiled form."""

from __future__ import annotations

import pytest
import torch

from autotune.drafters.teacher_batch import divergence


def test_divergence_is_that_of_the_distributions() -> None:
    """Against the definition, and zero of equal distributions."""
    logits, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    found, agrees = divergence(logits, teacher.log_softmax(-1))
    draft_share, share = logits.softmax(-1), teacher.softmax(-1)
    torch.testing.assert_close(found, (share * (share / draft_share).log()).sum(-1))
    assert agrees.tolist() == [float(a == b) for a, b in zip(logits.argmax(-1), teacher.argmax(-1), strict=True)]
    same, all_agree = divergence(teacher, teacher.log_softmax(-1))
    assert same.abs().max() < 1e-6 and all_agree.all()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_divergence_has_the_same_values_and_gradients(backend: str) -> None:
    """For any number of tokens."""
    compiled = torch.compile(divergence, dynamic=True, backend=backend)
    for num_tokens in (3, 8):
        teacher = torch.randn(num_tokens, 11).log_softmax(-1)
        logits = torch.randn(num_tokens, 11)
        results = []
        for compare in (divergence, compiled):
            given = logits.clone().requires_grad_()
            found, agrees = compare(given, teacher)
            found.mean().backward()
            results.append((found.detach(), agrees, given.grad))
        for expected, same in zip(*results, strict=True):
            torch.testing.assert_close(same, expected, atol=1e-6, rtol=1e-5)
