"""The program that runs one call where there is no hflow, in any Python of the caller's minor version.

`make_program` appends a call of `main` to the source of this module, which needs the standard library only.
The program starts a process that confines itself and calls the tool, waits for it, and writes its reply in
one line to standard output.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import types
import zlib
from contextlib import suppress
from typing import Any

MARK = b"hflow-sandbox-reply:"
"""The beginning of the line of the reply, as a shell may have written something before."""


def main(setup: dict[str, Any]) -> None:
    """Run a call and end this process.

    Args:
        setup: `python`, the caller's minor version; `modules`, name -> packed source of what may be absent;
            `tool`, a packed pickle; `arguments`; `timeout`, `memory_mb` and `processes`, the limits;
            `longest_stretch` and `longest_reply`; and `watches_input`, whether the call ends with standard
            input.
    """
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    here = "{}.{}".format(*sys.version_info)
    if here == setup["python"]:
        reply = _supervise(setup)
    else:
        reason = f"its Python is {here}, and the tool was compiled by {setup['python']}"
        reply = _reply("refused", reason)
    with os.fdopen(answer, "wb") as stream:
        stream.write(b"\n" + MARK + reply + b"\n")
    os._exit(0)


def _supervise(setup: dict[str, Any]) -> bytes:
    """Run the call in a process of its own, and return its reply."""
    for name, source in setup["modules"].items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []  # a package may import what is in it
        exec(compile(_unpack(source), name, "exec"), module.__dict__)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.dup2(1, 0)
            os.dup2(writing, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            reply = _call(setup)
            with os.fdopen(3, "wb") as stream:
                stream.write(reply)
        finally:
            os._exit(0)
    os.close(writing)
    reply = _read_in_time(setup, reading, child)
    if not reply and _was_killed(child):
        reply = _reply("lost", "its process was killed, as memory may be short")
    _kill(child)
    return reply or _reply("failed", "its process died")


def _was_killed(child: int) -> bool:
    """Return whether a process that has ended, or is about to, was killed from outside."""
    for _ in range(100):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        time.sleep(0.01)
    return False  # it has only closed its reply


def _call(setup: dict[str, Any]) -> bytes:
    """Confine this process, call the tool and return the reply."""
    inside, confinement = sys.modules["hflow_inside"], sys.modules["hflow_confinement"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    scratch = tempfile.mkdtemp()
    os.chdir(scratch)
    os.environ.update({"HOME": scratch, "TMPDIR": scratch})
    tempfile.tempdir = None
    try:
        tool = pickle.loads(_unpack(setup["tool"]))
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        return _reply("refused", f"the tool cannot be loaded there: {inside.format_error(error)}")
    try:
        if (missing := confinement.missing_filter()) is not None:
            return _reply("refused", missing)
        confinement.confine(setup["memory_mb"], scratch, (), setup["processes"], landlock=False)
    except OSError as error:
        return _reply("refused", f"its process cannot be confined: {inside.format_error(error)}")
    reply: bytes = inside.run_call(tool, setup["arguments"])
    return reply


def _read_in_time(setup: dict[str, Any], reading: int, child: int) -> bytes:
    """Return the bytes that the call writes, or the reply of one that took too long or wrote too much."""
    start, timeout, written = time.monotonic(), setup["timeout"], bytearray()
    files = [reading, 0] if setup["watches_input"] else [reading]
    remaining = timeout
    while True:
        ready = select.select(files, (), (), remaining)[0]
        if 0 in ready:  # nothing follows the program, so this is its end
            _kill(child)
            os._exit(1)
        if ready:
            part = os.read(reading, 65536)
            written += part
            if not part:
                return bytes(written)
            if len(written) > setup["longest_reply"]:
                return _reply("failed", f"returned more than {setup['longest_reply'] >> 20} MiB")
        elapsed, waited = time.monotonic() - start, _seconds_waited(child)
        if elapsed - waited >= timeout:
            return _reply("failed", f"took longer than its timeout of {timeout:g} s")
        if elapsed >= setup["longest_stretch"] * timeout:
            return _reply("lost", f"the machine is too busy: it had no result after {elapsed:.1f} s")
        remaining = max(0.01, timeout - elapsed + waited)


def _seconds_waited(pid: int) -> float:
    """Return for how long a process has waited for a processor; 0 if the kernel does not count it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _kill(session: int) -> None:
    for kill in (os.kill, os.killpg):
        with suppress(OSError):
            kill(session, signal.SIGKILL)


def _unpack(data: str) -> bytes:
    return zlib.decompress(base64.b64decode(data))


def _reply(kind: str, value: str) -> bytes:
    return json.dumps([kind, value]).encode()
