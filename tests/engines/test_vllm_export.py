"""``autotune export``: the command that starts vLLM, the models that are written for it, and every refusal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.cli.main import main
from autotune.documents.decoding_profile import DraftChoice, OperatingPoint
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, RETRIEVAL, bundled_models
from autotune.trees.policy import parse_policy
from tests.documents.test_draft_kinds import DFLASH, write_dflash
from tests.sample_documents import decoding_profile
from tests.tiny_models import llama_pair

CHAIN = {"policy": "chain", "depth": 5}


def write_profile(
    folder: Path, draft: str | None, *, target: str = BUNDLED_TARGET, kind: str = "independent", **fields: Any
) -> Path:
    """A profile whose last point decodes with a chain of 5 of ``draft``; ``fields`` replace those of its draft."""
    tree = parse_policy(fields.pop("tree", CHAIN))
    choice = None if draft is None else DraftChoice(kind=kind, id=draft, sha256="9" * 64, **fields)
    point = OperatingPoint(draft=choice, tree=choice and tree, predicted=None, measured=None)
    profile = decoding_profile().model_copy(
        update={"points": [point], "target": ModelReference(id=target, sha256="8" * 64)}
    )
    profile.save(folder / "profile.json")
    return folder / "profile.json"


def export(profile: Path, *options: object) -> Result:
    words = [profile, "-o", profile.parent / "out", *options]
    return CliRunner().invoke(main, ["export", *map(str, words)])


def exported(profile: Path, *options: object) -> tuple[list[str], dict[str, Any]]:
    """The words of the command before the speculation, and the object of ``--speculative-config``."""
    result = export(profile, *options)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    at = words.index("--speculative-config")
    return words[:at], json.loads(words[at + 1])


def test_a_vision_language_pair_is_written_in_the_form_that_loads(tmp_path: Path) -> None:
    profile, folder = write_profile(tmp_path, BUNDLED_DRAFT), tmp_path / "out"
    for _ in range(2):  # a second export replaces the first
        words, config = exported(profile)
        (target,), (draft,) = folder.glob("target-*"), folder.glob("draft-*")
        assert words == ["vllm", "serve", str(target), "--dtype", "float32"]
        assert config == {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5}
    for part in (target, draft):
        assert (part / "model.safetensors").exists()
    assert f"{target} holds the target with" in export(profile).stderr


def test_models_of_another_profile_are_written_into_other_folders(tmp_path: Path) -> None:
    words, config = exported(write_profile(tmp_path, BUNDLED_DRAFT))
    copy = tmp_path / "copy"
    copy.symlink_to(bundled_models()[BUNDLED_TARGET])
    others, other = exported(write_profile(tmp_path, BUNDLED_DRAFT, target=str(copy)))
    assert words[2] != others[2] and config == other


def test_a_text_pair_is_served_as_it_is(tmp_path: Path) -> None:
    made = llama_pair(tmp_path / "pair")
    profile = write_profile(tmp_path, str(made.draft_folder), target=str(made.target_folder))
    words, config = exported(profile, "--draft-tokens", 2)
    assert words[2] == str(made.target_folder)
    assert config["model"] == str(made.draft_folder) and config["num_speculative_tokens"] == 2
    assert not (tmp_path / "out").exists()


def test_an_mtp_head_is_served_as_one_of_mimo(tmp_path: Path) -> None:
    _, config = exported(write_profile(tmp_path, "digits/mtp", kind="mtp"))
    assert config["method"] == "mtp" and Path(config["model"]).parent == tmp_path / "out"
    assert "num_nextn_predict_layers" in export(tmp_path / "profile.json").stdout


def test_what_vllm_leaves_out_is_noted(tmp_path: Path) -> None:
    result = export(write_profile(tmp_path, BUNDLED_DRAFT, subnet=Subnet(visual_keep=0.5)))
    assert "vLLM runs the full draft" in result.stderr and "was not measured" in result.stderr
    assert "full draft" not in export(write_profile(tmp_path, BUNDLED_DRAFT)).stderr


@pytest.mark.parametrize(
    ("draft", "fields", "message"),
    [
        (None, {}, "decodes without a draft, so there is no draft model to export; serve the target alone"),
        (RETRIEVAL, {"kind": RETRIEVAL}, "decodes with retrieval, so there is no draft model to export"),
        ("digits/star", {"kind": "star"}, "this is star; choose another draft"),
        (
            BUNDLED_DRAFT,
            {"tree": {"policy": "sage", "k": 4, "d_max": 4}},
            "give the chain's length with --draft-tokens",
        ),
        ("gone/folder/of/draft", {}, "no model of safetensors|no such"),
        *((form, {"kind": "dflash"}, 'vLLM\'s own --speculative-config \'{"method": "dflash"') for form in DFLASH),
    ],
)
def test_what_vllm_does_not_serve_is_refused_in_a_line(
    tmp_path: Path, draft: str | None, fields: dict[str, Any], message: str
) -> None:
    draft = str(write_dflash(tmp_path / "draft", draft)) if draft in DFLASH else draft
    result = export(write_profile(tmp_path, draft, **fields))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert any(words in result.stderr for words in message.split("|")), result.stderr
    assert not (tmp_path / "out").exists()


def test_mrope_drafts_and_other_vocabularies_are_refused(tmp_path: Path) -> None:
    target = bundled_models()[BUNDLED_TARGET]
    vocabulary = json.loads((target / "config.json").read_text())["text_config"]["vocab_size"]
    mrope = {"rope_parameters": {"mrope_section": [1, 1, 2]}}
    for config, message in (
        ({"vocab_size": vocabulary, **mrope}, "has M-RoPE positions"),
        ({"vocab_size": vocabulary + 1}, f"a model of {vocabulary + 1} tokens"),
    ):
        made = llama_pair(tmp_path / f"{len(config)}")
        (made.draft_folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        result = export(write_profile(tmp_path, str(made.draft_folder)))
        assert result.exit_code == 2 and message in result.stderr, result.output
