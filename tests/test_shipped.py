"""Shipped files: their size, the cards of drafts, and the contents of the wheel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from autotune.files import read_lines, sha256_of
from autotune.modeling.loading import bundled_models
from autotune.training.recipe import Recipe

ROOT = Path(__file__).parents[1]
DRAFTS = {name: folder for name, folder in bundled_models().items() if not name.endswith("/target")}


def test_repository_is_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    sizes = [(ROOT / name).stat().st_size for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    assert 0 < sum(sizes) < 45e6


def test_drafts_of_the_bundled_targets_are_bundled() -> None:
    digits = {f"digits/{kind}" for kind in ("dream", "independent", "mtp", "specvlm", "star")}
    assert digits <= set(DRAFTS) <= digits | {"smollm2/eagle3", "smollm2/mtp"}


@pytest.mark.parametrize("name", DRAFTS)
def test_card_describes_the_weights(name: str) -> None:
    """Kind, target, acceptance by depth, licence, and the hash of the weights; the recipe and its curve, if there is
    one.
    """
    folder = DRAFTS[name]
    card = (folder / "README.md").read_text()
    sha256 = sha256_of(folder / "model.safetensors")
    target = "`digits/target`" if name.startswith("digits/") else "`smollm2`"
    facts = [sha256, "license: apache-2.0", f"`{folder.name}`", target, "| depth |"]
    if (folder / "recipe.yaml").exists():
        recipe = Recipe.load(folder / "recipe.yaml")
        assert (recipe.name, recipe.model) == (name, folder.name)
        facts += ["recipe.yaml", "training.png"]
        assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    for fact in facts:
        assert fact in card, fact
    (whole, *_) = [row for row in read_lines(folder / "acceptance.jsonl") if row["sha256"] == sha256]
    assert whole["identical"] == whole["prompts"] > 0, "losslessness"
    assert f"**{whole['tokens_per_round']:.2f}**" in card


def test_wheel_is_complete() -> None:
    """It has code, templates, JSON Schemas and the data folders, no checkpoints and no makers."""
    builders = pytest.importorskip("hatchling.builders.wheel")
    files = {file.distribution_path for file in builders.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {
        "autotune/cli/main.py",
        *(f"autotune/report/{name}" for name in ("page.html", "page.css", "card.md")),
    } <= files
    assert {f"autotune/documents/schemas/{name}.json" for name in ("decoding-profile", "cost-table")} <= files
    assert "autotune/engines/templates/k8s.yaml" in files
    assert {f"autotune/_data/search_spaces/{name}.yaml" for name in ("quick", "full")} <= files
    assert "autotune/_data/drafts/digits/star/model.safetensors" in files
    prompts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "autotune/workloads/prompts").rglob("*.*")}
    assert len(prompts) >= 16 and prompts <= files
    assert {
        "autotune/_data/drafts/digits/workload.jsonl",
        "autotune/_data/drafts/digits/images/tune-0-read.png",
    } <= files
    assert not [name for name in files if ".checkpoint" in name or "/make/" in name]
