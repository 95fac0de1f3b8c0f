"""Programs of Python in processes of their own that need not import torch, transformers and hflow.

`run` and `Popen` stand in for those of `subprocess`. A command `[sys.executable, ...]` with `-m`, `-c` or a
script is forked from a server that has imported these packages once. The process is a child of its caller;
its signals, streams and exit code are those of a fresh interpreter. The server has the environment of its
caller, and is replaced when that has changed, as imports read it. Tests of imports and start-up use
`subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import multiprocessing.process
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, AnyStr, NoReturn

PRELOADED = [
    "hflow.cli",
    "hflow.launch.running.run_recipe",
    "hflow.workers.worker",
    "hflow.training.fsdp.backend",
    "hflow.engines.embedded.engine",
    "transformers.models.qwen2.modeling_qwen2",
    "starlette.applications",
    "uvicorn",
]
"""What runs and `hflow serve` import; some of it may not be installed."""
LARGEST_REQUEST = 1 << 17
"""Most bytes of a program's arguments."""
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Both ends of the three streams, as `subprocess` names them."""


class Popen(subprocess.Popen[AnyStr]):
    """A `subprocess.Popen` that is forked from the server, if the command has no environment of its own.

    `preexec_fn` must be something to pickle that the server can import.
    """

    def _execute_child(self, *arguments: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(start).bind(*arguments).arguments
        if asked["args"][0] != sys.executable or asked["env"] is not None:
            start(*arguments)
            return
        assert not asked["pass_fds"], "forked_python passes standard streams only"
        request = {
            "words": [os.fspath(word) for word in asked["args"]],
            "cwd": os.path.join(os.getcwd(), os.fspath(asked["cwd"] or "")),
            "start_new_session": asked["start_new_session"],
            "preexec_fn": asked["preexec_fn"],
        }
        ends = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        self.pid = _server().fork(request, [number if end == -1 else end for number, end in enumerate(ends)])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]


def run(
    command: list[Any], *, input: Any = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as `subprocess.run` does with `check=False`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class _Server:
    """The process that programs are forked from."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"__import__('forked_python').serve({theirs.fileno()})"],
            cwd=Path(__file__).parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Let the server fork a child of this process, and return its id."""
        from run_processes import adopt_orphans

        adopt_orphans()
        try:
            socket.send_fds(self._connection, [pickle.dumps(request)], streams)
            pid = self._connection.recv(64)
        finally:
            adopt_orphans(False)
        assert pid, "the server has ended"
        return int(pid)

    def close(self) -> None:
        """End the server; its children continue."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.wait()


_servers: list[_Server] = []
"""The server, once it has been started."""


def _server() -> _Server:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    if _servers and _servers[0].environment != environment:
        _servers.pop().close()
    if not _servers:
        _servers.append(_Server(environment))
    return _servers[0]


def serve(number: int) -> None:
    """Fork a child for each request of a socket, until its other end is closed. A child runs its program.

    Args:
        number: the socket's file descriptor.
    """
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the memory of all modules
    assert len(os.listdir("/proc/self/task")) == 1, "the forked process has threads: OMP_NUM_THREADS is not 1"
    connection = socket.socket(fileno=number)
    while True:
        request, streams, *_ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
        if not request:
            return
        # The process in between ends: the system gives its child to the one that asked.
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            signal.signal(signal.SIGINT, on_interrupt)
            program = pickle.loads(request)
            try:
                _prepare(streams, **program)
            finally:
                connection.send(str(os.getpid()).encode())
                connection.close()
            _run_program(program["words"])
        os.waitpid(between, 0)
        for descriptor in streams:
            os.close(descriptor)


def _prepare(
    streams: list[int], words: list[str], cwd: str, start_new_session: bool, preexec_fn: Any
) -> None:
    """Do what `subprocess` and the interpreter do before a program begins."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        file = open(number, "wb" if number else "rb", 0 if old.write_through else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            file,
            old.encoding,
            old.errors,
            line_buffering=not old.write_through and (name == "stderr" or os.isatty(number)),
            write_through=old.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(cwd)
    if start_new_session:
        os.setsid()
    if preexec_fn is not None:
        preexec_fn()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.orig_argv = words


def _run_program(words: list[str]) -> NoReturn:
    """Run the program of a command line in `__main__`. The process then ends as any."""
    first, *rest = words[1:]
    if first == "-m":
        name, *sys.argv[1:] = rest
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(name)
    elif first == "-c":
        code, *sys.argv[1:] = rest
        sys.argv[0], sys.path[0] = "-c", ""
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        assert not first.startswith("-"), f"forked_python knows no option {first}"
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")
    sys.exit()
