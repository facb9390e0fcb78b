"""Screening evaluates every subnet once, and its figures equal those of decoding."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.cost.table import CostTable
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.measuring.tables import priced_variants
from autotune.modeling.target import Target
from autotune.recording.traces import record_in_worker, record_traces
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.runtime.model_pool import _run_task as run_worker
from autotune.search import screening, thresholds
from autotune.search.screening import screen, screen_units, survivors
from autotune.search.tuning import Tuning
from autotune.study.ledger import Ledger
from autotune.study.records import ScreenedSubnet, record_of
from autotune.workloads.workload import Workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import cost_table
from tests.search.conftest import tuning_of
from tests.tiny_models import Pair

GRID = {
    "name": "grid",
    "heads": [1.0, 0.25],
    "injection_layers": "all",
    "visual_keep": [1.0, 0.5],
    "trees": {"chain": {"depth": {"low": 1, "high": 4}}},
}


@pytest.fixture(scope="module")
def pool(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    """A pool with a supernet and an independent draft."""
    folder = tmp_path_factory.mktemp("star")
    with torch.inference_mode():
        agreeing_draft("star", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return ModelPool(str(pair.target_folder), [str(folder), str(pair.draft_folder)], "cpu")


@pytest.fixture(scope="module")
def table(pool: ModelPool) -> CostTable:
    """A table in which every draft costs the same."""
    known = cost_table()
    drafts = [
        known.drafts[0].model_copy(update={"draft": pool.references[draft], "subnet": subnet.of_price})
        for draft, subnet in priced_variants(variants_of(pool, SearchSpace.model_validate(GRID)))
    ]
    return known.model_copy(update={"drafts": drafts, "target": pool.target_reference})


@pytest.fixture
def tuned(pool: ModelPool, evaluate: Workload, tmp_path: Path) -> Callable[..., Tuning]:
    """A search of a space in ``tmp_path``."""
    return partial(tuning_of, pool, evaluate, tmp_path)


def late(limit: float) -> Any:
    """A clock whose deadline is over."""
    return SimpleNamespace(deadline_of=lambda _: time.monotonic() - 1, limit_of=lambda _: limit)


def test_screened_figures_equal_decoding(table: CostTable, tuned: Callable[..., Tuning]) -> None:
    tuning = tuned({**GRID, "visual_rankings": ["text_after_image", "random"]})
    found = screen(tuning, table).subnets
    assert {one.variant for one in found} == set(tuning.variants) and len(found) == len(tuning.variants)
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)
    assert len({round(one.tokens_per_round, 6) for one in found}) > 3, "equal subnets would prove nothing"
    for one in found:
        chosen: Any = {"visual_keep": one.subnet.visual_keep, "visual_ranking": one.subnet.visual_ranking}
        tree = {"policy": "chain", "depth": one.depth}
        decoder = Decoder(tuning.pool.target, tuning.pool.draft(*one.variant), tree=tree, **chosen)
        tokens = rounds = 0
        for prompt in tuning.tune.prompts:
            stats = decoder.generate(**prompt.inputs(tuning.pool.processor), **prompt.settings.generation).stats
            tokens, rounds = tokens + stats.new_tokens - 1, rounds + stats.rounds
        assert one.tokens_per_round == pytest.approx(tokens / rounds), one.variant


def test_screening_resumes_from_its_records(
    table: CostTable, tuned: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some groups, then all: what is known is not recorded again, and another table makes new records."""
    tuning = tuned(GRID)
    variants, groups = tuning.variants, screening._recorded_together(tuning.pool, tuning.variants)
    assert sorted(map(len, groups)) == [1, 1] + [2] * ((len(variants) - 2) // 2)
    tuning.variants = [variant for group in groups[:3] for variant in group]
    assert len(screen(tuning, table).subnets) == len(tuning.variants)
    tuning.variants = variants
    whole = screen(tuning, table)
    monkeypatch.setattr(screening.Units, "screen", lambda *_: pytest.fail("recorded twice"))
    assert screen(tuning, table) == whole
    with pytest.raises(pytest.fail.Exception, match="twice"):
        screen(tuning, table.model_copy(update={"threads": 7}))


def test_promising_subnets_are_screened_first(
    table: CostTable, tuned: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheap chain of each draft, its whole subnet, a few shares of visual tokens, then the neighbours of the best;
    all of them in the end.
    """
    heads = [[*shares] for shares in itertools.product((1.0, 0.5, 0.25), repeat=3)]
    tuning = tuned({**GRID, "heads": heads, "visual_keep": [1.0, 0.6, 0.5, 0.1]})
    star, independent = tuning.pool.references
    order: list[tuple[str, list[Subnet]]] = []

    class Units(screening.Units):
        def __init__(self, pool: ModelPool, variants: Any, *_: Any) -> None:
            groups = screening._recorded_together(pool, variants)
            self.groups = {f"{len(variants)}-{number}": group for number, group in enumerate(groups)}

        def screen(self, group: Any) -> Any:
            draft, subnets = group[0][0], [subnet for _, subnet in group]
            order.append((draft, subnets))
            speed = 2.0 if draft == star else 1.4
            return record_of(
                [
                    screened_subnet(draft, speed - 0.1 * abs(s.visual_keep - 0.5) - 0.2 * (s.injection_layer == 2), s)
                    for s in subnets
                ]
            )

    monkeypatch.setattr(screening, "Units", Units)
    found = screen(tuning, table).subnets
    assert len(found) == len(tuning.variants)
    assert max(len(subnets) for _, subnets in order) == thresholds.MAX_SCREENED_TOGETHER
    first, order = order[:2], order[2:]
    assert [draft for draft, _ in first] == [draft for draft, _ in order[:2]] == [star, independent]
    assert [subnets for _, subnets in first] == [[order[0][1][0]], [order[1][1][0]]], "one subnet of each"
    assert order[0][1][0].heads is None and {len(set(s.head_shares)) for s in order[0][1][:3]} == {1}
    assert [(draft, subnets[0].visual_keep) for draft, subnets in order[2:6]] == [
        (draft, keep) for draft in (star, independent) for keep in (0.5, 0.1)
    ]
    last = max(number for number, (draft, _) in enumerate(order) if draft == star)
    assert {draft for draft, _ in order[last + 1 :]} == {independent}, "a draft that cannot win comes last"
    for _, (nearest, *_) in order[6:10]:
        assert nearest.injection_layer == order[0][1][0].injection_layer or nearest.visual_keep == 0.5


def screened_subnet(draft: str, speedup: float, subnet: Subnet) -> ScreenedSubnet:
    return ScreenedSubnet(draft=draft, subnet=subnet, depth=1, tokens_per_round=2, ms_per_token=1, speedup=speedup)


def test_records_of_workers_are_reused(
    table: CostTable, tuned: Callable[..., Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loads the models itself and uses fewer threads; its records have the same keys."""
    tuning = tuned(GRID)
    some, threads = tuning.variants[:3], torch.get_num_threads()
    ledger = pickle.loads(pickle.dumps(Ledger(tuning.folder / "ledger.sqlite")))
    recording = {"variants": some, "workload": tuning.tune, "folder": tuning.folder}
    given = tuning.variants, table, tuning.tune, tuning.folder, ledger
    try:
        run_worker(1, tuning.pool.arguments, threads, 1, screen_units, *given)
        run_worker(1, tuning.pool.arguments, threads, 1, record_in_worker, recording)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("autotune.recording.recorder.record_forest", lambda *_: pytest.fail("recorded twice"))
    assert {one.variant for one in screen(tuning, table).subnets} == set(tuning.variants)
    traces = record_traces(tuning.pool, some, tuning.tune, tuning.folder, tuning.console)
    assert [(trace.header.draft.id, trace.header.subnet) for trace in traces] == some


def test_screening_ends_at_its_deadline(
    table: CostTable, tuned: Callable[..., Tuning], capsys: pytest.CaptureFixture[str]
) -> None:
    """With one chain where no other stage leaves time for more; with the first subnet of every draft before the limit;
    more time screens the others, and records are kept.
    """
    tuning = tuned(GRID)
    usual, (first, second) = tuning.clock, tuning.pool.references
    tuning.clock = late(time.monotonic() - 1)
    assert [one.variant for one in screen(tuning, table).subnets] == [tuning.variants[0]]
    missing = " ".join(capsys.readouterr().err.split()).replace("- ", "-").partition("not compared: ")[2]
    assert missing.startswith(f"{second}; there was no time")
    tuning.clock = late(time.monotonic() + 60)
    few = screen(tuning, table).subnets
    assert {one.draft for one in few} == {first, second}
    said = capsys.readouterr().err
    assert f"{len(few)} of {len(tuning.variants)} subnets were screened" in said and "not compared" not in said
    tuning.clock = usual
    assert len(few) < len(screen(tuning, table).subnets) == len(tuning.variants)
    tuning.clock = late(time.monotonic() - 1)
    assert len(screen(tuning, table).subnets) == len(tuning.variants), "records that exist are used"


@pytest.mark.parametrize("has_hopeless", [False, True])
@pytest.mark.parametrize(("count", "chosen"), [(3, [0, 3, 1]), (1, [0, 3]), (9, [0, 3, 1, 2, 4, 5])])
def test_survivors_include_the_best_subnet_of_each_draft_that_can_win(
    has_hopeless: bool, count: int, chosen: list[int]
) -> None:
    """The best of two drafts, then the best others; a draft that cannot win where there is room for all."""
    choices = [("a", 2.0, 1.0), ("a", 1.9, 0.5), ("a", 1.8, 0.4), ("b", 1.5, 1.0), ("b", 1.2, 0.5), ("c", 1.1, 1.0)]
    ranked = [screened_subnet(draft, speedup, Subnet(visual_keep=keep)) for draft, speedup, keep in choices]
    ranked = ranked if has_hopeless else ranked[:-1]
    assert survivors(ranked, count) == [ranked[n].variant for n in chosen if n < len(ranked)]
