"""Documents on disk: strict parsing, schema versions, atomic writes; and the folders of shipped and cached files."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import hashlib
import json
import os
import re
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

import platformdirs
from pydantic import BaseModel, ConfigDict, ValidationError

from autotune.errors import UserError, nearest, reading
from autotune.strict_parsing import parse_json, parse_yaml

if TYPE_CHECKING:
    from pandas import DataFrame

KEPT_BYTES = 1 << 26  # of files whose hash is kept; smaller ones are read in a tenth of a second
SETTLED_S = 10.0  # age of a file's last change from which another change has another time on every file system
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
WORKSPACE = Path(".autotune")
"""Folder for studies and other intermediate files, relative to the working directory."""


_BRANCH = re.compile(r"str|int|float|bool|.*\[.*|_?[A-Z]\w*")  # of a union, in the location of a violation


class Document(BaseModel):
    """A frozen record that refuses unknown keys, wrong types and non-finite numbers.

    A document that has a file of its own names its kind and version, and the command that makes such files::

        class CostTable(Document, kind="cost-table", version=3, made_by="autotune measure"):

    Its JSON begins with ``"schema": "autotune.cost-table/3"``. A file of another version is refused. Nested records
    have no kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    schema_kind: ClassVar[str] = ""
    schema_version: ClassVar[int] = 0
    schema_made_by: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str | None = None, version: int = 1, made_by: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.schema_kind, cls.schema_version, cls.schema_made_by = kind, version, made_by

    @classmethod
    def schema_id(cls) -> str:
        """The value of a file's ``schema`` key, ``autotune.cost-table/1``."""
        assert cls.schema_kind, f"{cls.__name__} is a nested record, and has no files"
        return f"autotune.{cls.schema_kind}/{cls.schema_version}"

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema (draft 2020-12) of the files."""
        schema = cls.model_json_schema()
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **schema,
            "properties": {"schema": {"const": cls.schema_id()}, **schema["properties"]},
            "required": ["schema", *schema.get("required", [])],
        }

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The document in a JSON file, or in a YAML file (``.yaml``, ``.yml``); see ``parse``."""
        path = Path(path)
        content = read_yaml(path) if path.suffix in (".yaml", ".yml") else read_json(path)
        return cls.parse(content, source=path)

    @classmethod
    def parse(cls, content: Any, *, source: Path | str) -> Self:
        """The document in the content of a file, which error messages call ``source``.

        Raises:
            UserError: not an object, a schema of another kind or version, an unknown or missing key, a wrong type, or a
                number that is not finite.
        """
        content = cls.without_schema(content, source=source)
        try:
            # Through JSON, in which a tuple is a list: strict about everything else.
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            raise UserError(f"{source}: {describe(error, cls)}") from None

    @classmethod
    def without_schema(cls, content: Any, *, source: Path | str) -> dict[str, Any]:
        """The content without its schema, whose kind and version are checked; the rest is not validated."""
        kind, present = cls.schema_kind, cls.schema_id()
        if not isinstance(content, dict):
            raise UserError(
                f"{source}: a {kind} is an object with a 'schema'; got {type(content).__name__}; give another file"
            )
        schema = content.get("schema")
        name, _, version = str(schema).partition("/")
        if name != f"autotune.{kind}" or not version.isdecimal():
            raise UserError(f"{source}: schema must be {present!r}; got {_shown(schema)}; give a file of that kind")
        if schema != present:
            raise UserError(
                f"{source}: this program reads schema {present!r}; got {_shown(schema)}; make the file again"
                f"{cls.schema_made_by and f' with {cls.schema_made_by}'}, or read it with the version of autotune that wrote it"
            )
        return {key: value for key, value in content.items() if key != "schema"}

    def save(self, path: Path | str) -> None:
        """Write the document to a JSON file, atomically."""
        write_bytes(Path(path), (self.dump() + "\n").encode())

    def dump(self) -> str:
        """The document as indented JSON, with its schema."""
        content = {"schema": self.schema_id(), **self.model_dump(mode="json", by_alias=True)}
        return json.dumps(content, indent=1, allow_nan=False)


D = TypeVar("D", bound=BaseModel)


def data_root() -> Path:
    """The folder of ``profiles``, ``search_spaces`` and ``drafts``: inside an installed package, next to it in a
    checkout.
    """
    package = Path(__file__).resolve().parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent


def user_cache() -> Path:
    """The user's cache folder for this program. It may not exist, or not be writable."""
    return platformdirs.user_cache_path("autotune", appauthor=False)


def sha256_of(*paths: Path) -> str:
    """SHA-256 of the concatenated contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def known_sha256_of(*paths: Path) -> str:
    """``sha256_of`` of large files, which is kept in the user's cache until the size, a time or the inode of one
    changes.
    """
    names, stats = [str(path.absolute()) for path in paths], [path.stat() for path in paths]
    if sum(stat.st_size for stat in stats) < KEPT_BYTES:
        return sha256_of(*paths)
    state = [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in stats]
    record = user_cache() / "sha256" / f"{content_key(names)}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # unreadable or of another version
        known = json.loads(record.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    is_settled = time.time() - max(max(stat.st_mtime, stat.st_ctime) for stat in stats) > SETTLED_S
    sha256 = sha256_of(*paths)
    if is_settled:
        with contextlib.suppress(OSError, UserError):  # the cache cannot be written
            write_bytes(record, json.dumps({"state": state, "sha256": sha256}).encode())
    return sha256


def content_key(value: Any) -> str:
    """Short hash of a JSON-serializable value, used as the key of cached results."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


# -------- read


def read_text(path: Path) -> str:
    """The content of a text file in UTF-8, or in UTF-16 with a byte order mark; it may be compressed by gzip (``.gz``).

    Raises:
        UserError: it does not exist, or is in neither of the two.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:  # not UTF-8, or a path with a zero byte
        raise UserError(f"{path}: cannot be read as text ({error}); check the path and its permissions") from None


def read_yaml(path: Path) -> Any:
    """The content of a YAML file (see ``parse_yaml``); a ``UserError`` if it is none."""
    with reading(f"{path}: not YAML", "fix the file"):
        return parse_yaml(read_text(path))


def read_json(path: Path) -> Any:
    """The content of a JSON file (see ``parse_json``); a ``UserError`` if it is none."""
    with reading(f"{path}: not a complete JSON document", "restore the file, or make it again"):
        return parse_json(read_text(path))


def parse_kind(value: Any, kinds: Mapping[str, type[D]], *, key: str, what: str, source: str) -> D:
    """Parse a record whose class is named by ``value[key]``. Missing keys take their defaults.

    Args:
        kinds: the classes, by name.
        what: what error messages call such a record, for example "tree policy".

    Raises:
        UserError: an unknown kind, an unknown key, or a value out of range.
    """
    name = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise UserError(f"{source}: unknown {what} {_shown(name)}; {nearest(str(name), kinds)}")
    try:
        return kinds[name].model_validate(value)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error, kinds[name])}") from None


def describe(error: ValidationError, kind_of: type[BaseModel]) -> str:
    """The first violation in one line: location, rule, value, next step. Unknown keys come before missing ones. Of a
    union, it is one of the branch that has the value's type.
    """
    violations = error.errors()

    def is_of_another_type(violation: Any) -> bool:
        *around, _ = loc = violation["loc"] or ("",)
        others = [other["loc"] for other in violations if len(other["loc"]) > len(loc)]
        return violation["type"].endswith("_type") and any(list(other[: len(around)]) == around for other in others)

    first = min(
        violations, key=lambda violation: (violation["type"] != "extra_forbidden", is_of_another_type(violation))
    )
    location = first["loc"]
    rule = str(first["ctx"]["error"]) if first["type"] == "value_error" else ""
    if "; " in rule:  # a rule of this program, which ends with its own next step
        return ": ".join([*filter(None, [".".join(_keys(location))]), rule])
    if first["type"] == "extra_forbidden":
        key, where = str(location[-1]), ".".join([*_keys(location[:-1]), str(location[-1])[:100]])
        return f"unknown key {_shown(where)}; {nearest(key, _keys_near(kind_of, location))}"
    where = ".".join(_keys(location)) or "the document"
    if first["type"] == "missing":
        return f"key {where!r} is required and missing; add it"
    rule = rule or first["msg"]
    return f"{where}: {rule[0].lower()}{rule[1:]}; got {_shown(first.get('input'))}; fix that value"


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys and numbers of a location, without the branches of unions."""
    return [str(part)[:100] for part in location if not _BRANCH.fullmatch(str(part))]


def _shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys_near(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names of the (possibly nested) model that contains an unknown key, or of all models of a union."""
    models = [model]
    for part in location[:-1]:
        fields = [outer.model_fields[str(part)] for outer in models if part in outer.model_fields]
        models = [inner for field in fields for inner in _models_of(field.annotation)] or models
    return [name for model in models for name in model.model_fields]


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models in a type, also in its lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_of(inner)]


# -------- write


def require_writable(path: Path, option: str = "-o") -> None:
    """Refuse a file that cannot be written, before the work that produces it. Creates nothing."""
    if path.is_dir():
        raise UserError(f"{path}: the output must be a file; got a folder; add a file name")
    with write_errors(path, f"choose another output with {option}"):
        folder = Path(os.path.realpath(path)).parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not _is_special(path):
            with tempfile.TemporaryFile(dir=folder):
                pass


@contextlib.contextmanager
def write_errors(path: Path, advice: str = "choose another output with -o") -> Iterator[None]:
    """Turn the errors of a file that is written into one line."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in DISK_FULL:
            advice = "free some space, and run the same command again"
        raise UserError(f"{path}: cannot be written ({reason}); {advice}") from None


def _is_special(path: Path) -> bool:
    """Whether a path names a device, a pipe or a socket, which is written to and never replaced."""
    return path.exists() and not path.is_file()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never a part of it. The permissions of a file
    that is replaced are kept; a link keeps pointing to its file, which is replaced.

    Raises:
        UserError: it cannot be written, as on a full disk.
    """
    require_writable(path)
    with write_errors(path):
        if _is_special(path):
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            try:
                _write_new(temporary, content, path.parent, os.O_TMPFILE)
            except (OSError, AttributeError):  # neither every system nor every file system has files without a name
                _write_new(temporary, content, temporary, os.O_CREAT | os.O_EXCL)
            if path.exists():
                os.chmod(temporary, path.stat().st_mode & 0o777)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, opened: Path, flags: int) -> None:
    """Write and sync a new file. One that is opened as its folder gets its name in the end: a killed process leaves
    nothing.
    """
    with open(os.open(opened, os.O_WRONLY | flags, 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        if opened != path:
            os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno())


def write_table(path: Path, frame: DataFrame) -> None:
    """Write a data frame atomically: as Parquet if the suffix says so, which needs pyarrow, else as CSV."""
    write_bytes(path, frame.to_parquet() if path.suffix == ".parquet" else frame.to_csv(index=False).encode())


def append_line(path: Path, *records: dict[str, Any]) -> None:
    """Append JSON records to a file in one write, and sync it to disk."""
    line = b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records)
    with write_errors(path, "check its folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            # A crash may have left an incomplete last line: begin a new one.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON Lines file. Lines left incomplete by a crash are skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(record := parse_json(line.decode()), dict):
                records.append(record)
    return records
