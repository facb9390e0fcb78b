"""A stand-in for the Hugging Face Hub: its HTTP interface on loopback, for folders of this machine, and for
repositories that clients make and fill.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by id, and how the Hub treats them."""

    folders: Mapping[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    """Before each answer, as on a slow network."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    url: str = ""
    uploads: Path = Path("uploads")
    """Folder of the repositories that clients make."""
    made: dict[str, Path] = field(default_factory=dict)
    """Repositories that clients made, by id."""
    private: set[str] = field(default_factory=set)
    """Repositories that are shown to clients with a token alone."""
    commits: list[tuple[str, list[str]]] = field(default_factory=list)
    """Repository and files of each commit."""
    tokens: set[str] = field(default_factory=set)
    """Tokens that may write."""
    echoes: bool = False
    """Whether errors hold the headers of the request, as those of a careless proxy."""

    def commit_of(self, id: str) -> str:
        """The newest commit of a repository."""
        return hashlib.sha1(str([commit for commit in self.commits if commit[0] == id]).encode()).hexdigest()

    def folder(self, id: str) -> Path | None:
        return self.made.get(id) or self.folders.get(id)

    def files(self, folder: Path) -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """The four requests of ``HfApi.create_repo`` and ``HfApi.create_commit`` for files that are not large."""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = path.strip("/").split("/")
        if self.headers.get("Authorization") not in {f"Bearer {token}" for token in self.hub.tokens}:
            self._send(401 if not self.headers.get("Authorization") else 403, self._refusal())
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts == ["api", "validate-yaml"]:
            self._send_json({"warnings": [], "errors": []})
        elif parts[4:] == ["preupload", "main"]:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._send_json(
                {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
            )
        elif parts[4:] == ["commit", "main"]:
            self._commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self._error(404, "EntryNotFound")

    def _refusal(self) -> bytes:
        text = f"you sent {self.headers.get('Authorization')}" if self.hub.echoes else "you may not write here"
        return json.dumps({"error": text}).encode()

    def _create(self, asked: dict[str, Any]) -> None:
        id = f"{asked['organization']}/{asked['name']}"
        if is_new := self.hub.folder(id) is None:
            self.hub.made[id] = self.hub.uploads / id.replace("/", "--")
            self.hub.made[id].mkdir(parents=True)
            self.hub.private |= {id} if asked.get("visibility") == "private" else set()
        self._send_json({"url": f"{self.hub.url}/{id}"}, 200 if is_new else 409)

    def _commit(self, id: str, lines: list[dict[str, Any]]) -> None:
        assert lines[0]["key"] == "header" and {line["key"] for line in lines[1:]} == {"file"}
        for line in lines[1:]:
            path = self.hub.made[id] / line["value"]["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(line["value"]["content"]))
        self.hub.commits.append((id, [line["value"]["path"] for line in lines[1:]]))
        commit = self.hub.commit_of(id)
        self._send_json({"commitUrl": f"{self.hub.url}/{id}/commit/{commit}", "commitOid": commit})

    def _send_json(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        time.sleep(self.hub.delay_s)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        id, rest = "/".join(parts[:2]), parts[2:]
        folder = self.hub.folder(id)
        if id in self.hub.renamed:
            self._send(307, headers={"Location": path.replace(id, self.hub.renamed[id], 1)})
        elif folder is None or (id in self.hub.private and not self.headers.get("Authorization")):
            self._error(401, "RepoNotFound")
        elif rest and rest[1] not in ("main", self.hub.commit_of(id)):
            self._error(404, "RevisionNotFound")
        elif is_api:
            self._describe(id, folder, is_tree=rest[:1] == ["tree"])
        elif id in self.hub.gated and not self.headers.get("Authorization"):
            self._error(401, "GatedRepo")
        else:
            self._file(id, folder / "/".join(rest[2:]))

    def _describe(self, id: str, folder: Path, *, is_tree: bool) -> None:
        paths = {str(path.relative_to(folder)): path for path in self.hub.files(folder)}
        if is_tree:
            found: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in paths.items()
            ]
        else:
            found = {"id": id, "sha": self.hub.commit_of(id), "siblings": [{"rfilename": name} for name in paths]}
        self._send_json(found)

    def _file(self, id: str, path: Path) -> None:
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": self.hub.commit_of(id), "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self._send(206 if start else 200, content[start:], headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
