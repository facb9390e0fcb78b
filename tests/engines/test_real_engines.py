"""Files of ``autotune export --as`` in the engines that ``make engines`` built: they start from them with the settings
of the profile, and answer.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.documents.speculation import Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend, llama_arguments
from autotune.engines.process import running
from autotune.engines.vllm import VllmBackend, vllm_arguments
from autotune.errors import UserError
from tests.engine_profiles import engine_profile
from tests.engines.test_formats import options_of
from tests.serve.servers import get, send
from tests.tiny_models import llama_pair

pytestmark = [pytest.mark.nightly, pytest.mark.long]
PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([vars(parser.parse_args(words)) for words in json.loads(sys.argv[1])], default=str))
"""
"""Prints what vLLM's own parser makes of command lines."""
HEAD = Speculation(
    type="eagle3", options={"num_speculative_tokens": 3}, model="OWNER/HEAD", schedule=[(1, 4, 3), (5, 256, 0)]
)
NGRAM = Speculation(type="ngram", options={"prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3})
MOD = Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 16})


def found(backend: type[EngineBackend]) -> str:
    """The executable; the test is skipped where there is none."""
    try:
        return str(backend.find(None)[0])
    except UserError as error:
        pytest.skip(str(error))


def export(
    command: list[str], backend: type[EngineBackend], speculation: Speculation | None, name: str, path: Path
) -> Path:
    """Write the file of a profile with a command."""
    words = (vllm_arguments if backend is VllmBackend else llama_arguments)(speculation)
    profile = engine_profile(*command, *words, speculation=speculation)
    assert profile.point.deployment is not None
    deployment = profile.point.deployment.model_copy(update={"backend": backend.name})
    profile.model_copy(update={"point": profile.point.model_copy(update={"deployment": deployment})}).save(
        path.with_suffix(".json")
    )
    done = CliRunner().invoke(main, ["export", f"{path.with_suffix('.json')}", "--as", name, "-o", f"{path}"])
    assert done.exit_code == 0, done.output
    return path


def test_vllms_parser_reads_from_the_file_what_it_reads_from_the_command(tmp_path: Path) -> None:
    program = found(VllmBackend)
    given: dict[str, tuple[list[str], Speculation | None]] = {
        "head": (["--max-num-seqs=256", "-tp", "2", "--dtype", "bfloat16"], HEAD),
        "ngram": (["--enforce-eager", "--no-enable-prefix-caching", "--seed", "-1"], NGRAM),
        "off": (["--middleware", "a.b", "--compilation-config", '{"mode": 0}', "--max-model-len", "2k"], None),
    }
    lines = list[list[str]]()
    for name, (words, speculation) in given.items():
        path = export(
            [program, "serve", "OWNER/MODEL", *words], VllmBackend, speculation, "vllm-yaml", tmp_path / f"{name}.yaml"
        )
        lines += [["--model", "OWNER/MODEL", *words, *vllm_arguments(speculation)], ["--config", str(path)]]
    python = Path(program).with_name("python")
    done = subprocess.run([python, "-c", PARSER, json.dumps(lines)], capture_output=True, text=True, check=True)
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed[::2] == parsed[1::2]
    assert parsed[1]["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 256, 0]]


def test_vllm_serves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = found(VllmBackend)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    target = llama_pair(tmp_path, hidden_size=64, num_attention_heads=1, num_key_value_heads=1).target_folder
    command = [program, "serve", str(target), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    path = export(command, VllmBackend, NGRAM, "vllm-yaml", tmp_path / "vllm.yaml")
    with running([program, "serve", "--config", str(path)], "vllm") as (url, _):
        body = {"model": str(target), "prompt": [40, 41, 42, 43] * 8, "max_tokens": 8, "temperature": 0.0}
        status, reply, _ = send(url, "/v1/completions", body)
        assert status == 200 and reply["usage"]["completion_tokens"] == 8, reply
        counters = [
            line
            for line in get(url, "/metrics")[1].splitlines()
            if line.startswith("vllm:spec_decode_num_drafts_total")
        ]
        assert counters and float(counters[0].split()[-1]) > 0


def test_llama_server_serves_the_file(tmp_path: Path) -> None:
    program = found(LlamaBackend)
    pytest.importorskip("gguf", reason="pip install autotune-speculative[gguf]")
    from tests.modeling.test_gguf import write_gguf
    from tests.tiny_models import new_tokenizer

    model = tmp_path / "tiny.gguf"
    write_gguf(model, llama_pair(tmp_path) and new_tokenizer())
    command = [program, "-m", str(model), "-t", "2", "--no-warmup", "--ctx-size", "256"]
    path = export(command, LlamaBackend, MOD, "llama-ini", tmp_path / "models.ini")
    with running([program, "--models-preset", str(path)], "llama-server") as (url, _):
        status, reply, _ = send(url, "/v1/completions", {"model": "target", "prompt": "3, 1, 4. " * 4, "max_tokens": 8})
        assert status == 200 and reply["usage"]["completion_tokens"] > 0, reply
        (row,) = [row for row in get(url, "/v1/models")[1]["data"] if row["id"] == "target"]
    started, wanted = options_of(row["status"]["args"][1:]), options_of(llama_arguments(MOD))
    assert {name: started[name] for name in wanted} == wanted
    assert started["model"] == [str(model)] and started["threads"] == ["2"] and started["no-warmup"] == []
