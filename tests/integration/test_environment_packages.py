"""Environments of real packages, in virtual environments that pip makes: minutes, and a package index."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from docker_stand_in import Docker, installed_docker
from endpoint_kit import serve
from episode_kit import chatml_tokenizer, check_tokens, episode, heard, new_effects, new_engine
from runs import run

from hflow.base.errors import ConfigError, EpisodeError
from hflow.environments.client import close_hosts, host_of, open_environment
from hflow.environments.interpreters import find_interpreter
from hflow.environments.mcp.tools import open_tools
from hflow.environments.openenv.adapter import openenv
from hflow.environments.verifiers.adapter import verifiers
from hflow.episodes.endpoint.server import EndpointServer
from hflow.testing import ScriptedEngine
from hflow.types import Endpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RECIPE = "recipes/environments/frozen_lake.py"
LETTERS = Path(__file__).parents[1] / "kits" / "letters.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cache")
    (directory / "gymnasium.txt").write_text("gymnasium[classic_control]==1.4.0\n")
    (directory / "verifiers.txt").write_text("verifiers==0.2.1\nreasoning-gym==0.1.25\n")
    (directory / "tasksets.txt").write_text("verifiers==0.4.0\nuv\n")
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


@pytest.fixture(scope="module")
def tasksets(cache: Path) -> Iterator[str]:
    """Return the interpreter that has verifiers 0.4 and the taskset `letters`."""
    python = find_interpreter(None, str(cache / "tasksets.txt"))
    (packages,) = (Path(python).parents[1] / "lib").glob("python*/site-packages")
    shutil.copy(LETTERS, packages)
    command = [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"]
    indexes = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    with pytest.MonkeyPatch.context() as patch:
        if indexes:  # uv, which starts harnesses, does not read pip's configuration
            patch.setenv("UV_INDEX", indexes)
            patch.setenv("UV_INDEX_STRATEGY", "unsafe-best-match")
        yield python


def test_verifiers_gives_rows_scores_and_reasons(cache: Path):
    settings = {
        "env": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
        "args": '{"gym": "gcd", "num_train_examples": 4, "num_eval_examples": 2}',
        "requirements": str(cache / "verifiers.txt"),
    }
    host = host_of("verifiers", settings)
    train, heldout = (host.request("rows", split=split, size=-1, select={}) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (4, 2)
    assert "777, 912" in train[0]["question"]

    async def play(reply: str, example: dict[str, Any]) -> Any:
        return await verifiers(ScriptedEngine([reply]), example, **settings)

    (talk,), reward, metrics = asyncio.run(play("<answer>3</answer>", train[0]))
    assert (talk.completion, reward) == ("<answer>3</answer>", 1.0)
    assert metrics == {"check_answer_reward_func": 1.0, "format_reward_func": 1.0}
    with pytest.raises(EpisodeError, match="Error calling reward function check_answer_reward_func"):
        asyncio.run(play("<answer>3</answer>", {**train[0], "answer": "no number"}))


def test_the_evaluator_of_environments_gives_the_same_scores(cache: Path):
    """Both score the same replies. `evaluate_sync` uses the endpoint of an episode."""
    requirements = str(cache / "verifiers.txt")
    sizes = {"gym": "gcd", "num_train_examples": 1, "num_eval_examples": 20}
    settings = {
        "env": "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv",
        "args": json.dumps(sizes),
        "requirements": requirements,
    }
    rows = host_of("verifiers", settings).request("rows", split="heldout", size=-1, select={})
    script = (
        "import json, sys\n"
        "from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv\n"
        "from verifiers.types import ClientConfig\n"
        f"client = ClientConfig(api_base_url=sys.argv[1], api_key_var='EPISODE_KEY')\n"
        f"done = ReasoningGymEnv(**{sizes}).evaluate_sync(client=client, model=sys.argv[2],\n"
        "    num_examples=-1, rollouts_per_example=1)\n"
        "print(json.dumps({row['example_id']: row['reward'] for row in done['outputs']}))\n"
    )
    reply = "<answer>3</answer>"

    async def main() -> tuple[Any, Any]:
        async with ScriptedEngine([reply] * len(rows)).endpoint() as endpoint:
            command = [find_interpreter(None, requirements), "-c", script]
            printed = await output([*command, endpoint.base_url, endpoint.model], endpoint)
        played = {
            str(row["example_id"]): (await verifiers(ScriptedEngine([reply]), row, **settings))[1]
            for row in rows
        }
        return json.loads(printed.splitlines()[-1]), played

    evaluated, played = asyncio.run(main())
    assert evaluated == played
    assert len(set(played.values())) > 1


async def output(command: list[str], endpoint: Endpoint) -> str:
    """Run a command that has the key of an endpoint, and return its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "EPISODE_KEY": endpoint.api_key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    return out.decode()


async def evaluate(python: str, directory: Path, endpoint: Endpoint, *options: str) -> list[Any]:
    """Run verifiers' own evaluator on `letters`, and return its traces."""
    command = [str(Path(python).with_name("vf-eval")), "letters", "-m", endpoint.model]
    command += ["--env.agent.runtime.type", "subprocess", "--output-dir", str(directory)]
    command += ["--client.base-url", endpoint.base_url, "--client.api-key-var", "EPISODE_KEY", *options]
    await output(command, endpoint)
    (file,) = directory.rglob("traces.jsonl")
    return [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]


def test_a_taskset_gives_rows_scores_and_reasons(tasksets: str):
    settings = {"env": "letters", "python": tasksets}
    host = host_of("verifiers", settings)
    rows = host.request("rows", split="train", size=2, select={"include": {"idx": ["1:"]}})
    assert [row["letter"] for row in rows] == ["b", "c"]
    with pytest.raises(EpisodeError, match="tasksets have no splits"):
        host.request("rows", split="heldout", size=-1, select={})
    with pytest.raises(EpisodeError, match=r"arguments\.select\.includ: Extra inputs are not permitted"):
        host.request("rows", split="train", size=-1, select={"includ": {}})

    async def play(row: dict[str, Any]) -> Any:
        return await verifiers(ScriptedEngine(["no", "ab"]), row, **settings)

    (talk,), reward, metrics = asyncio.run(play(rows[0]))
    assert (talk.num_turns, talk.completion, reward) == (2, "ab", 1.0)
    assert metrics == {"share": 0.5, "length": 2.0}
    with pytest.raises(EpisodeError, match=r"failed: TaskError: .*no letter"):
        asyncio.run(play({**rows[0], "letter": "!"}))


@pytest.mark.parametrize(
    ("env", "args", "problem"),
    [
        ("leters", {}, "taskset 'leters' not found"),
        ("letters", {"taskset": {"leters": "ab"}}, r"args\.taskset\.leters: Extra inputs are not permitted"),
        ("letters", {"taskset": {"id": "x"}}, r"args\.taskset must be an object without id"),
        ("letters", {"agent": {"harness": {"id": "mini_swe_agent"}}}, "needs a container runtime"),
    ],
)
def test_a_taskset_that_cannot_be_loaded(tasksets: str, env: str, args: dict[str, Any], problem: str):
    settings = {"env": env, "args": json.dumps(args), "python": tasksets}
    with pytest.raises(ConfigError, match=problem):
        host_of("verifiers", settings).start()


def test_agents_that_are_not_trained_only_talk(tasksets: str):
    """The environment `user-sim` has a user, who is no policy, and an assistant; uv starts their harness."""
    args = {"id": "user-sim", "assistant": {"harness": {"id": "null"}}}
    settings = {"env": "letters", "args": json.dumps(args), "python": tasksets}
    (row,) = host_of("verifiers", settings).request("rows", split="train", size=1, select={})
    engine = ScriptedEngine(["Please write a.", "aa", "###DONE###"])
    (talk,), reward, metrics = asyncio.run(verifiers(engine, row, **settings))
    assert [message["content"] for message in talk.messages] == ["Please write a.", "aa"]
    assert reward == 2.0
    assert metrics == {"assistant.share": 1.0, "assistant.length": 2.0, "assistant.user_turns": 2.0}


def test_the_evaluator_of_tasksets_gives_the_same_scores(tasksets: str, tmp_path: Path):
    settings = {"env": "letters", "args": '{"taskset": {"letters": "abc"}}', "python": tasksets}
    rows = host_of("verifiers", settings).request("rows", split="train", size=-1, select={})

    async def main() -> tuple[Any, Any]:
        async with ScriptedEngine(["aab"] * 6).endpoint() as endpoint:
            traces = await evaluate(tasksets, tmp_path, endpoint, "--env.taskset.letters", "abc")
        played = [(await verifiers(ScriptedEngine(["aab"] * 2), row, **settings))[1:] for row in rows]
        return traces, played

    traces, played = asyncio.run(main())
    evaluated = {
        trace["task"]["data"]["idx"]: (
            sum(reward["score"] * reward["weight"] for reward in trace["rewards"].values()),
            {name: reward["score"] for name, reward in trace["rewards"].items()} | trace["metrics"],
        )
        for trace in traces
    }
    assert [evaluated[row["idx"]] for row in rows] == played
    assert [reward for reward, _ in played] == pytest.approx([4 / 3, 2 / 3, 0])


def test_the_training_client_of_verifiers_has_the_tokens_of_the_engine(tasksets: str, tmp_path: Path):
    """It renders prompts itself, and continues a conversation by the tokens that were sampled."""
    tokenizer = chatml_tokenizer(tmp_path / "tokenizer")
    *_, end_of_text = tokenizer.encode("<|endoftext|>")
    options = [
        "-n",
        "1",
        "--client.type",
        "train",
        "--client.renderer-model-name",
        str(tmp_path / "tokenizer"),
    ]
    options += ["--client.renderer.name", "qwen3", "--client.renderer.enable-thinking", "false"]

    async def main(server: EndpointServer) -> None:
        with heard(new_engine(tokenizer)) as driver:
            engine = episode(driver, tokenizer, new_effects(), server=server, stop_ids=(end_of_text,))
            async with engine.endpoint() as endpoint:
                (trace,) = await evaluate(tasksets, tmp_path / "out", endpoint, *options)
            talk = endpoint.trajectory
            check_tokens(talk, driver.heard)
        assert talk.num_turns == 2
        assert [node.get("parent") for node in trace["nodes"]] == [None, 0, 1, 2]
        ids = [token for node in trace["nodes"] for token in node["token_ids"]]
        mask = [learned for node in trace["nodes"] for learned in node["mask"]]
        logprobs = [value for node in trace["nodes"] for value in node["logprobs"]]
        assert tuple(ids) == talk.input_ids
        assert tuple(mask) == talk.loss_mask
        assert logprobs == pytest.approx(
            [x for x, learned in zip(talk.behav_logprobs, talk.loss_mask, strict=True) if learned],
            abs=1e-4,  # the evaluator writes four decimals
        )

    serve(main, seconds=600)


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


@pytest.fixture
def docker(openenv_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    """A stand-in for Docker, whose images are the environment."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with installed_docker(tmp_path, [openenv_python, "-m", "pong.server.app", "--port"]) as docker:
        yield docker
    close_hosts()


def wait_until_removed(docker: Docker) -> None:
    deadline = time.monotonic() + 60
    while docker.containers:
        assert time.monotonic() < deadline, f"still there: {docker.containers}"
        time.sleep(0.05)


def test_an_image_of_openenv_is_played_in_containers_that_are_removed(openenv_python: str, docker: Docker):
    settings: dict[str, Any] = {"python": openenv_python, "image": "pong:1"}
    limits: dict[str, Any] = {"max_steps": 2, "step_timeout": 600.0}

    async def main() -> list[float]:
        replies = ["hi", "a long sentence"]
        played = [openenv(ScriptedEngine(replies), 1, **limits, **settings) for _ in range(2)]
        return [reward for _, reward, _, _ in await asyncio.gather(*played)]

    assert asyncio.run(main()) == [1.2, 1.2]
    wait_until_removed(docker)
    assert docker.num_started == 3  # the first before the run begins

    async def lose() -> None:
        play = await open_environment("openenv", settings, {"seed": 1, "instructions": ""})
        (container,) = docker.containers.values()
        container.process.kill()
        with pytest.raises(EpisodeError, match="step of the openenv environment failed: Connection"):
            await play.call("step", reply="hi")
        await play.close()

    asyncio.run(lose())
    with pytest.raises(ConfigError, match=r"missing:1 ended with exit code 125: docker: .*No such image"):
        host_of("openenv", {**settings, "image": "missing:1"}).start()


def test_containers_of_a_killed_process_are_removed(openenv_python: str, docker: Docker):
    code = (
        "import asyncio, sys\n"
        "from hflow.environments.client import open_environment\n"
        "async def main():\n"
        "    settings = {'python': sys.argv[1], 'image': 'pong:1'}\n"
        "    play = await open_environment('openenv', settings, {'seed': 1, 'instructions': ''})\n"
        "    print('open', flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())"
    )
    client = subprocess.Popen([sys.executable, "-c", code, openenv_python], stdout=subprocess.PIPE)
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"open\n"
        assert len(docker.containers) == 1
        client.kill()
    wait_until_removed(docker)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "set one of url, a server of OpenEnv .* module, .* or image"),
        ({"module": PONG, "image": "pong:1"}, "set one of url"),
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
