"""Decoding profiles: saved and loaded, used by the runtime, and refused with one line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autotune
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import beside
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import load
from autotune.trees.sage import SagePolicy
from tests.sample_documents import DEVICE, decoding_profile
from tests.tiny_models import Inputs, Pair

SAGE = {"policy": "sage", "d_max": 6, "n_max": 20}


@pytest.fixture
def profile(pair: Pair) -> DecodingProfile:
    """A profile of the tiny pair on this machine."""
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    return decoding_profile(target, draft, tree=SAGE, visual_keep=0.5, hardware=fingerprint("cpu"))


@pytest.fixture
def path(profile: DecodingProfile, tmp_path: Path) -> Path:
    profile.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def change(path: Path, *keys: str | int, **values: Any) -> None:
    """Update the object at ``keys``."""
    content = json.loads(path.read_text())
    part = content
    for key in keys:
        part = part[key]
    part.update(values)
    path.write_text(json.dumps(content))


def assert_equals_plain_decoding(decoder: Decoder, pair: Pair, inputs: Inputs) -> None:
    expected = pair.target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=20).sequences, expected)


def test_profile_is_saved_and_loaded(profile: DecodingProfile, path: Path) -> None:
    assert DecodingProfile.load(path) == profile
    content = json.loads(path.read_text())
    assert content["schema"] == "autotune.decoding-profile/2"
    point = content["point"]
    assert point["tree"] == SagePolicy(d_max=6, n_max=20).model_dump(), (
        "defaults are written too, because they may change"
    )
    assert (point["verification"], point["measured"]) == ({"kind": "lossless"}, None)


def test_decoder_uses_the_profile(path: Path, profile: DecodingProfile, pair: Pair, prompts: Any) -> None:
    decoder = autotune.load(str(path))
    assert decoder.point.policy == SagePolicy(d_max=6, n_max=20)
    assert (decoder.point.visual_keep, decoder.profile) == (0.5, profile)
    assert isinstance(decoder.draft, IndependentDraft) and decoder.processor is not None
    assert_equals_plain_decoding(decoder, pair, prompts["image"])


def test_loaded_models_are_not_hashed_or_copied(path: Path, profile: DecodingProfile, pair: Pair, prompts: Any) -> None:
    """The profile may be a path or an object."""
    for given in (path, profile):
        decoder = load(given, target=pair.target, draft=pair.draft)
        assert decoder.target_model is pair.target and decoder.draft.model is pair.draft
        assert_equals_plain_decoding(decoder, pair, prompts["text"])


def test_profile_without_a_draft_decodes_plainly(pair: Pair, prompts: Any, tmp_path: Path) -> None:
    plain = decoding_profile(reference(str(pair.target_folder)), None, hardware=fingerprint("cpu"))
    decoder = load(plain)
    assert decoder.draft is None
    assert_equals_plain_decoding(decoder, pair, prompts["image"])


def test_another_device_is_a_warning(path: Path, pair: Pair, prompts: Any) -> None:
    change(path, hardware=DEVICE.model_dump())
    here = fingerprint("cpu").key
    with pytest.warns(UserWarning, match="output is the same, the speedup may differ") as warned:
        decoder = load(path, device="cpu")
    assert f"tuned on {DEVICE.key}, this is {here}" in str(warned[0].message)
    assert_equals_plain_decoding(decoder, pair, prompts["text"])


def test_another_device_is_an_error_if_strict(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path, device="cpu", strict=True)
    change(path, hardware=DEVICE.model_dump())
    with pytest.raises(
        UserError, match=r"tuned on cpu/An abacus/1, .*; run autotune search here, or load without strict"
    ):
        load(path, device="cpu", strict=True)


def test_other_weights_are_refused(path: Path, pair: Pair) -> None:
    original = path.read_text()
    for keys, folder in ((("target",), pair.target_folder), (("point", "draft"), pair.draft_folder)):
        path.write_text(original)
        change(path, *keys, sha256="0" * 64)
        with pytest.raises(UserError, match=f"{folder} has other weights than the profile's; run autotune search"):
            load(path, device="cpu")


def test_models_beside_a_profile_are_found_from_elsewhere(
    pair: Pair, profile: DecodingProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path; names of other models stay, and so do those of models in this folder."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "invoices").symlink_to(pair.target_folder)
    monkeypatch.chdir(tmp_path)
    target = profile.target.model_copy(update={"id": "invoices"})
    named = profile.model_copy(update={"target": target})
    named.save("there/profile.json")
    decoder = load("there/profile.json")
    assert decoder.profile is not None and decoder.profile.target.id == "there/invoices"
    assert decoder.profile.point == profile.point
    (tmp_path / "invoices").mkdir()
    assert named.located(Path("there/profile.json")).target.id == "invoices"
    assert [beside(Path("there/p.json"), name) for name in ("org/model", "invoices.x:mtp")] == [
        "org/model",
        "invoices.x:mtp",
    ]
    (tmp_path / "there" / "invoices.x").mkdir()
    assert beside(Path("there/p.json"), "invoices.x:mtp") == "there/invoices.x:mtp"


def test_missing_model_is_refused(path: Path, tmp_path: Path) -> None:
    change(path, "target", id=str(tmp_path / "moved.away"))
    with pytest.raises(UserError, match=r"moved\.away: no such model"):
        load(path, device="cpu")


POINT = ("point",)
TREE = (*POINT, "tree")


INVALID: tuple[tuple[tuple[str | int, ...], dict[str, Any], str], ...] = (
    (
        (),
        {"schema": "autotune.decoding-profile/4"},
        "reads schema 'autotune.decoding-profile/2'; got 'autotune.decoding-profile/4'; make the file",
    ),
    ((), {"schema": "autotune.cost-table/1"}, "schema must be 'autotune.decoding-profile/2'; got 'autotune.cost"),
    ((), {"schema": None}, "schema must be 'autotune.decoding-profile/2'; got None"),
    ((), {"hardwear": 1}, "unknown key 'hardwear'; did you mean 'hardware'"),
    ((), {"point": 5}, "point"),
    ((), {"points": []}, "unknown key 'points'; did you mean 'point'"),
    ((), {"target": "a model"}, "target: .*; got 'a model'"),
    (POINT, {"drafts": None}, "unknown key 'point.drafts'; did you mean 'draft'"),
    (POINT, {"verification": {"kind": "typical"}}, "verification: .*'lossless', 'wetap'"),
    (POINT, {"verification": {"kind": "wetap", "threshold": 2.0}}, "threshold: .*got 2.0"),
    (POINT, {"fallback": {"round_steps": 0, "level_steps": 0.2, "node_steps": 0}}, "round_steps: .*got 0"),
    (POINT, {"tree": None}, "tree"),
    (POINT, {"draft": None}, "draft"),
    ((*POINT, "draft", "subnet"), {"visual_kep": 0.5}, "unknown key .*visual_kep'; did you mean 'visual_keep'"),
    ((*POINT, "draft", "subnet"), {"visual_keep": 1.5}, "visual_keep: .*less than or equal to 1; got 1.5"),
    ((*POINT, "predicted"), {"speedup": "fast"}, "speedup: .*valid number.*; got 'fast'"),
    (TREE, {"policy": "saeg"}, "point.tree: .*'saeg'.*'sage'"),
    (TREE, {"d_mxa": 3}, "unknown key .*d_mxa'; did you mean 'd_max'"),
    (TREE, {"d_min": 9}, "point.tree.*d_min must be at most d_max"),
)


def assert_refused(path: Path, message: str) -> None:
    """In one line that names the file."""
    with pytest.raises(UserError, match=message) as refused:
        DecodingProfile.load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_invalid_values_are_refused(path: Path) -> None:
    original = path.read_text()
    for keys, values, message in INVALID:
        path.write_text(original)
        change(path, *keys, **values)
        assert_refused(path, message)


def test_invalid_files_are_refused(path: Path) -> None:
    original = path.read_text()
    content = json.loads(original)
    del content["hardware"]
    for text, message in (
        (original.replace('"hardware"', '"hardwear"'), "unknown key 'hardwear'; did you mean 'hardware'"),
        (json.dumps(content), "key 'hardware' is required and missing; add it"),
        *(
            (original.replace('"speedup": 2.0', f'"speedup": {number}'), "finite number")
            for number in ("NaN", "Infinity", "-Infinity", "1e999")
        ),
        *((text, "a decoding-profile is an object with a 'schema'") for text in ("[]", '"profile"', "3", "null")),
    ):
        path.write_text(text)
        assert_refused(path, message)
