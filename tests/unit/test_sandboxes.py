"""Tools in processes of their own: limits, network, death, cancellation."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import sandboxed_tools

from hflow import sandbox
from hflow.base.errors import EpisodeError, RecipeError, RunError
from hflow.episodes.recorded_effects import RecordedEffects
from hflow.sandboxes import confinement
from hflow.sandboxes.process import provider
from hflow.sandboxes.process.provider import ProcessSandboxes
from hflow.sandboxes.providers import Sandboxes, SandboxProvider
from hflow.types.sandbox import SANDBOX_PROVIDERS, Sandbox, Tool, ToolFailed, sandbox_of

calculator = sandbox(timeout=5.0, memory_mb=256)(sandboxed_tools.calculator)
endless = sandbox(timeout=0.3)(sandboxed_tools.endless)
hungry = sandbox(timeout=5.0, memory_mb=64)(sandboxed_tools.hungry)
dying = sandbox()(sandboxed_tools.dying)
patient = sandbox()(sandboxed_tools.patient)
unsendable = sandbox()(sandboxed_tools.unsendable)
fetch = sandbox(timeout=5.0)(sandboxed_tools.fetch)
sleep = sandbox(timeout=600.0)(sandboxed_tools.sleep)
execute = sandbox(timeout=20.0)(sandboxed_tools.execute)
execute_more = sandbox(timeout=20.0, processes=True)(sandboxed_tools.execute_more)
busy = sandbox(timeout=0.4)(sandboxed_tools.busy)


def limits_of(tool: Callable[..., Any]) -> Sandbox:
    limits = sandbox_of(tool)
    assert limits is not None
    return limits


async def call(sandboxes: SandboxProvider, tool: Callable[..., Any], **arguments: Any) -> Any:
    return await sandboxes.run(tool, limits_of(tool), arguments)


@cache
def shared_sandboxes() -> ProcessSandboxes:
    made = ProcessSandboxes(1)
    atexit.register(made.close)
    return made


def run(work: Callable[[SandboxProvider], Awaitable[Any]]) -> Any:
    """Call tools in the servers that all tests share."""

    async def main() -> Any:
        async with asyncio.timeout(60):
            return await work(shared_sandboxes())

    return asyncio.run(main())


def run_alone(work: Callable[[SandboxProvider], Awaitable[Any]]) -> Any:
    """Call tools in new servers."""

    async def main() -> Any:
        sandboxes = ProcessSandboxes(1)
        try:
            async with asyncio.timeout(60):
                return await work(sandboxes)
        finally:
            sandboxes.close()

    return asyncio.run(main())


def failure(tool: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ToolFailed) as caught:
        run(lambda sandboxes: call(sandboxes, tool, **arguments))
    return str(caught.value)


def test_results_come_back() -> None:
    async def work(sandboxes: SandboxProvider) -> list[Any]:
        calls = [call(sandboxes, calculator, expression=f"{i} * 2") for i in range(20)]
        return [*await asyncio.gather(*calls), await call(sandboxes, patient, seconds=0.0)]

    *doubled, pid = run(work)
    assert doubled == [str(2 * i) for i in range(20)]
    assert pid != os.getpid()


def test_an_error_of_a_tool_is_reported_in_one_line() -> None:
    assert failure(calculator, expression="1 / 0") == "ZeroDivisionError: division by zero"
    assert failure(calculator, expression="__import__('os')").startswith("NameError: ")
    assert failure(calculator, other="1").startswith("TypeError: calculator() got an unexpected keyword")
    with pytest.raises(TypeError, match="what unsendable returned cannot be recorded"):
        run(lambda sandboxes: call(sandboxes, unsendable))


def test_limits_hold_and_the_next_call_works() -> None:
    async def work(sandboxes: SandboxProvider) -> int:
        with pytest.raises(ToolFailed, match=r"took longer than its timeout of 0.3 s"):
            await call(sandboxes, endless)
        with pytest.raises(ToolFailed, match="its process died"):
            await call(sandboxes, dying)
        with pytest.raises(ToolFailed, match="its process died"):
            await call(sandboxes, dying)
        with pytest.raises(ToolFailed, match="MemoryError"):
            await call(sandboxes, hungry, mib=100)
        return int(await call(sandboxes, hungry, mib=10))

    assert run(work) == 10 * 2**20


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = failure(fetch, port=server.getsockname()[1])
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert said.startswith("URLError: ")


def calls_in_progress() -> list[psutil.Process]:
    """Return the processes of calls, which work in directories of their own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "hflow-sandbox-" in process.cwd():
                found.append(process)
    return found


def test_a_cancelled_call_ends_its_process() -> None:
    async def work(sandboxes: SandboxProvider) -> None:
        task = asyncio.ensure_future(call(sandboxes, sleep))
        while not calls_in_progress():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while calls_in_progress():
            await asyncio.sleep(0.01)
        with pytest.raises(ToolFailed, match="TypeError"):  # there is room for another call
            await call(sandboxes, sleep, unknown=1)

    run(work)


NEEDS_NO_NETWORK = {
    "tcp": "import socket; socket.socket(socket.AF_INET)",
    "name": "import socket; socket.getaddrinfo('localhost', 80)[9]",
    "raw": "import socket; socket.socket(socket.AF_PACKET)",
    "unix": "import socket; socket.socket(socket.AF_UNIX)",
    "datagrams": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "ctypes": "import ctypes, os; ctypes.CDLL(None).socket(2, 1, 0) >= 0 or os.open('/refused', 0)",
}
STARTS_PROCESSES = {
    "fork": "import os; os.fork()",
    "vfork": "import subprocess; subprocess.run(['true'])",
    "shell": "import os; os.system('true') == 0 or os.open('/refused', 0)",
    "exec": "import os; os.execv('/bin/true', ['true'])",
}
HARMS = {
    "kill": "import os; os.kill({worker}, 0)",
    "ptrace": "import ctypes, os; ctypes.CDLL(None).ptrace(16, {worker}) >= 0 or os.open('/refused', 0)",
    "memory": "open('/proc/{worker}/mem', 'rb')",
    "environment": "open('/proc/{worker}/environ', 'rb')",
    "command": "open('/proc/{worker}/cmdline', 'rb')",
    "read": "open('{secret}')",
    "list": "import os; os.listdir('{directory}')",
    "write": "open('{secret}', 'w')",
    "truncate": "import os; os.truncate('{secret}', 0)",
    "create": "open('{directory}/new', 'w')",
    "remove": "import os; os.unlink('{secret}')",
    "mode": "import os; os.chmod('{secret}', 0)",
    "code": "open('{code}', 'a')",
    "mount": "import ctypes, os; ctypes.CDLL(None).unshare(0x10000000) == 0 or os.open('/refused', 0)",
    "limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "queue": """
import ctypes, signal, struct
info = struct.pack("=iii116x", 0, 0, -1)  # as sigqueue does; signal 0 asks whether it may be sent
number = {{"x86_64": 129, "aarch64": 138}}[__import__("platform").machine()]
ctypes.CDLL(None).syscall(number, {worker}, 0, info) == 0 or open("/refused")
""",
    "owner": "import fcntl; fcntl.fcntl(open('x', 'w'), fcntl.F_SETOWN, {worker})",
    "times": "import os; os.utime('{secret}', (0, 0))",
    "observe": "import ctypes; ctypes.CDLL(None).inotify_init1(0) >= 0 or open('/refused')",
    "observe readable": "import fcntl, os; fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 2)",
    "lease": "import fcntl; fcntl.fcntl(open('{code}'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "hidden memory": "import os; os.memfd_create('x')",
    "many pipes": "import os; result = [os.pipe() for _ in range(1024)]",
    "other limits": "import resource; resource.prlimit({worker}, resource.RLIMIT_NOFILE, (8, 8))",
}


def test_model_written_code_can_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    monkeypatch.setenv("SECRET_KEY", "42")
    places = {"secret": secret, "directory": tmp_path, "worker": os.getpid(), "code": os.__file__}
    cases = NEEDS_NO_NETWORK | STARTS_PROCESSES | HARMS

    async def outcomes(sandboxes: SandboxProvider) -> dict[str, str]:
        said = {}
        for name, code in cases.items():
            try:
                said[name] = f"did it: {await call(sandboxes, execute, code=code.format(**places))}"
            except ToolFailed as error:
                said[name] = str(error)
        environment = await call(sandboxes, execute, code="import os; result = dict(os.environ)")
        assert not any("SECRET" in name or value == "42" for name, value in environment.items())
        raw = "result = 'SECRET_KEY' in open('/proc/self/environ').read()"
        assert await call(sandboxes, execute, code=raw) is False
        return said

    said = run_alone(outcomes)
    assert secret.stat().st_mtime > 0
    refusals = (
        "OSError: [Errno 24]",
        "PermissionError: ",
        "FileNotFoundError: ",
        "gaierror: ",
        "ValueError: not allowed to raise",
    )
    assert {name: text for name, text in said.items() if not text.startswith(refusals)} == {}
    assert secret.read_text() == "42"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


ON_KERNEL = """
import os, signal, sys
from hflow.sandboxes import confinement
landlock_version = confinement._landlock_version
confinement._landlock_version = lambda: min(landlock_version(), int(sys.argv[2]))
confinement.confine(1024, os.getcwd(), [sys.argv[3]], processes=True, landlock=True)
for flags in (os.O_RDONLY, os.O_ACCMODE):
    try:
        os.open(sys.argv[3], flags | os.O_TRUNC)
        print("emptied")
    except PermissionError:
        print("refused")
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    signal.alarm(2)
    signal.pause()
for process in (int(sys.argv[1]), child):
    try:
        os.kill(process, signal.SIGKILL if process == child else 0)
        print("sent")
    except PermissionError:
        print("refused")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("version", "to_child"), [(1, "refused"), (5, "refused"), (6, "sent")])
def test_no_kernel_lets_a_call_signal_or_empty_what_is_not_its_own(
    tmp_path: Path, version: int, to_child: str
) -> None:
    if version > confinement._landlock_version():
        pytest.skip(f"the kernel's Landlock is older than version {version}")
    readable, scratch = tmp_path / "readable", tmp_path / "scratch"
    readable.write_text("42")
    scratch.mkdir()
    command = [sys.executable, "-u", "-c", ON_KERNEL, str(os.getpid()), str(version), str(readable)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, check=False)
    assert done.stdout.split() == ["refused", "refused", "refused", to_child], done.stderr
    assert done.returncode == -signal.SIGKILL
    assert readable.read_text() == "42"


def test_a_call_has_a_directory_of_its_own() -> None:
    code = "import os; open('x', 'w').write('y'); result = [os.getcwd(), os.listdir('.'), open('x').read()]"

    async def work(sandboxes: SandboxProvider) -> list[Any]:
        return [await call(sandboxes, execute, code=code) for _ in range(2)]

    (first, *_), (second, files, text) = run(work)
    assert first != second
    assert (files, text) == (["x"], "y")
    assert not Path(first).exists()


def test_a_call_finds_nothing_that_an_earlier_one_left() -> None:
    async def work(sandboxes: SandboxProvider) -> Any:
        await call(sandboxes, execute, code="import builtins; builtins.sum = execute = lambda *_: 7")
        return await call(sandboxes, execute, code="result = sum([1, 2])")

    assert run(work) == 3


@pytest.mark.parametrize("forged", ["[1, 2, 3]", "[" * 5_000, "no json", "\\x80\\x05N."])
def test_a_forged_reply_is_only_text(forged: str) -> None:
    code = f"import os; os.write(3, b'{forged}'); os._exit(0)"
    assert failure(execute, code=code) == "its process wrote no valid reply"


DEEP = """
import os
for _ in range(1500):
    os.mkdir("d" * 200, 0o300)
    os.chdir("d" * 200)
result = os.getcwd()
"""


def test_what_a_call_leaves_harms_no_other_call() -> None:
    async def work(sandboxes: SandboxProvider) -> None:
        for _ in range(2):
            left = call(sandboxes, execute, code=DEEP.replace("os.getcwd()", "0"))
            doubled = [call(sandboxes, execute, code=f"result = 2 * {i}") for i in range(3)]
            assert await asyncio.gather(left, *doubled) == [0, 0, 2, 4]
        where = await call(sandboxes, execute, code=DEEP.replace("1500", "1"))
        while Path(where).parent.exists():
            await asyncio.sleep(0.02)

    run(work)


@pytest.mark.long
def test_a_call_whose_server_was_killed_is_repeated_once(tmp_path: Path) -> None:
    async def work(sandboxes: SandboxProvider, kills: int) -> Any:
        task = asyncio.create_task(call(sandboxes, patient, seconds=1.0))
        for _ in range(kills):
            while not (running := calls_in_progress()):
                await asyncio.sleep(0.01)
            server = running[0].parent()
            assert server is not None
            server.kill()
            psutil.wait_procs([server, *running], timeout=10)
        return await task

    assert run_alone(lambda sandboxes: work(sandboxes, 1)) > 0
    with pytest.raises(EpisodeError, match="the sandbox of patient failed twice, so the call has no result"):
        run_alone(lambda sandboxes: work(sandboxes, 2))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process was killed"),  # as the kernel does without memory
        (
            "import errno\ntry: raise OSError(errno.ENOSPC, 'disk full')\nexcept OSError: exit(1)",
            "OSError: .*disk full",
        ),
    ],
)
def test_a_call_that_the_machine_ended_has_no_result(code: str, reason: str) -> None:
    with pytest.raises(EpisodeError, match=f"failed twice, so the call has no result: {reason}"):
        run(lambda sandboxes: call(sandboxes, execute, code=code))


def test_waiting_for_a_processor_is_not_the_time_of_a_call() -> None:
    async def work(sandboxes: SandboxProvider) -> bool:
        await call(sandboxes, busy, seconds=0.0)
        loops = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            for _ in range(4)
        ]
        try:
            with pytest.raises(ToolFailed, match="took longer than its timeout"):
                await call(sandboxes, busy, seconds=60.0)
            return bool(await call(sandboxes, busy, seconds=0.25))
        finally:
            for process in loops:
                process.kill()
                process.wait()

    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        assert run_alone(work)
    finally:
        os.sched_setaffinity(0, processors)


def test_processes_that_a_call_starts_end_with_it() -> None:
    code = """
import subprocess, sys
subprocess.run(["true"], check=True)
command = [sys.executable, "-c", "import time; time.sleep(600)"]
left = [subprocess.Popen(command, start_new_session=own).pid for own in (False, True)]
try:
    subprocess.run([sys.executable, "-c", "import socket; socket.socket()"], check=True)
except subprocess.CalledProcessError:
    result = left
"""

    async def work(sandboxes: SandboxProvider) -> None:
        left = await call(sandboxes, execute_more, code=code)
        assert len(left) == 2
        while any(psutil.pid_exists(pid) for pid in left):
            await asyncio.sleep(0.02)

    run(work)


def test_readable_files_can_be_read_only(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("abc")

    @sandbox(readable=[str(words)])
    def first_word(path: str, mode: str) -> str:
        with open(path, mode) as file:
            return str(file.read())

    async def work(sandboxes: SandboxProvider) -> str:
        with pytest.raises(ToolFailed, match="PermissionError"):
            await call(sandboxes, first_word, path=str(words), mode="r+")
        return str(await call(sandboxes, first_word, path=str(words), mode="r"))

    assert run(work) == "abc"


def test_a_kernel_that_cannot_protect_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "missing_protection", lambda: "this kernel has no Landlock")
    with pytest.raises(RunError, match=r"the sandbox of calculator .* no Landlock.*without_landlock=True"):
        run_alone(lambda _: Sandboxes(1).run(calculator, limits_of(calculator), {"expression": "1"}))


class ThreadSandboxes:
    """A provider that confines nothing."""

    made: ClassVar[list[ThreadSandboxes]] = []

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.is_closed = False
        self.made.append(self)

    @staticmethod
    def find_problem(limits: Sandbox) -> str | None:
        return "no threads are left" if limits.image else None

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        if limits.timeout < 1:
            raise ToolFailed("too slow")
        return await asyncio.to_thread(tool, **arguments)

    def close(self) -> None:
        self.is_closed = True


def test_each_tool_is_run_by_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SANDBOX_PROVIDERS.own, "thread", f"{__name__}:ThreadSandboxes")
    monkeypatch.setattr(ThreadSandboxes, "made", [])

    @sandbox(provider="thread")
    def own_pid() -> int:
        return os.getpid()

    @sandbox(provider="thread", timeout=0.5)
    def slow() -> None: ...

    async def work() -> list[Any]:
        owner = Sandboxes(3)
        effects = RecordedEffects(owner)
        found = [await effects.call("actor", tool, {}, str) for tool in (own_pid, slow, own_pid)]
        found.append(await effects.call("actor", calculator, {"expression": "6 * 7"}, str))
        owner.close()
        return found

    assert asyncio.run(work()) == [os.getpid(), "too slow", os.getpid(), "42"]
    (made,) = ThreadSandboxes.made
    assert (made.num_calls, made.is_closed) == (3, True)
    absent = Sandbox(timeout=1.0, memory_mb=64, provider="thread", image="x")
    with pytest.raises(RunError, match="the sandbox of own_pid cannot be made: no threads are left"):
        asyncio.run(Sandboxes(1).run(own_pid, absent, {}))


def test_a_provider_that_does_not_exist_is_refused_where_it_is_named() -> None:
    with pytest.raises(RecipeError, match=r"there is no provider 'proces'; did you mean 'process'"):
        sandbox(provider="proces")
