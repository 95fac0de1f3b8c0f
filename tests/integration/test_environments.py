"""Environments in another interpreter: the protocol, failures, and the end of all processes.

The environment is that of the package `tests/kits/extension/hflow_dice`, which needs no other package.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from episode_kit import new_effects
from runs import run

from hflow import nodes
from hflow.base.errors import ConfigError, EpisodeError, PlanError
from hflow.environments.client import RemoteEnvironment, close_hosts, host_of, open_environment
from hflow.environments.host import load_name
from hflow.environments.interface import ENVIRONMENTS

EXTENSION = Path(__file__).parents[1] / "kits" / "extension"
RECIPE = """
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset("train", prompt=Text)
actor = Model("actor", trainable=True)
recipe = Recipe(
    "dice",
    data,
    [
        use(nodes.dice, actor, group=4),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
OPTIONS = (
    "cluster=cpu-1x1",
    "workers=inproc",
    "steps=1",
    "batch=4",
    "+model@models.actor=tiny-qwen2",
    "data.train.generator=addition",
    "nodes.dice.max_tokens=4",
)


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXTENSION))
    ENVIRONMENTS.__dict__.pop("_added", None)
    yield
    close_hosts()
    ENVIRONMENTS.__dict__.pop("_added", None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "dice.py"
    file.write_text(RECIPE)
    return file


def opened(seed: int = 1, timeout: float | None = None, **settings: Any) -> Coroutine[Any, Any, Any]:
    return open_environment("dice", settings, {"seed": seed}, timeout)


def play(body: Callable[[RemoteEnvironment], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """Return the result of a coroutine that uses an environment."""

    async def main() -> Any:
        die = await opened(**settings)
        try:
            return await body(die)
        finally:
            await die.close()

    return asyncio.run(main())


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]
        if not alive:
            return
        time.sleep(0.05)
    raise AssertionError(f"still alive: {alive}")


def is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize("one_process", [False, True])
def test_calls_return_results_whatever_the_environment_prints(one_process: bool):
    async def rolls(die: RemoteEnvironment) -> list[int]:
        return [await die.call("roll"), await die.call("roll_later")]

    first = play(rolls, one_process=one_process)
    assert first == play(rolls, one_process=one_process)
    assert first != play(rolls, one_process=one_process, seed=5)
    assert host_of("dice", {"one_process": one_process}).request("rows", size=3) == [0, 1, 2]


@pytest.mark.parametrize("one_process", [False, True])
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fail", "fail of the dice environment failed: RuntimeError: the die rolled off the table"),
        ("no_json", "TypeError: Object of type object is not JSON serializable"),
        ("spin", "AttributeError"),
    ],
)
def test_a_failure_is_the_episodes_and_leaves_the_environment_usable(
    method: str, reason: str, one_process: bool
):
    async def fail(die: RemoteEnvironment) -> Any:
        with pytest.raises(EpisodeError, match=reason):
            await die.call(method)
        return await die.call("roll")

    assert play(fail, one_process=one_process) in range(1, 7)


def test_a_call_that_takes_too_long_ends_its_process_and_no_other():
    async def main() -> Any:
        slow, other = await asyncio.gather(opened(timeout=0.3), opened())
        child, own, _ = await slow.call("processes")
        with pytest.raises(EpisodeError, match=r"hang took longer than step_timeout=0\.3 s"):
            await slow.call("hang")
        await asyncio.to_thread(wait_until_gone, child, own)
        return await other.call("roll")

    assert asyncio.run(main()) in range(1, 7)


def test_a_process_that_dies_is_named_with_its_signal_and_the_next_episode_begins():
    async def die_once(die: RemoteEnvironment) -> None:
        message = "the process of the dice environment was killed by SIGKILL during kill"
        with pytest.raises(EpisodeError, match=message):
            await die.call("kill")

    play(die_once)
    assert play(lambda die: die.call("roll")) in range(1, 7)


def test_a_server_that_dies_fails_its_episodes_and_is_started_again():
    async def lose(die: RemoteEnvironment) -> None:
        child, own, server = await die.call("processes")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="the process of the dice environment has ended during hang"):
            await die.call("hang")
        await asyncio.to_thread(wait_until_gone, child, own, server)

    play(lose)
    assert play(lambda die: die.call("roll")) in range(1, 7)


def test_a_closed_connection_ends_what_the_environment_started():
    pids = play(lambda die: die.call("processes"))
    wait_until_gone(*pids[:2])


def test_nothing_outlives_a_client_that_is_killed():
    code = (
        "import asyncio, json, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from hflow.environments.client import open_environment\n"
        "async def main():\n"
        "    die = await open_environment('dice', {}, {'seed': 1})\n"
        "    print(json.dumps(await die.call('processes')), flush=True)\n"
        "    await die.call('hang')\n"
        "asyncio.run(main())"
    )
    client = subprocess.Popen([sys.executable, "-c", code, str(EXTENSION)], stdout=subprocess.PIPE)
    with client:
        assert client.stdout is not None
        pids = json.loads(client.stdout.readline())
        client.kill()
    wait_until_gone(*pids)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sides": -1}, "ValueError: a die has no -1 sides and no second line"),
        (
            {"sides": 0},
            "has no module 'a_package_that_is_missing'; run .* -m pip install dice, or set python=",
        ),
        ({"python": "/no/python"}, "python is '/no/python', but no such program can be run"),
        ({"python": "/bin/true"}, "/bin/true ended with exit code 0; it printed nothing"),
        ({"sides": 1}, r"was killed by SIGKILL; its last lines: .*a die with one side \| rolls away$"),
        (
            {"sides": 2, "start_timeout": 0.5},
            r"had not loaded it after 0\.5 s; raise start_timeout if it only needs more time; its last lines|"
            r"had not loaded it after 0\.5 s; .*; it printed nothing",
        ),
        ({"start_timeout": 0}, "start_timeout is 0; set it to seconds"),
        ({"requirements": "no.txt"}, "requirements is 'no.txt', which cannot be read: No such file"),
    ],
)
def test_an_environment_that_cannot_start_says_why(settings: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=f"the dice environment cannot start: {reason}|{reason}"):
        host_of("dice", settings).start()


def test_names_of_files_and_modules_are_loaded_in_the_server(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def roll():\n    return 6\n")
    assert load_name(f"{file}:roll")() == 6
    assert load_name(f"{file}:roll") is load_name(f"{file}:roll")
    assert load_name("json:loads") is json.loads
    for place, reason in [
        ("json:lods", "json has no 'lods'; write MODULE:NAME or FILE.py:NAME"),
        ("no_package.app:app", "no_package.app:app cannot be imported: No module named 'no_package'"),
        (f"{tmp_path}/no.py:roll", "no.py:roll cannot be imported: .*No such file"),
    ]:
        with pytest.raises(ValueError, match=reason):
            load_name(place)


def test_an_image_needs_docker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    reason = "the openenv environment cannot start: .*image needs the command docker, which is not installed"
    with pytest.raises(ConfigError, match=reason):
        host_of("openenv", {"image": "mine:1"}).start()


def test_another_interpreter_does_not_see_the_variables_of_this_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "a/path")
    other = os.path.realpath(sys.executable)
    assert other != sys.executable
    assert "PYTHONPATH" not in play(lambda die: die.call("variables"), python=other)
    assert play(lambda die: die.call("variables"))["PYTHONPATH"] == "a/path"


def test_a_replayed_episode_makes_the_calls_again():
    async def attempt(journal: Any = None) -> Any:
        effects = new_effects(journal)
        arguments = {"adapter": "dice", "settings": {}, "arguments": {"seed": 3}}
        die = await effects.create_environment("actor", open_environment, arguments)
        rolls = [await effects.call("actor", die.call, {"method": "roll"}, str) for _ in range(3)]
        await effects.close_environments()
        return rolls, effects.journal

    async def main() -> None:
        rolls, journal = await attempt()
        assert await attempt(journal) == (rolls, journal)

    asyncio.run(main())


def test_a_recipe_uses_the_environment_of_a_package(recipe: Path, tmp_path: Path):
    assert "dice" in dir(nodes)
    summary = run(recipe, tmp_path, *OPTIONS)
    assert (summary.steps, dict(summary.sample_ends)) == (1, {"trained": 16})


def test_a_run_is_refused_before_its_models_load(recipe: Path, hflow: CommandLine):
    line = hflow.fails("run", recipe, *OPTIONS, "nodes.dice.sides=-1", f"out={recipe.parent}")
    assert line.startswith(f"dice ({recipe}")
    assert "the dice environment cannot start: ValueError: a die has no -1 sides" in line


def test_an_environment_that_is_unknown_is_refused():
    with pytest.raises(PlanError, match="unknown environment 'dise'; did you mean 'dice'"):
        host_of("dise", {})
    with pytest.raises(AttributeError, match="dise"):
        nodes.dise  # noqa: B018
