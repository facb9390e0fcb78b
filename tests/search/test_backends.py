"""The backends of a search: what is chosen, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.search.backends import choose_backends
from autotune.study.search_settings import SearchSettings
from tests.sample_documents import write_workload


def choices(*backends: str, **fields: Any) -> list[tuple[str, str, dict[str, str]]]:
    known = {"target": "digits/target", "workload": "digits", **fields}
    settings = SearchSettings(backends=backends, **known)
    return [(one.name, one.model, dict(one.options)) for one in choose_backends(settings)]


def test_a_backend_loads_the_target_or_a_model_of_its_own() -> None:
    assert choices() == choices("runtime") == [("runtime", "digits/target", {})]
    assert choices("runtime=other", drafts=("retrieval",)) == [("runtime", "other", {})]
    commands = ("llama.cpp:command=llama-server -t 4", "llama.cpp:draft=d.gguf", "keep=0.2")
    assert choices("runtime", "llama.cpp=a.gguf", "llama.cpp=b.gguf", "vllm", changes=commands) == [
        ("runtime", "digits/target", {}),
        ("llama.cpp", "a.gguf", {"command": "llama-server -t 4", "draft": "d.gguf"}),
        ("llama.cpp", "b.gguf", {"command": "llama-server -t 4", "draft": "d.gguf"}),
        ("vllm", "digits/target", {}),
    ]


def test_one_backend_is_searched_as_without_the_option() -> None:
    given = {"target": "digits/target", "drafts": ("retrieval",), "workload": "digits"}
    plain, named = SearchSettings(**given), SearchSettings(backends=("runtime",), **given)
    assert plain.key == named.key and plain == named


LLAMA = ["--backend", "llama.cpp"]
AT_ONCE = (
    "--load: the runtime serves one request at a time, and a server that runs is not measured; "
    "let --backend llama.cpp or vllm start its servers"
)
REFUSED = {
    "an unknown backend": (["--backend", "vlm"], "--backend vlm: no such backend; did you mean 'vllm'?"),
    "a backend twice": (
        [*LLAMA, "--backend", "llama.cpp=digits/target"],
        "--backend llama.cpp=digits/target: llama.cpp is given twice with the model digits/target; give each model once",
    ),
    "a command of no backend": (
        [*LLAMA, "--set", "vllm:command=vllm"],
        "--set vllm:...: this search has no backend vllm; add --backend vllm",
    ),
    "an option of no backend": (
        [*LLAMA, "--set", "llama.cpp:comand=x"],
        "--set llama.cpp:comand=x: no option of a backend, NAME:OPTION=VALUE; did you mean 'llama.cpp:command'?",
    ),
    "an option without a value": (
        [*LLAMA, "--set", "llama.cpp:url="],
        "--set llama.cpp:url=: no option of a backend, NAME:OPTION=VALUE; did you mean 'llama.cpp:url'?",
    ),
    "a command and a URL": (
        [*LLAMA, "--set", "llama.cpp:url=http://x", "--set", "llama.cpp:command=x"],
        "llama.cpp: --set llama.cpp:url: a server that runs keeps its settings; leave llama.cpp:command out",
    ),
    "a space without the runtime": (
        [*LLAMA, "--space", "quick-x"],
        "--space: not an option of llama.cpp; drop it, or search the runtime alone",
    ),
    "a dimension without the runtime": (
        [*LLAMA, "--set", "keep=0.2"],
        "--set keep=0.2: not an option of llama.cpp; drop it, or search the runtime alone",
    ),
    "a plan of engines": ([*LLAMA, "--plan"], "--plan: not an option of llama.cpp; drop it, or search the runtime alone"),
    "a draft of the runtime": (
        [*LLAMA, "--draft", "a"],
        "--draft: not an option of llama.cpp; drop it, or search the runtime alone",
    ),
    "other weights of one backend": ([*LLAMA, "--any-weights"], "--any-weights chooses among backends; name several with --backend"),
    "requests at once in the runtime": (["--load", "2"], AT_ONCE),
    "requests at once in a server that runs": (
        [*LLAMA, "--load", "2,8", "--set", "llama.cpp:url=http://x"],
        AT_ONCE,
    ),
    "a load of none": (
        [*LLAMA, "--load", "0,4"],
        "Invalid value for '--load': '0,4' is not a list of requests at once (from 1 to 4,096); write for example 1,4,16,64",
    ),
    "a load of too many": (
        [*LLAMA, "--load", "4097"],
        "Invalid value for '--load': '4097' is not a list of requests at once (from 1 to 4,096); write for example 1,4,16,64",
    ),
    "loads without commas": (
        [*LLAMA, "--load", "1 4"],
        "Invalid value for '--load': '1 4' is not a list of requests at once (invalid literal for int() with base 10: '1 4'); write for example 1,4,16,64",
    ),
    "another device": (
        [*LLAMA, "--backend", "runtime", "--gpu", "h100"],
        "--gpu: backends race each other on this machine; give --device, or leave --backend out",
    ),
    "an engine that is not installed": (
        [*LLAMA, "--set", "llama.cpp:command=no-llama-server"],
        "llama.cpp: digits/target: llama.cpp loads a GGUF file, or a folder with one; give one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_backends_do_not_have_is_refused_in_one_line(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, expected = REFUSED[name]
    workload = str(write_workload(tmp_path, [{"prompt": "Go on."}] * 4))
    given = ["search", "--target", "digits/target", "--workload", workload, *words]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 2 and done.stderr.splitlines()[-1] == f"autotune: {expected}"
