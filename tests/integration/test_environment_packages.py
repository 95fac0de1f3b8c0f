"""Environments of real packages, in virtual environments that pip makes: minutes, and a package index."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import run

from hflow.base.errors import EpisodeError
from hflow.environments.client import close_hosts, host_of, open_environment
from hflow.environments.mcp.tools import open_tools
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
