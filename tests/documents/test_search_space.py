"""Search spaces: shipped files, error messages, and the configurations that they contain."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import ABLATIONS, COMPARED_DEFAULTS, DEFAULTS, NAMED, PUBLISHED_DEFAULTS
from autotune.documents.search_space import MAX_ENUMERATED, NAMES, Dimension, SearchSpace, ordered
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import data_root
from autotune.study.spaces import load_space
from autotune.trees.policy import parse_policy

SHIPPED = sorted(path.stem for path in (data_root() / "search_spaces").glob("*.yaml"))


def space(trees: dict[str, Any], visual_keep: Any = None) -> SearchSpace:
    keeps = visual_keep or [1.0, 0.5]
    return SearchSpace.model_validate({"name": "by hand", "visual_keep": keeps, "trees": trees})


def write_space(folder: Path, content: dict[str, Any]) -> Path:
    known = {"schema": "autotune.search-space/1", "name": "by hand", "visual_keep": [1.0]}
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**known, "trees": {"chain": {"depth": {"low": 1, "high": 4}}}, **content}))
    return path


def suggestions(of: SearchSpace, count: int, seed: int = 0) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [of.suggest(study.ask(), list(of.trees)) for _ in range(count)]


def test_shipped_spaces_contain_valid_policies() -> None:
    for name in SHIPPED:
        found = load_space(name)
        assert found.name == name and found.description
        sampled = found.model_copy(update={"trees": {name: d for name, d in found.trees.items() if name != "static"}})
        assert all(parse_policy(tree) for tree in suggestions(sampled, 100))


def test_full_holds_every_published_default() -> None:
    """The subnet, and the tree: hyperparameters that the space does not search have their default values. A static tree
    is held with its size, see ``Evaluator.template_trees``.
    """
    full = load_space("full")
    for name, default in PUBLISHED_DEFAULTS.items():
        policy = parse_policy(default.tree)
        dimensions = full.trees[policy.policy]
        values = {field: getattr(policy, field) for field in dimensions if not policy.template_sizes}
        assert policy.template_sizes or parse_policy({"policy": policy.policy, **values}) == policy, name
        if policy.template_sizes:
            values = {"budget": policy.size.nodes, "depth": policy.size.depth}
        assert all(holds(dimensions[field], value) for field, value in values.items()), (name, values)
        for whole in (Subnet(), Subnet(injection_layer=5)):  # of another draft, and of a supernet
            readable = () if whole.injection_layer is None else (4, 5)
            subnet = default.subnet.model_copy(update={"injection_layer": whole.injection_layer})
            assert subnet in full.subnets("d", whole, readable), name


def holds(dimension: Dimension, value: Any) -> bool:
    if dimension.choices is not None:
        return value in dimension.choices
    assert dimension.low is not None and dimension.high is not None
    return dimension.low <= value <= dimension.high and (
        dimension.step is None or value in (dimension.values or [value])
    )


def test_star_exhaustive_holds_every_subnet_that_training_samples() -> None:
    """64 shares of heads of the three blocks, 5 layers and 10 shares of visual tokens; star has 200 of them,
    and full.
    """
    layers = tuple(range(8, 13))
    found = load_space("star-exhaustive").subnets("d", Subnet(), layers)
    trained = {
        (heads, layer, keep)
        for heads in itertools.product((0.25, 0.5, 0.75, 1.0), repeat=3)
        for layer in layers
        for keep in (tenths / 10 for tenths in range(1, 11))
    }
    assert len(found) == 3200 and {(s.head_shares, s.injection_layer, s.visual_keep) for s in found} == trained
    equal = {s for s in found if len(set(s.head_shares)) == 1}
    assert len(equal) == 200 and set(load_space("star").subnets("d", Subnet(), layers)) == equal
    assert equal < set(load_space("full").subnets("d", Subnet(), layers))


def test_one_default_of_each_paper_is_compared_unasked() -> None:
    """The others can be named; the releases of EAGLE-2 and DREAM draft a level more and verify a node less."""
    assert set(COMPARED_DEFAULTS) == {"chain", "star", "eagle2", "dream", "sage", "wetap"}
    assert all(default.verification.is_lossless for default in PUBLISHED_DEFAULTS.values())
    assert set(DEFAULTS) | set(ABLATIONS) == set(NAMED) and not set(DEFAULTS) & set(ABLATIONS)
    for found in {**DEFAULTS, **ABLATIONS}.values():
        assert any(word in found.source for word in ("section", "table", "settings", "documentation", "code"))
    for name, levels, budget, settings in [("eagle2", 8, 59, (7, 60)), ("dream", 7, 31, (6, 32))]:
        release = PUBLISHED_DEFAULTS[f"{name}-release"].tree
        assert (release["depth"], release["budget"]) == (levels, budget) == (settings[0] + 1, settings[1] - 1)


def test_the_chains_of_a_space_are_chain_and_priced_with_one_child() -> None:
    chains = load_space("full").chains()
    assert set(chains.trees) == {"chain", "priced"} and chains.trees["chain"] == load_space("full").trees["chain"]
    assert all(parse_policy(tree).is_chain for tree in suggestions(chains, 40))
    assert not parse_policy({"policy": "priced", "k": 1, "retrieval": True}).is_chain
    assert list(space({"chain": {"depth": {"low": 1, "high": 4}}}).chains().trees) == ["chain"]
    with pytest.raises(
        UserError, match=r"space by hand: .*follow one path.*; name a space with the policy chain or priced"
    ):
        space({"eagle2": {"depth": {"low": 1, "high": 4}}}).chains()


@pytest.mark.parametrize(
    ("name", "message"),
    [("quik", "unknown search space 'quik'; did you mean 'quick'"), ("nowhere.yaml", r"nowhere\.yaml: no such file")],
)
def test_unknown_spaces_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_space(name)


TWO: dict[str, dict[str, Any]] = {
    "chain": {"depth": {"low": 1, "high": 4}},
    "sage": {"d_min": {"low": 1, "high": 2}, "d_max": {"low": 3, "high": 9}},
}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"trees": {"chian": {}}}, "unknown tree policy 'chian'; did you mean 'chain'"),
    ({"trees": {"sage": {"d_mni": {"low": 1, "high": 2}}}}, "sage: unknown key 'd_mni'; did you mean 'd_min'"),
    ({"trees": {}}, "trees: .*at least 1 item"),
    ({"trees": {"chain": {"depth": {"low": 5, "high": 2}}}}, "low must be at most high, which is 2"),
    ({"trees": {"chain": {"depth": {"choices": [1], "low": 1, "high": 2}}}}, "give either choices, or low and high"),
    ({"trees": {"chain": {"depth": {"low": 1}}}}, "give either choices, or low and high"),
    ({"trees": {"chain": {"depth": {"choices": []}}}}, "at least 1 item"),
    ({"trees": {"chain": {"depth": {"low": 1, "hihg": 2}}}}, "unknown key 'trees.chain.depth.hihg'"),
    ({"trees": {"chain": {"depth": {"low": 0, "high": 4}}}}, "chain: depth: .*greater than or equal to 1; got 0"),
    ({"trees": {"chain": {"depth": {"low": 1, "high": 99}}}}, "chain: depth: .*less than or equal to 24; got 99"),
    ({"trees": {"sage": {"confidence": {"choices": ["previous", "now"]}}}}, "sage: confidence: .*got 'now'"),
    ({"trees": {"sage": {"k": {"choices": [4, 99, 5]}}}}, "k: .*got 99"),
    ({"trees": {"sage": {"lower": {"low": 0.0, "high": 2.0, "log": True}}}}, "log"),
    ({"trees": {"chain": {"depth": {"low": 1, "high": 4, "step": 0}}}}, "step"),
    ({"heads": [-1, 1.0]}, "heads.0.*greater than 0"),
    ({"heads": [1.0, 1.5]}, "heads.1.*less than or equal to 1"),
    ({"visual_keep": [True, 0.5]}, "visual_keep.0.*got True"),
    ({"trees": {"chain": {"depth": {"low": 0, "high": 10**12}}}}, "a range of integers has at most 100000 values"),
    ({"trees": {"chain": {"depth": {"low": 1, "high": 4, "step": 0.5}}}}, "step must be an integer"),
    ({"trees": {"chain": {"n_min": {"choices": ["x", 2]}}}}, "chain: n_min: .*got 'x'"),
    ({"trees": {"sage": {"d_min": {"choices": ["x", 2]}, "d_max": {"choices": [3]}}}}, "sage: d_min: .*got 'x'"),
    ({"visual_keeps": [1.0]}, "unknown key 'visual_keeps'; did you mean 'visual_keep'"),
    ({"schema": "autotune.search-space/9"}, "this program reads schema"),
    *(({"visual_keep": choices}, "visual_keep") for choices in ([1.5], [0.0, 1.0], ["all"])),
    *(
        ({"trees": {"static": dimensions}}, "static needs integers: budget from 1 to 128 and depth from 1 to 24")
        for dimensions in (
            {"budget": {"low": 1, "high": 9}},
            {"budget": {"low": 1.0, "high": 9.0}},
            {"budget": {"low": 1, "high": 300}},
            {"budgett": {"low": 1, "high": 9}},
        )
    ),
]


def test_errors_are_one_line_with_the_file_and_the_rule(tmp_path: Path) -> None:
    for content, message in MISTAKES:
        with pytest.raises(UserError, match=message) as refused:
            load_space(str(write_space(tmp_path, content)))
        assert "space.yaml" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ("heads=0.5", {"heads": [0.5]}),
        ("heads=1,0.5", {"heads": [1.0, 0.5]}),
        ("heads=[[1, 0.5, 0.5]]", {"heads": [[1.0, 0.5, 0.5]]}),
        ("injection-layer=9", {"injection_layers": [9]}),
        ("injection-layer=all", {"injection_layers": "all"}),
        ("operator=prune,pool", {"operators": ["prune", "pool"]}),
        ("operator-ratio=5", {"operator_ratios": [5]}),
        ("vocabulary=0.25", {"vocabularies": [0.25]}),
        ("weights=float8", {"weights": ["float8"]}),
        ("keep=0.2", {"visual_keep": [0.2]}),
        ("keep=1,0.2", {"visual_keep": [1, 0.2]}),
        ("ranking=even", {"visual_rankings": ["even"]}),
        ("d_max=8", {"trees": {**TWO, "sage": {"d_min": {"low": 1, "high": 2}, "d_max": {"choices": [8]}}}}),
        ("sage.d_max=8", {"trees": {**TWO, "sage": {"d_min": {"low": 1, "high": 2}, "d_max": {"choices": [8]}}}}),
        ("d_max={low: 4, high: 6}", {"trees": {**TWO, "sage": {**TWO["sage"], "d_max": {"low": 4, "high": 6}}}}),
        ("policy=chain", {"trees": {"chain": TWO["chain"]}}),
    ],
)
def test_a_change_is_what_the_file_would_say(change: str, content: dict[str, Any], tmp_path: Path) -> None:
    """A file may have one value where it has a list of one."""
    whole = load_space(str(write_space(tmp_path, {"trees": TWO}))).changed([change])
    assert whole == load_space(str(write_space(tmp_path, {"trees": TWO, **content})))
    alone = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in content.items()}
    if not isinstance(alone.get("heads"), list):  # whose one value would be a list
        assert whole == load_space(str(write_space(tmp_path, {"trees": TWO, **alone})))


def test_the_documentation_has_the_names_of_all_changes() -> None:
    page = (data_root() / "docs/cli.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, flags=re.M))
    assert rows == {**NAMES, "policy": "trees"}


def test_ordered_pairs_are_swapped_where_needed() -> None:
    """Both are drawn independently: neither restricts the other's distribution."""
    drawn = ordered("sage", {"d_min": 9, "d_max": 2, "w_min": 3, "w_max": 5, "lower": 4.0, "upper": 1.0})
    assert drawn == {"policy": "sage", "d_min": 2, "d_max": 9, "w_min": 3, "w_max": 5, "lower": 1.0, "upper": 4.0}
    crossing = space({"sage": {"d_min": {"low": 1, "high": 12}, "d_max": {"low": 1, "high": 12}}})
    drawn_pairs = {(tree["d_min"], tree["d_max"]) for tree in suggestions(crossing, 100)}
    assert all(low <= high for low, high in drawn_pairs) and len(drawn_pairs) > 30


def test_small_policies_are_enumerated() -> None:
    """Each tree once: 3 depths, 2 x 2 x 2 trees, and swapped pairs only once."""
    found = space(
        {
            "chain": {"depth": {"low": 1, "high": 5, "step": 2}},
            "sage": {"d_max": {"choices": [4, 8]}, "confidence": {"choices": ["previous", "current"]}, "k": {"low": 3, "high": 4}},
        }
    )  # fmt: skip
    assert [tree["depth"] for tree in found.enumerated("chain") or ()] == [1, 3, 5]
    trees = found.enumerated("sage") or []
    assert len({str(tree) for tree in trees}) == len(trees) == 8
    assert space({"sage": {}}).enumerated("sage") == [{"policy": "sage"}], "without dimensions: the defaults"
    crossing = space({"sage": {"d_min": {"low": 1, "high": 3}, "d_max": {"low": 1, "high": 3}}})
    assert len(crossing.enumerated("sage") or ()) == 6


def test_large_and_continuous_policies_are_not_enumerated() -> None:
    assert MAX_ENUMERATED == 10 * 15 * 20
    cases = [({"low": 1, "high": 20}, True), ({"low": 1, "high": 21}, False), ({"low": 1.0, "high": 2.0}, False)]
    for depths, is_small in cases:
        found = space({"sage": {"d_min": depths, "w_min": {"low": 1, "high": 15}, "k": {"low": 1, "high": 10}}})
        assert (found.enumerated("sage") is not None) == is_small


def test_suggestions_stay_within_their_dimensions() -> None:
    found = space(
        {"sage": {"n_max": {"low": 4, "high": 64, "log": True}, "upper": {"low": 3.0, "high": 5.0, "step": 0.5}}}
    )
    drawn = suggestions(found, 60)
    assert {tree["upper"] for tree in drawn} == {3.0, 3.5, 4.0, 4.5, 5.0}
    sizes = [tree["n_max"] for tree in drawn]
    assert all(isinstance(n, int) and 4 <= n <= 64 for n in sizes)
    assert sum(n <= 16 for n in sizes) > 20, "a logarithmic range gives half of its draws to its lower half"


def test_equal_configurations_have_equal_keys() -> None:
    """Defaults may be given or left out."""
    short = Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.5))
    full = Configuration(tree=parse_policy(short.tree).model_dump(), subnet=Subnet(visual_keep=0.5))
    assert short.key == full.key
    others = [
        Configuration(tree={"policy": "sage", "k": 9}, subnet=Subnet(visual_keep=0.5)),
        Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.25)),
        Configuration(tree={"policy": "chain"}, subnet=Subnet(visual_keep=0.5)),
    ]
    assert len({short.key, *(other.key for other in others)}) == 4


def test_labels_omit_defaults() -> None:
    labels: list[tuple[dict[str, Any], str]] = [
        ({"policy": "chain", "depth": 5}, "chain(depth=5) keep=0.5"),
        ({"policy": "sage"}, "sage() keep=0.5"),
        ({"policy": "sage", "d_max": 8, "k": 4, "upper": 4.25}, "sage(k=4, upper=4.25) keep=0.5"),
    ]
    for tree, label in labels:
        assert Configuration(tree=tree, subnet=Subnet(visual_keep=0.5)).label == label


def test_sweep_fills_every_dimension_evenly() -> None:
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
    swept = found.sweep("sage", 1024, seed=0)
    for tree in swept[:50]:
        assert found.suggest(optuna.trial.FixedTrial(found.parameters(tree)), ["sage"]) == tree
    counts = {name: Counter(values[name] for values in swept) for name in ("upper", "d_max")}
    assert set(counts["upper"]) == {3.0, 3.5, 4.0, 4.5, 5.0} and set(counts["d_max"]) == set(range(2, 10))
    for of_dimension in counts.values():
        assert max(of_dimension.values()) - min(of_dimension.values()) <= 3
    sizes = [values["n_max"] for values in swept]
    # Half of the logarithm lies below the geometric mean of 4 and 65.
    assert min(sizes) == 4 and max(sizes) == 64 and abs(np.mean(np.array(sizes) <= 16) - 0.5) < 0.03
    assert abs(np.mean([values["lower"] for values in swept]) - 1.0) < 0.01
    assert found.sweep("sage", 16, seed=0) == swept[:16] != found.sweep("sage", 16, seed=1)
    parts = [tree for first in range(0, 64, 16) for tree in found.sweep("sage", 16, seed=0, first=first)]
    assert parts == swept[:64], "the parts of a sweep make the sweep"


def test_full_space_has_the_grid_of_a_supernet() -> None:
    """STAR's shares of visual tokens and DREAM's, with one share of heads in all blocks; other drafts have 11
    subnets.
    """
    full = load_space("full")
    found = full.subnets("star", Subnet(injection_layer=12), range(8, 13))
    assert len({subnet.name for subnet in found}) == len(found) == 220
    assert {subnet.injection_layer for subnet in found} == {8, 9, 10, 11, 12}
    assert {subnet.head_shares for subnet in found} == {(s, s, s) for s in (0.25, 0.5, 0.75, 1.0)}
    assert {subnet.visual_keep for subnet in found} == {0.75, *(tenths / 10 for tenths in range(1, 11))}
    assert Subnet(injection_layer=12) in found, "the whole draft is one of them"
    assert len(full.subnets("other", Subnet(), ())) == 11


def test_heads_per_block_and_layers_by_number(tmp_path: Path) -> None:
    content = {"heads": [[1.0, 0.5, 0.25], 0.5], "injection_layers": [9, 11]}
    found = load_space(str(write_space(tmp_path, content))).subnets("star", Subnet(injection_layer=12), range(8, 13))
    assert [(s.head_shares, s.injection_layer) for s in found] == [
        ((1.0, 0.5, 0.25), 9), ((1.0, 0.5, 0.25), 11), ((0.5, 0.5, 0.5), 9), ((0.5, 0.5, 0.5), 11)
    ]  # fmt: skip
    with pytest.raises(UserError, match="star can read the target's layers 8, 10, 12; got 9; name one of them"):
        load_space(str(write_space(tmp_path, content))).subnets("star", Subnet(injection_layer=12), (8, 10, 12))
