"""Files of ``autotune export --as``: every format with every kind of profile is accepted by what stands for its reader,
or refused in a line.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.cli.export import FORMATS as CHOICES
from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.formats import FORMATS
from autotune.engines.llama_cpp import llama_arguments
from autotune.engines.vllm import vllm_arguments
from autotune.trees.eagle2 import Eagle2Policy
from tests.engine_profiles import engine_profile
from tests.sample_documents import DEVICE, DRAFT, decoding_profile

HUB_HEAD = "/cache/models--OWNER--a-head/snapshots/0123"
SCHEDULE = [(1, 4, 3), (5, 64, 1), (65, 256, 0)]
SGLANG = json.loads(Path(__file__).with_name("sglang_0.5.23.schema.json").read_text())
JSON_TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 8}


def speculation(kind: str, model: str = "", schedule: list[Any] | None = None) -> Speculation:
    return Speculation(type=kind, options=OPTIONS[kind], model=model, schedule=schedule or [])


def of_engine(backend: str, given: Speculation | None, *arguments: str, kind: str = "cpu") -> DecodingProfile:
    """A profile whose command is the one that the backend writes."""
    start = {"vllm": ["/bin/vllm", "serve", "/srv/smol"], "llama.cpp": ["/bin/llama-server", "-m", "/srv/smol.gguf"]}
    words = (llama_arguments if backend == "llama.cpp" else vllm_arguments)(given)
    profile = engine_profile(*start.get(backend, ["fake-server", "a-model"]), *arguments, *words, speculation=given)
    deployment = profile.point.deployment
    assert deployment is not None
    deployment = deployment.model_copy(update={"backend": backend, "build": "0.32.0+cpu"})
    point = profile.point.model_copy(update={"deployment": deployment})
    hardware = DEVICE.model_copy(update={"kind": kind})
    return profile.model_copy(update={"point": point, "hardware": hardware})


def of_runtime(kind: str | None, **options: Any) -> DecodingProfile:
    """A profile with the models of the fixture ``folder``; the files of the draft are of an EAGLE-3 head."""
    draft = DRAFT.model_copy(update={"id": "draft"}) if kind else None
    profile = decoding_profile(ModelReference(id="model", sha256=""), draft, **options)
    if profile.point.draft is None:
        return profile
    choice = profile.point.draft.model_copy(update={"kind": kind})
    return profile.model_copy(update={"point": profile.point.model_copy(update={"draft": choice})})


VLLM, LLAMA = {"command", "vllm-yaml", "k8s"}, {"command", "llama-ini", "k8s"}
PROFILES: dict[str, tuple[DecodingProfile, set[str]]] = {
    "vllm ngram": (of_engine("vllm", speculation("ngram"), "-tp", "2", kind="cuda"), VLLM | {"generation-config"}),
    "vllm suffix": (of_engine("vllm", speculation("suffix"), "--enforce-eager"), VLLM),
    "vllm draft": (of_engine("vllm", speculation("draft_model", "/srv/a-draft"), "--seed=-1"), VLLM | {"sglang-json"}),
    "vllm dflash": (of_engine("vllm", speculation("dflash", HUB_HEAD)), VLLM | {"sglang-json"}),
    "vllm own head": (of_engine("vllm", speculation("mtp"), "--max-num-seqs", "64"), VLLM | {"sglang-json"}),
    "vllm by load": (
        of_engine("vllm", speculation("eagle3", HUB_HEAD, SCHEDULE), kind="cuda"),
        VLLM | {"sglang-json", "sglang-by-load"},
    ),
    "vllm draft by load": (
        of_engine("vllm", speculation("draft_model", "/srv/a-draft", SCHEDULE)),
        VLLM | {"sglang-by-load"},
    ),
    "vllm of one name": (
        of_engine("vllm", speculation("draft_model", "/other/smol")),
        {*VLLM, "sglang-json"} - {"k8s"},
    ),
    "vllm off": (of_engine("vllm", None, "--middleware", "a.b", "c.d"), VLLM),
    "vllm short option": (of_engine("vllm", None, "-O3"), VLLM - {"vllm-yaml"}),
    "llama ngram": (
        of_engine("llama.cpp", speculation("ngram-mod"), "-t", "2", "--no-mmap"),
        LLAMA | {"generation-config"},
    ),
    "llama draft": (of_engine("llama.cpp", speculation("draft-simple", "/srv/a-draft.gguf"), kind="cuda"), LLAMA),
    "llama off": (of_engine("llama.cpp", None), LLAMA),
    "llama comment": (of_engine("llama.cpp", None, "--grammar", "a ; b"), LLAMA - {"llama-ini"}),
    "llama two values": (of_engine("llama.cpp", None, "--lora-scaled", "a", "2"), LLAMA - {"llama-ini"}),
    "another backend": (of_engine("fake", None), {"command"}),
    "runtime chain": (of_runtime("eagle3"), VLLM | {"sglang-json"}),
    "runtime tree": (of_runtime("eagle3", tree=TREE), set()),
    "runtime model": (of_runtime("independent"), VLLM | {"sglang-json", "generation-config"}),
    "runtime lookup": (of_runtime("retrieval"), {"generation-config"}),
    "runtime lookup by tree": (of_runtime("retrieval", tree=TREE), set()),
    "runtime off": (of_runtime(None), set()),
}


def export(*words: str) -> Result:
    return CliRunner().invoke(main, ["export", "profile.json", *words])


# -------- what stands for the readers


def options_of(words: list[str]) -> dict[str, Any]:
    """Values by option as an argument parser of an engine has them, objects as such."""
    options: dict[str, Any] = {}
    for word in words:
        if word.startswith("-") and word != "-1":
            name, *value = word.split("=", 1)
            name = {"-tp": "--tensor-parallel-size"}.get(name, name).lstrip("-")
            options[name] = value
        else:
            options[name].append(json.loads(word) if word.startswith("{") else word)
    return options


def command_of(profile: DecodingProfile) -> list[str]:
    """The words of the command that ``export`` prints, from the model on."""
    deployment = profile.point.deployment
    if deployment is not None:
        return deployment.command[2:]
    speculation = {"method": "eagle3", "model": f"{Path('draft').resolve()}", "num_speculative_tokens": 3}
    return ["model", "--dtype", "float32", "--speculative-config", json.dumps(speculation)]


def read_vllm(text: str, profile: DecodingProfile) -> None:
    """As ``FlexibleArgumentParser.load_config_file`` of vLLM 0.32.0 reads it."""
    words = list[str]()
    for key, value in yaml.safe_load(text).items():
        assert value is not False and not key.startswith("-")
        words.append(f"--{key}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    assert options_of(words) == options_of(["--model", *command_of(profile)])


def read_llama(text: str, profile: DecodingProfile) -> None:
    """As ``common/preset.cpp`` of llama.cpp b11434 reads it: comments begin anywhere."""
    parser = configparser.ConfigParser(delimiters="=", inline_comment_prefixes=(";", "#"), interpolation=None)
    parser.read_string(f"[default]\n{text}")
    assert parser.sections() == ["default", "target"] and parser["default"]["version"] == "1"
    options = options_of(["-model", *command_of(profile)])
    assert dict(parser["target"]) == {name: "".join(value or ["true"]) for name, value in options.items()}


def read_generate(text: str, profile: DecodingProfile) -> None:
    speculation = profile.point.deployment.speculation if profile.point.deployment else None
    match, depth = (16, 3) if speculation is None else {"ngram": (4, 5), "ngram-mod": (24, 64)}[speculation.type]
    lookup = {"prompt_lookup_num_tokens": depth, "max_matching_ngram_size": match}
    assistant = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    is_model = profile.point.draft is not None and profile.point.draft.kind == "independent"
    assert json.loads(text) == (assistant | {"assistant_confidence_threshold": 0.0} if is_model else lookup)


def read_sglang(text: str, profile: DecodingProfile) -> None:
    arguments = json.loads(text)
    for name, value in arguments.items():
        field = SGLANG["properties"][name]
        types = [field["type"]] if isinstance(field["type"], str) else field["type"]
        assert type(value) in [JSON_TYPES[kind] for kind in types] and value in field.get("enum", [value]), name
    speculation = profile.point.deployment.speculation if profile.point.deployment else None
    assert arguments.get("speculative_adaptive", False) == bool(speculation and speculation.schedule)
    is_block = arguments["speculative_algorithm"] == "DFLASH"
    assert arguments["speculative_num_steps"] == (1 if is_block else 3)
    assert arguments["speculative_num_draft_tokens"] == 4


def read_sglang_steps(text: str, profile: DecodingProfile) -> None:
    steps = {int(first): entry["candidate_steps"] for first, entry in json.loads(text).items()}
    assert steps == {1: [3], 5: [1], 65: [0]}


def read_kubernetes(text: str, profile: DecodingProfile) -> None:
    deployment, service = yaml.safe_load_all(text)
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    labels = template["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items() and selector
    assert labels["autotune/profile"] == profile.content_hash
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in template["spec"]["volumes"]}
    args = " ".join(container["args"])
    assert ("models" in mounted) == ("/models/" in args) and "/srv/" not in args and "/cache/" not in args
    on_gpu = profile.hardware.kind == "cuda"
    num_gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    assert num_gpus == (None if not on_gpu else 2 if "-tp 2" in args else 1)
    assert (
        container["image"]
        in {
            "vllm": ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai-cpu:v0.32.0-x86_64"),
            "llama.cpp": ("ghcr.io/ggml-org/llama.cpp:server-cuda", "ghcr.io/ggml-org/llama.cpp:server"),
            "runtime": ("", "vllm/vllm-openai-cpu:latest-x86_64"),
        }[profile.backend][0 if on_gpu else 1 :][:1]
    )


READERS: dict[str, Callable[[str, DecodingProfile], None]] = {
    "vllm-yaml": read_vllm,
    "llama-ini": read_llama,
    "generation-config": read_generate,
    "sglang-json": read_sglang,
    "sglang-by-load": read_sglang_steps,
    "k8s": read_kubernetes,
}


# -------- tests


def test_the_command_line_names_every_format() -> None:
    assert tuple(FORMATS) == CHOICES and set(FORMATS) == {"command", *READERS}
    assert {name for name, form in FORMATS.items() if not form.is_measured} == {"sglang-json", "sglang-by-load", "k8s"}


@pytest.mark.parametrize("kind", PROFILES)
def test_a_profile_is_expressed_or_refused_in_a_line(folder: Path, kind: str) -> None:
    profile, expressed = PROFILES[kind]
    profile.save("profile.json")
    located = DecodingProfile.load("profile.json").located(Path("profile.json"))
    for name, form in FORMATS.items():
        done = export("--as", name)
        assert done.exit_code == (0 if name in expressed else 2), (name, done.output)
        if name not in expressed:
            assert done.stdout == "" and done.stderr.splitlines()[-1].startswith("autotune: "), (name, done.output)
            continue
        assert ("not measured there" in done.stderr) == (not form.is_measured)
        READERS.get(name, lambda *_: None)(done.stdout, located)


@pytest.mark.parametrize("kind", [kind for kind, (_, expressed) in PROFILES.items() if "k8s" in expressed])
def test_manifests_follow_the_schema_of_kubernetes(folder: Path, kind: str) -> None:
    PROFILES[kind][0].save("profile.json")
    for manifest in yaml.safe_load_all(export("--as", "k8s").stdout):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_a_tree_is_expressed_as_a_chain_of_the_given_length(folder: Path) -> None:
    PROFILES["runtime lookup by tree"][0].save("profile.json")
    assert "give the chain's length with --draft-tokens" in export("--as", "generation-config").stderr
    done = export("--as", "generation-config", "--draft-tokens", "7")
    assert json.loads(done.stdout)["prompt_lookup_num_tokens"] == 7
    profile = PROFILES["runtime lookup by tree"][0]
    tree = Eagle2Policy(depth=3, k=1, budget=8)
    point = profile.point.model_copy(update={"tree": tree})
    profile.model_copy(update={"point": point}).save("profile.json")
    assert json.loads(export("--as", "generation-config").stdout)["prompt_lookup_num_tokens"] == 3, "one child a node"


def test_a_file_is_written_and_replaces_no_result(folder: Path) -> None:
    PROFILES["vllm ngram"][0].save("profile.json")
    for _ in range(2):
        assert export("--as", "vllm-yaml", "-o", "below/vllm.yaml").stdout == "below/vllm.yaml\n"
    assert Path("below/vllm.yaml").read_text() == export("--as", "vllm-yaml").stdout
    for words, message in {
        ("-o", "profile.json"): "profile.json: holds another result, which is not replaced",
        ("--as", "vllm-toml"): "'vllm-toml' is not one of 'command', 'vllm-yaml'",
        ("--as", "vllm-yaml", "--models", "m"): "--models: not an option for a profile of vllm",
    }.items():
        done = export(*words)
        assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.output
