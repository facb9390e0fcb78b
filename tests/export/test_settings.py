"""Settings of every engine: the engine's rules are enforced, and the numbers mean the same as ours."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.cli.export import EXPORT_ENGINES
from autotune.evaluation.hf_generate import hf_generate
from autotune.export.document import BatchPrediction
from autotune.export.engine import Pair
from autotune.export.exporter import ENGINES
from autotune.export.sglang import SglangSettings
from autotune.export.vllm import VllmSettings
from autotune.files import Document
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from tests.trees.drafts import Ranks, TreeSession, logprobs_of, random_draft

SCHEDULE = [
    BatchPrediction(start=start, end=end, draft_tokens=depth, least_speedup=1.0, estimated=True)
    for start, end, depth in ((1, 2, 5), (3, 7, 3), (8, 64, 0))
]
CHAIN = ChainPolicy(depth=5)
TREE = Eagle2Policy(depth=3, k=2, budget=6)


def test_command_line_lists_every_engine() -> None:
    assert tuple(ENGINES) == EXPORT_ENGINES


def test_documentation_lists_every_field_with_its_version() -> None:
    """The table lists no other field."""
    table = (Path(__file__).parents[2] / "docs" / "export.md").read_text().partition("## Fields")[2]
    rows = re.findall(r"^\|(.*?)\| `(\w+)` \|", table, flags=re.M)
    listed: dict[str, list[str]] = {}
    for title, field in rows:
        listed.setdefault(title.strip() or list(listed)[-1], []).append(field)
    assert len(listed) == len(ENGINES)
    for (title, fields), engine in zip(listed.items(), ENGINES.values(), strict=True):
        assert title.endswith(engine.version), title
        assert fields == list(engine.settings_type.model_fields), title


def test_settings_are_complete_without_fields_that_are_none() -> None:
    """SGLang grows trees of any draft; the other engines run chains only."""
    assert [name for name, engine in ENGINES.items() if engine.runs_trees] == ["sglang"]
    for name, engine in ENGINES.items():
        for kind in engine.served:
            pair = Pair("some/target", "some/draft", kind)
            for tree in (CHAIN, TREE) if engine.runs_trees else (CHAIN,):
                schedule = SCHEDULE if engine.supports_schedule(pair) and tree is CHAIN else []
                settings = engine.settings(pair, tree, schedule)
                text = json.dumps(settings.model_dump(exclude_none=True))
                assert engine.settings_type.model_validate_json(text) == settings, (name, kind, tree)


SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def vllm(*ranges: tuple[int, int, int], k: int = 5) -> dict[str, Any]:
    settings = {"method": "draft_model", "model": "d", "num_speculative_tokens": k}
    return settings | {"num_speculative_tokens_per_batch_size": list(ranges)}


def sglang(*sizes: int, algorithm: str = "STANDALONE", **fields: Any) -> dict[str, Any]:
    settings = {"speculative_algorithm": algorithm, "speculative_draft_model_path": "d"}
    return settings | dict(zip(SIZES, sizes, strict=True)) | fields


VALID: dict[str, tuple[type[Document], dict[str, Any]]] = {
    "vllm, schedule": (VllmSettings, vllm((1, 4, 5), (5, 64, 1), (100, 200, 0))),
    "sglang, largest tree": (SglangSettings, sglang(3, 4, 4 + 2 * 16 + 1)),
    "sglang, adaptive": (SglangSettings, sglang(5, 1, 6, algorithm="EAGLE3", speculative_adaptive=True)),
}
INVALID: dict[str, tuple[type[Document], dict[str, Any], str]] = {
    "vllm, no draft token": (VllmSettings, vllm(k=0), "greater than or equal to 1"),
    "vllm, too many draft tokens": (VllmSettings, vllm((1, 4, 6)), "at most num_speculative_tokens, 5; got 1 to 4 with 6"),
    "vllm, overlap": (VllmSettings, vllm((1, 4, 5), (4, 8, 2)), "got 4 to 8 with 2 after 4"),
    "vllm, backwards": (VllmSettings, vllm((1, 8, 5), (16, 9, 2)), "got 16 to 9 with 2 after 8"),
    "vllm, not from 1": (VllmSettings, vllm((2, 8, 5)), "got 2 to 8 with 5 after 0"),
    "sglang, chain": (SglangSettings, sglang(5, 1, 5), "5 steps of top-k 1 draft at most 5 tokens plus the root"),
    "sglang, tree": (SglangSettings, sglang(3, 4, 38), "3 steps of top-k 4 draft at most 36 tokens plus the root"),
    "sglang, adaptive tree": (SglangSettings, sglang(3, 4, 8, algorithm="EAGLE3", speculative_adaptive=True), "takes EAGLE3"),
    "sglang, adaptive model": (SglangSettings, sglang(5, 1, 6, speculative_adaptive=True), "takes EAGLE3"),
    "any engine, unknown key": (SglangSettings, sglang(5, 1, 6, speculative_topk=1), "Extra inputs"),
}  # fmt: skip


def test_settings_that_an_engine_would_refuse_are_refused() -> None:
    for name, (settings_type, content) in VALID.items():
        assert settings_type.model_validate_json(json.dumps(content)), name
    for name, (settings_type, content, message) in INVALID.items():
        with pytest.raises(ValidationError) as caught:
            settings_type.model_validate_json(json.dumps(content))
        assert message in str(caught.value), (name, str(caught.value))


# -------------------------------------------------------------------------------------------------- meaning of the numbers


def engine_tree(draft: Any, *, steps: int, topk: int, draft_tokens: int) -> tuple[set[Ranks], int]:
    """EAGLE-2's tree as serving engines grow it, and the number of its candidates: each of ``steps`` levels expands the
    ``topk`` best nodes to ``topk`` children, and the ``draft_tokens`` best of all candidates are kept.
    """
    level: dict[Ranks, float] = {(): 0.0}
    candidates: dict[Ranks, float] = {}
    for _ in range(steps):
        expanded = sorted(level, key=lambda path: -level[path])[:topk]
        level = {
            (*path, rank): level[path] + float(own)
            for path in expanded
            for rank, own in enumerate(logprobs_of(draft, path, topk))
        }
        candidates |= level
    best = sorted(candidates, key=lambda path: -candidates[path])[:draft_tokens]
    return set(best), len(candidates)


def test_trees_of_engines_equal_ours() -> None:
    """``depth`` counts levels below the root, ``k`` nodes expanded, ``budget`` nodes without the root. SGLang's number of
    draft tokens includes the root.
    """
    pair = Pair("t", "d", "eagle3")
    for seed in range(30):
        depth, k, budget = 2 + seed % 4, 2 + seed % 3, 5 + seed % 9
        budget = min(budget, depth * k)
        draft = random_draft(seed, 0.3)
        ours = set(TreeSession("eagle2", depth=depth, k=k, budget=budget).grow(draft))
        tree = Eagle2Policy(depth=depth, k=k, budget=budget)
        flags = ENGINES["sglang"].settings(pair, tree)
        assert isinstance(flags, SglangSettings)
        steps, topk, tokens = (getattr(flags, name) for name in SIZES)
        theirs, num_candidates = engine_tree(draft, steps=steps, topk=topk, draft_tokens=tokens - 1)
        assert ours == theirs and len(ours) + 1 == tokens, seed
        assert num_candidates == topk + (steps - 1) * topk**2, "the rule for the largest tree"


def test_chains_of_engines_equal_ours() -> None:
    """A chain of depth k has k draft tokens and a verification of k + 1."""
    for depth in (1, 4):
        session = TreeSession("chain", depth=depth)
        assert len(session.grow(random_draft(0, 0.3))) == depth and len(session.expanded) == depth
        pair, chain = Pair("t", "d", "independent"), ChainPolicy(depth=depth)
        found = {name: engine.settings(pair, chain).model_dump() for name, engine in ENGINES.items()}
        assert found["vllm"]["num_speculative_tokens"] == depth
        assert [found["sglang"][name] for name in SIZES] == [depth, 1, depth + 1]
        assert found["transformers"]["num_assistant_tokens"] == depth


def test_vllm_gets_ranges_of_batch_sizes_that_end_with_plain_decoding() -> None:
    settings = ENGINES["vllm"].settings(Pair("t", "d", "independent"), CHAIN, SCHEDULE).model_dump()
    assert settings["num_speculative_tokens_per_batch_size"] == [(1, 2, 5), (3, 7, 3), (8, 1024, 0)]


def test_sglang_chooses_steps_by_batch_size_for_eagle3_heads() -> None:
    """Keys are the smallest batch sizes; beyond the predictions nothing is drafted. The file holds num_steps."""
    engine = ENGINES["sglang"]
    assert not engine.supports_schedule(Pair("t", "d", "independent"))
    pair = Pair("t", "d", "eagle3")
    for schedule, expected in (
        (SCHEDULE, {"1": 5, "3": 3, "8": 0}),
        (SCHEDULE[:2], {"1": 5, "3": 3, "8": 0}),
        (SCHEDULE[:1], {"1": 5, "3": 0}),
    ):
        settings = engine.settings(pair, CHAIN, schedule)
        assert isinstance(settings, SglangSettings) and settings.speculative_adaptive
        ((file, found),) = engine.companions(schedule).items()
        assert {key: slot["candidate_steps"] for key, slot in found.items()} == {k: [v] for k, v in expected.items()}
        assert file == settings.speculative_adaptive_config
        assert [settings.speculative_num_steps] in [slot["candidate_steps"] for slot in found.values()]
        command = engine.command(pair, settings, Path("out/chain.json"))
        assert command.endswith(" --speculative-adaptive --speculative-adaptive-config out/adaptive.json")


def test_assisted_generation_drafts_the_exported_number_of_tokens(text_pair: Pair) -> None:
    """A target that assists itself accepts every draft. The same settings in the target's config have no effect."""
    import torch

    patch = ENGINES["transformers"].settings(Pair("t", "d", "independent"), ChainPolicy(depth=3)).model_dump()
    inputs = {"input_ids": torch.arange(5, 25)[None]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def drafted(model: Any, assistant: Any) -> list[int]:
        _, stats = hf_generate(model, inputs, max_new_tokens=24, assistant=assistant)
        return stats.accepted_lengths

    target, draft = copy.deepcopy(text_pair.target), copy.deepcopy(text_pair.target)
    draft.generation_config.update(**patch)
    assert drafted(target, draft) == [3] * 6
    plain = drafted(target, copy.deepcopy(text_pair.target))
    target.generation_config.update(**patch)
    assert drafted(target, copy.deepcopy(text_pair.target)) == plain != [3] * 6
