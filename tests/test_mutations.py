"""Anything that a user can give is read, or refused with one line: no other error, whatever is damaged.

Of documents, workloads, images, traces, and what clients and engines send; models and studies have modules of their
own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from PIL import Image

from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.files import data_root, read_json, read_lines, read_yaml
from autotune.replay.replay import replay
from autotune.replay.trace import load_trace, save_trace
from autotune.schemas import DOCUMENTS
from autotune.serve.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from autotune.study.spaces import load_space
from autotune.training.recipe import Recipe
from autotune.trees.policy import parse_policy
from autotune.workloads.formats import FORMATS
from autotune.workloads.prompt import load_image
from autotune.workloads.workload import load_workload
from tests.check.sample_documents import check_result
from tests.engines.test_http import LLAMA_REPLIES, REPLIES, ask, ask_llama
from tests.mutations import damaged, json_bytes, mutate, mutated, nightly
from tests.sample_documents import cost_table, decoding_profile, free_prices, random_trace, write_image
from tests.study.test_document import study_document
from tests.workloads import test_formats as formats

FEW = 25
Read = Callable[[Path], Any]
ROOT = data_root()


def skeleton(schema: dict[str, Any], definitions: dict[str, Any]) -> Any:
    """A value with everything that a JSON schema requires."""
    if "$ref" in schema:
        return skeleton(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return skeleton(schema[key][0], definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            required = schema.get("required", [])
            return {
                name: skeleton(value, definitions)
                for name, value in schema.get("properties", {}).items()
                if name in required
            }
        case "array":
            return [skeleton(item, definitions) for item in schema.get("prefixItems", [schema.get("items", {})])]
        case "string":
            return "x"
        case "boolean":
            return True
        case _:
            return max(1, schema.get("minimum", 1))


def documents() -> dict[str, tuple[Any, Read]]:
    """Content and reader of every kind of document."""
    real = [decoding_profile(), cost_table(), study_document(), random_trace(0).header, check_result()]
    found: dict[str, tuple[Any, Read]] = {
        f"{type(document).schema_kind}.json": (json.loads(document.dump()), type(document).load) for document in real
    }
    for kind in DOCUMENTS:
        schema = kind.json_schema()
        found.setdefault(f"{kind.schema_kind}.json", (skeleton(schema, schema.get("$defs", {})), kind.load))
    found["shipped.json"] = (read_json(ROOT / "profiles/cpu/digits.decode.json"), DecodingProfile.load)
    found["limits.yaml"] = (read_yaml(ROOT / "profiles/devices/h100.yaml"), DOCUMENTS[-2].load)
    found["full.yaml"] = (read_yaml(ROOT / "search_spaces/full.yaml"), lambda path: load_space(str(path)))
    found["quick.yaml"] = (read_yaml(ROOT / "search_spaces/quick.yaml"), use_space)
    found["recipe.yaml"] = (read_yaml(ROOT / "drafts/digits/dream/recipe.yaml"), Recipe.load)
    found["runs.jsonl"] = ([{"a": 1, "b": [1]}], read_lines)
    return found


def use_space(path: Path) -> None:
    space = load_space(str(path))
    for policy in space.trees:
        assert all(parse_policy(tree) for tree in space.enumerated(policy) or [])
    space.dump()


@nightly
@pytest.mark.parametrize("name", documents())
def test_documents(name: str, is_nightly: bool, tmp_path: Path) -> None:
    content, read = documents()[name]
    path = tmp_path / name

    def check(text: bytes) -> None:
        path.write_bytes(text)
        if hasattr(document := read(path), "dump"):
            assert type(document).parse(json.loads(document.dump()), source="dumped") == document

    mutate(FEW, json_bytes(content), check, is_nightly)


@nightly
def test_yaml_texts(is_nightly: bool, tmp_path: Path) -> None:
    """Damaged as texts: in the space's own form, with its comments."""
    path = tmp_path / "space.yaml"

    def check(text: bytes) -> None:
        path.write_bytes(text)
        use_space(path)

    mutate(FEW, damaged((ROOT / "search_spaces/quick.yaml").read_bytes()), check, is_nightly)


ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "autotune": (
        {"prompt": "What?", "images": ["a.png"], "task": "see", "split": "tune", "temperature": 0.5},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "split": "tune"},
        {"turns": ["One?", "Two?"], "split": "evaluate"},
    ),
    "mt-bench": tuple(formats.MT_BENCH),
    "spec-bench": tuple(formats.SPEC_BENCH),
    "mmspec": tuple(row | {"image": "../a.png"} for row in formats.MMSPEC),
    "speed-bench": tuple(formats.SPEED_BENCH + formats.PREPARED),
    "vllm": (
        {"prompt": "x", "image_files": ["a.png"], "output_tokens": 5},
        {"content": [{"type": "text", "text": "x"}]},
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "", "canonical_solution": ""},
    )
    * 2,
    "gsm8k": ({"question": "How many?", "answer": "Two.\n#### 2"},) * 2,
    "sharegpt": ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},) * 2,
}


@nightly
@pytest.mark.parametrize("format", FORMATS)
def test_workloads(format: str, is_nightly: bool, tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    write_image(tmp_path / "a.png", 0)

    def check(text: bytes) -> None:
        path.write_bytes(text)
        for prompt in load_workload(str(path), "tune", num_prompts=2).prompts:
            assert prompt.sha256 and prompt.name

    mutate(FEW, json_bytes(ROWS[format]), check, is_nightly)


@nightly
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_images(kind: str, is_nightly: bool, tmp_path: Path) -> None:
    file, path = io.BytesIO(), tmp_path / "image"
    Image.new("RGB", (8, 8), "red").save(file, kind)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        load_image(path)

    mutate(FEW, damaged(file.getvalue()), check, is_nightly)


@nightly
def test_traces(is_nightly: bool, tmp_path: Path) -> None:
    """Arrays that are loaded can be replayed."""
    from safetensors.numpy import load_file, save_file

    path, policy = tmp_path / "a.trace.json", parse_policy({"policy": "eagle2", "k": 3, "depth": 4})
    save_trace(path, random_trace(0))
    header, whole = json.loads(path.read_text()), load_file(path.with_suffix(".safetensors"))

    def check(change: tuple[Any, str, int, int, bytes]) -> None:
        content, name, at, value, _ = change
        path.write_text(json.dumps(content))
        array = whole[name].copy()
        if array.size:
            array.flat[at % array.size] = value
        save_file(whole | {name: array[: at % 50] if value == 3 else array}, path.with_suffix(".safetensors"))
        trace = load_trace(path)
        played = replay(trace, policy, free_prices())
        for lengths, tokens in zip(played.accepted_lengths, played.tokens, strict=True):
            # The last round may end with an accepted token.
            assert lengths.sum() + len(lengths) - tokens in (0, 1)
        assert trace.agreement()["share"].between(0, 1).all()

    values = st.sampled_from([-(2**31), -2, -1, 0, 1, 3, 40, 10**6, 2**31 - 1])
    contents = st.one_of(st.just(header), mutated(header))
    mutate(
        FEW,
        st.tuples(contents, st.sampled_from(sorted(whole)), st.integers(0, 10**4), values, st.just(b"")),
        check,
        is_nightly,
    )
    data = path.with_suffix(".safetensors").read_bytes()

    def check_bytes(damage: bytes) -> None:
        path.write_text(json.dumps(header))
        path.with_suffix(".safetensors").write_bytes(damage)
        load_trace(path)

    mutate(FEW, damaged(data), check_bytes, is_nightly)


ENGINES = {"vllm": (REPLIES, ask), "llama.cpp": (LLAMA_REPLIES, ask_llama)}


@nightly
@pytest.mark.parametrize(("engine", "path"), [(name, path) for name in ENGINES for path in ENGINES[name][0]])
def test_replies_of_engines(engine: str, path: str, is_nightly: bool) -> None:
    replies, ask = ENGINES[engine]
    whole = replies[path]
    texts = damaged(whole.encode()) if isinstance(whole, str) else json_bytes(whole)

    def check(text: bytes) -> None:
        tokens = ask({path: text.decode(errors="replace")}) or []
        assert all(type(token) is int and 0 <= token < 2**31 for token in tokens)

    mutate(FEW, texts, check, is_nightly)


REQUEST = {"model": "m", "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "seed": 1, "n": 1, "stream": True}
BODIES: dict[type[CompletionRequest | ChatRequest], dict[str, Any]] = {
    CompletionRequest: {**REQUEST, "prompt": [1, 2], "logit_bias": {}, "stream_options": {"include_usage": True}},
    ChatRequest: {
        **REQUEST,
        "messages": [
            {"role": "system", "content": "x", "name": None},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]},
        ],
    },
}


@nightly
@pytest.mark.parametrize("kind", BODIES)
def test_requests_of_clients(kind: type[CompletionRequest | ChatRequest], is_nightly: bool) -> None:
    """A wrong one is an error of the client, in one line."""

    def check(body: bytes) -> None:
        try:
            asked = parse_request(kind, body)
            assert asked.num_characters >= 0 and isinstance(
                asked.settings(SimpleNamespace(top_k=None, top_p=None)), dict
            )
        except ApiError as error:
            assert 400 <= error.status < 500
            raise UserError(str(error)) from None

    mutate(FEW, json_bytes(BODIES[kind]), check, is_nightly)
