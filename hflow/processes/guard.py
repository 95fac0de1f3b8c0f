"""Guards a server that forks processes: what they start ends with them, and all ends with its owner.

A body may start processes of its own, which nothing ends if the body is killed, or if its worker is. So a
server that forks the processes of bodies or tools calls `guard_server` first, which puts two small processes
above it:

    worker ── anchor ── guard ── server ── process of a body ── what the body started

The guard is a subreaper: a process below it that loses its parent becomes its child. It kills such a process
unless its session is that of a living process (`run_in_session`), and kills everything when the anchor ends,
which is when the worker ends in any way. The anchor is the process that the worker started. Without it,
Ray, which kills the children of a worker that it ends, would kill the guard before what it guards.

Each continues what it has started if that is stopped: the worker the anchor, while it waits for a process
that it has asked for, the anchor the guard, and the guard the server and the processes that the server has
forked. Otherwise a pool would wait for a stopped process, which it has not given a job yet, for ever.

This module imports only what a guard needs, as a guard keeps it in memory. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.25
"""Time between two looks of a guard. A process outlives its parent by at most this much, and its worker by
twice as much."""

SHARED_FILES = Path("/dev/shm")
"""Directory in which the system keeps named semaphores, and hflow the sockets of fork servers."""

OWNER_POLLS = 8
"""How often a guard that ends looks whether its owner has ended too."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)
_server_pid: int | None = None
"""Id of the guarded server, in the server and in the processes that it forks."""


def guard_server(at_end: Sequence[str] = ()) -> None:
    """Start a guard above this process. Returns in a child of the guard, which is the server from now on.

    Call it before the process has threads. SIGINT, SIGTERM and SIGHUP are ignored from now on: a terminal
    or a job scheduler sends them to all processes at once, and the worker decides what ends.

    `at_end` is a command that the guard runs when all processes have ended, for what is no process below it.
    """
    global _server_pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner, anchor = os.getppid(), os.getpid()
    guard = os.fork()
    if guard:
        _stay_while(owner, guard)
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard, server = os.getpid(), os.fork()
    if server:
        _guard(anchor, server, owner, at_end)
    _server_pid = os.getpid()
    _die_with(guard)


def run_in_session() -> None:
    """Make this process, forked by a guarded server, the leader of a session that ends with it."""
    os.setsid()
    if _server_pid is None:
        os.write(2, b"hflow: the fork server cannot import hflow, so nothing ends what bodies start\n")
    else:
        _die_with(_server_pid)


def children(parent: int | None = None) -> list[int]:
    """Return the ids of the children, also adopted, of a process without threads (None: of this one)."""
    parent = os.getpid() if parent is None else parent
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    found = []  # the kernel was built without the list
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def continue_stopped(*pids: int) -> None:
    """Continue those of these processes that are stopped."""
    for pid in pids:
        if read_stat(pid)[:1] == ["T"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def reap() -> dict[int, int]:
    """Remove this process's children that have ended; return ids -> exit codes, negative for signals."""
    ended = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0] != 0:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def kill_orphans(known: Collection[int]) -> None:
    """Kill children that are not `known` and whose session has no other, living leader."""
    for pid in children():
        if pid not in known:
            with suppress(ProcessLookupError):
                session = os.getsid(pid)
                if session == pid or not _is_alive(session):
                    os.kill(pid, signal.SIGKILL)


def kill_children() -> None:
    """Kill all children and, as they become children, all their descendants."""
    while pids := children():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)


def read_stat(pid: int) -> list[str]:
    """Return the system's description of a process, beginning with its state; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _stay_while(owner: int, guard: int) -> None:
    """Stay as long as the owner and the guard live, then end, as the guard did. Does not return."""
    _continue_with_end_of(owner)
    _close_files()
    ended: dict[int, int] = {}
    while os.getppid() == owner and guard not in (ended := reap()):
        continue_stopped(guard)
        time.sleep(POLL_SECONDS)
    os._exit(_exit_status(ended.get(guard, 0)))


def _guard(anchor: int, server: int, owner: int, at_end: Sequence[str]) -> None:
    """Kill orphans as long as the anchor and the server live, then everything, and end as the server did.

    Does not return.
    """
    _continue_with_end_of(anchor)
    _close_files()
    remove_shared_files()
    ended: dict[int, int] = {}
    while os.getppid() == anchor and server not in (ended := reap()):
        kill_orphans({server})
        continue_stopped(server, *children(server))
        time.sleep(POLL_SECONDS)
    kill_children()
    if at_end:
        os.spawnvp(os.P_WAIT, at_end[0], list(at_end))
    for _ in range(OWNER_POLLS):
        if read_stat(owner)[:1] in ([], ["Z"], ["X"]):
            break
        time.sleep(POLL_SECONDS)  # it ends, or only its server has ended
    remove_shared_files()
    os._exit(_exit_status(ended.get(server, 0)))


def _exit_status(code: int) -> int:
    """Return the status of a process that ends as another one did: 128 + N for signal N, as in a shell."""
    return code if code >= 0 else 128 - code


def shared_file_prefix(owner: int) -> str:
    """Return the prefix of a process's shared files. If it ends without removing them, a guard does.

    Containers may share the directory of these files and have equal process ids, so a name has the id of the
    container's processes too, and the time at which its process started.
    """
    return f"hflow-{_pid_namespace()}-{owner}-{read_stat(owner)[19]}-"


def remove_shared_files() -> None:
    """Remove the semaphores and sockets of all processes that have ended without removing them."""
    for path in SHARED_FILES.glob(f"*hflow-{_pid_namespace()}-*"):
        owner, start = path.name.split("-")[2:4]
        state = read_stat(int(owner))
        if state and state[0] not in "ZX" and state[19] == start:
            continue
        with suppress(OSError):  # another guard removes it too
            if path.is_dir():
                for socket in path.iterdir():
                    socket.unlink()
                path.rmdir()
            else:
                path.unlink()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even if it is stopped then."""
    _die_with(os.getppid())


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _continue_with_end_of(parent: int) -> None:
    """Let the kernel continue this process when its parent ends, should it be stopped then."""
    if os.getppid() == parent:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _close_files() -> None:
    """Close all files except the standard ones, so that no other process waits for their end."""
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
