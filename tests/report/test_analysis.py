"""The report's numbers against brute force and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.documents.subnet import Subnet
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.report.ablation import cumulative_ablation
from autotune.report.acceptance import acceptance
from autotune.report.analysis import pareto_front, subnet_grids
from autotune.report.cost_curves import cost_curves, middle_kv_length
from autotune.report.points import heads_label
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet
from tests.report.conftest import EVIL, SHAPE, MadeStudy
from tests.sample_documents import DEVICE, cost_table


def test_pareto_front_is_not_dominated(sources: Sources) -> None:
    def beats(one: Candidate, other: Candidate) -> bool:
        no_worse = one.ms_per_token <= other.ms_per_token and one.nodes_per_round <= other.nodes_per_round
        return no_worse and (one.ms_per_token, one.nodes_per_round) != (other.ms_per_token, other.nodes_per_round)

    kept = pareto_front(sources.candidates)
    assert len(kept) > 2
    for one in kept:
        assert not any(beats(other, one) for other in sources.candidates)
    for one in sources.candidates:
        assert any(
            other.ms_per_token <= one.ms_per_token and other.nodes_per_round <= one.nodes_per_round for other in kept
        )


def test_cumulative_ablation_frees_dimensions_one_by_one(sources: Sources, made: MadeStudy) -> None:
    steps = cumulative_ablation(sources)
    assert [*steps] == ["full draft", "+ visual tokens", "+ heads", "+ injection layer"]
    assert [best.ms_per_token for best in steps.values()] == pytest.approx([1.17, 1.155, 1.055, 1.005])
    other = ScreenedSubnet(draft="other", subnet=Subnet(), depth=2, tokens_per_round=2, ms_per_token=0.5, speedup=4.0)
    steps = cumulative_ablation(replace(sources, screened=[*made.screened, other]))
    assert [*steps.items()][-1] == ("+ draft", other)
    assert cumulative_ablation(Sources()) == {}


def test_grids_hold_every_screened_subnet(made: MadeStudy) -> None:
    found = subnet_grids(made.screened)
    assert [(grid.draft, grid.layer) for grid in found] == [(EVIL.id, 3), (EVIL.id, 4)]
    for s in made.screened:
        (grid,) = (grid for grid in found if grid.layer == s.subnet.injection_layer)
        assert grid.speedups.loc[heads_label(s.subnet), s.subnet.visual_keep] == s.speedup
    assert list(found[0].speedups.index) == ["100 %", "50 %"] and list(found[0].speedups) == [0.25, 0.5, 1.0]
    partial, _ = subnet_grids(made.screened[:1] + made.screened[4:5])
    assert partial.speedups.fillna(0).to_numpy().tolist() == [[0, made.screened[0].speedup]]
    assert subnet_grids([]) == []


def test_acceptance_on_tuning_and_held_out_prompts(sources: Sources, made: MadeStudy) -> None:
    found = acceptance(sources)
    assert found is not None and (found.num_replayed, found.num_measured) == (4, 3)
    assert len(sources.runs) == 5, "runs of other arms and with other times are no evidence"
    depth = found.tables["depth"]
    measured = depth[["measured_offered", "measured_accepted"]].loc[1:2]
    assert measured.to_numpy().tolist() == [[15, 12], [9, 6]], "three runs"
    trace = made.traces[1]
    tokens = sum(int(trace.answer_start[p + 1] - trace.answer_start[p]) - 1 for p in range(4))
    rounds, accepted = depth.replayed_offered[1], depth.replayed_accepted.sum()
    assert rounds + accepted <= tokens, "plain steps emit the other tokens"


def test_curves_repeat_the_cost_table(sources: Sources) -> None:
    table = sources.table
    assert table is not None
    found = {one.part: one for one in cost_curves(table, sources.study)}
    assert middle_kv_length(table) == 256
    for point in table.verify.points:
        if point.kv_length == 256:
            assert found["target, verification"].ms(point.tokens) == pytest.approx(point.latency_ms)
    assert found["target, verification"].tokens == [1, 2, 8, 65]
    assert found["target, verification"].ms(66) is None is found["target, plain step"].ms(2)
    assert len(found) == 6 and all(one.limit_ms(1) is None for one in found.values()), (
        "the sample device has no datasheet"
    )


def test_datasheet_gives_a_limit(sources: Sources) -> None:
    """By hand: memory traffic of few tokens, arithmetic in float32 of 65. The host's launches are no limit of the
    device.
    """
    table = cost_table(EVIL).model_copy(update={"device": DEVICE.model_copy(update={"name": "h100", "kind": "cuda"})})
    verify = cost_curves(table, sources.study)[1]
    weights = SHAPE.text_parameters * SHAPE.bytes_per_parameter
    limits = [(weights + (256 + n) * SHAPE.kv_bytes_per_token) / 3350e6 for n in (1, 2, 8)]
    limits.append((2 * 65 * SHAPE.text_parameters + 4 * SHAPE.num_layers * SHAPE.hidden_size * 65 * (256 + 65)) / 67e9)
    assert [verify.limit_ms(n) for n in verify.tokens] == pytest.approx(limits)
    assert verify.share_of_limit(8) == pytest.approx(limits[2] / (1.0 + 0.02 * 8 + 0.001 * 256))
    assert cost_curves(table, None)[1].limit_ms(1) is None, "without a study the model's shape is unknown"
    estimated = table.model_copy(update={"estimated": True})
    assert cost_curves(estimated, sources.study)[1].limit_ms(1) is None, "an estimated table equals the limit"


def test_evaluator_needs_a_cost_table_of_the_drafts(sources: Sources) -> None:
    assert isinstance(sources.evaluator, Evaluator)
    assert Sources(traces=sources.traces).evaluator is None
    assert Sources(traces=sources.traces, table=cost_table()).evaluator is not None, (
        "weights are identified by hash, not by name"
    )
    other = cost_table(EVIL.model_copy(update={"sha256": "f" * 64}))
    assert Sources(traces=sources.traces, table=other).evaluator is None
