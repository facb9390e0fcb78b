"""Screening evaluates every subnet once, and its figures equal those of decoding."""

from __future__ import annotations

import math
import pickle
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.machine.worker_pool import MAX_WORKERS
from autotune.measuring.tables import priced_variants
from autotune.modeling.target import Target
from autotune.recording.chain_recorder import chain_traces
from autotune.recording.recorder import Recorder
from autotune.recording.traces import Recording, RecordingTimes, record_in_worker, record_trace, record_traces
from autotune.runtime.decoder import Decoder
from autotune.runtime.draft_variants import variants_of
from autotune.runtime.model_pool import ModelPool
from autotune.runtime.model_pool import _run_task as run_worker
from autotune.search import screening
from autotune.search.screening import DEPTHS, MAX_TOGETHER, screen, screen_units, survivors
from autotune.search.thresholds import MIN_TRACED_PROMPTS
from autotune.study.ledger import Ledger
from autotune.study.records import ScreenedSubnet, record_of
from autotune.study.spaces import load_space
from autotune.workloads.workload import Workload, load_workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import cost_table, write_image, write_workload
from tests.tiny_models import Pair

SCREENED = {"depth": 1, "tokens_per_round": 2.0, "ms_per_token": 1.0}
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
        agreeing_draft("star", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return ModelPool(str(pair.target_folder), [str(folder), str(pair.draft_folder)], "cpu")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("workload")
    images = [write_image(folder / "0.png", 0)]
    prompts: list[dict[str, Any]] = [{"prompt": "Read the digits row by row.", "images": images}, {"prompt": "And 2?"}]
    lines = [{"split": "tune", "max_new_tokens": 14, **prompt} for prompt in prompts]
    return load_workload(str(write_workload(folder, lines)), "tune")


@pytest.fixture(scope="module")
def table(model_pool: ModelPool) -> CostTable:
    """A table in which every draft costs the same."""
    known = cost_table()
    grid = SearchSpace.model_validate(GRID)
    drafts = [
        known.drafts[0].model_copy(update={"draft": model_pool.references[draft], "heads": subnet.heads})
        for draft, subnet in priced_variants(variants_of(model_pool, grid))
    ]
    return known.model_copy(update={"drafts": drafts, "target": model_pool.target_reference})


def test_subnets_of_every_draft(model_pool: ModelPool) -> None:
    star, independent = model_pool.references
    found = variants_of(model_pool, SearchSpace.model_validate(GRID))
    layers = sorted({subnet.injection_layer for draft, subnet in found if draft == star})
    assert len(found) == len(set(found)) == 2 * len(layers) * 2 + 2 and layers[-1] == 4
    assert [subnet for draft, subnet in found if draft == independent] == [Subnet(), Subnet(visual_keep=0.5)]
    assert len(priced_variants(found)) == 3, "two shares of heads of the supernet, and the other draft"
    ranked = variants_of(model_pool, SearchSpace.model_validate({**GRID, "visual_rankings": ["even", "all_queries"]}))
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


def test_heads_of_a_space_are_those_of_supernets(pair: Pair) -> None:
    """Other drafts have none. A user who asks for heads or a layer needs a supernet."""
    alone = ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")
    (name,) = alone.references
    assert variants_of(alone, SearchSpace.model_validate(GRID)) == [(name, Subnet()), (name, Subnet(visual_keep=0.5))]
    assert len(variants_of(alone, load_space("quick"))) == 10
    with pytest.raises(UserError, match="only a star draft has heads and layers to choose"):
        variants_of(alone, load_space("quick", ("heads=0.5",)))


def test_many_choices_of_heads_are_priced_by_equal_shares(model_pool: ModelPool) -> None:
    star, independent = model_pool.references
    exhaustive = variants_of(model_pool, load_space("star-exhaustive"))
    priced = priced_variants(exhaustive)
    assert [subnet.heads for draft, subnet in priced if draft == star] == [None, 0.75, 0.5, 0.25]
    assert [subnet for draft, subnet in priced if draft == independent] == [Subnet()]
    few = [(star, Subnet(heads=heads)) for heads in ((1.0, 0.5, 0.5), (0.25, 0.5, 0.5))]
    assert priced_variants(few) == few, "a few are priced themselves"


def test_screened_figures_equal_decoding(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path
) -> None:
    variants = variants_of(
        model_pool, SearchSpace.model_validate({**GRID, "visual_rankings": ["text_after_image", "random"]})
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
    """After some groups, then all: nothing is recorded twice, and another table makes new records."""
    variants = variants_of(model_pool, SearchSpace.model_validate(GRID))
    groups = screening._recorded_together(model_pool, variants)
    assert sorted(map(len, groups)) == [1, 1] + [2] * ((len(variants) - 2) // 2)
    recorded: list[Subnet] = []

    def alone(recorder: Recorder, pool: ModelPool, variant: Any, prompts: Workload, bounds: Any) -> Any:
        recorded.extend([variant] * (bounds == screening.BOUNDS))  # the cheap chains are not counted
        return record_trace(recorder, pool, variant, prompts, bounds)

    def together(recorder: Recorder, draft: Any, reference: Any, prompts: Any, subnets: Any, bounds: Any) -> Any:
        recorded.extend((reference.id, subnet) for subnet in subnets)
        return chain_traces(recorder, draft, reference, prompts, subnets, bounds)

    monkeypatch.setattr(screening, "record_trace", alone)
    monkeypatch.setattr(screening, "chain_traces", together)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    some = [variant for group in groups[:3] for variant in group]
    assert len(screen(model_pool, some, table, workload, tmp_path, ledger, Console())) == len(recorded) == len(some)
    first = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    assert len(recorded) == len(set(recorded)) == len(variants)
    assert screen(model_pool, variants, table, workload, tmp_path, ledger, Console()) == first
    assert len(recorded) == len(variants)
    dearer = table.model_copy(update={"verify": table.decode.model_copy(), "precision": "bfloat16"})
    with pytest.raises(UserError):  # which prices one token at a time
        screen(model_pool, variants[:1], dearer, workload, tmp_path, ledger, Console())


def test_promising_subnets_are_screened_first(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheap chain of each draft, its whole subnet, a few shares of visual tokens, then the neighbours of the best;
    all of them in the end.
    """
    star, independent = model_pool.references
    by_block = {"heads": [1.0, 0.5, 0.25], "heads_by_block": True}
    keeps = {"visual_keep": {"choices": [1.0, 0.6, 0.5, 0.1]}}
    variants = variants_of(model_pool, SearchSpace.model_validate({**GRID, **by_block, **keeps}))
    speeds: dict[str, float] = {star: 2.0, independent: 1.4}
    order: list[tuple[str, list[Subnet]]] = []

    def unit(pool: ModelPool, variants: Any, *others: Any) -> Any:
        def screen_together(group: Any) -> Any:
            draft, subnets = group[0][0], [subnet for _, subnet in group]
            order.append((draft, subnets))
            slower = {s: 0.1 * abs(s.visual_keep - 0.5) + 0.2 * (s.injection_layer == 2) for s in subnets}
            return record_of(
                [ScreenedSubnet(**SCREENED, draft=draft, subnet=s, speedup=speeds[draft] - slower[s]) for s in subnets]
            )

        groups = screening._recorded_together(pool, variants)
        return {f"{len(others)}-{number}": group for number, group in enumerate(groups)}, screen_together

    monkeypatch.setattr(screening, "_screening_units", unit)
    arguments = model_pool, variants, table, workload, tmp_path
    ledger = Ledger(tmp_path / "ledger.sqlite")
    found = screen(*arguments, ledger, Console(), jobs=1)
    assert len(found) == len(variants) and max(len(subnets) for _, subnets in order) == MAX_TOGETHER
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


def screened_subnet(draft: str, speedup: float, **choices: Any) -> ScreenedSubnet:
    subnet = Subnet(**choices)
    return ScreenedSubnet(draft=draft, subnet=subnet, depth=1, tokens_per_round=2, ms_per_token=1, speedup=speedup)


def test_records_of_workers_are_reused(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker loads the models itself and uses fewer threads; its records have the same keys."""
    variants = variants_of(model_pool, SearchSpace.model_validate(GRID))
    threads = torch.get_num_threads()
    try:
        ledger = pickle.loads(pickle.dumps(Ledger(tmp_path / "ledger.sqlite")))
        work = ledger, (variants, table, workload, tmp_path), (math.inf, math.inf, 1)
        run_worker(1, model_pool.arguments, threads, 1, screen_units, *work)
        recording = {"variants": variants[:3], "workload": workload, "folder": tmp_path}
        run_worker(1, model_pool.arguments, threads, 1, record_in_worker, recording)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("autotune.recording.recorder.record_forest", lambda *_: pytest.fail("recorded twice"))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    screened = screen(model_pool, variants, table, workload, tmp_path, ledger, Console())
    assert {one.variant for one in screened} == set(variants)
    traces = record_traces(model_pool, variants[:3], workload, tmp_path, Console())
    assert [(trace.header.draft.id, trace.header.subnet.name) for trace in traces] == [
        (draft, subnet.name) for draft, subnet in variants[:3]
    ]


def test_screening_ends_at_its_deadline(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the first subnet of every draft; more time screens the others, and records are kept."""
    variants, ledger = variants_of(model_pool, SearchSpace.model_validate(GRID)), Ledger(tmp_path / "ledger.sqlite")
    arguments = model_pool, variants, table, workload, tmp_path, ledger, Console()
    late = screen(*arguments, deadline=time.monotonic() - 1)
    assert {one.draft for one in late} == set(model_pool.references)
    assert {one.variant for one in late} >= {next(v for v in variants if v[0] == d) for d in model_pool.references}
    said = capsys.readouterr().err
    assert f"{len(late)} of {len(variants)} subnets were screened" in said and "not compared" not in said
    assert len(late) < len(screen(*arguments)) == len(variants)
    assert len(screen(*arguments, deadline=time.monotonic() - 1)) == len(variants), "records that exist are used"


def test_drafts_without_time_for_a_chain_are_named(
    model_pool: ModelPool, table: CostTable, workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time for one chain is all there is: the first draft's."""
    first, second = model_pool.references
    variants, ledger = variants_of(model_pool, SearchSpace.model_validate(GRID)), Ledger(tmp_path / "ledger.sqlite")
    past = time.monotonic() - 1
    late = screen(model_pool, variants, table, workload, tmp_path, ledger, Console(), deadline=past, limit=past)
    assert [one.variant for one in late] == [variants[0]]
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"not compared: {second}; there was no time" in said.replace("- ", "-")
        and first not in said.partition("not compared")[2]
    )
    assert {
        one.draft for one in screen(model_pool, variants, table, workload, tmp_path, ledger, Console(), deadline=past)
    } == {first, second}, "as long as later stages keep their time, each draft has a chain"


def test_traces_end_at_their_deadline(
    model_pool: ModelPool, workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All variants are recorded on the same first prompts, and these traces equal those of whole recordings."""
    variants = variants_of(model_pool, SearchSpace.model_validate(GRID))[:2]
    many = Workload("x", "tune", tuple(replace(p, name=f"{n}") for n in range(8) for p in workload.prompts))
    over = RecordingTimes(time.monotonic() - 1, time.monotonic() - 1, num_least=MIN_TRACED_PROMPTS)
    late = record_traces(model_pool, variants, many, tmp_path, Console(), jobs=1, times=over)
    count = late[0].num_prompts
    assert [trace.num_prompts for trace in late] == [count] * 2 and MIN_TRACED_PROMPTS <= count < len(many.prompts)
    assert f"{count} of {len(many.prompts)} prompts were recorded" in capsys.readouterr().err
    for trace, whole in zip(
        late, record_traces(model_pool, variants, many.cut(count), tmp_path, Console()), strict=True
    ):
        np.testing.assert_array_equal(trace.forest.child_token, whole.forest.child_token)
        assert trace.header.workload_sha256 == many.cut(count).sha256


def test_recording_begins_nothing_that_would_end_late(
    model_pool: ModelPool, workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts take 10 s each. The least may pass the deadline, and not the limit; more must end before the deadline."""
    many = Workload("x", "tune", tuple(replace(p, name=f"{n}") for n in range(12) for p in workload.prompts))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("autotune.recording.traces.time", clock)
    for deadline, limit, count in ((60.0, 90.0, 12), (15.0, 90.0, MIN_TRACED_PROMPTS), (15.0, 29.0, 4), (0.0, 0.0, 2)):
        clock.now = 0.0
        times = RecordingTimes(least=limit, num_least=MIN_TRACED_PROMPTS)
        recording = Recording(model_pool, [], many, tmp_path, num_processes=2, times=times)
        done = recording.record(many, 2, deadline, lambda _: setattr(clock, "now", clock.now + 10.0))
        assert done == count, (deadline, limit)
        assert clock.now <= max(deadline, limit, 10.0)


def test_every_prompt_is_recorded_by_one_process(model_pool: ModelPool, workload: Workload, tmp_path: Path) -> None:
    """Workers take their own prompts; the first process takes all that are missing."""
    many = Workload("x", "tune", tuple(replace(p, name=f"{n}") for n in range(12) for p in workload.prompts))
    made: list[list[str]] = []
    for rank in range(3):
        recording = Recording(model_pool, [], many, tmp_path, rank=rank, num_processes=3)
        parts: list[str] = []
        recording.record(many, 2, math.inf, lambda part, parts=parts: parts.extend(p.name for p in part.prompts))
        made.append(parts)
    names = [prompt.name for prompt in many.prompts]
    assert sorted(made[0]) == sorted(names)
    assert not set(made[1]) & set(made[2])
    own = [name for name in made[0] if name not in {*made[1], *made[2]}]
    assert sorted([*own, *made[1], *made[2]]) == sorted(names)


def test_worker_limits(model_pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "num_cores", 8)
    monkeypatch.setattr("autotune.runtime.model_pool.free_memory", lambda device: 1 << 50)
    assert model_pool.worker_limits(None) == (7, 1)
    assert model_pool.worker_limits(2) == (1, 4)
    assert model_pool.worker_limits(1) == (0, 8)
    monkeypatch.setattr(model_pool, "num_cores", 64)
    assert model_pool.worker_limits(None) == (MAX_WORKERS, 8)
    monkeypatch.setattr("autotune.runtime.model_pool.free_memory", lambda device: 1 << 31)
    assert model_pool.worker_limits(None) == (0, 64), "half of 2 GiB is too little for a worker"


def test_survivors_include_the_best_subnet_of_each_draft_that_can_win() -> None:
    choices = [("a", 2.0, 1.0), ("a", 1.9, 0.5), ("a", 1.8, 0.4), ("b", 1.5, 1.0), ("b", 1.2, 0.5), ("c", 1.1, 1.0)]
    hopeless = [screened_subnet(draft, speedup, visual_keep=keep) for draft, speedup, keep in choices]
    ranked = hopeless[:-1]
    for screened in (ranked, hopeless):
        assert survivors(screened, 3) == [ranked[0].variant, ranked[3].variant, ranked[1].variant]
        assert survivors(screened, 1) == [ranked[0].variant, ranked[3].variant], "both drafts survive"
    assert survivors(ranked, 9) == [ranked[n].variant for n in (0, 3, 1, 2, 4)]
    assert survivors(hopeless, 9) == [hopeless[n].variant for n in (0, 3, 1, 2, 4, 5)], "there is room for all"
