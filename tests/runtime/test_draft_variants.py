"""The variants of drafts that a space contains, and those whose steps have prices of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.measuring.tables import priced_variants
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search.screening import _recorded_together
from autotune.study.spaces import load_space
from tests.search.test_vocabularies import folders
from tests.tiny_models import Pair

__all__ = ["folders"]
CHAINS = {"name": "x", "visual_keep": [1.0, 0.5], "trees": {"chain": {"depth": {"low": 1, "high": 4}}}}
HEADS = {"heads": [1.0, 0.25], "injection_layers": "all"}
RANKINGS = {"visual_rankings": ["even", "all_queries"]}
OPERATORS = {"operators": ["gate", "prune", "convolve", "text_only"], "operator_ratios": [2, 5]}


def subnets(**choices: list[Any]) -> list[Subnet]:
    """Subnets by the values of their fields, of which the n-th ones belong together."""
    return [Subnet(**dict(zip(choices, values, strict=True))) for values in zip(*choices.values(), strict=True)]


@pytest.fixture(scope="module")
def pool(pair: Pair, folders: dict[str, Path]) -> ModelPool:
    drafts = str(folders["star"]), str(folders["specvlm"]), str(pair.draft_folder)
    return ModelPool(str(pair.target_folder), drafts, "cpu")


@pytest.mark.parametrize(
    ("choices", "draft", "expected"),
    [
        (HEADS, 2, subnets(visual_keep=[1.0, 0.5])),  # other drafts have no heads to choose
        (  # there is nothing to rank where all tokens are kept
            RANKINGS,
            2,
            subnets(visual_keep=[1.0, 0.5, 0.5], visual_ranking=["text_after_image", "even", "all_queries"]),
        ),
        (OPERATORS, 2, subnets(visual_keep=[1.0, 0.5])),
        (
            OPERATORS,
            1,
            subnets(
                visual_keep=[1.0] * 5 + [0.5] * 4,
                operator=[None, "prune", "prune", "convolve", "text_only", None, "prune", "prune", "convolve"],
                operator_ratio=[None, 2, 5, None, None, None, 2, 5, None],
                injection_layer=[4] * 9,
            ),
        ),
        ({"vocabularies": [1.0, 0.5]}, 2, subnets(visual_keep=[1.0, 0.5])),
        (
            {"vocabularies": [1.0, 0.5], "heads": [1.0, 0.5], "visual_keep": [1.0]},
            0,
            subnets(heads=[None, None, 0.5, 0.5], vocabulary=[None, 0.5, None, 0.5], injection_layer=[4] * 4),
        ),
    ],
)
def test_a_space_lists_the_choices_that_a_draft_has(
    pool: ModelPool, choices: dict[str, Any], draft: int, expected: list[Subnet]
) -> None:
    name = list(pool.references)[draft]
    variants = variants_of(pool, SearchSpace.model_validate({**CHAINS, **choices}))
    found = [subnet for id, subnet in variants if id == name]
    assert set(found) == set(expected) and len(found) == len(expected)


@pytest.mark.parametrize(
    ("choices", "num_priced"), [(HEADS, 2), (HEADS | RANKINGS, 2), (OPERATORS, 1), ({"vocabularies": [1.0, 0.5]}, 2)]
)
def test_heads_and_vocabularies_have_prices(pool: ModelPool, choices: dict[str, Any], num_priced: int) -> None:
    """Visual tokens, layers and operators do not change the cost of a step."""
    variants = variants_of(pool, SearchSpace.model_validate({**CHAINS, **choices}))
    star, specvlm, independent = pool.references
    priced = [draft for draft, _ in priced_variants(variants)]
    assert priced.count(specvlm if "operators" in choices else star) == num_priced and priced.count(independent) == 1
    groups = _recorded_together(pool, [variant for variant in variants if variant[0] == star])
    assert all(len({subnet.vocabulary for _, subnet in group}) == 1 for group in groups)


def test_many_choices_of_heads_are_priced_by_equal_shares(pool: ModelPool) -> None:
    star, _, independent = pool.references
    priced = priced_variants(variants_of(pool, load_space("star-exhaustive")))
    assert [subnet.heads for draft, subnet in priced if draft == star] == [None, 0.75, 0.5, 0.25]
    assert [subnet for draft, subnet in priced if draft == independent] == [Subnet()]
    few = [(star, Subnet(heads=heads)) for heads in ((1.0, 0.5, 0.5), (0.25, 0.5, 0.5))]
    assert priced_variants(few) == few, "a few are priced themselves"


@pytest.mark.parametrize(
    ("change", "dimension"),
    [
        ("heads=0.5", "heads"),
        ("injection-layer=4", "injection layers"),
        ("operator=pool", "operators"),
        ("vocabulary=0.5", "vocabularies"),
        ("weights=float8", "weights"),
    ],
)
def test_choices_that_no_draft_has_are_refused(pair: Pair, change: str, dimension: str) -> None:
    alone = ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")
    assert len(variants_of(alone, load_space("quick"))) == 10
    with pytest.raises(UserError, match=f"has {dimension} to choose; leave {dimension} out"):
        variants_of(alone, load_space("quick", [change]))


def test_subnets_of_one_network_share_it(pool: ModelPool) -> None:
    """Visual tokens are selected per prompt."""
    star, specvlm, _ = pool.references
    for name, one, other in (
        (star, Subnet(heads=0.25, injection_layer=2), Subnet()),
        (specvlm, Subnet(operator="pool", operator_ratio=2), Subnet(operator="prune", operator_ratio=2)),
    ):
        draft = pool.draft(name, one)
        assert draft is pool.draft(name, one.model_copy(update={"visual_keep": 0.5}))
        assert draft is not pool.draft(name, other) and draft is not pool.draft(name)
    assert pool.draft(star, Subnet(injection_layer=4)) is pool.draft(star)
    half = pool.draft(star, Subnet(heads=0.25, injection_layer=2))
    assert half.num_parameters < pool.draft(star).num_parameters and half.aux_layers == (2,)
