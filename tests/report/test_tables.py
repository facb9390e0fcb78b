"""The report's tables against brute force and sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.cost.latency_table import latency_table
from autotune.documents.decoding_profile import AR, TUNED
from autotune.documents.loads import loads_table
from autotune.documents.subnet import Subnet
from autotune.replay.evaluator import Candidate
from autotune.report.sources import Sources
from autotune.report.tables import acceptance_tables, cumulative_ablation, decoding_table, pareto_front, subnet_tables
from autotune.study.records import ScreenedSubnet
from autotune.table import Table, with_interval
from tests.engine_profiles import LOADS, backend_result, engine_profile
from tests.report.conftest import EVIL, SHAPE, MadeStudy
from tests.sample_documents import DEVICE, cost_table, decoding_profile


def facts(table: Table) -> dict[str, str]:
    return {name: value for name, value in table.rows}


def test_pareto_front_is_not_dominated(sources: Sources) -> None:
    def beats(one: Candidate, other: Candidate) -> bool:
        no_worse = one.ms_per_token <= other.ms_per_token and one.nodes_per_round <= other.nodes_per_round
        return no_worse and (one.ms_per_token, one.nodes_per_round) != (other.ms_per_token, other.nodes_per_round)

    front = pareto_front(sources.candidates)
    assert len(front) > 2
    assert not any(beats(other, one) for one in front for other in sources.candidates)
    for one in sources.candidates:
        assert any(
            other.ms_per_token <= one.ms_per_token and other.nodes_per_round <= one.nodes_per_round for other in front
        )


def test_cumulative_ablation_frees_dimensions_one_by_one(sources: Sources, made: MadeStudy) -> None:
    steps = cumulative_ablation(sources)
    assert [*steps] == ["full draft", "+ visual tokens", "+ heads", "+ injection layer"]
    assert [best.ms_per_token for best in steps.values()] == pytest.approx([1.17, 1.155, 1.055, 1.005])
    other = ScreenedSubnet(draft="other", subnet=Subnet(), depth=2, tokens_per_round=2, ms_per_token=0.5, speedup=4.0)
    steps = cumulative_ablation(replace(sources, screened=[*made.screened, other]))
    assert [*steps.items()][-1] == ("+ draft", other)
    assert cumulative_ablation(Sources()) == {}


def test_subnet_tables_hold_every_screened_subnet(made: MadeStudy) -> None:
    tables = subnet_tables(made.screened)
    assert [table.title for table in tables] == [f"{EVIL.id}, layer {layer} of the target" for layer in (3, 4)]
    for s in made.screened:
        table = tables[(s.subnet.injection_layer or 0) - 3]
        row = next(row for row in table.rows if row[0] == ("50 %" if s.subnet.heads else "100 %"))
        assert row[table.columns.index(f"{100 * s.subnet.visual_keep:.0f} % of visual tokens")] == f"{s.speedup:.2f}x"
    partial, _ = subnet_tables(made.screened[:1] + made.screened[4:5])
    assert partial.rows == [["100 %", "-", f"{made.screened[0].speedup:.2f}x"]] and subnet_tables([]) == []


def test_acceptance_is_counted_on_recorded_prompts_and_in_runs_of_the_evidence(sources: Sources) -> None:
    assert len(sources.runs) == 5 and len(sources.evidence_runs) == 3, "runs of other arms or times are no evidence"
    depth, rank = acceptance_tables(sources)
    assert depth.columns[1:] == ["replayed, 4 tuning prompts", "measured, 3 held-out prompts"]
    assert [row[2] for row in depth.rows[:2]] == ["12 of 15 (80 %)", "6 of 9 (67 %)"]
    assert [row[2] for row in rank.rows[:2]] == ["15 of 24 (62 %)", "3 of 21 (14 %)"]
    trace = sources.trace
    assert trace is not None
    replayed = [row[1].split() for row in depth.rows]
    assert int(replayed[0][2]) + sum(int(words[0]) for words in replayed) <= trace.num_tokens, (
        "plain steps emit the rest"
    )
    assert acceptance_tables(Sources()) == []


def test_latencies_repeat_the_cost_table(sources: Sources) -> None:
    """At KV length 256; the sample device has no datasheet."""
    assert sources.table is not None
    table = latency_table(sources.table)
    assert "KV length 256" in table.title and len(table.rows) == 6 and not table.labels
    rows = {row[0]: row[1:] for row in table.rows}
    known = {point.tokens: point.latency_ms for point in sources.table.verify.points if point.kv_length == 256}
    assert rows["verify"][0] == f"{known[1]:.2f}" and rows["decode"][1:4] == ["-", "-", "-"]


def test_a_datasheet_gives_a_limit() -> None:
    """By hand: memory traffic of one token. The host's launches are no limit of the device."""
    table = cost_table(EVIL).model_copy(update={"device": DEVICE.model_copy(update={"name": "h100", "kind": "cuda"})})
    table = table.model_copy(update={"target_shape": SHAPE})
    limit = (SHAPE.text_parameters * SHAPE.bytes_per_parameter + 257 * SHAPE.kv_bytes_per_token) / 3350e6
    ms = 1.0 + 0.02 + 0.001 * 256
    shown = latency_table(table)
    assert shown.rows[1][1] == f"{ms:.2f} ({100 * limit / ms:.0f} %)" and "%" in shown.labels
    estimated = table.model_copy(update={"estimated": True})
    assert "%" not in latency_table(estimated).rows[1][1], "an estimated table equals the limit"


def test_the_tables_of_a_profile_have_its_evidence(made: MadeStudy) -> None:
    arms, gains = made.profile.tables()
    assert arms.rows[1] == ["chain", "1.51x", "1.49x (1.39-1.69)", "2.00", "149", "3/3"]
    assert arms.labels[TUNED] == "this profile" and arms.rows[arms.emphasised or 0][0] == TUNED
    assert gains.columns == ["task", "over plain decoding", "over chain"]
    assert gains.rows == [["read", "1.90x (1.80-2.00)", "-"], ["all", "1.83x (1.73-1.93)", "1.23x (1.13-1.33)"]]
    point = made.profile.point.model_copy(update={"draft": None, "tree": None})
    plain, *_ = made.profile.model_copy(update={"point": point}).tables()
    assert plain.rows[plain.emphasised or 0][0] == AR and decoding_profile().tables() == []
    (finalists,) = made.study.tables()
    assert [row[1:] for row in finalists.rows] == [
        ["1.90x (1.60-2.20)", "1.80x (1.70-1.90)", "5.6 %", "8"],
        ["1.90x (1.60-2.20)", "1.40x (1.20-1.60)", "35.7 %", "8, eliminated"],
        ["-", "1.30x (1.20-1.40)", "-", "16"],
    ]


def test_how_a_profile_decodes(made: MadeStudy) -> None:
    found = facts(decoding_table(made.profile))
    assert found["draft"] == f"{EVIL.id} (independent)" and found["subnet"] == made.profile.point.draft.subnet.label  # type: ignore[union-attr]
    assert found["output"].startswith("lossless") and found["measured speedup"].startswith(
        "1.83x on held-out prompts; 2 of 2"
    )
    assert facts(decoding_table(decoding_profile(draft=None)))["draft"] == "none: no draft was faster on this device"
    served = facts(decoding_table(engine_profile()))
    assert (served["backend"], served["command"]) == ("llama.cpp", f"llama-server -m model.gguf (build {'b' * 64})")


def test_the_tables_of_an_engine_and_of_the_race_between_backends() -> None:
    engine = engine_profile().evidence.engine
    assert engine is not None
    settings, prices = engine.tables()
    label = "ngram-mod(24,48,64)"
    assert settings.rows == [
        [f"{label}, default", "ngram-mod", "40", "1.40x (1.20-1.60)"],
        [label, "ngram-simple", "12", "1.40x (1.20-1.60)"],
    ]
    assert settings.labels == {"ngram-simple": "left out, the build <does> not have it"}
    assert prices.rows == [["1", "64 tokens", "10.0", "9.0"], ["2", "64 tokens", "20.0", "9.0"]]
    off = ["40 (38-42)", "1.00x", "9 (8-12)", "3.0 (2.9-3.2)", "-", "7/16"]
    assert loads_table(LOADS).rows == [
        ["4: ngram-mod(4,0,3)", "60 (55-66)", "1.50x (1.40-1.60)", "9 (8-12)", "3.0 (2.9-3.2)", "26 %", "7/16"],
        ["4: off", *off],
        ["16: off", *off],
    ]
    failed = {"failure": "llama-server ended", "precision": "Q4_1", "has_own_weights": False}
    race = [backend_result("runtime", is_deployed=True), backend_result("llama.cpp", **failed)]
    profile = decoding_profile()
    evidence = profile.evidence.model_copy(update={"backends": race})
    (table,) = profile.model_copy(update={"evidence": evidence}).tables()
    assert table.title == "Backends on 3 held-out prompts" and table.emphasised == 0
    assert table.rows == [
        ["runtime", "tests/target, float32", "off", "3.0", "1.50x (1.40-1.60)", "100.0 %"],
        ["llama.cpp", "tests/target, Q4_1, another model", "llama-server ended", "-", "-", "-"],
    ]


def test_a_single_prompt_has_no_interval() -> None:
    assert with_interval(1.57, (1.46, 1.68)) == "1.57x (1.46-1.68)"
    assert with_interval(3.59, (3.59, 3.59)) == "3.59x"
