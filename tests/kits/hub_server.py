"""A server that speaks the protocol of the Hugging Face Hub, for models and datasets in local directories."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A model or dataset. Every commit is a mapping from names to contents."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    token: str | None = None
    """Who does not send it, may not read."""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        text = branch + "".join(f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in files.items())
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class HubServer:
    """What is on the server, and the requests that it has answered, as `GET /path`."""

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.problem: int | None = None
        """The status with which it answers everything."""
        self.endpoint = ""

    def add(self, name: str, directory: Path, **settings: Any) -> str:
        """Add a model with the files of a directory; return its commit."""
        repository = self.models.setdefault(name, Repository(**settings))
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        return repository.commit(files)

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded."""
        return [
            line.rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        ]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Give a server, which answers until the block ends."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"POST {path}")
        if self.hub.problem is not None:
            return self._fail(self.hub.problem, "")
        if "Authorization" not in self.headers:
            return self._fail(401, "")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            name = name if "/" in name else f"me/{name}"
            if name.startswith("other/"):
                return self._fail(403, "")
            self.hub.models.setdefault(name, Repository())
            return self._send({"url": f"{self.hub.endpoint}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        parts = path.removeprefix("/api/models/").split("/")
        repository = self.hub.models["/".join(parts[:2])]
        if parts[2] == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._send({"files": modes})
        assert parts[2] == "commit", path
        lines = [json.loads(line) for line in body.splitlines()]
        known = repository.commits.get(repository.branches.get("main", ""), {})
        added = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        sha = repository.commit({**known, **added})
        url = f"{self.hub.endpoint}/{'/'.join(parts[:2])}/commit/{sha}"
        return self._send({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        if self.hub.problem is not None:
            return self._fail(self.hub.problem, "")
        if path == "api/whoami-v2":
            return self._send({"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})
        is_api, path = path.startswith("api/"), path.removeprefix("api/")
        is_dataset = path.startswith("datasets/")
        kind = self.hub.datasets if is_dataset else self.hub.models
        if path.count("/") < 2:
            return self._fail(404, "")
        owner, name, *rest = path.removeprefix("datasets/").removeprefix("models/").split("/")
        repository = kind.get(f"{owner}/{name}")
        if repository is None:
            return self._fail(401, "RepoNotFound")
        if repository.is_gated and not is_api:
            return self._fail(403, "GatedRepo")
        if repository.token is not None and repository.token not in self.headers.get("Authorization", ""):
            return self._fail(401, "RepoNotFound")
        action, revision = (*rest, "revision", "main")[:2] if len(rest) > 1 else ("revision", "main")
        sha = repository.sha(revision)
        if sha is None:
            return self._fail(404, "RevisionNotFound")
        files = repository.commits[sha]
        if action == "revision":
            siblings = [{"rfilename": file} for file in files]
            return self._send({"id": f"{owner}/{name}", "sha": sha, "siblings": siblings, "tags": []})
        if action == "tree":
            rows = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            return self._send(rows)
        assert action == "resolve", path
        file = "/".join(rest[2:])
        if file not in files:
            return self._fail(404, "EntryNotFound")
        etag = hashlib.sha1(files[file]).hexdigest()
        return self._send(files[file], {"X-Repo-Commit": sha, "ETag": f'"{etag}"'})

    def _send(self, content: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send({"error": code}, {"X-Error-Code": code, "X-Error-Message": code}, status)
