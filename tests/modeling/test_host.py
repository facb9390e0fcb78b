"""Steps use a limited number of threads, prefills and callers all; a level's proposals are one transfer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.drafters.independent import IndependentDraft
from autotune.measuring.step_bench import choose_threads
from autotune.modeling.host import limited_threads
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.tiny_models import Inputs, Pair


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_number_of_threads_is_restored_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), limited_threads(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2
    with limited_threads(None):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(("threads", "prefill_threads"), [(1, None), (None, 1)])
def test_steps_and_prefills_have_their_own_threads(
    pair: Pair,
    prompts: dict[str, Inputs],
    monkeypatch: pytest.MonkeyPatch,
    drafts: bool,
    threads: int | None,
    prefill_threads: int | None,
) -> None:
    """Image encoders are a part of the prefills, that of the draft too."""
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    seen: dict[str, set[int]] = {"prefill": set(), "step": set(), "caller": set()}

    def record(model: Any, name: str, kind: str) -> None:
        inner = getattr(model, name)

        def recording(*args: Any, **kwargs: Any) -> Any:
            seen[kind].add(torch.get_num_threads())
            return inner(*args, **kwargs)

        monkeypatch.setattr(model, name, recording)

    for model in (target, draft):
        record(model, "prefill", "prefill")
        record(model, "evaluate_step", "step")
    record(target, "encode", "prefill")
    record(draft, "prompts", "prefill")
    decoder = Decoder(target, draft if drafts else None, threads=threads, prefill_threads=prefill_threads)
    for _ in decoder.stream(**prompts["image"], max_new_tokens=12):
        seen["caller"].add(torch.get_num_threads())
    assert seen == {"prefill": {prefill_threads or 2}, "step": {threads or 2}, "caller": {2}}


class Bench:
    """Says how long plain steps and rounds take with the threads of the moment."""

    def __init__(self, plain: dict[int, float], rounds: dict[int, float], device: str = "cpu") -> None:
        self.plain, self.rounds = plain, rounds
        self.decoder = SimpleNamespace(target=SimpleNamespace(device=torch.device(device)))

    kv_length = 16

    def decode_ms(self, kv_length: int) -> float:
        return self.plain[torch.get_num_threads()]

    def round_ms(self) -> float:
        return self.rounds[torch.get_num_threads()]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("plain", "rounds", "expected"),
    [
        ({1: 10.0, 2: 10.2}, {1: 20.0, 2: 30.0}, 1),
        ({1: 10.0, 2: 10.2}, {1: 30.0, 2: 20.0}, 2),
        ({1: 10.0, 2: 8.0}, {1: 20.0, 2: 30.0}, 2),  # the baseline is never slowed down for a better ratio
    ],
)
def test_the_baseline_stays_at_its_best(plain: dict[int, float], rounds: dict[int, float], expected: int) -> None:
    assert choose_threads([Bench(plain, rounds)]) == expected  # type: ignore[list-item]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("scatter", "second", "expected"),
    [
        ([1.0], [20.0], 1),
        ([1.2, 0.8, 1.0, 1.25, 0.85], [20.0], 2),  # 5 % slower, in the median of samples that lie 40 % apart
        ([1.2, 0.8, 1.0, 1.25, 0.85], [27.0, 27.0, 200.0], 1),  # in each third round, its threads wait for each other
    ],
)
def test_samples_that_scatter_rule_no_number_of_threads_out(
    scatter: list[float], second: list[float], expected: int
) -> None:
    factors, second_ms, plain = itertools.cycle(scatter), itertools.cycle(second), {1: 10.0, 2: 10.5}
    bench = Bench(plain, {})
    bench.decode_ms = lambda kv_length: next(factors) * plain[torch.get_num_threads()]  # type: ignore[method-assign]
    bench.round_ms = lambda: 30.0 if torch.get_num_threads() == 1 else next(second_ms)  # type: ignore[method-assign]
    assert choose_threads([bench]) == expected  # type: ignore[list-item]


def test_there_is_nothing_to_choose_on_an_accelerator_or_with_one_thread() -> None:
    assert choose_threads([Bench({}, {}, "cuda")]) is None  # type: ignore[list-item]
    with limited_threads(1):
        assert choose_threads([Bench({}, {})]) is None  # type: ignore[list-item]
