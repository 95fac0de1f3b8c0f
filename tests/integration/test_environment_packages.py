"""Environments of real packages, in virtual environments that pip makes: minutes, and a package index."""

import asyncio
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from runs import run

from hflow.base.errors import ConfigError, EpisodeError
from hflow.environments.client import close_hosts, host_of, open_environment
from hflow.environments.interpreters import find_interpreter
from hflow.environments.mcp.tools import open_tools
from hflow.environments.openenv.adapter import openenv
from hflow.environments.verifiers.adapter import verifiers
from hflow.testing import ScriptedEngine

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RECIPE = "recipes/environments/frozen_lake.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cache")
    (directory / "gymnasium.txt").write_text("gymnasium[classic_control]==1.4.0\n")
    (directory / "verifiers.txt").write_text("verifiers==0.2.1\nreasoning-gym==0.1.25\n")
    (directory / "mcp.txt").write_text("mcp-server-time==2026.10.19\nmcp-server-git==2026.10.19\n")
    (directory / "openenv.txt").write_text("openenv==0.10.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFLOW_CACHE", str(directory))
        yield directory
    close_hosts()


def test_gymnasium_is_installed_once_and_played(cache: Path, tmp_path: Path):
    options = [f"nodes.{node}.requirements={cache / 'gymnasium.txt'}" for node in ("gymnasium", "eval_game")]
    summary = run(RECIPE, tmp_path, "steps=1", "workers=inproc", *options)
    assert summary.sample_ends["trained"] == 16 * 8
    (made,) = (path for path in (cache / "environments").iterdir() if path.is_dir())
    assert (made / "complete").exists()


@pytest.mark.parametrize(
    ("id", "reply", "observation"),
    [
        ("Taxi-v4", "go 0", r"^\d+$"),
        ("FrozenLake-v1", "1", r"\[F\]"),
        ("CartPole-v1", "1", r"^\[ ?-?0\.\d+, "),
        ("Pendulum-v1", "I push by 0.5", r"^\["),
        ("Blackjack-v1", "stop: 0", r"^\d+, \d+, [01]$"),
    ],
)
def test_spaces_of_gymnasium_become_words(cache: Path, id: str, reply: str, observation: str):
    settings = {"id": id, "requirements": str(cache / "gymnasium.txt")}

    async def main() -> tuple[Any, Any]:
        game = await open_environment("gymnasium", settings, {"seed": 1, "instructions": ""})
        turn, silence = await game.call("step", reply=reply), await game.call("step", reply="no")
        await game.close()
        return turn, silence

    turn, silence = asyncio.run(main())
    assert turn["is_action"]
    assert not silence["is_action"]
    assert silence["message"].startswith("Reply with ")
    assert re.search(observation, turn["message"])


def test_verifiers_gives_rows_scores_and_reasons(cache: Path):
    settings = {
        "env": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
        "args": '{"gym": "gcd", "num_train_examples": 4, "num_eval_examples": 2}',
        "requirements": str(cache / "verifiers.txt"),
    }
    host = host_of("verifiers", settings)
    train, heldout = (host.request("rows", split=split, size=-1) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (4, 2)
    assert "777, 912" in train[0]["question"]

    async def play(reply: str, example: dict[str, Any]) -> Any:
        return await verifiers(ScriptedEngine([reply]), example, **settings)

    (talk,), reward, metrics = asyncio.run(play("<answer>3</answer>", train[0]))
    assert (talk.completion, reward) == ("<answer>3</answer>", 1.0)
    assert metrics == {"check_answer_reward_func": 1.0, "format_reward_func": 1.0}
    with pytest.raises(EpisodeError, match="Error calling reward function check_answer_reward_func"):
        asyncio.run(play("<answer>3</answer>", {**train[0], "answer": "no number"}))


def test_public_mcp_servers_are_installed_and_called(cache: Path, tmp_path: Path):
    subprocess.run(["git", "init", "-q", "-b", "main", str(tmp_path)], check=True)
    (tmp_path / "new.txt").write_text("new")
    servers = ["mcp-server-time --local-timezone UTC", f"mcp-server-git --repository {tmp_path}"]

    async def main() -> tuple[Any, str, str]:
        tools = await open_tools(servers, requirements=str(cache / "mcp.txt"))
        noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        converted = json.loads(await tools["convert_time"](**noon))
        before = await tools["git_status"](repo_path=str(tmp_path))
        await tools["git_add"](repo_path=str(tmp_path), files=["new.txt"])
        after = await tools["git_status"](repo_path=str(tmp_path))
        await tools.close()
        return converted, before, after

    converted, before, after = asyncio.run(main())
    assert "T21:00:00" in converted["target"]["datetime"]
    assert "Untracked files" in before
    assert "Changes to be committed" in after


PONG = "pong.server.app:app"
"""The environment that `openenv init pong` writes: it echoes a text, and rewards long ones."""


@pytest.fixture(scope="module")
def openenv_python(cache: Path) -> str:
    """An interpreter that has openenv and the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFLOW_CACHE", str(cache))
        python = find_interpreter(None, str(cache / "openenv.txt"))
    subprocess.run([Path(python).with_name("openenv"), "init", "pong"], cwd=cache, check=True)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "./pong"]
    subprocess.run([python, *install], cwd=cache, check=True)
    return python


@pytest.fixture(scope="module")
def pong(openenv_python: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the environment, which has one session at a time, and its URL."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen([openenv_python, "-m", "pong.server.app", "--port", str(port)])
    with server:
        while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", server
        server.kill()


def test_openenv_gives_the_rewards_of_its_own_client(
    openenv_python: str, pong: tuple[str, subprocess.Popen[bytes]]
):
    replies, (url, server) = ["hi", "a long sentence", ""], pong
    code = (
        "import json, sys\n"
        "from pong import PongAction, PongEnv\n"
        "with PongEnv(base_url=sys.argv[1]).sync() as env:\n"
        "    env.reset(seed=1)\n"
        "    replies = json.loads(sys.argv[2])\n"
        "    print(json.dumps([env.step(PongAction(message=reply)).reward for reply in replies]))\n"
    )
    own = subprocess.run(
        [openenv_python, "-c", code, url, json.dumps(replies)], capture_output=True, text=True, check=True
    )
    rewards = json.loads(own.stdout)
    assert rewards == [0.2, 1.0, 0.0]
    for place in ({"module": PONG}, {"url": url}, {"url": url}):
        settings: dict[str, Any] = {"python": openenv_python, "max_steps": 3, **place}
        talk, reward, num_steps, num_unreadable = asyncio.run(openenv(ScriptedEngine(replies), 1, **settings))
        assert (reward, num_steps, num_unreadable) == (sum(rewards), 3, 0)
        assert [message["content"] for message in talk.messages if message["role"] == "user"] == [
            "Your reply is the message.\nechoed_message: Pong environment ready!\nmessage_length: 0",
            "echoed_message: hi\nmessage_length: 2",
            "echoed_message: a long sentence\nmessage_length: 15",
        ]

    async def lose() -> None:
        settings = {"python": openenv_python, "url": url}
        play = await open_environment("openenv", settings, {"seed": 1, "instructions": ""})
        with pytest.raises(EpisodeError, match="CAPACITY_REACHED"):
            await open_environment("openenv", settings, {"seed": 1, "instructions": ""})
        assert (await play.call("step", reply="hi"))["reward"] == 0.2
        server.kill()
        server.wait()
        with pytest.raises(EpisodeError, match="step of the openenv environment failed: Connection"):
            await play.call("step", reply="hi")
        await play.close()

    asyncio.run(lose())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "set url to a server of OpenEnv.* or module to the application"),
        ({"url": "http://127.0.0.1:9"}, "ConnectionError: http://127.0.0.1:9 cannot be reached"),
        ({"module": "no_package.app:app"}, "no_package.app:app cannot be imported: No module named"),
        ({"module": "pong.server.app:no"}, "pong.server.app has no 'no'; write MODULE:NAME"),
        ({"module": PONG, "render": "length"}, "an observation has .*echoed_message, message_length"),
        ({"module": PONG, "render": "message_length"}, "an observation became int and no text"),
    ],
)
def test_openenv_refuses_what_cannot_be_played(openenv_python: str, settings: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        host_of("openenv", {"python": openenv_python, **settings}).start()


@pytest.mark.parametrize(
    ("field", "reply", "action"),
    [
        ({"type": "string"}, "a text", {"move": "a text"}),
        ({"type": "integer"}, "first 3, then -4", {"move": -4}),
        ({"type": "integer"}, "none", None),
        ({"$ref": "#/$defs/Move"}, "UP? no, down.", {"move": "DOWN"}),
        ({"$ref": "#/$defs/Move"}, "upwards", None),
        ({"type": "array"}, 'I say {"a": 1}, no, {"move": [{"x": 1}]}.', {"move": [{"x": 1}]}),
        ({"type": "array"}, "{move", None),
    ],
)
def test_the_action_of_openenv_is_in_the_reply(field: dict[str, Any], reply: str, action: Any):
    from hflow.environments.openenv.remote import _Actions

    properties = {"move": field, "metadata": {"type": "object"}}
    schema = {"properties": properties, "$defs": {"Move": {"enum": ["UP", "DOWN"], "type": "string"}}}
    assert _Actions(schema, None).read(reply) == action
