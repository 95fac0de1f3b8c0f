"""`hflow watch`: serves the page of a run to browsers on this machine, and lets it follow the run."""

from __future__ import annotations

import getpass
import gzip
import hashlib
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from hflow.base.errors import ConfigError, HflowError
from hflow.base.files import resolved
from hflow.launch.results.runs import read_report
from hflow.launch.targets import resolve
from hflow.report.html.run import render_run_page
from hflow.runtime.saving.run_directory import RunDirectory

HOST = "127.0.0.1"
SHORTEST_SECONDS = 1.0
"""Shortest time between two looks at the run's files."""
READ_SHARE = 0.2
"""Largest share of the time in which files are read and the page is made. A long run is read less often."""
IDLE_SECONDS = 30.0
"""A connection without a request is closed after so many seconds."""
_OWN_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
"""Values of the header Host. The port is another one behind `ssh -L`."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class WatchedRun:
    """A run whose page is served."""

    run: str
    """Name and state of the run."""
    url: str
    tunnel: str | None
    """The command that makes the page reachable on the user's own machine; None: this is it."""


def watch(run: str, port: int = 0, on_ready: Callable[[WatchedRun], None] = lambda watched: None) -> None:
    """Serve the page of a run on a port of 127.0.0.1 (0: a free one) until Ctrl-C. The run may have ended.

    Raises:
        ConfigError: if there is no such run, a file of it is damaged, or the port is in use.
        KeyboardInterrupt: at Ctrl-C.
    """
    page = RunPage(run)
    with serve_page(page, port) as server:
        number = server.server_address[1]
        on_ready(WatchedRun(page.state, f"http://{HOST}:{number}/", ssh_tunnel(number, os.environ)))
        server.serve_forever()


class RunPage:
    """The page of a run, which is made again when it is asked for and some time has passed.

    The run's name is resolved once, so that a later run does not take its place.
    """

    def __init__(self, run: str) -> None:
        report = read_report(str(find_watched(run).path), is_live=True)
        self._run = str(resolved(report.record.directory.path))
        self.state = f"{report.record.name}: {report.record.state}"
        self._lock = threading.Lock()
        self._page = b""
        self._due = 0.0

    def content(self) -> bytes:
        """Return the page in UTF-8.

        Raises:
            ConfigError: if a file of the run is damaged, or the run was deleted.
        """
        with self._lock:
            start = time.monotonic()
            if start >= self._due:
                self._update()
                end = time.monotonic()
                self._due = end + max(SHORTEST_SECONDS, (end - start) / READ_SHARE)
            return self._page

    def _update(self) -> None:
        report = read_report(self._run, is_live=True)
        self._page = render_run_page(report, time.time()).encode()


def find_watched(run: str) -> RunDirectory:
    """Return the run that a user names. A run that starts is not the latest yet, but it is the one meant.

    Raises:
        ConfigError: if there is no such run.
    """
    named = resolve(run).require_run()
    is_latest = resolved(named.path).name != named.path.name
    if is_latest and not named.is_running:
        others = sorted(resolved(named.path).parent.glob("[!.]*/plan.json"), reverse=True)
        starting = (
            other for other in map(RunDirectory, (file.parent for file in others)) if other.is_running
        )
        return next(starting, named)
    return named


def serve_page(page: RunPage, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on 127.0.0.1 and has one resource, the page.

    Raises:
        ConfigError: if the port is in use.
    """

    class Handler(_PageHandler):
        content = staticmethod(page.content)

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {HOST}, port {port}: {error.strerror or error}; choose another --port, or "
            "0 for a free one"
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    @override
    def server_bind(self) -> None:
        """Bind, without asking a name server for the name of this machine."""
        socketserver.TCPServer.server_bind(self)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless a browser has gone away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _PageHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hflow", ""
    timeout = IDLE_SECONDS
    content: Callable[[], bytes]

    def do_GET(self) -> None:
        """Answer with the page, unless the browser has it, or was led here by another site."""
        if not _OWN_NAME.fullmatch(self.headers.get("Host", "")):
            # Such as a name of a web site that its owner lets point to 127.0.0.1.
            self._answer(403, b"this page is only for http://127.0.0.1 and http://localhost\n")
        elif self.path != "/":
            self._answer(404, b"there is only /\n")
        else:
            self._answer_page()

    def _answer_page(self) -> None:
        try:
            page = self.content()
        except HflowError as error:
            self._answer(503, f"{error}\n".encode())
            return
        tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, b"", {"ETag": tag})
            return
        headers = {"ETag": tag, "Content-Type": "text/html; charset=utf-8"}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            page, headers["Content-Encoding"] = gzip.compress(page, 3), "gzip"
        self._answer(200, page, headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "text/plain; charset=utf-8",
            **_HEADERS,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def ssh_tunnel(port: int, environment: Mapping[str, str]) -> str | None:
    """Return the command that forwards a port of this machine to where the user came from; None without SSH.

    The variable SSH_CONNECTION has the addresses and ports of both ends.
    """
    ends = environment.get("SSH_CONNECTION", "").split()
    if len(ends) != 4:
        return None
    _, _, address, ssh_port = ends
    other_port = "" if ssh_port == "22" else f" -p {ssh_port}"
    return f"ssh -N -L {port}:{HOST}:{port}{other_port} {getpass.getuser()}@{address}"
