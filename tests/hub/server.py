"""A stand-in for the Hugging Face Hub: its HTTP interface on loopback, for folders of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


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

    def files(self, id: str) -> list[Path]:
        return sorted(path for path in self.folders[id].rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        time.sleep(self.hub.delay_s)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        id, rest = "/".join(parts[:2]), parts[2:]
        if id in self.hub.renamed:
            self._send(307, headers={"Location": path.replace(id, self.hub.renamed[id], 1)})
        elif id not in self.hub.folders:
            self._error(401, "RepoNotFound")
        elif rest and rest[1] not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
        elif is_api:
            self._describe(id, is_tree=rest[:1] == ["tree"])
        elif id in self.hub.gated and not self.headers.get("Authorization"):
            self._error(401, "GatedRepo")
        else:
            self._file(self.hub.folders[id] / "/".join(rest[2:]))

    def _describe(self, id: str, *, is_tree: bool) -> None:
        paths = {str(path.relative_to(self.hub.folders[id])): path for path in self.hub.files(id)}
        if is_tree:
            found: object = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in paths.items()
            ]
        else:
            found = {"id": id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in paths]}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self._send(206 if start else 200, content[start:], headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
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
