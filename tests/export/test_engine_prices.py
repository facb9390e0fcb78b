"""Prices of rounds that were measured in an engine: interpolation, chains priced by them, and exports that they choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from autotune.acceptance.replay import replay
from autotune.cli.main import main
from autotune.errors import UserError
from autotune.export.document import EXPORT, Export
from autotune.export.engine_prices import EnginePrices, RoundTimes
from autotune.export.engine_replay import MeasuredReplay
from autotune.trees.chain import ChainPolicy
from tests.export.studies import cheap_table, trace_of, write_pair
from tests.sample_documents import DEVICE, DRAFT, PROVENANCE, TARGET, cost_table, free_prices

LENGTHS, SIZES = (0, 1, 4), (1, 4)


def prices(round_ms: Callable[[int, int], float], *, sizes: tuple[int, ...] = SIZES, **fields: Any) -> EnginePrices:
    """Prices of ``round_ms`` by number of requests and draft tokens; a draft adds 0.5 ms to a prefill of 2 ms."""
    times = [
        RoundTimes(
            requests_at_once=size,
            draft_tokens=length,
            round_ms=[round_ms(size, length), 99.0, round_ms(size, length)],
            prefill_ms=[2.0 + 0.5 * (length > 0)],
        )
        for size in sizes
        for length in LENGTHS
    ]
    known = {"engine": "vllm", "engine_version": "0.32.0", "target": TARGET, "draft": DRAFT, "times": times} | fields
    return EnginePrices(provenance=PROVENANCE, hardware=DEVICE, workload="by hand", **known)


def by_hand(size: int, length: int) -> float:
    """Steps cost 3 ms, 1 ms for every draft token and, of each further request, 0.6 ms a token."""
    step_ms = 3.0 + length + 0.6 * (size - 1) * (length + 1)
    return step_ms / size


def test_steps_are_interpolated_between_measured_sizes() -> None:
    found = prices(by_hand)
    assert (found.batch_sizes, found.draft_lengths) == ([1, 4], [0, 1, 4])
    for size in (1, 2, 3, 4):
        for length in (0, 1, 2, 3, 4):
            assert found.round_ms(size, length) == pytest.approx(by_hand(size, length)), (size, length)
        assert found.draft_prefill_ms(size) == pytest.approx(0.5)


def test_chains_cost_their_rounds_and_the_drafts_prefill() -> None:
    trace = trace_of()
    for depth in (1, 2, 3, 4):
        counted = replay(trace, ChainPolicy(depth=depth), free_prices())
        rounds, tokens = int(counted.rounds.sum()), int(counted.tokens.sum())
        for batch in (1, 2, 4):
            replayed = MeasuredReplay(trace, cost_table(), prices(by_hand))
            found = replayed.price(ChainPolicy(depth=depth), batch).predicted
            ms = rounds * by_hand(batch, depth) + 0.5 * trace.num_prompts
            assert found.ms_per_token == pytest.approx(ms / tokens), (depth, batch)
            assert found.speedup == pytest.approx(tokens * by_hand(batch, 0) / ms), (depth, batch)
            assert found.tokens_per_round == tokens / rounds and not found.estimated


def test_the_fastest_chain_and_the_schedule_are_the_least_sums() -> None:
    """Up to the largest number of requests that was measured."""
    trace = trace_of()
    replayed = MeasuredReplay(trace, cost_table(), prices(by_hand))
    assert [chain.depth for chain in replayed.chains()] == [1, 2, 3, 4]
    longest = replayed.fastest().chain.depth
    schedule = replayed.schedule()
    assert schedule[0].start == 1 and schedule[-1].end == 4
    for one in schedule:
        for batch in range(one.start, one.end + 1):
            chains = [ChainPolicy(depth=depth) for depth in range(1, longest + 1)]
            times = {chain.depth: replayed.price(chain, batch).predicted.ms_per_token for chain in chains}
            times[0] = by_hand(batch, 0)
            assert one.draft_tokens == min(times, key=lambda depth: times[depth]), (batch, times)
    assert len({one.draft_tokens for one in schedule}) > 1, "the batch size changes nothing here"


def test_a_larger_batch_may_draft_more_where_its_prices_say_so() -> None:
    """Two requests are dear to draft for, four are not."""

    def round_ms(size: int, length: int) -> float:
        return 3.0 + (50.0 if size == 2 else 0.0) * length

    replayed = MeasuredReplay(trace_of(), cost_table(), prices(round_ms, sizes=(1, 2, 4)))
    assert replayed.fastest().chain.depth == 4
    lengths = {batch: one.draft_tokens for one in replayed.schedule() for batch in range(one.start, one.end + 1)}
    assert lengths[1] == lengths[4] == 4 and lengths[2] == 0
    assert set(replayed.gains()) == {1, 4}


def test_an_export_chooses_at_the_engines_prices(tmp_path: Path) -> None:
    """Where drafting costs nothing, the longest chain that was measured; where it is dear, none."""
    profile = write_pair(tmp_path, table=cheap_table())

    def export(found: EnginePrices, engine: str = "vllm") -> Any:
        found.save(tmp_path / "prices.json")
        words = [profile, "--to", engine, "--prices", tmp_path / "prices.json", "-o", tmp_path / "out"]
        return CliRunner().invoke(main, ["export", *map(str, words)])

    result = export(prices(lambda size, length: 3.0))
    assert result.exit_code == 0, result.output
    document = Export.load(tmp_path / "out" / EXPORT)
    assert document.settings["num_speculative_tokens"] == 4
    assert document.settings["num_speculative_tokens_per_batch_size"] == [[1, 4, 4], [5, 1024, 0]]
    assert any("measured with 0, 1, 4 draft tokens and 1, 4 requests at once" in note for note in document.notes)
    assert not any("nothing was measured" in note or "were not measured" in note for note in document.notes)
    dear = export(prices(lambda size, length: 3.0 + 99.0 * length))
    assert dear.exit_code == 2 and "serve the target alone" in dear.stderr and "at once" not in dear.stderr
    together = export(prices(lambda size, length: 3.0 + (99.0 if size == 1 else 0.0) * length))
    message = "with 4 draft tokens and 4 requests at once; serve the target alone"
    assert together.exit_code == 2 and message in together.stderr
    for changed, what in (
        (prices(by_hand, engine="transformers"), "engine"),
        (prices(by_hand, engine_version="0.1"), "version"),
        (prices(by_hand, target=DRAFT), "target"),
        (prices(by_hand, draft=TARGET), "draft"),
    ):
        refused = export(changed)
        message = f"prices are valid for the {what} that they were measured with"
        assert refused.exit_code == 2 and message in refused.stderr


def test_prices_are_a_grid() -> None:
    whole = prices(by_hand)
    for times in (whole.times[:-1], [*whole.times, whole.times[0]], [t for t in whole.times if t.draft_tokens != 1]):
        with pytest.raises(ValidationError, match="every draft length with every number of requests"):
            prices(by_hand, times=times)
    with pytest.raises(UserError, match="chains of 1 to 4 tokens"):
        MeasuredReplay(trace_of(), cost_table(), whole, draft_tokens=7)
