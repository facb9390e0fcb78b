"""Documents on disk: every mistake has a message of its own, and crashes leave no incomplete file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import Field, ValidationError

from autotune import files
from autotune.errors import UserError
from autotune.files import Document, describe


class Part(Document):
    weight: float = 1.0
    name: str = "part"


class Example(Document, kind="study"):
    """A document with required and optional keys, bounds, nested records and lists."""

    trials: int = Field(ge=1)
    budget_ms: float = 10.0
    parts: list[Part] = Field(default_factory=list)
    device: Part | None = None


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps({"schema": "autotune.study/1", **content}) if isinstance(content, dict) else content)
    return path


# -------- reading


def test_document_is_saved_and_loaded(tmp_path: Path) -> None:
    document = Example(trials=3, budget_ms=0.1, parts=[Part(weight=2.0), Part(name="é")], device=Part())
    path = tmp_path / "new" / "folder" / "study.json"
    document.save(path)
    assert Example.load(path) == document
    assert json.loads(path.read_text())["schema"] == "autotune.study/1"
    assert path.read_bytes().endswith(b"}\n")


INTEGER, ARRAY = "input should be a valid integer; got", "input should be a valid array; got"
KIND = "schema must be 'autotune.study/1'; got {}; give a file of that kind"
OBJECT = "a study is an object with a 'schema'; got {}; give another file"
REFUSED: list[tuple[Any, str]] = [
    ({"trials": 1, "budget": 5}, "unknown key 'budget'; did you mean 'budget_ms'?"),
    ({"trials": 1, "zzz": 5}, "unknown key 'zzz'; known: budget_ms, device, parts, trials"),
    ({"trials": 1, "parts": [{}, {"wight": 2}]}, "unknown key 'parts.1.wight'; did you mean 'weight'?"),
    ({"trials": 1, "device": {"nam": "x"}}, "unknown key 'device.nam'; did you mean 'name'?"),
    ({"budget_ms": 1.0}, "key 'trials' is required and missing; add it"),
    ({"trials": "many"}, f"trials: {INTEGER} 'many'; fix that value"),
    ({"trials": "3"}, f"trials: {INTEGER} '3'; fix that value"),
    ({"trials": True}, f"trials: {INTEGER} True; fix that value"),
    ({"trials": 1.5}, f"trials: {INTEGER} 1.5; fix that value"),
    ({"trials": None}, f"trials: {INTEGER} None; fix that value"),
    ({"trials": 0}, "trials: input should be greater than or equal to 1; got 0; fix that value"),
    ({"trials": 1, "parts": {}}, f"parts: {ARRAY} {{}}; fix that value"),
    ({"trials": 1, "parts": [{"name": 3}]}, "parts.0.name: input should be a valid string; got 3; fix that value"),
    ({"trials": 1, "parts": "p" * 200}, f"parts: {ARRAY} '{'p' * 56}...; fix that value"),
    *(
        ({"trials": 1, "schema": schema}, KIND.format(repr(schema)))
        for schema in ("autotune.trace/1", "autotune.study", "autotune.study/one", "autotune.study/²", "study/1", None)
    ),
    (
        {"trials": 1, "schema": "autotune.study/2"},
        "this program reads schema 'autotune.study/1'; got 'autotune.study/2'; make the file again, or read it with "
        "the version of autotune that wrote it",
    ),
    ("[1, 2]", OBJECT.format("list")),
    ('"text"', OBJECT.format("str")),
    ("null", OBJECT.format("NoneType")),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_invalid_documents_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "study.json", content)
    with pytest.raises(UserError) as caught:
        Example.load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        *(("study.json", number, f"{number} is not a finite") for number in ("NaN", "Infinity", "-Infinity", "1e999")),
        *(("study.yaml", number, "values are not JSON compliant") for number in (".nan", ".inf", "-.inf", "1.0e+999")),
    ],
)
def test_numbers_that_are_not_finite_are_refused(name: str, number: str, message: str, tmp_path: Path) -> None:
    """YAML takes the form of JSON, too."""
    path = write(tmp_path / name, f'{{"schema": "autotune.study/1", "trials": 1, "budget_ms": {number}}}')
    with pytest.raises(UserError, match=re.escape(message)):
        Example.load(path)


def test_every_truncation_of_a_document_is_refused(tmp_path: Path) -> None:
    text = Example(trials=3, parts=[Part()]).dump()
    for length in range(len(text)):
        with pytest.raises(UserError, match="not a complete JSON document"):
            Example.load(write(tmp_path / "study.json", text[:length]))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    missing, binary, zero = tmp_path / "no.json", tmp_path / "binary.json", tmp_path / "a\0b"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (missing, "no such file; check the path"),
        (binary, "cannot be read as text"),
        (zero, "cannot be read as text"),
        (tmp_path, "cannot be read as text"),
    ):
        for read in (files.read_text, files.read_json, files.read_yaml):
            with pytest.raises(UserError) as caught:
                read(path)
            assert str(caught.value).startswith(f"{path}: {message}")


NOT_JSON = {
    "[" * 3000: "it is nested too deeply",
    "[" * 300 + "]" * 300: "recursion limit exceeded",
    '{"a": {"b": 1, "b": 2}}': "key 'b' occurs twice",
    "9" * 5000: "Exceeds the limit",
    r'"\ud800"': "hex escape",
    r'"\uDFff"': "hex escape",
    "[1e999]": "1e999 is not a finite number",
}


def test_json_that_no_document_has(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    for text, message in NOT_JSON.items():
        path.write_text(text)
        with pytest.raises(
            UserError, match=rf"study.json: not a complete JSON document \(.*{re.escape(message)}.*\); restore"
        ):
            files.read_json(path)
        path.write_text(f'{{"a": 1}}\n\n17\n[2]\n"text"\n{text}\n{{"a": 2}}\n')
        assert [record["a"] for record in files.read_lines(path)] == [1, 2]
    path.write_text(r'["\ud83d\ude00", [[]], 0.5, -1e-300]')
    assert files.read_json(path) == ["\N{GRINNING FACE}", [[]], 0.5, -1e-300]


NOT_YAML = {
    "depth: {low: 3\nhigh: ]": "line 2: ",
    "a: &b [1]\nc: *b": "line 2: aliases are not accepted; write the value out",
    "a: !!set {b}": "line 1: tags are not accepted",
    "a: !!int abc": "line 1: tags are not accepted",
    "!!python/object/apply:os.getcwd []": "line 1: tags are not accepted",
    "a: 1\na: 2": "key 'a' occurs twice",
    "1: a": "line 1: keys are text; got 1",
    "? [a]\n: b": "line 1: keys are text; got ['a']",
    "a: " + "9" * 5000: "Exceeds the limit",
    "[" * 3000: "it is nested too deeply",
    'a: "\\ud800"': "hex escape",
    "a: \0": "unacceptable character",
}


def test_yaml(tmp_path: Path) -> None:
    """Dates are text, and a merge key is a key."""
    path = tmp_path / "space.yaml"
    path.write_text("depth: {low: 3, high: 8}\nday: 2020-99-99\nshare: 0.5\nlog: yes\nname: null\n<<: {a: 1}\n")
    merged = {"depth": {"low": 3, "high": 8}, "day": "2020-99-99", "share": 0.5, "log": True, "name": None}
    assert files.read_yaml(path) == merged | {"<<": {"a": 1}}
    for text, message in NOT_YAML.items():
        path.write_text(text)
        with pytest.raises(UserError, match=rf"space.yaml: not YAML \(.*{re.escape(message)}.*\); fix the file"):
            files.read_yaml(path)


@pytest.mark.parametrize("text", ["5e-4", "5.0e-4", "0.0005", "+5E-4", ".5e-3", "5.e-4", "0.05e-2", "0.00005e1"])
def test_numbers_of_yaml_need_no_dot(text: str, tmp_path: Path) -> None:
    """YAML 1.1 takes some of them for text."""
    (tmp_path / "a.yaml").write_text(f"rate: {text}\nname: 5e\nhash: 5e4f\n")
    assert files.read_yaml(tmp_path / "a.yaml") == {"rate": pytest.approx(5e-4), "name": "5e", "hash": "5e4f"}


# -------- writing


def test_failed_write_leaves_the_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.json"

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for before in ({}, {"study.json": b"old"}):
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)
        for step in ("replace", "fsync", *(["chmod"] if before else [])):
            with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
                patch.setattr(os, step, fail)
                Example(trials=1).save(path)
            assert str(caught.value) == (
                f"{path}: cannot be written (No space left on device); free some space, and run the same command again"
            )
            assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, step


def test_a_full_disk_is_a_mistake_of_one_line() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    for write in (lambda: files.write_bytes(full, b"text"), lambda: files.append_line(full, {"a": 1})):
        with pytest.raises(
            UserError, match=r"/dev/full: cannot be written \(No space left on device\); free some space"
        ):
            write()


def test_devices_pipes_and_links_are_written_through(tmp_path: Path) -> None:
    """Never replaced: root could, and every later program would miss the device."""
    null = os.stat(os.devnull)
    files.require_writable(Path(os.devnull))
    files.write_bytes(Path(os.devnull), b"text")
    assert (os.stat(os.devnull).st_rdev, os.stat(os.devnull).st_mode) == (null.st_rdev, null.st_mode)
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_bytes(pipe, b"text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
    for file in (tmp_path / "real.json", tmp_path / "new.json"):
        link = tmp_path / f"link-{file.name}"
        link.symlink_to(file.name)
        for content in (b"first", b"second"):
            files.write_bytes(link, content)
            assert link.is_symlink() and file.read_bytes() == content


def test_permissions_are_the_umask_s_for_new_files_and_kept_for_old_ones(tmp_path: Path) -> None:
    path, before = tmp_path / "profile.json", os.umask(0o077)
    try:
        for mode in (0o600, 0o640):
            files.write_bytes(path, b"prompts")
            assert path.stat().st_mode & 0o777 == mode
            path.chmod(0o640)
    finally:
        os.umask(before)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    """Not even a temporary file, where files can be without a name."""
    program = "import os, signal; os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)"
    program += f"; from autotune.files import write_bytes; from pathlib import Path; write_bytes(Path({str(tmp_path / 'a')!r}), b'x')"
    try:
        os.close(os.open(tmp_path, os.O_WRONLY | os.O_TMPFILE))
    except (OSError, AttributeError):
        pytest.skip("no files without a name")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not any(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A path below a regular file, because permissions do not apply to root, who may run the tests."""
    (tmp_path / "file").write_bytes(b"")
    below = tmp_path / "file" / "folder" / "study.json"
    messages = {
        below: f"{below}: cannot be written (Not a directory); choose another output with -o",
        tmp_path: f"{tmp_path}: the output must be a file; got a folder; add a file name",
    }
    for path, message in messages.items():
        for function in (files.require_writable, lambda path: files.write_bytes(path, b"")):
            with pytest.raises(UserError) as caught:
                function(path)
            assert str(caught.value) == message


# -------- JSON Lines


def test_appended_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    assert files.read_lines(path) == []
    records = [{"key": number, "text": "a\nb\u2028c"} for number in range(3)]
    for record in records:
        files.append_line(path, record)
    assert files.read_lines(path) == records
    assert path.read_bytes().count(b"\n") == 3, "one line per record, also with line breaks in strings"


def test_crash_at_any_byte_loses_one_record_at_most(tmp_path: Path) -> None:
    """If the second record is incomplete, the first is kept, the second skipped, and later ones are complete."""
    path = tmp_path / "ledger.jsonl"
    first, torn, following = {"key": 1}, {"key": 2, "nested": {"a": [1, 2]}}, {"key": 3}
    files.append_line(path, first)
    length = path.stat().st_size
    files.append_line(path, torn)
    content = path.read_bytes()
    for end in range(length, len(content) + 1):
        path.write_bytes(content[:end])
        complete = [first, torn] if end >= len(content) - 1 else [first]  # a record is complete without its line end
        assert files.read_lines(path) == complete
        files.append_line(path, following)
        assert files.read_lines(path) == [*complete, following]


# -------- hashes


def test_hashes_depend_on_content_and_order(tmp_path: Path) -> None:
    a, b, copy = tmp_path / "a", tmp_path / "b", tmp_path / "copy"
    a.write_bytes(b"1" * 3_000_000)  # more than one block
    b.write_bytes(b"2")
    copy.write_bytes(a.read_bytes())
    assert files.sha256_of(a, b) == files.sha256_of(copy, b) != files.sha256_of(b, a)
    assert files.sha256_of(b) == "d4735e3a265e16eee03f59718b9b5d03019c07d8b6c51f90da3a666eec13ab35"
    first, same, other = map(files.content_key, ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": [3]}))
    assert first == same != other


class _Leaf(Document):
    size: int | list[int] = 0


class _Tree(Document):
    leaves: str | list[_Leaf] | None = None
    names: dict[str, int | list[int]] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"leaves": [{"size": "x"}]}, "leaves.0.size: input should be a valid integer; got 'x'"),
        ({"leaves": [{"size": [1, "x"]}]}, "leaves.0.size.1: input should be a valid integer; got 'x'"),
        ({"leaves": [{"sise": 1}]}, "unknown key 'leaves.0.sise'; did you mean 'size'?"),
        ({"leaves": [{"Size": 1}]}, "unknown key 'leaves.0.Size'; did you mean 'size'?"),
        ({"leaves": 5}, "leaves: input should be a valid string; got 5"),
        ({"names": {"a": ["x"]}}, "names.a.0: input should be a valid integer; got 'x'"),
    ],
)
def test_the_line_about_a_union_is_of_the_branch_of_the_value(content: Any, line: str) -> None:
    with pytest.raises(ValidationError) as error:
        _Tree.model_validate(content)
    assert describe(error.value, _Tree).startswith(line)


def test_the_hash_of_large_files_is_kept_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "KEPT_BYTES", 1)
    monkeypatch.setattr(files, "SETTLED_S", -1.0)
    read = Mock(wraps=files.sha256_of)
    monkeypatch.setattr(files, "sha256_of", read)
    path = tmp_path / "model.safetensors"
    for number, content in enumerate((b"first", b"other", b"longer than these"), start=1):
        path.write_bytes(content)
        assert {files.known_sha256_of(path) for _ in range(3)} == {hashlib.sha256(content).hexdigest()}
        assert read.call_count == number
    (record,) = files.user_cache().rglob("*.json")
    record.write_text("{damaged")
    monkeypatch.setattr(files, "SETTLED_S", 3600.0)  # a later change could have the same time
    assert files.known_sha256_of(path) == files.known_sha256_of(path) and read.call_count == 5


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_text_with_a_byte_order_mark(encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    (tmp_path / "w.jsonl").write_bytes((mark + '{"prompt": "Größe?"}\n').encode(encoding))
    assert files.read_text(tmp_path / "w.jsonl") == '{"prompt": "Größe?"}\n'
