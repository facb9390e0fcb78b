"""``benchmarks/paper_figures.py`` against loops over rounds, numbers by hand and a replay of an estimated cost
table.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from autotune.cost.roofline import datasheets, estimate_table, find_limits
from autotune.documents.subnet import Subnet
from autotune.replay.reference_replay import rounds
from autotune.replay.replay import plain_decode_ms, replay
from autotune.replay.trace import ForestBounds, RecordedPrompt, join
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet
from autotune.trees.policy import parse_policy
from autotune.trees.sage import root_confidence
from autotune.trees.tree import CHILD
from benchmarks import paper_figures
from tests.report.conftest import SHAPE, MadeStudy
from tests.sample_documents import DRAFT, TARGET, forest_of, header, random_trace


def test_normalised_entropy_is_one_minus_sages_confidence() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        probabilities = 0.9 * rng.dirichlet(np.full(6, 0.4))
        proposals = np.zeros((1, 6), CHILD)
        proposals["probability"], proposals["logprob"] = probabilities, np.log(probabilities)
        expected = 1 - root_confidence(proposals, 0, 6)
        assert paper_figures.normalised_entropy(probabilities) == pytest.approx(expected, abs=1e-5)


def test_autocorrelation_pairs_values_of_one_sequence() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.normal(size=length).cumsum() for length in (3, 20, 1, 12)]
    for row in paper_figures.autocorrelation(sequences, max_lag=4).itertuples():
        pairs = [(s[i], s[i + row.lag]) for s in sequences for i in range(len(s) - row.lag)]
        assert (row.correlation, row.pairs) == pytest.approx(
            (statistics.correlation(*zip(*pairs, strict=True)), len(pairs))
        )


def test_every_accepted_node_has_a_position() -> None:
    trace = random_trace(3, num_prompts=6, num_tokens=30)
    tree = parse_policy({"policy": "eagle2", "depth": 4, "k": 4, "budget": 24})
    decoded = [one for prompt in range(trace.num_prompts) for one in rounds(trace, prompt, tree)]
    found = paper_figures.accepted_positions(decoded)
    assert found.accepted.sum() == sum(len(one.path) for one in decoded) > 50
    assert sorted(found.layer.unique()) == [1, 2, 3, 4]


def test_operations_of_a_round_by_hand() -> None:
    """One layer of width 2 with 10 parameters: 20 operations a token, and 8 for every token attended to."""
    size = {"num_layers": 1, "hidden_size": 2, "text_parameters": 10, "kv_bytes_per_token": 1, "bytes_per_parameter": 2}
    shape = SHAPE.model_copy(update=size)
    first, second, third = 3 * 20 + 8 * 3 * 103, 20 + 8 * 102, 20 + 8 * 103
    found = paper_figures.round_operations(shape, depth=3, tokens_per_round=3, kv_length=100)
    assert found == first + second + third


def test_estimated_speedup_equals_a_replay_with_the_estimated_table() -> None:
    """Every round accepts a chain of 2. Both models are so small that kernel launches alone take time."""
    num_tokens, draft_shape = 31, SHAPE.model_copy(update={"num_layers": 1})
    last = num_tokens - 1
    nodes = [[(1, 0.9, last + position)] for position in range(last)] + [[(1, 0.9, -1)]] * last
    trace = join(
        header(1, bounds=ForestBounds(depth=2, num_proposals=1), aux_layers=(4,)),
        [RecordedPrompt(forest_of([1] * num_tokens, nodes), 20, 20, 0)],
    )
    policy = parse_policy({"policy": "chain", "depth": 2})
    subnet = ScreenedSubnet(draft="d", subnet=Subnet(), depth=2, tokens_per_round=3.0, ms_per_token=1.0, speedup=1.0)
    for device in datasheets():
        table = estimate_table(
            device, target=TARGET, target_shape=SHAPE, drafts=[(DRAFT, Subnet(), draft_shape)], precision="float32"
        )
        prices = table.prices(DRAFT, max_tokens=8, max_kv_length=64)
        result = replay(trace, policy, prices)
        expected = plain_decode_ms(trace, prices).sum() / (result.decode_ms - result.draft_prefill_ms).sum()
        found = paper_figures.estimated_speedup(draft_shape, SHAPE, find_limits(device), subnet, (35.0, 35.0))
        assert found == pytest.approx(expected, rel=1e-3), device


def test_every_figure_of_a_study_is_written(made: MadeStudy, sources: Sources, tmp_path: Path) -> None:
    frame = paper_figures.subnet_operations(sources)
    assert len(frame) == (1 + len(datasheets())) * len(sources.screened)
    assert frame.groupby("device").is_on_front.any().all()
    done = CliRunner().invoke(paper_figures.main, [str(made.profile_path), "-o", str(tmp_path)], catch_exceptions=False)
    names = {path.stem for path in tmp_path.glob("*.csv")}
    assert done.exit_code == 0 and "subnet-operations" in names
    figures = paper_figures.decoding_figures(sources)
    assert len(figures) == 6 and figures.keys() <= names
    assert figures["gain-by-length"].prompts.sum() == 4 and figures["time-shares"].share.sum() == 1
