"""Screening evaluates every subnet once, and its figures equal those of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.acceptance.recorder import Recorder
from autotune.acceptance.trace import ForestBounds
from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import save_draft
from autotune.errors import UserError
from autotune.evaluation.runner import ArmRunner
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.search import screening
from autotune.search import traces as traces_module
from autotune.search.cost_tables import priced_variants
from autotune.search.model_pool import ModelPool
from autotune.search.model_pool import _run_task as run_worker
from autotune.search.screening import DEPTHS, measure, screen, survivors
from autotune.search.space import SearchSpace, load_space
from autotune.search.traces import record_traces
from autotune.search.worker_pool import MAX_WORKERS
from autotune.study.ledger import Ledger
from autotune.study.records import ScreenedSubnet
from autotune.workloads.workload import Workload, load_workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import cost_table, write_image, write_workload
from tests.tiny_models import Pair

GRID = {
    "name": "grid",
    "heads": [1.0, 0.25],
    "injection_layers": "all",
    "visual_keep": {"choices": [1.0, 0.5]},
    "trees": {"chain": {"depth": {"low": 1, "high": 4}}},
}


@pytest.fixture(scope="module")
def model_pool(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    """A pool with a supernet and an independent draft."""
    folder = tmp_path_factory.mktemp("star")
    with torch.inference_mode():
        save_draft(agreeing_draft("star", Target(pair.target), injection_layer=4).network, folder)  # type: ignore[arg-type]
    return ModelPool(str(pair.target_folder), [str(folder), str(pair.draft_folder)], "cpu")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("workload")
    images = [write_image(folder / "0.png", 0)]
    prompts: list[dict[str, Any]] = [{"prompt": "Read the digits row by row.", "images": images}, {"prompt": "And 2?"}]
    lines = [{"split": "tune", "max_new_tokens": 24, **prompt} for prompt in prompts]
    return load_workload(str(write_workload(folder, lines)), "tune")


@pytest.fixture(scope="module")
def table(model_pool: ModelPool) -> CostTable:
    """A table in which every draft costs the same."""
    known = cost_table()
    grid = SearchSpace.model_validate(GRID)
    drafts = [
        known.drafts[0].model_copy(update={"draft": model_pool.references[draft], "heads": subnet.heads})
        for draft, subnet in priced_variants(model_pool.subnets(grid))
    ]
    return known.model_copy(update={"drafts": drafts, "target": model_pool.target_reference})


def test_subnets_of_every_draft(model_pool: ModelPool) -> None:
    star, independent = model_pool.references
    found = model_pool.subnets(SearchSpace.model_validate(GRID))
    layers = sorted({subnet.injection_layer for draft, subnet in found if draft == star})
    assert len(found) == len(set(found)) == 2 * len(layers) * 2 + 2 and layers[-1] == 4
    assert [subnet for draft, subnet in found if draft == independent] == [Subnet(), Subnet(visual_keep=0.5)]
    assert len(priced_variants(found)) == 3, "two shares of heads of the supernet, and the other draft"
    ranked = model_pool.subnets(SearchSpace.model_validate({**GRID, "visual_ranking": ["even", "all_queries"]}))
    assert [subnet for draft, subnet in ranked if draft == independent] == [
        Subnet(),  # there is nothing to rank where all tokens are kept
        Subnet(visual_keep=0.5, visual_ranking="even"),
        Subnet(visual_keep=0.5, visual_ranking="all_queries"),
    ]
    assert priced_variants(ranked) == priced_variants(found)
    whole = model_pool.draft(star)
    assert model_pool.draft(star, Subnet(injection_layer=4)) is whole
    half = model_pool.draft(star, Subnet(heads=0.25, injection_layer=2))
    assert half is model_pool.draft(star, Subnet(heads=0.25, injection_layer=2, visual_keep=0.5))
    assert half.num_parameters < whole.num_parameters and half.aux_layers == (2,)


def test_heads_without_a_supernet_are_refused(pair: Pair) -> None:
    alone = ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")
    with pytest.raises(UserError, match="only a star draft has heads and layers to choose"):
        alone.subnets(SearchSpace.model_validate(GRID))
    assert len(alone.subnets(load_space("quick"))) == 3


def test_screened_figures_equal_decoding(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path
) -> None:
    variants = model_pool.subnets(
        SearchSpace.model_validate({**GRID, "visual_ranking": ["text_after_image", "random"]})
    )
    ledger = Ledger(tmp_path / "ledger.sqlite")
    found = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    assert {one.variant for one in found} == set(variants) and len(found) == len(variants)
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)
    assert len({round(one.tokens_per_round, 6) for one in found}) > 3, "equal subnets would prove nothing"
    for one in found:
        assert one.depth in DEPTHS
        tree = {"policy": "chain", "depth": one.depth}
        draft = model_pool.draft(*one.variant)
        chosen = {"visual_keep": one.subnet.visual_keep, "visual_ranking": one.subnet.visual_ranking}
        decoder = Decoder(model_pool.target, draft, tree=tree, **chosen)  # type: ignore[arg-type]
        tokens = rounds = 0
        for prompt in workload.prompts:
            stats = decoder.generate(**prompt.inputs(model_pool.processor), **prompt.settings.generation).stats
            tokens, rounds = tokens + stats.new_tokens - 1, rounds + stats.rounds
        assert one.tokens_per_round == pytest.approx(tokens / rounds), one.variant


def test_screening_resumes_from_its_records(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some variants, then all: nothing is recorded twice, and another table makes new records."""
    variants = model_pool.subnets(SearchSpace.model_validate(GRID))
    recorded: list[Subnet] = []
    trace = Recorder.trace

    def counting(self: Recorder, draft: Any, *args: Any, visual_keep: float, **options: Any) -> Any:
        recorded.append(draft.subnet.model_copy(update={"visual_keep": visual_keep}))
        return trace(self, draft, *args, visual_keep=visual_keep, **options)

    monkeypatch.setattr(Recorder, "trace", counting)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    screen(model_pool, variants[:3], table, workload, tmp_path, ledger, Console())
    first = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    assert len(recorded) == len(variants)
    assert screen(model_pool, variants, table, workload, tmp_path, ledger, Console()) == first
    assert len(recorded) == len(variants)
    dearer = table.model_copy(update={"verify": table.decode.model_copy(), "precision": "bfloat16"})
    with pytest.raises(UserError):  # which prices one token at a time
        screen(model_pool, variants[:1], dearer, workload, tmp_path, ledger, Console())


def test_records_of_workers_are_reused(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loads the models itself and uses fewer threads; its records have the same keys."""
    variants = model_pool.subnets(SearchSpace.model_validate(GRID))
    threads = torch.get_num_threads()
    try:
        arguments = variants, table, workload, tmp_path, tmp_path / "ledger.sqlite"
        run_worker(1, model_pool.arguments, 1, screening._screen_in_worker, arguments)
        run_worker(
            1,
            model_pool.arguments,
            1,
            traces_module._record_in_worker,
            (variants[:3], workload, tmp_path, ForestBounds()),
        )
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("autotune.acceptance.recorder.record_forest", lambda *_: pytest.fail("recorded twice"))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    screened = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    assert {one.variant for one in screened} == set(variants)
    traces = record_traces(model_pool, variants[:3], workload, tmp_path, Console())
    assert [(trace.header.draft.id, trace.header.subnet.name) for trace in traces] == [
        (draft, subnet.name) for draft, subnet in variants[:3]
    ]


def test_worker_limits(model_pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "arguments", model_pool.arguments._replace(num_threads=8))
    monkeypatch.setattr("autotune.search.model_pool.free_memory", lambda device: 1 << 50)
    assert model_pool.worker_limits(None) == (7, 1)
    assert model_pool.worker_limits(2) == (1, 4)
    assert model_pool.worker_limits(1) == (0, 8)
    monkeypatch.setattr(model_pool, "arguments", model_pool.arguments._replace(num_threads=64))
    assert model_pool.worker_limits(None) == (MAX_WORKERS, 8)
    monkeypatch.setattr("autotune.search.model_pool.free_memory", lambda device: 1 << 31)
    assert model_pool.worker_limits(None) == (0, 64), "half of 2 GiB is too little for a worker"


def test_every_subnet_can_be_measured(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs make one record per variant, and determine the order."""
    star, independent = model_pool.references
    variants = [(independent, Subnet()), (independent, Subnet(visual_keep=0.5)), (star, Subnet(injection_layer=4))]
    ledger = Ledger(tmp_path / "ledger.sqlite")
    screened = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    found = measure(model_pool, screened, None, workload, ledger, Console())
    assert {one.variant for one in found} == set(variants)
    assert all(one.measured_speedup and one.measured_speedup > 0 for one in found)
    monkeypatch.setattr(ArmRunner, "compare", lambda *args, **options: pytest.fail("measured twice"))
    assert measure(model_pool, screened, None, workload, ledger, Console()) == found
    assert [one.measured_speedup for one in found] == sorted((one.measured_speedup for one in found), reverse=True)  # type: ignore[type-var]


def test_survivors_include_the_best_subnet_of_each_draft() -> None:
    def one(draft: str, keep: float, speedup: float) -> ScreenedSubnet:
        return ScreenedSubnet(
            draft=draft, subnet=Subnet(visual_keep=keep), depth=1, tokens_per_round=2, ms_per_token=1, speedup=speedup
        )

    ranked = [one("a", 1.0, 2.0), one("a", 0.5, 1.9), one("a", 0.4, 1.8), one("b", 1.0, 1.2), one("b", 0.5, 1.1)]
    assert survivors(ranked, 3) == [ranked[0].variant, ranked[3].variant, ranked[1].variant]
    assert survivors(ranked, 1) == [ranked[0].variant, ranked[3].variant], "every draft has a survivor"
    assert survivors(ranked, 9) == [ranked[n].variant for n in (0, 3, 1, 2, 4)]
