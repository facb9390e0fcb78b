"""Settings of every engine: files are read back, the engine's rules are enforced, and the numbers mean the same as ours."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.export import EXPORT_ENGINES
from autotune.documents.decoding_profile import Predicted
from autotune.errors import UserError
from autotune.evaluation.hf_generate import hf_generate
from autotune.export.document import BatchPrediction
from autotune.export.engine import Candidate, Pair, read_settings, write_settings
from autotune.export.engine_replay import EngineTree
from autotune.export.exporter import ENGINES
from autotune.export.sglang import AdaptiveSteps, SglangSettings
from autotune.export.tensorrt_llm import TensorRtLlmDecoding, TensorRtLlmSettings, TensorRtLlmSettings121
from autotune.export.transformers import TransformersSettings
from autotune.export.vllm import VllmSettings
from autotune.files import Document
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from tests.tiny_models import Pair as ModelPair
from tests.trees.drafts import Ranks, TreeSession, logprobs_of, random_draft

SCHEDULE = [
    BatchPrediction(start=start, end=end, draft_tokens=depth, least_speedup=1.0, estimated=True)
    for start, end, depth in ((1, 2, 5), (3, 7, 3), (8, 64, 0))
]
CHAIN = ChainPolicy(depth=5)
TREES: list[EngineTree] = [CHAIN, Eagle2Policy(depth=3, k=2, budget=6)]


def test_command_line_lists_every_engine() -> None:
    assert tuple(ENGINES) == EXPORT_ENGINES


def test_documentation_lists_every_field_with_its_version() -> None:
    """And no other field."""
    table = (Path(__file__).parents[2] / "docs" / "export.md").read_text().partition("## Fields")[2]
    rows = re.findall(r"^\|(.*?)\| `(\w+)` \|", table, flags=re.M)
    listed: dict[str, list[str]] = {}
    for title, field in rows:
        listed.setdefault(title.strip() or list(listed)[-1], []).append(field)
    assert len(listed) == len(ENGINES)
    for (title, fields), engine in zip(listed.items(), ENGINES.values(), strict=True):
        assert title.endswith(engine.version), title
        settings_type = engine.settings_type
        if issubclass(settings_type, TensorRtLlmSettings):
            settings_type = TensorRtLlmDecoding
        assert fields == list(settings_type.model_fields), title


def test_settings_are_read_back_as_written(tmp_path: Path) -> None:
    """SGLang grows trees of any draft, TensorRT-LLM those of EAGLE-3 heads; the other engines run chains only."""
    trees = set()
    for name, engine in ENGINES.items():
        for kind in engine.methods:
            pair = Pair("some/target", "some/draft", kind)
            for tree in TREES:
                if isinstance(tree, Eagle2Policy):
                    if not engine.supports_tree(pair, tree):
                        continue
                    trees.add((name, kind))
                settings = engine.settings(
                    pair, tree, SCHEDULE if engine.supports_schedule(pair) and tree is CHAIN else []
                )
                path = tmp_path / engine.settings_file.format(variant="chain")
                write_settings(path, settings)
                assert read_settings(engine.settings_type, path) == settings, (name, kind, tree)
                text = path.read_text()
                plain = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
                assert "None" not in text and "null" not in text, "fields that are None are not written"
                assert engine.settings_type.model_validate_json(json.dumps(plain)) == settings, (name, kind, tree)
    assert trees == {("sglang", "independent"), ("sglang", "eagle3"), ("tensorrt-llm", "eagle3")}


VLLM = {"method": "draft_model", "model": "d", "num_speculative_tokens": 5}
SGLANG = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d"}
EAGLE3 = {"speculative_algorithm": "EAGLE3"}
SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
TENSORRT = {"decoding_type": "Eagle3", "speculative_model": "d", "max_draft_len": 4}
DYNAMIC = {**TENSORRT, "use_dynamic_tree": True, "dynamic_tree_max_topK": 3}


def vllm(**fields: Any) -> tuple[type[Document], dict[str, Any]]:
    return VllmSettings, {**VLLM, **fields}


def synthetic(rates: list[float] | None = None, length: float | None = None) -> tuple[type[Document], dict[str, Any]]:
    given = {"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": length}
    return vllm(
        rejection_sample_method="synthetic", **{name: value for name, value in given.items() if value is not None}
    )


def by_batch(*ranges: list[int]) -> tuple[type[Document], dict[str, Any]]:
    return vllm(num_speculative_tokens_per_batch_size=list(ranges))


def sglang(*sizes: int | None, **fields: Any) -> tuple[type[Document], dict[str, Any]]:
    return SglangSettings, {**SGLANG, **dict(zip(SIZES, sizes, strict=False)), **fields}


def tensorrt(**fields: Any) -> tuple[type[Document], dict[str, Any]]:
    return TensorRtLlmSettings, {"speculative_config": fields}


def tensorrt_121(**fields: Any) -> tuple[type[Document], dict[str, Any]]:
    return TensorRtLlmSettings121, {"speculative_config": fields}


def assisted(**fields: Any) -> tuple[type[Document], dict[str, Any]]:
    return TransformersSettings, {"num_assistant_tokens": 5, **fields}


VALID = {
    "vllm": vllm(),
    "vllm, every field": vllm(
        num_speculative_tokens_per_batch_size=[[1, 4, 5], [5, 64, 1], [100, 200, 0]],
        draft_tensor_parallel_size=1,
        quantization="fp8",
        rejection_sample_method="block",
    ),
    "vllm, synthetic": vllm(rejection_sample_method="synthetic", synthetic_acceptance_rates=[1.0, 0.5, 0.5, 0.0, 0.0]),
    "vllm, synthetic length": vllm(rejection_sample_method="synthetic", synthetic_acceptance_length=6.0),
    "sglang, its own sizes": sglang(),
    "sglang, chain": sglang(5, 1, 6),
    "sglang, largest tree": sglang(3, 4, 4 + 2 * 16 + 1),
    "sglang, tree with pages": sglang(3, 4, 8, attention_backend="fa3", page_size=64),
    "sglang, adaptive": sglang(
        5, 1, 6, **EAGLE3, speculative_adaptive=True, speculative_adaptive_config="a.json", page_size=64
    ),
    "sglang, rejection sampling": sglang(5, 1, 6, **EAGLE3, speculative_use_rejection_sampling=True),
    "tensorrt": tensorrt(**TENSORRT),
    "tensorrt, chain": tensorrt(**TENSORRT, max_total_draft_tokens=4, draft_len_schedule={"4": 4, "8": 2, "32": 0}),
    "tensorrt 1.2.1": tensorrt_121(**TENSORRT, draft_len_schedule={"1": 4, "8": 2, "32": 0}),
    "tensorrt, smallest tree": tensorrt(**DYNAMIC, max_total_draft_tokens=4),
    "tensorrt, largest tree": tensorrt(**DYNAMIC, max_total_draft_tokens=12),
    "transformers": assisted(assistant_confidence_threshold=0.4, num_assistant_tokens_schedule="heuristic"),
}
INVALID = {
    "vllm, unknown key": (vllm(num_speculative_token=5), "unknown key 'num_speculative_token'; did you mean"),
    "vllm, no model": ((VllmSettings, {"method": "draft_model", "num_speculative_tokens": 5}), "'model' is required"),
    "vllm, method": (vllm(method="star"), "method: input should be 'draft_model' or 'eagle3'; got 'star'"),
    "vllm, nothing": (vllm(num_speculative_tokens=0), "num_speculative_tokens: .*greater than or equal to 1; got 0"),
    "vllm, k": (by_batch([1, 4, 6]), "at most num_speculative_tokens, 5; batch sizes 1 to 4 have 6"),
    "vllm, negative k": (by_batch([1, 4, -1]), "batch sizes 1 to 4 have -1"),
    "vllm, overlap": (by_batch([1, 4, 5], [4, 8, 2]), "without overlap; 4 to 8 comes after 4"),
    "vllm, backwards": (by_batch([1, 8, 5], [16, 9, 2]), "16 to 9 comes after 8"),
    "vllm, not from 1": (by_batch([2, 8, 5]), "ascend from 1 without overlap; 2 to 8 comes after 0"),
    "vllm, pair": (by_batch([1, 8]), "required and missing"),
    "vllm, lossy": (vllm(synthetic_acceptance_rates=[0.5]), "rejection_sample_method synthetic takes .*, and no other method takes them"),
    "vllm, synthetic": (vllm(rejection_sample_method="synthetic"), "rejection_sample_method synthetic takes synthetic_acceptance_rates or"),
    "vllm, few rates": (synthetic(rates=[0.5]), "are num_speculative_tokens, 5, numbers from 0 to 1 .*got .0.5."),
    "vllm, rising rates": (synthetic(rates=[0.1, 0.2, 0.1, 0, 0]), "that do not increase"),
    "vllm, large rates": (synthetic(rates=[1.5, 0.2, 0.1, 0, 0]), "from 0 to 1"),
    "vllm, negative rates": (synthetic(rates=[0.5, 0.2, 0.1, 0, -0.1]), "from 0 to 1"),
    "vllm, long": (synthetic(length=6.5), r"synthetic_acceptance_length is from 1 to .*6; got 6\.5"),
    "vllm, short": (synthetic(length=0.5), r"synthetic_acceptance_length is from 1 to .*6; got 0\.5"),
    "vllm, rates and length": (synthetic(rates=[0, 0, 0, 0, 0], length=1.0), "or synthetic_acceptance_length"),
    "vllm, standard and both": (
        vllm(synthetic_acceptance_rates=[0, 0, 0, 0, 0], synthetic_acceptance_length=1.0),
        "no other method takes them",
    ),
    "vllm, parallel draft": (vllm(draft_tensor_parallel_size=2), "draft_tensor_parallel_size: input should be 1; got 2"),
    "sglang, adaptive tree": (sglang(3, 4, 8, **EAGLE3, speculative_adaptive=True), "takes EAGLE3 with eagle_topk 1"),
    "sglang, adaptive model": (sglang(5, 1, 6, speculative_adaptive=True), "takes EAGLE3 with eagle_topk 1"),
    "sglang, config alone": (sglang(5, 1, 6, **EAGLE3, speculative_adaptive_config="a"), "requires speculative_adaptive"),
    "sglang, backend": (sglang(3, 4, 8, attention_backend="trtllm_mha"), "trtllm_mha takes eagle_topk 1 only"),
    "sglang, pages": (sglang(3, 4, 8, page_size=64), "with page_size 64 takes attention_backend flashinfer, fa3, triton"),
    "sglang, sampled tree": (
        sglang(3, 4, 8, **EAGLE3, speculative_use_rejection_sampling=True),
        "rejection_sampling takes eagle_topk 1 only",
    ),
    "sglang, sampled model": (
        sglang(5, 1, 6, speculative_use_rejection_sampling=True),
        "speculative_use_rejection_sampling takes EAGLE3",
    ),
    "tensorrt 1.2.1, no batch 1": (
        tensorrt_121(**TENSORRT, draft_len_schedule={"4": 4, "8": 2}),
        "draft_len_schedule begins with batch size 1",
    ),
    "sglang, unknown key": (sglang(5, 1, 6, speculative_topk=1), "unknown key 'speculative_topk'"),
    "sglang, two sizes": (sglang(5, 1), "set all three, or none"),
    "sglang, chain": (sglang(5, 1, 5), "a chain of 5 steps has 6 draft tokens with its root; got 5"),
    "sglang, long chain": (sglang(5, 1, 7), "a chain of 5 steps has 6 draft tokens"),
    "sglang, tree": (sglang(3, 4, 38), "3 steps of top-k 4 draft at most 36 tokens plus the root; got 38"),
    "sglang, algorithm": (sglang(5, 1, 6, speculative_algorithm="STAR"), "speculative_algorithm: input should be"),
    "tensorrt, unknown key": (tensorrt(**TENSORRT, topk=3), r"unknown key 'speculative_config\.topk'"),
    "tensorrt, small": (tensorrt(**DYNAMIC, max_total_draft_tokens=3), "between max_draft_len, 4, and .*12; got 3"),
    "tensorrt, large": (tensorrt(**DYNAMIC, max_total_draft_tokens=13), "between max_draft_len, 4, .*12; got 13"),
    "tensorrt, no top-k": (tensorrt(**TENSORRT, use_dynamic_tree=True), "needs decoding_type Eagle3 and dynamic_tree"),
    "tensorrt, model": (tensorrt(**{**DYNAMIC, "decoding_type": "Draft_Target"}), "needs decoding_type Eagle3"),
    "tensorrt, scheduled tree": (tensorrt(**DYNAMIC, draft_len_schedule={"1": 4}), "takes no draft_len_schedule"),
    "tensorrt, chain": (tensorrt(**TENSORRT, max_total_draft_tokens=5), "a chain has max_total_draft_tokens = .* = 4"),
    "tensorrt, top-k alone": (tensorrt(**TENSORRT, dynamic_tree_max_topK=3), "and no dynamic_tree_max_topK"),
    "tensorrt, smallest": (tensorrt(**TENSORRT, draft_len_schedule={"4": 2}), "smallest batches max_draft_len, 4"),
    "tensorrt, longer": (tensorrt(**TENSORRT, draft_len_schedule={"4": 4, "8": 5}), "lengths up to 4; got"),
    "tensorrt, batch 0": (tensorrt(**TENSORRT, draft_len_schedule={"0": 4}), "batch sizes of at least 1"),
    "transformers, unknown key": (assisted(num_assistant_token=5), "unknown key 'num_assistant_token'; did you mean"),
    "transformers, threshold": (assisted(assistant_confidence_threshold=1.0), "less than 1; got 1.0"),
    "transformers, schedule": (assisted(num_assistant_tokens_schedule="fixed"), "input should be 'constant'"),
}  # fmt: skip


def written(folder: Path, settings_type: type[Document], content: dict[str, Any]) -> Path:
    """A settings file as a person might have edited it."""
    if not issubclass(settings_type, TensorRtLlmSettings):
        path = folder / "settings.json"
        path.write_text(json.dumps(content))
        return path
    decoding = dict(content["speculative_config"])
    if "draft_len_schedule" in decoding:
        decoding["draft_len_schedule"] = {int(size): k for size, k in decoding["draft_len_schedule"].items()}
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({"speculative_config": decoding}))
    return path


def test_valid_settings_are_read(tmp_path: Path) -> None:
    for name, (settings_type, content) in VALID.items():
        assert isinstance(read_settings(settings_type, written(tmp_path, settings_type, content)), settings_type), name


def test_settings_that_an_engine_would_refuse_are_refused(tmp_path: Path) -> None:
    for name, ((settings_type, content), message) in INVALID.items():
        path = written(tmp_path, settings_type, content)
        with pytest.raises(UserError) as caught:
            read_settings(settings_type, path)
        assert re.search(message, str(caught.value)), (name, str(caught.value))
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value), name


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
    draft tokens includes the root, TensorRT-LLM's does not.
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
        config = ENGINES["tensorrt-llm"].settings(pair, tree)
        assert isinstance(config, TensorRtLlmSettings)
        decoding = config.speculative_config
        total, topk = decoding.max_total_draft_tokens, decoding.dynamic_tree_max_topK
        assert topk and total
        theirs, _ = engine_tree(draft, steps=decoding.max_draft_len, topk=topk, draft_tokens=total)
        assert ours == theirs and len(ours) == total, seed


def test_chains_of_engines_equal_ours() -> None:
    """A chain of depth k has k draft tokens and a verification of k + 1."""
    for depth in (1, 4):
        session = TreeSession("chain", depth=depth)
        assert len(session.grow(random_draft(0, 0.3))) == depth and len(session.expanded) == depth
        pair, chain = Pair("t", "d", "independent"), ChainPolicy(depth=depth)
        found = {name: engine.settings(pair, chain).model_dump() for name, engine in ENGINES.items()}
        assert found["vllm"]["num_speculative_tokens"] == depth
        assert [found["sglang"][name] for name in SIZES] == [depth, 1, depth + 1]
        config = found["tensorrt-llm"]["speculative_config"]
        assert (config["max_draft_len"], config["max_total_draft_tokens"]) == (depth, depth)
        assert found["transformers"]["num_assistant_tokens"] == depth


def test_schedules_of_both_engines_agree() -> None:
    """vLLM gets ranges of batch sizes, TensorRT-LLM the largest batch of each length and no entry for plain decoding."""
    ranges, config = (
        ENGINES[name].settings(Pair("t", "d", "independent"), CHAIN, SCHEDULE).model_dump()
        for name in ("vllm", "tensorrt-llm")
    )
    assert ranges["num_speculative_tokens_per_batch_size"] == [(1, 2, 5), (3, 7, 3), (8, 1024, 0)]
    assert config["speculative_config"]["draft_len_schedule"] == {2: 5, 7: 3}


def test_tensorrt_llm_1_2_1_gets_the_smallest_batch_of_each_length() -> None:
    """Batches beyond the predictions decode plainly there too."""
    pair = Pair("t", "d", "independent")
    for end, expected in ((3, {1: 5, 3: 3, 8: 0}), (2, {1: 5, 3: 3, 8: 0})):
        settings = ENGINES["tensorrt-llm"].of_version("1.2.1").settings(pair, CHAIN, SCHEDULE[:end])
        assert isinstance(settings, TensorRtLlmSettings121)
        assert settings.speculative_config.draft_len_schedule == expected


def test_unknown_versions_are_refused() -> None:
    for engine, known in (("vllm", "0.32.0"), ("tensorrt-llm", "1.3.0rc27 or 1.2.1")):
        assert ENGINES[engine].of_version(None).version in known
        message = (
            f"--engine-version 0.1: settings for {engine} were checked against {known}; give one of them, or leave"
        )
        with pytest.raises(UserError, match=re.escape(message)):
            ENGINES[engine].of_version("0.1")


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
        predicted = Predicted(speedup=2.0, ms_per_token=1.0, tokens_per_round=2.0)
        candidate = Candidate("chain", "", CHAIN, predicted, settings, schedule)
        ((file, steps),) = engine.companions(candidate).items()
        found = steps.model_dump()
        assert {key: slot["candidate_steps"] for key, slot in found.items()} == {k: [v] for k, v in expected.items()}
        assert file == settings.speculative_adaptive_config
        assert [settings.speculative_num_steps] in [slot["candidate_steps"] for slot in found.values()]
        words = shlex.split(engine.command(pair, settings, Path("out/chain.json")))
        assert words[words.index("--speculative-adaptive") + 1 :] == [
            "--speculative-adaptive-config",
            "out/adaptive.json",
        ]


def test_adaptive_files_that_sglang_would_refuse_are_refused(tmp_path: Path) -> None:
    steps = {"candidate_steps": [0, 1, 3]}
    path = tmp_path / "adaptive.json"
    for content, message in (
        ({"1": steps, "8": steps}, None),
        ({}, "the keys are batch sizes of at least 1"),
        ({"large": steps}, "the keys are batch sizes of at least 1"),
        ({"1": {"candidate_steps": []}}, "at least 1 item"),
        ({"1": {"candidate_steps": [-1]}}, "candidate_steps are at least 0"),
        ({"1": {"steps": [1]}}, "unknown key '1.steps'"),
    ):
        path.write_text(json.dumps(content))
        if message is None:
            assert read_settings(AdaptiveSteps, path).model_dump() == content
            continue
        with pytest.raises(UserError, match=re.escape(message)):
            read_settings(AdaptiveSteps, path)


def test_assisted_generation_drafts_the_exported_number_of_tokens(text_pair: ModelPair, tmp_path: Path) -> None:
    """A target that assists itself accepts every draft. The same settings in the target's config have no effect."""
    import torch

    patch = ENGINES["transformers"].settings(Pair("t", "d", "independent"), ChainPolicy(depth=3))
    write_settings(tmp_path / "generation_config.json", patch)
    inputs = {"input_ids": torch.arange(5, 25)[None]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def drafted(model: Any, assistant: Any) -> list[int]:
        _, stats = hf_generate(model, inputs, max_new_tokens=24, assistant=assistant)
        return stats.accepted_lengths

    target, draft = copy.deepcopy(text_pair.target), copy.deepcopy(text_pair.target)
    draft.generation_config.update(**json.loads((tmp_path / "generation_config.json").read_text()))
    assert drafted(target, draft) == [3] * 6
    plain = drafted(target, copy.deepcopy(text_pair.target))
    target.generation_config.update(**patch.model_dump())
    assert drafted(target, copy.deepcopy(text_pair.target)) == plain != [3] * 6
