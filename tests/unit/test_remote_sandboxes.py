"""Tools in containers: a program named `docker` stands for Docker, and runs on this machine what it is given.

The program of a call, its confinement, its limits and its end are real. That Docker takes the options of
`docker run`, and holds them, is not tested here.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import sandboxed_tools as tools
from command_line import CommandLine

from hflow import rewards, sandbox
from hflow.base.errors import EpisodeError, RecipeError, RunError
from hflow.sandboxes.providers import Sandboxes
from hflow.sandboxes.remote import provider
from hflow.types.sandbox import Sandbox, ToolFailed

ROOT = Path(__file__).parents[2]
DOCKER = f"""#!{sys.executable} -I
import json, os, subprocess, sys
from pathlib import Path
command = sys.argv[sys.argv.index("python3") + 1:]
container = subprocess.Popen([{sys.executable!r}, "-I", *command], env={{"PATH": os.defpath}})
with open(Path(__file__).with_name("calls"), "a") as log:
    log.write(json.dumps([container.pid, *sys.argv[1:]]) + "\\n")
sys.exit(container.wait())
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which `docker` writes the arguments of its calls."""
    install(tmp_path, monkeypatch, DOCKER)
    return tmp_path / "calls"


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    path = directory / "docker"
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def call(tool: Callable[..., Any], arguments: dict[str, Any] | None = None, **limits: Any) -> Any:
    """Call a tool in a container."""

    async def main() -> Any:
        sandboxes = Sandboxes(2)
        given = Sandbox(**{"timeout": 20.0, "memory_mb": 256, "provider": "docker", **limits})
        return await sandboxes.run(tool, given, arguments or {})

    return asyncio.run(main())


def test_a_call_returns_its_result(docker: Path) -> None:
    limit = 3

    def limited(number: int) -> list[int]:
        """Use a variable of this test, which the container does not have."""
        return [min(number, limit), os.getppid()]

    first, parent = call(limited, {"number": 5}, image="mine:1")
    assert first == 3
    assert call(tools.patient, {"seconds": 0.0}) != os.getpid()
    one, two = [json.loads(line) for line in docker.read_text().splitlines()]
    assert parent == one[0]
    assert one[one.index("python3") - 1] == "mine:1"
    assert two[two.index("python3") - 1] == f"python:{provider.PYTHON}-slim"
    options = " ".join(map(str, one))
    assert "--rm --interactive" in options
    assert "--network none --memory 512m" in options


@pytest.mark.long
def test_failures_are_those_of_the_tool(docker: Path) -> None:
    cases: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
        (tools.calculator, {"expression": "1 / 0"}, {}, "ZeroDivisionError: division by zero"),
        (tools.dying, {}, {}, "its process died"),
        (tools.endless, {}, {"timeout": 0.3}, r"took longer than its timeout of 0.3 s"),
        (tools.hungry, {"mib": 400}, {}, "MemoryError"),
        (tools.execute, {"code": "import os; os.write(3, b'no json'); os._exit(0)"}, {}, "no valid reply"),
        (tools.execute, {"code": "import os; os.fork()"}, {}, "PermissionError"),
    ]
    for tool, arguments, limits, reason in cases:
        with pytest.raises(ToolFailed, match=reason):
            call(tool, arguments, **limits)
    with pytest.raises(TypeError, match="what unsendable returned cannot be recorded"):
        call(tools.unsendable)
    assert call(tools.execute, {"code": "import os\nif os.fork() == 0: os._exit(0)"}, processes=True) is None


@pytest.mark.long
def test_there_is_no_network_wherever_a_call_runs(docker: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ToolFailed, match="URLError"):
            call(tools.fetch, {"port": server.getsockname()[1]})
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def processes_of(docker: Path) -> list[psutil.Process]:
    """Return the processes of the last container."""
    with suppress(FileNotFoundError, psutil.NoSuchProcess, IndexError):
        container = psutil.Process(json.loads(docker.read_text().splitlines()[-1])[0])
        return [container, *container.children(recursive=True)]
    return []


def test_a_cancelled_call_ends_its_container(docker: Path) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(
            Sandboxes(1).run(tools.sleep, Sandbox(timeout=600.0, memory_mb=64, provider="docker"), {})
        )
        while len(running := processes_of(docker)) < 2:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert psutil.wait_procs(running, timeout=30)[1] == []

    asyncio.run(main())


KILLED = """
import asyncio, sandboxed_tools as tools
from hflow.sandboxes.providers import Sandboxes
from hflow.types.sandbox import Sandbox
asyncio.run(Sandboxes(1).run(tools.sleep, Sandbox(timeout=600.0, memory_mb=64, provider="docker"), {}))
"""


@pytest.mark.long
def test_a_killed_process_leaves_no_container(docker: Path) -> None:
    """The container is not told: it ends with its standard input."""
    kits = Path(tools.__file__).parent
    process = psutil.Popen([sys.executable, "-c", KILLED], cwd=kits)
    while len(running := processes_of(docker)) < 2:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert psutil.wait_procs(running, timeout=30)[1] == []


def test_failures_of_docker_refuse_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, reason in [
        (
            "echo 'docker: Cannot connect to the Docker daemon at unix:///docker.sock.' >&2; exit 125",
            "Docker refused: docker: Cannot connect to the Docker daemon",
        ),
        ("echo 'exec: \"python3\": executable file not found in $PATH' >&2; exit 127", "the image refused"),
        ("echo Segmentation fault; exit 139", "wrote no reply, but 'Segmentation fault'"),
    ]:
        install(tmp_path, monkeypatch, f"#!/bin/sh\n{program}\n")
        with pytest.raises(EpisodeError, match=rf"the sandbox of calculator \(docker\) failed: .*{reason}"):
            call(tools.calculator, {"expression": "1"})


def test_a_call_needs_the_python_that_compiled_it(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "PYTHON", "3.5")
    with pytest.raises(EpisodeError, match=r"its Python is 3\.\d+, and the tool was compiled by 3\.5"):
        call(tools.calculator, {"expression": "1"})


def test_what_cannot_be_is_refused(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"no files of this machine\. Remove readable="):
        call(tools.calculator, readable=("/etc",))
    with pytest.raises(RunError, match=r"has no images\. Remove image='x'"):
        call(tools.calculator, provider="process", image="x")
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(RunError, match="needs the command docker, which is not installed"):
        call(tools.calculator)
    with pytest.raises(RecipeError, match="image is 3; it must be"):
        sandbox(image=3)  # type: ignore[arg-type]


def test_a_tool_without_its_provider_is_refused_before_a_run(
    hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ROOT / "recipes" / "tool_agent.py"
    (tmp_path / "mine.yaml").write_text(own.with_suffix(".yaml").read_text())
    text = own.read_text()
    changed = text.replace("@sandbox(timeout=2.0, memory_mb=128)", "@sandbox(provider='docker')")
    assert changed != text
    (tmp_path / "mine.py").write_text(changed)
    monkeypatch.setenv("PATH", os.defpath)
    options = ("model@models.actor=tiny-qwen2", "nodes.agent.max_tokens=16", "workers=inproc")
    said = hflow.refused("run", str(tmp_path / "mine.py"), *options)
    assert "the sandbox of calculator (" in said
    assert "mine.py:20) cannot be made: provider='docker' needs the command docker" in said


def test_the_reward_for_programs_tests_them_in_containers(docker: Path) -> None:
    program = "print(int(input()) + 1)"
    tests = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]
    half = rewards.code(program, tests, score="fraction", provider="docker", image="own:3", memory_mb=256)
    assert asyncio.run(half) == 0.5
    calls = [json.loads(line) for line in docker.read_text().splitlines()]
    assert len(calls) == 2
    assert all("own:3" in arguments for arguments in calls)


PROGRAMS = """
from hflow import Dataset, Json, Model, Recipe, Text, nodes, rewards, use

actor = Model("actor", trainable=True)
recipe = Recipe(
    "mine",
    Dataset("train", prompt=Text, tests=Json),
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=16),
        use(rewards.code, returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor),
    ],
)
"""


def test_programs_without_their_provider_are_refused_before_a_run(
    hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PROGRAMS)
    monkeypatch.setenv("PATH", os.defpath)
    models = ("model@models.actor=tiny-qwen2", "models.actor.path=hflow:addition", "workers=inproc")
    options = (str(tmp_path / "mine.py"), *models, "data.train.path=rows.jsonl")
    said = hflow.refused("check", *options, "nodes.code.provider=dokcer")
    assert "code: there is no provider 'dokcer'; did you mean 'docker'" in said
    said = hflow.refused("run", *options, "nodes.code.provider=docker")
    assert "the sandbox of code (" in said
    assert "cannot be made: provider='docker' needs the command docker" in said
