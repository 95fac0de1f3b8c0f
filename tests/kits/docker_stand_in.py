"""A stand-in for Docker, which runs servers of this machine as containers.

The program `docker` sends its arguments to this process, which starts the servers. So they are no processes
below those that call it, and end only when they are removed, as those of Docker.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_PROGRAM = """#!{python} -I
import json, sys, urllib.request
with urllib.request.urlopen({url!r}, json.dumps(sys.argv[1:]).encode()) as reply:
    code, output, problem = json.load(reply)
print(output)
print(problem, file=sys.stderr)
sys.exit(code)
"""


@dataclass
class Container:
    """A server, and the address that `docker port` prints."""

    label: str
    address: str
    process: subprocess.Popen[bytes]


class Docker(ThreadingHTTPServer):
    """What answers the program.

    Args:
        command: starts the server of any image; the port follows.
    """

    daemon_threads = True

    def __init__(self, command: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.command = command
        self.containers: dict[str, Container] = {}
        self.num_started = 0

    def execute(self, command: str, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code, the output and the errors of a command."""
        return getattr(self, command)(*arguments)  # type: ignore[no-any-return]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Start a container, and wait until it ends."""
        *options, image = arguments
        assert options[:2] == ["--rm", "--name"]
        assert options[3] == "--label"
        assert options[5:] == ["--publish", "127.0.0.1::8000"]
        if image == "missing:1":
            return 125, "", f"docker: Error response from daemon: No such image: {image}"
        with closing(socket.socket()) as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        process = subprocess.Popen([*self.command, str(port)], stderr=subprocess.DEVNULL)
        name, label = options[2], options[4]
        self.containers[name] = Container(label, f"127.0.0.1:{port}", process)
        self.num_started += 1
        code = process.wait()
        self.containers.pop(name, None)
        return code, "", ""

    def port(self, name: str, port: str) -> tuple[int, str, str]:
        """Print the address of a container."""
        assert port == "8000"
        if name not in self.containers:
            return 1, "", f"Error response from daemon: No such container: {name}"
        return 0, f"{self.containers[name].address}\n[::1]:1", ""

    def ps(self, *arguments: str) -> tuple[int, str, str]:
        """Print the names of the containers with a label."""
        *options, given = arguments
        assert options == ["--all", "--quiet", "--filter"]
        label = given.removeprefix("label=")
        return 0, "\n".join(name for name, c in list(self.containers.items()) if c.label == label), ""

    def rm(self, force: str, *names: str) -> tuple[int, str, str]:
        """End containers."""
        assert force == "--force"
        for name in names:
            if (container := self.containers.get(name)) is not None:
                container.process.kill()
                container.process.wait()
        return 0, "", ""


class _Handler(BaseHTTPRequestHandler):
    server: Docker

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps(self.server.execute(*arguments)).encode()
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
        except OSError:
            pass  # the program was killed


@contextmanager
def installed_docker(directory: Path, command: list[str]) -> Iterator[Docker]:
    """Put the program `docker` into a directory, and answer it."""
    with Docker(command) as docker:
        program = directory / "docker"
        url = f"http://127.0.0.1:{docker.server_address[1]}"
        program.write_text(_PROGRAM.format(python=os.path.realpath(sys.executable), url=url))
        program.chmod(0o755)
        Thread(target=docker.serve_forever, daemon=True).start()
        try:
            yield docker
        finally:
            docker.shutdown()
            docker.rm("--force", *list(docker.containers))
