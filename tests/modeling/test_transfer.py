"""Transfers between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.drafters.draft import top_proposals
from autotune.modeling import transfer


def test_a_level_s_proposals_are_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, infinities included."""
    transfers = []

    def counted(tensor: torch.Tensor) -> np.ndarray:
        transfers.append(tensor.shape)
        return tensor.cpu().numpy()

    monkeypatch.setattr(transfer, "to_host", counted)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 4:] = -torch.inf
    expected = logits.log_softmax(-1).topk(5)
    tokens, logprobs = transfer.rows_to_host(*top_proposals(logits, 5))
    assert transfers == [(2, 3, 5)]
    assert tokens.dtype == np.int32 and np.array_equal(tokens, expected.indices.numpy())
    assert logprobs.dtype == np.float32 and np.array_equal(logprobs, expected.values.numpy())
