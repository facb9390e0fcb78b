"""Prices of a pair on a card, from its configs alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.cost.roofline import all_reduce_ms, find_limits, step_ms
from autotune.cost.table import CostTable
from autotune.documents.execution import CUDA_GRAPH
from tests.drafters.test_eagle3 import write_head
from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def configs(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of a target, a draft model and a star draft, which hold a config alone."""
    root = tmp_path_factory.mktemp("configs")
    for name, source in (("target", pair.target_folder), ("draft", pair.draft_folder)):
        (root / name).mkdir()
        shutil.copy(source / "config.json", root / name)
    return [str(root / name) for name in ("target", "draft")]


def test_a_pair_is_priced_by_its_configs(configs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round costs its steps and its overhead, by hand; no speedup is claimed that a round cannot have."""
    monkeypatch.chdir(tmp_path)
    target, draft = configs
    words = ["search", "--target", target, "--draft", draft, "--draft", "retrieval", "--gpu", "h100"]
    done = CliRunner().invoke(main, [*words, "--random-weights", "--json"])
    assert done.exit_code == 0, done.output
    table, limits = CostTable.parse(json.loads(done.stdout), source="here"), find_limits("h100")
    assert table.estimated and table.target_shape is not None and table.target_shape.vision_layers == 1
    assert limits is not None and table.prefill.image_ms == limits.eager_layer_ms
    draft_shape = table.drafts[0].shape
    assert draft_shape is not None and not any(tmp_path.iterdir()), "no profile is written"
    plain, drafted = (step_ms(shape, limits, 1, 1024, CUDA_GRAPH) for shape in (table.target_shape, draft_shape))
    round_ms = 3 * drafted + plain + limits.round_ms * (1 + 3 / 8)
    row = re.search(r"chain, 3 +([\d.]+) +([\d.]+|never) +(\S+) +(\S+) +(\S+)", done.stderr)
    assert row is not None and float(row[1]) == pytest.approx(round_ms, abs=0.06)
    assert float(row[3].rstrip("x")) == pytest.approx(2 * plain / round_ms, abs=0.01)
    assert re.search(r"chain, 1 +\S+ +\S+ +\S+ +- +-", done.stderr), "a round of one drafted token commits at most two"
    assert "no gain is claimed" in " ".join(done.stderr.split()) and "retrieval: rounds" in done.stderr


def test_several_cards_share_the_target(configs: list[str]) -> None:
    """The target's parts are divided, its sums take time, and the draft stays on one card; heads that do not divide are
    refused in one line.
    """
    target, draft = configs
    words = ["search", "--target", target, "--draft", draft, "--random-weights", "--json", "--gpu"]

    def priced(cards: str) -> tuple[CostTable, str]:
        done = CliRunner().invoke(main, [*words, cards])
        assert done.exit_code == 0, done.output
        return CostTable.parse(json.loads(done.stdout), source="here"), done.stderr

    (one, alone), (two, shared) = priced("1xh100"), priced("2xh100")
    shape, limits = two.target_shape, find_limits("2xh100")
    assert shape is not None and shape.device_numbers == (1, 2) and limits is not None
    undivided = shape.text_parameters - shape.divided_parameters
    assert shape.divided_parameters > 0 and undivided > shape.embedding_parameters, "the head is not divided"
    assert (one.device.name, two.device.name) == ("h100", "2xh100") and one.drafts == two.drafts
    reduces_ms = 2 * shape.num_layers * all_reduce_ms(limits, shape.hidden_size * 4)
    rows = [re.search(r"^1 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.M) for text in (alone, shared)]
    assert all(rows) and [float(row[5]) for row in rows if row] == [0, pytest.approx(reduces_ms, abs=0.006)]
    assert two.decode.points[0].latency_ms > one.decode.points[0].latency_ms, "so small a target is slower on two"
    assert "cards of NVIDIA H100 SXM5 80GB that hold the target" in " ".join(shared.split())
    done = CliRunner().invoke(main, [*words, "3xh100"])
    assert done.exit_code == 2 and re.search(
        r"--gpu 3xh100: 3 cards cannot share .*, these numbers can: 1, 2; name one", " ".join(done.stderr.split())
    )


def test_a_published_head_beside_the_target_is_priced_by_its_weights(configs: list[str], tmp_path: Path) -> None:
    """It is a default draft, and its sizes are in its weights alone."""
    shutil.copytree(configs[0], tmp_path / "target")
    write_head(tmp_path / "head", "SpecForge/qwen2-5-vl-7b")
    words = ["search", "--target", str(tmp_path / "target"), "--gpu", "h100", "--random-weights"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0 and "head: rounds" in " ".join(done.stderr.split()), done.output
    assert done.stderr.startswith(f"pricing {words[2]} on h100"), "before torch is imported"


@pytest.mark.parametrize("gpu", [[], ["--gpu", "cpu"]])
def test_a_card_must_be_named(configs: list[str], gpu: list[str]) -> None:
    done = CliRunner().invoke(main, ["search", "--target", configs[0], "--random-weights", *gpu])
    assert done.exit_code == 2 and "name a card, such as --gpu h100" in " ".join(done.output.split())
