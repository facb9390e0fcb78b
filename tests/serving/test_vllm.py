"""The real vLLM on a CPU makes the rounds that replay predicts. ``make engines ENGINE=vllm`` installs it, or
``AUTOTUNE_VLLM`` names its executable.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", exc_type=ImportError)

from autotune.cli.main import main
from autotune.export import vllm as export
from autotune.export.model_files import find_model
from autotune.export.vllm import Pair
from autotune.files import user_cache
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET, reference, resolve
from autotune.serving.vllm_server import VllmEngine
from tests.sample_documents import decoding_profile, write_workload
from tests.serving.exports import DEPTH, EXECUTABLE_VARIABLE, write_export
from tests.tiny_models import llama_pair

pytestmark = [pytest.mark.nightly, pytest.mark.long]


@pytest.fixture(scope="session")
def vllm() -> str:
    """The executable of the version that exports are checked against; the tests are skipped where there is none."""
    executable = os.environ.get(EXECUTABLE_VARIABLE, str(user_cache().parent / "autotune-engines" / VllmEngine.built))
    if not Path(executable).exists():
        pytest.skip("vLLM is not installed; run make engines ENGINE=vllm")
    return executable


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
    folders = [resolve(name) for name in names]
    pair = Pair(folders[0], folders[1], "independent", *map(find_model, names), dtype="float32")
    pair, conversions = export.loadable(pair, tmp_path)
    for conversion in conversions:
        conversion.write()
    settings = export.settings(pair, DEPTH)
    target, draft = map(reference, names)
    decoding_profile(target, draft).save(tmp_path / "profile.json")
    command = export.command(pair, settings)
    write_export(tmp_path, target, draft, settings, command=command)
    words = ["bench-server", tmp_path / "profile.json", "--export", tmp_path, "--workload", workload]
    words += ["--engine-command", f"{vllm} --enforce-eager --gpu-memory-utilization 0.1"]
    words += ["--prompts", num_prompts, "--max-new-tokens", 48, "--json"]
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for one in found["prompts"]:
        assert one["first_difference"] is None, one
        assert one["has_image"] or one["rounds"] == one["predicted_rounds"] > 1, one
    rounds, predicted = (sum(one[name] for one in found["prompts"]) for name in ("rounds", "predicted_rounds"))
    assert abs(rounds / predicted - 1) <= 0.02
