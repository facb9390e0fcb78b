"""Study folders made by hand: a cost table and traces, and a profile of their search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.acceptance.trace import ForestBounds, Trace, save_trace
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import DecodingProfile, DraftChoice, OperatingPoint, Predicted
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.prediction.evaluator import Evaluator
from autotune.trees.policy import parse_policy
from tests.sample_documents import DRAFT, cost_table, decoding_profile, random_trace, surface

TREE = {"policy": "sage", "k": 4, "d_max": 4}
WHOLE = ForestBounds(depth=4, num_proposals=4, beam=4, beam_depth=4)
"""Random forests hold every child, so every beam of 4 is covered."""


def trace_of(
    draft: ModelReference = DRAFT, *, seed: int = 0, num_tokens: int = 40, images: bool = False, **fields: Any
) -> Trace:
    """A random trace of a draft, half of its prompts with ``images``; ``fields`` update its header."""
    trace = random_trace(seed, num_tokens=num_tokens)
    return dataclasses.replace(
        trace,
        header=trace.header.model_copy(update={"draft": draft, "bounds": WHOLE, **fields}),
        num_visual_tokens=trace.num_visual_tokens * images,
    )


def point_of(
    trace: Trace, table: CostTable, *, kind: str = "independent", tree: dict[str, Any] | None = None, **fields: Any
) -> OperatingPoint:
    """An operating point with the prediction of its search."""
    draft = trace.header.draft
    point = OperatingPoint(
        draft=DraftChoice(kind=kind, id=draft.id, sha256=draft.sha256, subnet=trace.header.subnet),
        tree=parse_policy(tree or TREE),
        predicted=None,
        measured=None,
        **fields,
    )
    configuration = configuration_of(point)
    assert isinstance(configuration, Configuration)
    found = Evaluator([trace], table).evaluate(configuration)
    predicted = Predicted(
        speedup=found.speedup, ms_per_token=found.ms_per_token, tokens_per_round=found.tokens_per_round
    )
    return point.model_copy(update={"predicted": predicted})


def profile_of(*points: OperatingPoint, trace: Trace) -> DecodingProfile:
    """A profile tuned on the trace's prompts, for its target."""
    profile = decoding_profile()
    workload = profile.workload.model_copy(
        update={"tune_sha256": trace.header.workload_sha256, "num_tune_prompts": trace.num_prompts}
    )
    return profile.model_copy(update={"points": list(points), "workload": workload, "target": trace.header.target})


def write_study(folder: Path, table: CostTable, *traces: Trace) -> Path:
    """Write the documents as a search does."""
    table.save(folder / "abacus.cost.json")
    for trace in traces:
        name = trace.header.draft.id.replace("/", "-")
        save_trace(folder / "traces" / name / f"{trace.header.name}.trace.json", trace)
    return folder


def write_search(folder: Path, table: CostTable, *traces: Trace, points: Sequence[OperatingPoint] = ()) -> Path:
    """Write a profile, by default of one point, tuned on the first trace, with its study; return the profile's path."""
    write_study(folder / ".autotune" / "pair", table, *traces)
    profile_of(*points or [point_of(traces[0], table)], trace=traces[0]).save(folder / "profile.json")
    return folder / "profile.json"


def write_pair(folder: Path, *, kind: str = "independent", table: CostTable | None = None, **fields: Any) -> Path:
    """As ``write_search``, of one trace with these ``fields``."""
    trace, table = trace_of(**fields), table or cost_table()
    return write_search(folder, table, trace, points=[point_of(trace, table, kind=kind)])


def cheap_table() -> CostTable:
    """A cost table whose draft costs a tenth of a target step, so that drafting pays."""
    (costs,) = cost_table().drafts
    level = surface(lambda n, m: 0.05 + 0.01 * n)
    return cost_table(drafts=[costs.model_copy(update={"draft_first": level, "draft_level": level})])


PRUNED = Subnet(visual_keep=0.5)
