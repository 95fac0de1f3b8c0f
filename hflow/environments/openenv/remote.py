"""Runs in the interpreter that has openenv: observations become texts, and replies become actions."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_VALUES = 64
"""Most numbers of an observation's field that becomes a text without a function of the user."""
_PORT = 8000
"""The port of a server in an image."""
_POLL_SECONDS = 0.1
_NO_LIMIT = 1e9
"""Seconds of the client's own limits. Those of the node are the limits."""


def load(
    url: str, module: str, image: str, options: dict[str, Any], render: str, parse: str
) -> OpenEnvEnvironments:
    """Import the environment or find its server, reset it once, and check that it can be played in words."""
    if image and shutil.which("docker") is None:
        raise FileNotFoundError(
            "image needs the command docker, which is not installed. Install Docker, or set url or module"
        )
    environments = OpenEnvEnvironments(url, module, image, options, render, parse)
    asyncio.run(environments.check())
    return environments


class OpenEnvEnvironments:
    """Opens environments of one kind."""

    def __init__(
        self, url: str, module: str, image: str, options: dict[str, Any], render: str, parse: str
    ) -> None:
        import openenv.core.generic_client  # noqa: F401 - episodes begin as copies of this process
        from hflow_host import load_name

        self.one_process = not module  # connections to a server must stay alive while a model generates
        self._url = url.rstrip("/")
        self._image = image
        self._app: Any = load_name(module) if module else None
        self._serving: asyncio.Future[None] | None = None
        self.options = options
        self.field = "" if ":" in render else render
        self.render = load_name(render) if ":" in render else None
        self.parse = load_name(parse) if parse else None

    async def check(self) -> None:
        """Open an environment once."""
        play = await self.open(seed=0, instructions="")
        await play.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def open(self, seed: int, instructions: str) -> Play:
        """Begin an episode, with a server of its own if there is a module or an image."""
        container = _Container(self._image) if self._image else None
        play = Play(self, instructions, container)
        try:
            url = await container.start() if container else self._url or await self._serve()
            await play.start(url, seed)
        except BaseException:
            await play.close()
            raise
        return play

    def text(self, observation: dict[str, Any]) -> str:
        """Return the text of an observation."""
        if self.render is not None:
            text = self.render(observation)
        elif self.field:
            if self.field not in observation:
                raise ValueError(f"render is {self.field!r}, but an observation has {', '.join(observation)}")
            text = observation[self.field]
        else:
            text = _fields_text({name: v for name, v in observation.items() if name != "metadata"})
        if not isinstance(text, str):
            raise TypeError(
                f"an observation became {type(text).__name__} and no text; set render to another field or to "
                "FILE.py:FUNCTION"
            )
        return text

    async def _serve(self) -> str:
        """Start the server of the module on a free port of this machine. It ends with this process."""
        import uvicorn

        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_level="warning", ws_ping_interval=None))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                raise RuntimeError("the server of the environment ended while it started")
            await asyncio.sleep(0.005)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Container:
    """A server in a container of this machine's Docker, which its program `docker` holds."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._name = f"hflow-{secrets.token_hex(8)}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
        self._process: Any = None

    async def start(self) -> str:
        """Start it, wait until its server is healthy, and return the server's URL.

        Raises:
            ConnectionError: if it ends before, with its exit code and last line.
        """
        from hflow_host import CONTAINER_LABEL

        self._process = await asyncio.create_subprocess_exec(
            *("docker", "run", "--rm", "--name", self._name, "--label", CONTAINER_LABEL),
            *("--publish", f"127.0.0.1::{_PORT}", self._image),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        address = ""
        while self._process.returncode is None:
            address = address or await self._docker("port", self._name, str(_PORT))
            if address:
                with suppress(OSError):
                    await asyncio.to_thread(_get, f"http://{address}/health")
                    return f"http://{address}"
            await asyncio.sleep(_POLL_SECONDS)
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        raise ConnectionError(
            f"the container of {self._image} ended with exit code {self._process.returncode}: "
            f"{lines[-1] if lines else 'it printed nothing'}"
        )

    async def close(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()  # it may still download the image
            await self._process.wait()
            await self._docker("rm", "--force", self._name)
        self._log.close()

    async def _docker(self, *command: str) -> str:
        """Run a command, and return the first line of its output."""
        process = await asyncio.create_subprocess_exec(
            "docker",
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate()
        return output.decode().partition("\n")[0]


class Play:
    """One episode of an environment."""

    def __init__(
        self, environments: OpenEnvEnvironments, instructions: str, container: _Container | None
    ) -> None:
        self._environments = environments
        self._container = container
        self._client: Any = None
        self._instructions = instructions
        self._text = ""

    async def start(self, url: str, seed: int) -> None:
        """Connect to the server and reset the environment."""
        from openenv.core.generic_client import GenericEnvClient

        # No pings: the event loop of an episode's process stops between calls, and would find them late.
        self._client = GenericEnvClient(url, message_timeout_s=_NO_LIMIT, websocket_ping_interval_s=None)
        try:
            schema = await asyncio.to_thread(_get, f"{url}/schema")
        except OSError as error:
            raise ConnectionError(f"{url} cannot be reached: {error}") from None
        self._actions = _Actions(schema["action"], self._environments.parse)
        self._instructions = self._instructions or self._actions.instructions
        result = await self._client.reset(seed=seed, **self._environments.options)
        self._connection = self._client._ws
        self._text = self._environments.text(result.observation)

    def message(self) -> str:
        """Return the instructions and the observation."""
        return f"{self._instructions}\n{self._text}"

    async def step(self, reply: str) -> dict[str, Any]:
        """Do what a reply says. The message is the next observation, or that the reply has no action."""
        action = self._actions.read(reply)
        if action is not None:
            try:
                result = await self._client.step(action)
            except RuntimeError as error:
                if "VALIDATION_ERROR" not in str(error):
                    raise
                action = None
            if self._client._ws is not self._connection:  # the client connects again, to a new environment
                raise ConnectionError("the connection to the environment was lost")
        if action is None:
            return {"message": self.message(), "reward": None, "is_end": False, "is_action": False}
        is_end = bool(result.done)
        if not is_end:
            self._text = self._environments.text(result.observation)
        reward = None if result.reward is None else float(result.reward)
        return {"message": self._text, "reward": reward, "is_end": is_end, "is_action": True}

    async def close(self) -> None:
        """End the session, and remove its container."""
        try:
            if self._client is not None:
                await self._client.close()
        finally:
            if self._container is not None:
                await self._container.close()


class _Actions:
    """Reads actions from replies.

    An action with one field is the reply, or the last number or name in it; any other is the last JSON object
    in the reply.

    `parse`, a function of the reply, returns the action or None in place of this.
    """

    def __init__(self, schema: dict[str, Any], parse: Callable[[str], Any] | None) -> None:
        self._parse = parse
        properties = {name: v for name, v in schema["properties"].items() if name != "metadata"}
        needed = [name for name in schema.get("required", ()) if name in properties] or list(properties)
        self._field = needed[0] if len(needed) == 1 else ""
        field = _resolved(properties[self._field], schema) if self._field else {}
        self._names = field["enum"] if all(isinstance(n, str) for n in field.get("enum", [0])) else []
        self._type = field.get("type")
        if self._names:
            self.instructions = f"Reply with one of: {', '.join(self._names)}."
        elif self._type == "string":
            self.instructions = f"Your reply is the {self._field}."
        elif self._type == "integer":
            self.instructions = f"Reply with a number, the {self._field}."
        else:
            self._field = ""
            self.instructions = f"Reply with a JSON object of this schema: {json.dumps(schema)}"

    def read(self, reply: str) -> dict[str, Any] | None:
        """Return the action in a reply; None if there is none."""
        if self._parse is not None:
            action = self._parse(reply)
            if action is not None and not isinstance(action, dict):
                raise TypeError(
                    f"parse returned {type(action).__name__}; return a dict, or None for no action"
                )
            return action
        if not self._field:
            return _last_object(reply)
        if self._names:
            values = {name.lower(): name for name in self._names}
            words = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
            found = re.findall(rf"(?<![\w-])(?:{words})(?!\w)", reply, re.IGNORECASE)
            return {self._field: values[found[-1].lower()]} if found else None
        if self._type == "integer":
            found = re.findall(r"-?\d+", reply)
            return {self._field: int(found[-1])} if found else None
        return {self._field: reply}


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field, or that which it names."""
    name = field.get("$ref", "").rpartition("/")[2]
    return schema["$defs"][name] if name else field


def _last_object(reply: str) -> dict[str, Any] | None:
    """Return the last JSON object in a text that is in no other; None if there is none."""
    found, start = None, reply.find("{")
    while start >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(reply, start)
        except ValueError:
            end = start + 1
        start = reply.find("{", end)
    return found


def _fields_text(fields: dict[str, Any]) -> str:
    """Return the text of an observation's fields: that of the only one, or a line for each.

    Raises:
        TypeError: for a field that has no short text, or if there is none.
    """
    texts = {name: _value_text(name, value) for name, value in fields.items() if value is not None}
    if not texts:
        raise TypeError("an observation has no fields; set render to FILE.py:FUNCTION, a function of it")
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{name}: {text}" for name, text in texts.items())


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value)
    if len(re.findall(r"[-\d.]+", re.sub(r'"[^"]*"', "", text))) > MAX_VALUES:
        raise TypeError(
            f"the field {name} of an observation has more than {MAX_VALUES} numbers and no short text; set "
            "render to another field, or to FILE.py:FUNCTION, a function of the observation"
        )
    return text


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)
