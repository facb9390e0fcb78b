"""Weights in float8: drafts, cost tables, search spaces, and a search on a GPU that has their products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.documents.decoding_profile import DraftChoice
from autotune.documents.search_space import SearchSpace
from autotune.documents.subnet import Subnet
from autotune.drafters import feature_draft
from autotune.errors import UserError
from autotune.measuring.tables import priced_variants
from autotune.modeling.loading import BUNDLED_TARGET, load_model, load_processor
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import load
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search.prices import table_for_gpu
from autotune.search.screening import _recorded_together
from autotune.study.spaces import load_space
from tests.drafters.test_eagle3 import write_head
from tests.drafters.test_feature_draft import KINDS
from tests.rehearsal import Rehearsal
from tests.sample_documents import decoding_profile
from tests.search.test_vocabularies import folders, loaded
from tests.test_bundled_pair import bundled
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

__all__ = ["folders", "loaded"]
DIGITS = ("star", "dream", "specvlm", "mtp")
FLOAT8 = Subnet(weights="float8")
SPACE = {
    "name": "weights",
    "weights": ["unchanged", "float8"],
    "visual_keep": [1.0],
    "trees": {"chain": {"depth": {"low": 1, "high": 2}}},
}
TREE = {"policy": "eagle2", "depth": 3, "k": 3, "budget": 8}


@pytest.mark.parametrize("kind", [*KINDS, "mtp", "eagle3"])
def test_decoding_is_lossless_and_reads_fewer_bytes(
    pair: Pair, prompts: dict[str, Inputs], folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Greedy and sampled, on the host and over fixed buffers, with the output head's rounded rows where the vocabulary
    is cut. The target's own tensors stay as they are.
    """
    target = Target(pair.target)
    folder = write_head(tmp_path / "head", "speculators/qwen3-8b", target) if kind == "eagle3" else folders[kind]
    cut: dict[str, Any] = {} if kind == "eagle3" else {"vocabulary": 144 / VOCABULARY_SIZE}
    whole, draft = loaded(folder, target, **cut), loaded(folder, target, **cut, weights="float8")
    weights = {name: tensor.clone() for name, tensor in pair.target.state_dict().items()}
    for settings in ({}, {"temperature": 0.8, "seed": 3}):
        inputs: dict[str, Any] = {**prompts["image"], "max_new_tokens": 12, **settings}
        expected = Decoder(target).generate(**inputs).sequences
        for mode in ("eager", "fixed"):
            assert torch.equal(Decoder(target, draft, tree=TREE, mode=mode).generate(**inputs).sequences, expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pair.target.state_dict().items())
    assert draft.subnet.weights == "float8" and draft.num_parameters == whole.num_parameters
    assert draft.weight_bytes < 0.65 * whole.weight_bytes
    shape = draft.shape
    assert shape.text_parameters == whole.shape.text_parameters and shape.layer_kernels > whole.shape.layer_kernels
    assert 1 < shape.bytes_per_parameter < 0.65 * whole.shape.bytes_per_parameter


@pytest.mark.parametrize("kind", ["star", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in DIGITS[1:])])
def test_acceptance_of_bundled_drafts_hardly_changes(kind: str) -> None:
    """With a copy of the target's output head in float8."""
    workload = bundled("digits", "tune", 3)
    target, processor = Target(load_model(BUNDLED_TARGET)), load_processor(BUNDLED_TARGET)
    tokens, accepted, drafts = {}, {}, {}
    for weights in (None, "float8"):
        draft = drafts[weights] = loaded(Path(f"digits/{kind}"), target, weights=weights)
        decoder = Decoder(target, draft, tree={"policy": "chain", "depth": 4})
        found = [decoder.generate(**prompt.inputs(processor), max_new_tokens=48) for prompt in workload.prompts]
        tokens[weights] = [output.sequences.tolist() for output in found]
        accepted[weights] = np.concatenate([output.stats.accepted_lengths for output in found]).mean()
    assert tokens["float8"] == tokens[None]
    assert accepted["float8"] == pytest.approx(accepted[None], rel=0.08) and accepted[None] > 1
    assert drafts["float8"].num_parameters == drafts[None].num_parameters
    assert drafts[None].shape.bytes_per_parameter == 4 and drafts["float8"].shape.bytes_per_parameter < 1.3


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_search_offers_weights_that_the_device_multiplies(
    rehearsal: Rehearsal, pair: Pair, folders: dict[str, Path], device: str
) -> None:
    """On other devices a user can ask for them. A draft that reads no features has none."""
    star, independent = str(folders["star"]), str(pair.draft_folder)
    pool = ModelPool(str(pair.target_folder), [star, independent], device)
    variants = variants_of(pool, SearchSpace.model_validate(SPACE))
    offered = [(draft == next(iter(pool.references)), subnet.weights) for draft, subnet in variants]
    unchanged = [(True, None), (False, None)]
    assert offered == (unchanged if device == "cpu" else [(True, None), (True, "float8"), (False, None)])
    assert len(priced_variants(variants)) == len(_recorded_together(pool, variants)) == len(variants)
    asked_for = load_space("full", ("weights=float8",))
    assert {subnet.weights for draft, subnet in variants_of(pool, asked_for)[:1]} == {"float8"}


def test_a_gpu_without_the_products_refuses_the_weights(
    rehearsal: Rehearsal, pair: Pair, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_draft, "why_no_float8", lambda device: "compute capability 8.0")
    target = Target(load_model(str(pair.target_folder), device="cuda:0"))
    assert loaded(folders["mtp"], target).dimensions.has_float8 is False
    with pytest.raises(
        UserError, match=r"cuda:0 does not \(compute capability 8.0\); leave weights out, or search again"
    ):
        loaded(folders["mtp"], target, weights="float8")


def test_a_profile_and_an_estimate_have_the_weights(
    pair: Pair, folders: dict[str, Path], tmp_path: Path, prompts: dict[str, Inputs]
) -> None:
    """The estimate reads fewer bytes, and prices the kernels that round the inputs."""
    pool = ModelPool(str(pair.target_folder), [str(folders["mtp"])], "cpu")
    (draft,) = pool.references
    table = table_for_gpu("h100", pool, [(draft, Subnet()), (draft, FLOAT8)])
    whole, rounded = (table.costs_of(pool.references[draft], subnet).shape for subnet in (Subnet(), FLOAT8))
    assert whole is not None and rounded is not None and rounded.layer_kernels > whole.layer_kernels
    assert rounded.bytes_per_parameter < whole.bytes_per_parameter
    profile = decoding_profile(pool.target_reference, pool.references[draft])
    choice = DraftChoice(kind="mtp", **profile.point.draft.model_dump(include={"id", "sha256"}), subnet=FLOAT8)  # type: ignore[union-attr]
    point = profile.point.model_copy(update={"draft": choice})
    path = tmp_path / "profile.json"
    profile.model_copy(update={"point": point}).save(path)
    with pytest.warns(UserWarning, match="output is the same"):
        decoder = load(path, target=pair.target)
    assert decoder.draft.subnet.weights == "float8"
    assert torch.equal(
        decoder.generate(**prompts["text"], max_new_tokens=16).sequences,
        Decoder(Target(pair.target)).generate(**prompts["text"], max_new_tokens=16).sequences,
    )
