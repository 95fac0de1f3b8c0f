"""`nodes.mcp` and `open_tools` with a real server. A server takes seconds to start."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from episode_kit import new_effects
from runs import run

from hflow.base.errors import ConfigError, EpisodeError
from hflow.environments.client import close_hosts, host_of
from hflow.environments.mcp.adapter import mcp
from hflow.environments.mcp.tools import McpTools, open_tools
from hflow.testing import ScriptedEngine
from hflow.types import ToolCall
from hflow.types.sandbox import ToolFailed

pytestmark = pytest.mark.long

FILE = Path(__file__).parents[1] / "kits" / "mcp_server.py"
SERVER = f"COLOUR=$SHADE python {FILE}"
RECIPE = """
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "tools",
    data,
    [
        use(nodes.mcp, actor, group=4),
        reward,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
"""
OPTIONS = (
    "cluster=cpu-1x1",
    "workers=inproc",
    "steps=1",
    "batch=2",
    "+model@models.actor=tiny-qwen2",
    "models.actor.chat_template='{% for m in messages %}{{ m.content }}{% endfor %}'",
    "data.train.generator=addition",
    "nodes.mcp.max_tokens=4",
)


@pytest.fixture(autouse=True, scope="module")
def shade() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHADE", "light blue")
        yield
    close_hosts()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tools.py"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a server that runs."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(FILE), str(port)], stderr=subprocess.DEVNULL)
    with server:
        while server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()


def use_tools(body: Callable[[McpTools], Awaitable[Any]], server: str = SERVER, **options: Any) -> Any:
    """Return the result of a coroutine that uses the tools of a server."""

    async def main() -> Any:
        tools = await open_tools([server], **options)
        try:
            return await body(tools)
        finally:
            await tools.close()

    return asyncio.run(main())


async def is_gone(pid: int, tries: int = 1200) -> bool:
    for _ in range(tries):
        if not Path(f"/proc/{pid}").exists():
            return True
        await asyncio.sleep(0.05)
    return False


def test_a_conversation_calls_tools_and_reads_their_errors():
    calls = [ToolCall("add", {"number": 3}), ToolCall("add", {"number": 4})]
    engine = ScriptedEngine(
        [calls, ToolCall("add", {"number": "x"}), ToolCall("divide", {"a": 1, "b": 0}), "It is 7."]
    )
    talk = asyncio.run(mcp(engine, [{"role": "user", "content": "3 + 4?"}], servers=(SERVER,)))
    assert (talk.completion, talk.num_turns) == ("It is 7.", 4)
    said = [message["content"] for message in talk.messages if message["role"] == "tool"]
    assert said[:2] == ["3", "7"]
    assert said[2].startswith("error: Error executing tool add: 1 validation error")
    assert said[3].startswith("error: Error executing tool divide")
    assert [call.name for call in engine.calls] == ["add", "add", "add", "divide"]
    (schema,) = (tool["function"] for tool in talk.tools if tool["function"]["name"] == "add")
    assert schema["description"] == "Add a number to the total of this process, and return it."
    assert schema["parameters"]["properties"]["number"]["type"] == "integer"


def test_a_conversation_has_a_limit():
    engine = ScriptedEngine([ToolCall("add", {"number": 3})] * 3)
    talk = asyncio.run(mcp(engine, [{"role": "user", "content": "?"}], servers=(SERVER,), max_steps=2))
    assert (talk.num_turns, len(engine.calls)) == (2, 1)


def test_a_server_has_the_variables_of_its_command_and_no_others():
    async def variables(tools: McpTools) -> list[str]:
        return [await tools["variable"](name=name) for name in ("COLOUR", "SHADE")]

    assert use_tools(variables) == ["light blue", "not set"]


def test_each_episode_has_a_server_which_ends_with_it():
    async def main() -> None:
        first, second = await asyncio.gather(open_tools([SERVER]), open_tools([SERVER]))
        assert await first["add"](number=3) == await second["add"](number=3) == "3"
        pid = int(await first["process"]())
        await first.close()
        assert await is_gone(pid)
        assert await second["add"](number=3) == "6"
        await second.close()

    asyncio.run(main())


def test_a_server_that_ends_or_takes_too_long_refuses_the_sample():
    async def fail(tools: McpTools) -> None:
        with pytest.raises(EpisodeError, match=r"mcp_server.py' cannot be used: .*: the counter ends"):
            await tools["end"]()
        with pytest.raises(EpisodeError, match=r"mcp_server.py' cannot be used"):
            await tools["add"](number=1)

    async def wait(tools: McpTools) -> None:
        pid = int(await tools["process"]())
        with pytest.raises(EpisodeError, match="call_tool took longer than step_timeout=20 s"):
            await tools["hang"]()
        assert await is_gone(pid)

    use_tools(fail)
    use_tools(wait, timeout=20.0)


def test_shared_servers_serve_all_episodes_and_start_again_after_their_end():
    async def main() -> None:
        first, second = await asyncio.gather(*(open_tools([SERVER], shared=True) for _ in range(2)))
        assert await first["add"](number=3) == "3"
        assert await second["add"](number=3) == "6"
        await first.close()
        assert await second["add"](number=3) == "9"
        with pytest.raises(EpisodeError, match=r"mcp_server.py' cannot be used: .*: the counter ends"):
            await second["end"]()
        with pytest.raises(EpisodeError, match=r"mcp_server.py' cannot be used"):
            await second["add"](number=1)
        await second.close()
        third, fourth = [await open_tools([SERVER], shared=True, timeout=20.0) for _ in range(2)]
        assert await third["add"](number=1) == "1"
        pid = int(await third["process"]())
        with pytest.raises(EpisodeError, match="call_tool took longer than step_timeout=20 s"):
            await third["hang"]()
        fifth = await open_tools([SERVER], shared=True)
        assert await fifth["add"](number=2) == "2"
        assert not await is_gone(pid, tries=1)
        await fourth.close()
        assert await is_gone(pid)
        pid = int(await fifth["process"]())
        close_hosts()
        assert await is_gone(pid)

    asyncio.run(main())


def test_nothing_outlives_a_client_that_is_killed():
    code = (
        "import asyncio, sys\n"
        "from hflow.environments.mcp.tools import open_tools\n"
        "async def main():\n"
        "    tools = await open_tools([sys.argv[1]])\n"
        "    print(await tools['process'](), flush=True)\n"
        "    await tools['hang']()\n"
        "asyncio.run(main())"
    )
    client = subprocess.Popen([sys.executable, "-c", code, SERVER], stdout=subprocess.PIPE)
    with client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.kill()
    assert asyncio.run(is_gone(pid))


@pytest.mark.parametrize("replay", ["again", "recorded", "never"])
def test_a_replayed_episode_has_the_results_of_its_calls(replay: str):
    async def attempt(journal: Any, *calls: str) -> tuple[list[Any], Any]:
        effects = new_effects(journal)
        arguments = {"servers": [SERVER], "replay": replay}
        tools = await effects.create_environment("actor", open_tools, arguments)
        effects.offer(tools.schemas)
        values = {"add": {"number": 2}, "divide": {"a": 1, "b": 0}}
        try:
            told = [
                await effects.call("actor", tools[name], values.get(name, {}), "error: {}".format)
                for name in calls
            ]
        finally:
            await effects.close_environments()
        assert effects.counts["tool_calls"] == len(calls)
        assert effects.counts["tool_errors"] == calls.count("divide")
        return told, effects.journal

    async def main() -> None:
        told, journal = await attempt(None, "add", "divide")
        again, _ = await attempt(journal, "add", "divide", "add")
        assert again[:2] == told
        assert told[1].startswith("error: Error executing tool divide")
        assert again[2] == ("2" if replay == "recorded" else "4")
        if replay == "again":
            _, journal = await attempt(None, "clock")
            with pytest.raises(EpisodeError, match="clock of an environment, returned"):
                await attempt(journal, "clock")

    asyncio.run(main())


def test_a_server_is_used_by_its_url(url: str):
    async def add(tools: McpTools) -> str:
        with pytest.raises(ToolFailed, match="Error executing tool divide"):
            await tools["divide"](a=1, b=0)
        return await tools["add"](number=3)

    async def end(tools: McpTools) -> None:
        with pytest.raises(EpisodeError, match=r"127.0.0.1.*cannot be used"):
            await tools["end"]()

    async def header(tools: McpTools) -> Any:
        return await tools["header"](name="authorization")

    assert [use_tools(add, url) for _ in range(2)] == ["3", "6"]
    with_headers = json.dumps({"url": url, "headers": {"Authorization": "Bearer ${SHADE}"}})
    assert [use_tools(header, server) for server in (with_headers, url)] == ["Bearer light blue", "not set"]
    use_tools(end, url)


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ([], r"set servers to command lines or URLs of MCP servers"),
        (["no-such-program a"], "there is no program 'no-such-program'"),
        (["http://127.0.0.1:9/mcp"], "the server 'http://127.0.0.1:9/mcp' cannot be used: All connection"),
        (
            ['{"url": "http://127.0.0.1:9", "header": {}}'],
            'must be {"url": "https://...", "headers": {"NAME"',
        ),
        (['{"url": "http://a", "headers": {"A": "$NONE"}}'], "A of .* needs the environment variable NONE"),
        (["A=${NONE} python"], "A of .* needs the environment variable NONE"),
        (["{url: 3}"], "is no JSON: Expecting property name"),
        (["python 'x"], "is no command line: No closing quotation"),
        (["COLOUR=blue"], "has no command"),
        (["python -m no_module"], "cannot be used: .*; its last line: .*No module named no_module"),
        ([SERVER, SERVER], "both have a tool add; leave out one of them"),
    ],
)
def test_servers_that_cannot_be_used_say_why(servers: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        host_of("mcp", {"servers": servers}).start()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string"}, "tools.0.inputSchema.type Input should be 'object'"),
        (
            {"type": "object", "properties": {"a": {"type": "text"}}},
            "the tool odd of .* invalid schema: 'text'",
        ),
    ],
)
def test_a_tool_needs_the_schema_of_an_object(tmp_path: Path, schema: dict[str, Any], reason: str):
    file = tmp_path / "server.py"
    file.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    method = request['method']\n"
        f"    tools = {{'tools': [{{'name': 'odd', 'inputSchema': {schema}}}]}}\n"
        "    first = {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}},\n"
        "        'serverInfo': {'name': 'odd', 'version': '1'}}\n"
        "    reply = {'jsonrpc': '2.0', 'id': request.get('id')}\n"
        "    if method == 'server/discover':\n"
        "        reply['error'] = {'code': -32601, 'message': 'no'}\n"
        "    else:\n"
        "        reply['result'] = first if method == 'initialize' else tools\n"
        "    if 'id' in request:\n"
        "        print(json.dumps(reply), flush=True)\n"
    )
    with pytest.raises(ConfigError, match=reason):
        host_of("mcp", {"servers": [f"python {file}"]}).start()


def test_a_recipe_uses_tools(recipe: Path, tmp_path: Path):
    summary = run(recipe, tmp_path, *OPTIONS, f"nodes.mcp.servers=['{SERVER}']")
    assert (summary.steps, dict(summary.sample_ends)) == (1, {"trained": 8})


def test_a_run_is_refused_before_its_models_load(recipe: Path, hflow: CommandLine):
    line = hflow.fails("run", recipe, *OPTIONS, "nodes.mcp.servers=[no-program]", f"out={recipe.parent}")
    assert line.startswith(f"mcp ({recipe}")
    assert "there is no program 'no-program'" in line
    assert os.environ["SHADE"] not in line
