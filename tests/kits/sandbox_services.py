"""A server with the parts of the HTTP APIs of E2B and Daytona that one call needs. It runs commands here."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

END_OF_STREAM = 2
"""The flag of the last message of a stream (connectrpc.com/docs/protocol)."""


class Service(ThreadingHTTPServer):
    """The server. `fail_with` is the status of the next request for a machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fail_with = 0
        self.made: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.files = Path(tempfile.mkdtemp())

    def execute(self, command: str) -> str:
        """Run a command whose paths are those of a machine."""
        local = command.replace("python3", f"{sys.executable} -I").replace("/tmp/", f"{self.files}/")
        done = subprocess.run(
            local, shell=True, stdout=subprocess.PIPE, env={"PATH": os.defpath}, check=False
        )
        return done.stdout.decode()


@contextmanager
def serve() -> Iterator[Service]:
    with Service() as service:
        Thread(target=service.serve_forever, daemon=True).start()
        yield service
        service.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        if path in ("/v2/sandboxes", "/sandboxes", "/sandbox"):
            self._make(json.loads(body))
        elif path == "/files" or path.endswith("/files/bulk-upload"):
            (file,) = (part for part in body.split(b"\r\n--") if b"filename=" in part)
            head, _, content = file.partition(b"\r\n\r\n")
            name = re.split(r"[/%\"]|2F", head.split(b"filename=")[1].split(b"\r\n")[0].decode().strip('"'))[
                -1
            ]
            (self.server.files / name).write_bytes(content)
            self._json([{"path": f"/tmp/{name}", "name": name, "type": "file"}])
        elif path == "/process.Process/Start":
            self._stream(json.loads(body[5:])["process"]["args"][-1])
        elif path.endswith("/process/execute"):
            self._json({"exitCode": 0, "result": self.server.execute(json.loads(body)["command"])})
        else:
            self._json({"message": f"unknown: {self.path}"}, 404)

    def do_GET(self) -> None:
        if self.path.endswith("/toolbox-proxy-url"):
            self._json({"url": f"{self.server.url}/toolbox"})
        else:
            self._json({"message": f"unknown: {self.path}"}, 404)

    def do_DELETE(self) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.server.ended.append(name)
        self._json({**_DAYTONA, "id": name, "state": "destroyed", "toolboxProxyUrl": self.server.url})

    def _make(self, asked: dict[str, Any]) -> None:
        if self.server.fail_with:
            self._json(
                {"code": self.server.fail_with, "message": "refused by the stub"}, self.server.fail_with
            )
            return
        self.server.made.append(asked)
        name, made = f"m{len(self.server.made)}", 200 if self.path == "/sandbox" else 201
        e2b = {
            **{"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.5.0"},
            **{"envdAccessToken": "t", "domain": None},
        }
        self._json({**_DAYTONA, **e2b, "id": name, "toolboxProxyUrl": f"{self.server.url}/toolbox"}, made)

    def _stream(self, command: str) -> None:
        events = [
            {"start": {"pid": 1}},
            {"data": {"stdout": base64.b64encode(self.server.execute(command).encode()).decode()}},
            {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}},
        ]
        messages = [(0, {"event": event}) for event in events] + [(END_OF_STREAM, {})]
        data = b""
        for flag, message in messages:
            packed = json.dumps(message).encode()
            data += bytes([flag]) + len(packed).to_bytes(4, "big") + packed
        self._send(data, "application/connect+json", 200)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data


_DAYTONA = {
    **{"organizationId": "o", "name": "n", "user": "daytona", "env": {}, "labels": {}, "public": False},
    **{"networkBlockAll": True, "target": "us", "cpu": 1, "gpu": 0, "memory": 1, "disk": 3},
    **{"state": "started", "kvm": False},
}
