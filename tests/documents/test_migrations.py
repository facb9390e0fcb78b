"""Documents that earlier versions wrote are read: the files in ``old`` are named by their kind and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.acceptance.trace import TraceHeader
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.files import data_root, read_json
from autotune.trees.sage import SagePolicy
from tests.sample_documents import cost_table

OLD = Path(__file__).parent / "old"


def old(name: str) -> Any:
    return read_json(OLD / f"{name}.json")


def test_a_decoding_profile_of_version_1() -> None:
    """The one that was shipped; it named no mode."""
    profile = DecodingProfile.load(OLD / "decoding-profile-1.json")
    assert profile == DecodingProfile.load(data_root() / "profiles" / "cpu" / "digits.decode.json")
    captured = {**old("decoding-profile-1"), "runner": "graph", "buckets": [1, 4, 8]}
    profile = DecodingProfile.parse(captured, source="old")
    assert (profile.mode, profile.capture_sizes) == ("cuda-graph", (1, 4, 8))


def test_trees_of_a_decoding_profile_of_version_2_keep_their_rules() -> None:
    """WETAP's top-p was a share of the probability of all tokens."""
    content = read_json(data_root() / "profiles" / "cpu" / "digits.decode.json")
    expected = DecodingProfile.parse(content, source="new")
    trees = [point["tree"] for point in content["points"]]
    assert sum(tree.pop("nucleus", None) == "all" for tree in trees if tree["policy"] == "wetap") == 2
    assert DecodingProfile.parse(content | {"schema": "autotune.decoding-profile/2"}, source="old") == expected
    assert DecodingProfile.parse(content, source="new") != expected, "a new profile has the rule of transformers"


def test_sage_trees_of_version_2_drop_candidates_below_the_threshold() -> None:
    content = old("decoding-profile-1")
    profile = DecodingProfile.parse(content, source="old")
    trees = [point.tree for point in profile.points if isinstance(point.tree, SagePolicy)]
    assert [(tree.d_max, tree.depth_cap) for tree in trees] == [(10, None), (9, None)]
    for tree in trees:
        assert (tree.below_threshold, tree.threshold_on, tree.plan) == ("drop", "path", "current")
        assert (tree.threshold, tree.rounding, tree.first_paths) == (0.1, "nearest", None)


def test_a_cost_table_of_version_4() -> None:
    table = CostTable.load(OLD / "cost-table-4.json")
    content = old("cost-table-4")
    (draft,), (old_draft,) = table.drafts, content["drafts"]
    assert (table.mode, table.capture_sizes) == ("cuda-graph", (1, 4, 8))
    assert draft.kv_bytes_per_token == old_draft["cache_bytes_per_token"] == 512
    for surface, name in ((draft.draft_first, "commit"), (draft.draft_level, "propose")):
        assert surface.model_dump(mode="json") == old_draft[name]
    assert draft.overhead.samples == [(3, 9, 20, 0, 1.5)]
    assert (table.decode, table.verify) == (cost_table().decode, cost_table().verify)


def test_a_cost_table_of_version_5_counted_drifted_samples() -> None:
    """Such samples were measured again then, and what was kept of them is disturbed."""
    content = json.loads(cost_table().dump()) | {"schema": "autotune.cost-table/5"}
    del content["disturbed_samples"]
    table = CostTable.parse(content | {"remeasured_samples": 7, "drifted_samples": 3}, source="old")
    assert table == cost_table().model_copy(update={"disturbed_samples": 3})


def test_a_cost_table_of_version_3_kept_the_nodes_apart() -> None:
    content = old("cost-table-4") | {"schema": "autotune.cost-table/3"}
    content["drafts"][0]["overhead"] |= {"samples": [[3, 9, 1.5]], "nodes": [20]}
    assert CostTable.parse(content, source="old") == CostTable.load(OLD / "cost-table-4.json")


def test_a_cost_table_of_version_2_held_no_errors() -> None:
    """It prices as it did."""
    content = old("cost-table-4") | {"schema": "autotune.cost-table/2"}
    (draft,) = content["drafts"]
    for name in ("remeasured_samples", "drifted_samples"):
        del content[name]
    for name in ("samples", "held_out_error"):
        del draft["overhead"][name]
    for prefill in (content["prefill"], draft["prefill"]):
        del prefill["held_out_error"]
    for part in (content["decode"], content["verify"], draft["commit"], draft["propose"]):
        del part["examined"], part["model"], part["errors"]
    expected = CostTable.load(OLD / "cost-table-4.json")
    (costs,) = expected.drafts
    costs = costs.model_copy(update={"overhead": costs.overhead.model_copy(update={"samples": []})})
    assert CostTable.parse(content, source="old") == expected.model_copy(update={"drafts": [costs]})


def test_a_trace_of_version_1() -> None:
    assert TraceHeader.load(OLD / "trace-1.json").aux_layers == (9, 12)
