"""A stand-in for the Hugging Face Hub: its HTTP interface on loopback, for repositories that are folders."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "main"
_MODEL = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(/.*)?")
_FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """Repositories by id, each made when it is first asked for.

    ``gated`` and ``renamed`` are ids; a renamed one has another repository's id as its value. ``delay_s`` passes before
    every answer, and ``files`` counts the downloads.
    """

    folder: Path
    make: Callable[[str, Path], None]
    ids: set[str]
    gated: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    files: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def repository(self, name: str) -> Path:
        path = self.folder / name.replace("/", "--")
        with self._lock:
            if not path.exists():
                self.make(name, path)
        return path

    def file_names(self, name: str) -> list[str]:
        path = self.repository(name)
        return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())

    def commit(self, name: str) -> str:
        """The revision of a repository: a hash of its files, so that a changed file is a new commit."""
        path = self.repository(name)
        digest = hashlib.sha1(usedforsecurity=False)
        for file in self.file_names(name):
            digest.update(file.encode())
            digest.update(_etag(path / file).encode())
        return digest.hexdigest()


def _etag(path: Path) -> str:
    stat = path.stat()
    return hashlib.sha1(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode(), usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.requests += 1
        time.sleep(hub.delay_s)
        for pattern, answer in ((_TREE, self._tree), (_MODEL, self._model), (_FILE, self._file)):
            if match := pattern.fullmatch(path):
                parts = match.groupdict()
                name = parts["id"]
                if name in hub.renamed:
                    return self._send(307, b"", {"Location": self.path.replace(name, hub.renamed[name])})
                if name not in hub.ids:
                    return self._refuse(404, "RepoNotFound", "Repository not found")
                if parts.get("revision") not in (None, REVISION, hub.commit(name)):
                    return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {parts['revision']}")
                return answer(name, parts)
        return self._refuse(404, "EntryNotFound", "Entry not found")

    def _model(self, name: str, _: dict[str, str]) -> None:
        hub = self.server.hub
        siblings = [{"rfilename": file} for file in hub.file_names(name)]
        gated = "manual" if name in hub.gated else False
        content = {"id": name, "modelId": name, "sha": hub.commit(name), "siblings": siblings, "gated": gated}
        self._send_json({**content, "private": False, "tags": [], "downloads": 0, "likes": 0, "disabled": False})

    def _tree(self, name: str, _: dict[str, str]) -> None:
        path = self.server.hub.repository(name)
        self._send_json(
            [
                {"type": "file", "path": file, "size": (path / file).stat().st_size, "oid": _etag(path / file)}
                for file in self.server.hub.file_names(name)
            ]
        )

    def _file(self, name: str, parts: dict[str, str]) -> None:
        hub = self.server.hub
        if name in hub.gated:
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            return self._refuse(401, "GatedRepo", message)
        file = hub.repository(name) / parts["file"]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": hub.commit(name)})
        content = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": hub.commit(name), "Accept-Ranges": "bytes"}
        if self.command == "GET":
            hub.files[f"{name}/{parts['file']}"] += 1
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if begin:
            first = int(begin[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self._send(206, content[first:], headers)
        return self._send(200, content, headers)

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        reasons = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        self._send(status, json.dumps({"error": message}).encode(), reasons)

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class HubServer(ThreadingHTTPServer):
    """Serves a ``Hub`` on a free port of loopback, in a thread of its own."""

    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
