"""Search spaces: the shipped ones load, every mistake has its line, and what is suggested can be decoded with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

from autotune.errors import UserError
from autotune.files import data_root
from autotune.search.space import (
    MAX_ENUMERATED,
    PUBLISHED_DEFAULTS,
    Configuration,
    Dimension,
    SearchSpace,
    configuration,
    load_space,
)
from autotune.trees.policy import parse_policy

SHIPPED = sorted(path.stem for path in (data_root() / "search_spaces").glob("*.yaml"))


def space(trees: dict[str, Any], visual_keep: Any = None) -> SearchSpace:
    keeps = visual_keep or {"choices": [1.0, 0.5]}
    return SearchSpace.model_validate({"name": "by hand", "visual_keep": keeps, "trees": trees})


def write_space(folder: Path, content: dict[str, Any]) -> Path:
    known = {"schema": "autotune.search-space/1", "name": "by hand", "visual_keep": {"choices": [1.0]}}
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**known, "trees": {"chain": {"depth": {"low": 1, "high": 4}}}, **content}))
    return path


def suggestions(of: SearchSpace, count: int, seed: int = 0) -> list[Configuration]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [of.suggest(study.ask(), list(of.trees)) for _ in range(count)]


# -------------------------------------------------------------------------------------------------------------- shipped


def test_the_default_space_is_shipped() -> None:
    assert "quick" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_space_holds_what_can_be_decoded(name: str) -> None:
    """Whatever is drawn from it is a policy, and its visual keeps are shares."""
    found = load_space(name)
    assert found.name == name and found.description
    keeps = found.visual_keep.values
    assert keeps is not None and all(0 < keep <= 1 for keep in keeps)
    sampled = found.model_copy(update={"trees": {name: d for name, d in found.trees.items() if name != "static"}})
    for drawn in suggestions(sampled, 100):
        assert parse_policy(drawn.tree) and drawn.visual_keep in keeps


def test_published_defaults_are_configurations() -> None:
    """Under the policy's own name, but for two methods whose trees are others' policies."""
    borrowed = {"star": "chain", "dream": "eagle2"}
    for name, default in PUBLISHED_DEFAULTS.items():
        assert parse_policy(default.tree).policy == borrowed.get(name, name) and 0 < default.visual_keep <= 1
    assert set(PUBLISHED_DEFAULTS) == {"chain", "star", "eagle2", "dream", "sage", "wetap"}


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_space_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown search space 'quik'; did you mean 'quick'"):
        load_space("quik")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        load_space("nowhere.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trees": {"chian": {}}}, "unknown tree policy 'chian'; did you mean 'chain'"),
        (
            {"trees": {"sage": {"d_mni": {"low": 1, "high": 2}}}},
            "sage has no hyperparameter 'd_mni'; did you mean 'd_min'",
        ),
        ({"trees": {"chain": {"policy": {"choices": ["sage"]}}}}, "chain has no hyperparameter 'policy'"),
        ({"trees": {}}, "trees: .*at least 1 item"),
        ({"trees": {"chain": {"depth": {"low": 5, "high": 2}}}}, "low must be at most high, which is 2"),
        (
            {"trees": {"chain": {"depth": {"choices": [1], "low": 1, "high": 2}}}},
            "give either choices, or low and high",
        ),
        ({"trees": {"chain": {"depth": {"low": 1}}}}, "give either choices, or low and high"),
        ({"trees": {"chain": {"depth": {}}}}, "give either choices, or low and high"),
        ({"trees": {"chain": {"depth": {"choices": []}}}}, "at least 1 item"),
        ({"trees": {"chain": {"depth": {"low": 1, "hihg": 2}}}}, "unknown key 'trees.chain.depth.hihg'"),
        ({"trees": {"chain": {"depth": {"low": 0, "high": 4}}}}, "chain: depth: .*greater than or equal to 1; got 0"),
        ({"trees": {"chain": {"depth": {"low": 1, "high": 99}}}}, "chain: depth: .*less than or equal to 24; got 99"),
        ({"trees": {"sage": {"confidence": {"choices": ["previous", "now"]}}}}, "sage: confidence: .*got 'now'"),
        ({"trees": {"sage": {"k": {"choices": [4, 99, 5]}}}}, "k: .*got 99"),
        ({"trees": {"sage": {"lower": {"low": 0.0, "high": 2.0, "log": True}}}}, "log"),
        ({"trees": {"chain": {"depth": {"low": 1, "high": 4, "step": 0}}}}, "step"),
        ({"trees": {"chain": {"depth": {"low": 1, "high": 4, "step": -1}}}}, "step"),
        ({"trees": {"chain": {"depth": {"choices": [1], "low": 1}}}}, "choices"),
        ({"visual_keeps": {"choices": [1.0]}}, "unknown key 'visual_keeps'; did you mean 'visual_keep'"),
        ({"schema": "autotune.search-space/9"}, "newer than this program reads"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as refused:
        load_space(str(write_space(tmp_path, content)))
    assert "space.yaml" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("choices", [[1.5], [0.0, 1.0], ["all"]])
def test_visual_keeps_are_shares(choices: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="visual_keep"):
        load_space(str(write_space(tmp_path, {"visual_keep": {"choices": choices}})))


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("trees: [")
    with pytest.raises(UserError, match="not YAML"):
        load_space(str(path))


# ------------------------------------------------------------------------------------------------------- configurations


def test_ordered_pairs_are_put_in_order() -> None:
    """Sampled freely, so that neither end of a pair restricts the other's sampler."""
    drawn = configuration("sage", {"d_min": 9, "d_max": 2, "w_min": 3, "w_max": 5, "lower": 4.0, "upper": 1.0}, 0.5)
    assert drawn.tree == {
        "policy": "sage", "d_min": 2, "d_max": 9, "w_min": 3, "w_max": 5, "lower": 1.0, "upper": 4.0
    }  # fmt: skip
    crossing = space({"sage": {"d_min": {"low": 1, "high": 12}, "d_max": {"low": 1, "high": 12}}})
    drawn_pairs = {(c.tree["d_min"], c.tree["d_max"]) for c in suggestions(crossing, 100)}
    assert all(low <= high for low, high in drawn_pairs) and len(drawn_pairs) > 30


def test_small_policies_are_enumerated() -> None:
    """All of them, once each: 3 depths, and 2 x 2 x 2, for each of two visual keeps."""
    found = space(
        {
            "chain": {"depth": {"low": 1, "high": 5, "step": 2}},
            "sage": {"d_max": {"choices": [4, 8]}, "confidence": {"choices": ["previous", "current"]}, "k": {"low": 3, "high": 4}},
        }
    )  # fmt: skip
    chains, trees = list(found.enumerated("chain") or ()), list(found.enumerated("sage") or ())
    assert [(c.tree["depth"], c.visual_keep) for c in chains] == [(d, keep) for keep in (1.0, 0.5) for d in (1, 3, 5)]
    assert len({c.key for c in trees}) == len(trees) == 16
    bare = list(space({"sage": {}}).enumerated("sage") or ())
    assert [c.tree for c in bare] == [{"policy": "sage"}] * 2, "a policy without dimensions is its defaults"


@pytest.mark.parametrize(
    ("depths", "is_few"),
    [({"low": 1, "high": 20}, True), ({"low": 1, "high": 21}, False), ({"low": 1.0, "high": 2.0}, False)],
)
def test_only_few_are_enumerated(depths: dict[str, Any], is_few: bool) -> None:
    """5 visual keeps times 2 times 15 times the depths; a continuous dimension never ends."""
    assert MAX_ENUMERATED == 5 * 2 * 15 * 20
    confidence, width = {"choices": ["previous", "current"]}, {"low": 1, "high": 15}
    found = space(
        {"sage": {"d_max": depths, "confidence": confidence, "w_max": width}},
        {"choices": [1.0, 0.8, 0.6, 0.4, 0.2]},
    )
    assert (found.enumerated("sage") is not None) == is_few


def test_dimensions_say_their_values() -> None:
    assert Dimension(choices=["a", "b"]).values == ["a", "b"]
    assert Dimension(low=1, high=4).values == [1, 2, 3, 4]
    assert Dimension(low=1, high=6, step=3).values == [1, 4]
    assert Dimension(low=0.0, high=1.0).values is None


def test_suggestions_stay_within_their_dimensions() -> None:
    found = space(
        {"sage": {"n_max": {"low": 4, "high": 64, "log": True}, "upper": {"low": 3.0, "high": 5.0, "step": 0.5}}}
    )
    drawn = suggestions(found, 60)
    assert {c.tree["upper"] for c in drawn} == {3.0, 3.5, 4.0, 4.5, 5.0}
    sizes = [c.tree["n_max"] for c in drawn]
    assert all(isinstance(n, int) and 4 <= n <= 64 for n in sizes)
    assert sum(n <= 16 for n in sizes) > 20, "a logarithmic range gives half of its draws to its lower half"


def test_equal_configurations_have_equal_keys() -> None:
    """However they are written: defaults left out or spelled out."""
    short = Configuration(tree={"policy": "sage"}, visual_keep=0.5)
    full = Configuration(tree=parse_policy(short.tree).model_dump(), visual_keep=0.5)
    assert short.key == full.key
    others = [
        Configuration(tree={"policy": "sage", "k": 9}, visual_keep=0.5),
        Configuration(tree={"policy": "sage"}, visual_keep=0.25),
        Configuration(tree={"policy": "chain"}, visual_keep=0.5),
    ]
    assert len({short.key, *(other.key for other in others)}) == 4


@pytest.mark.parametrize(
    ("tree", "label"),
    [
        ({"policy": "chain", "depth": 5}, "chain(depth=5) keep=0.5"),
        ({"policy": "sage"}, "sage() keep=0.5"),
        ({"policy": "sage", "d_max": 8, "k": 4, "upper": 4.25}, "sage(k=4, upper=4.25) keep=0.5"),
    ],
)
def test_labels_say_what_is_not_default(tree: dict[str, Any], label: str) -> None:
    assert Configuration(tree=tree, visual_keep=0.5).label == label


def test_a_sweep_fills_every_dimension_evenly() -> None:
    found = space(
        {
            "sage": {
                "n_max": {"low": 4, "high": 64, "log": True},
                "upper": {"low": 3.0, "high": 5.0, "step": 0.5},
                "lower": {"low": 0.0, "high": 2.0},
                "d_max": {"low": 2, "high": 9},
            }
        }
    )
    pairs = list(found.sweep("sage", 1024, seed=0))
    for drawn, parameters in pairs[:50]:
        assert found.suggest(optuna.trial.FixedTrial(parameters), ["sage"]) == drawn
    swept = [{**drawn.tree, "visual_keep": drawn.visual_keep} for drawn, _ in pairs]
    counts = {name: Counter(values[name] for values in swept) for name in ("upper", "d_max", "visual_keep")}
    assert set(counts["upper"]) == {3.0, 3.5, 4.0, 4.5, 5.0} and set(counts["d_max"]) == set(range(2, 10))
    for of_dimension in counts.values():
        assert max(of_dimension.values()) - min(of_dimension.values()) <= 3
    sizes = [values["n_max"] for values in swept]
    # Half of the logarithm lies below the geometric mean of 4 and 65.
    assert min(sizes) == 4 and max(sizes) == 64 and abs(np.mean(np.array(sizes) <= 16) - 0.5) < 0.03
    assert abs(np.mean([values["lower"] for values in swept]) - 1.0) < 0.01
    assert list(found.sweep("sage", 16, seed=0)) == list(found.sweep("sage", 16, seed=0))
    assert list(found.sweep("sage", 16, seed=0)) != list(found.sweep("sage", 16, seed=1))


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"budget": {"low": 1, "high": 9}}, "static needs depth, whole numbers from 1 to 24"),
        ({"budget": {"low": 1.0, "high": 9.0}, "depth": {"low": 1, "high": 2}}, "static needs budget, whole numbers"),
        ({"budget": {"low": 1, "high": 300}, "depth": {"low": 1, "high": 2}}, "whole numbers from 1 to 128"),
        ({"budgett": {"low": 1, "high": 9}}, "static trees have no 'budgett' to search; did you mean 'budget'"),
    ],
)
def test_static_trees_are_searched_by_budget_and_depth(
    tmp_path: Path, dimensions: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_space(str(write_space(tmp_path, {"trees": {"static": dimensions}})))
