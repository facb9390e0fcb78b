"""What does not fit is refused before it is allocated, with the numbers."""

from __future__ import annotations

import pytest
import torch

from autotune import memory
from autotune.device import check_room, free_memory, gib
from autotune.errors import UserError
from autotune.modeling.loading import load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.tiny_models import Pair

GIB = 2**30


def test_sizes_are_said_as_people_read_them() -> None:
    assert [gib(number) for number in (3 * 2**20, 1.5 * GIB)] == ["3 MiB", "1.5 GiB"]


def test_what_fits_is_let_through_and_what_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * GIB)
    needs = {"weights": 3 * GIB, "cache": 2 * GIB}
    check_room("cpu", needs, what="it", advice="mend it", freed=GIB)
    with pytest.raises(UserError) as error:
        check_room("cpu", needs, what="it", advice="mend it")
    assert str(error.value) == (
        "it needs 5.0 GiB of memory on cpu (weights 3.0 GiB, cache 2.0 GiB), and 4.0 GiB are free; mend it"
    )
    monkeypatch.setattr(memory, "free_memory", lambda device: None)  # a system that does not say
    check_room("cpu", needs, what="it", advice="mend it")


def test_a_cache_that_does_not_fit_is_not_allocated(text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(text_pair.target)
    text = decoder.target.text
    per_token = 2 * len(text.layers) * text.config.num_key_value_heads * text.config.head_dim * 4
    inputs = {"input_ids": torch.arange(1100)[None] % 40 + 5}
    before = decoder.target.cache
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000 * per_token)
    with pytest.raises(UserError, match=r"a sequence of 11\d\d tokens needs .* MiB of memory on cpu \(cache"):
        decoder.generate(**inputs, max_new_tokens=20)
    assert decoder.target.cache is before
    monkeypatch.undo()
    decoder.generate(**inputs, max_new_tokens=2)
    assert decoder.target.cache.memory_bytes == per_token * decoder.target.cache.capacity


def test_weights_that_do_not_fit_are_not_loaded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(UserError, match=r"needs \d+ MiB of memory on cpu \(weights \d+ MiB\), and 0 MiB are free"):
        load_model(str(pair.target_folder))


def test_a_draft_s_cache_counts_as_its_blocks_have_heads(pair: Pair) -> None:
    target = Target(pair.target)
    assert target.kv_bytes_per_token == 2 * len(target.text.layers) * 2 * target.text.config.head_dim * 4
    assert free_memory("cpu") is not None
