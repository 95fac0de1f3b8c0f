"""`Service`: a remote service that asynchronous bodies call, within the limits of the run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hflow.base.errors import ServiceError, nearest, reason_of, shorten
from hflow.services.limits import ServiceSettings

if TYPE_CHECKING:
    import httpx

MAX_BACKOFF_SECONDS = 60.0
"""The longest wait before a further attempt, unless the service asks for more."""
_ENDED = "the run that limits its services has ended, or cannot be reached"
_TEMPORARY = (408, 409, 425, 429)
"""Statuses, besides those from 500 on, after which the same request may succeed later."""


@dataclass(frozen=True)
class ServiceAccess:
    """The services of a run, and where its processes ask before each request (`server.LimitServer`)."""

    host: str
    port: int
    key: str
    services: Mapping[str, ServiceSettings]


@dataclass
class _ProcessState:
    """The run's services, and the clients of this process's event loops."""

    access: ServiceAccess | None = None
    clients: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_Client]] = field(
        default_factory=WeakKeyDictionary
    )


_process = _ProcessState()


def use_services(access: ServiceAccess | None) -> None:
    """Let bodies in this process call the services of a run; None: there are none."""
    _process.access = access


def services_of_process() -> ServiceAccess | None:
    """Return the services that bodies in this process may call."""
    return _process.access


class Service:
    """A service of the configuration, `services.NAME`, that asynchronous bodies call.

    `await Service("judge").chat("Is 7 prime?")` returns the text of a reply. Requests wait for the limits of
    the service, which hold for the whole run. Those that fail for a while are made again.

    Args:
        name: the service's name in the configuration.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the reply of a chat model, by OpenAI's chat completions API.

        Args:
            messages: the conversation, or the only message of the user.
            **options: further keys of the request, such as `temperature=0`.

        Raises:
            ServiceError: when `post` raises it, and for a reply without text.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request = {"model": self._settings().model, "messages": [*messages], **options}
        reply = await self.post("/chat/completions", request)
        try:
            text = reply["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ServiceError(f"services.{self.name} replied without a text: {json.dumps(reply)!r:.200}")
        return text

    async def post(self, path: str, body: Any) -> Any:
        """Send JSON to a path below the service's URL, and return the JSON of the reply.

        It costs what the prices say, by the reply's `usage` if tokens have a price.

        Raises:
            ServiceError: when the service refuses the request, or fails for longer than its `patience`, or
                the budget of the run is used up.
        """
        settings, client = self._settings(), await _client()
        seconds = 0.0
        for attempt in count():
            number = await client.begin(self.name)
            start, outcome = time.monotonic(), _Outcome("was interrupted", cost=None)
            try:
                outcome = await client.send(settings, path, body)
            finally:
                client.end(number, outcome, settings.patience)
            if outcome.problem is None:
                return outcome.reply
            wait = min(MAX_BACKOFF_SECONDS, settings.backoff * 2.0**attempt) * random.uniform(0.5, 1.0)
            wait = max(wait, outcome.pause)
            seconds += time.monotonic() - start
            if not outcome.is_temporary or seconds + wait > settings.patience:
                tried = f" (attempt {attempt + 1}, after {seconds:.0f} s)" if attempt else ""
                raise ServiceError(f"services.{self.name} {outcome.problem}{tried}")
            await asyncio.sleep(wait)
            seconds += wait
        raise AssertionError("unreachable")

    def _settings(self) -> ServiceSettings:
        access = _process.access
        services = {} if access is None else access.services
        if self.name not in services:
            raise ServiceError(
                f"the configuration has no service {self.name!r}{nearest(self.name, services)}. Set "
                f"services.{self.name}.url, or in a test use hflow.testing.services"
            )
        return services[self.name]


@dataclass(frozen=True)
class _Outcome:
    """The outcome of one request."""

    problem: str | None = None
    """Why it failed, after the service's name."""
    is_temporary: bool = True
    """Whether the same request may succeed later."""
    reply: Any = None
    tokens: int = 0
    cost: float | None = 0.0
    """None: it is not known."""
    pause: float = 0.0
    """Seconds for which the service wants no requests."""


class _Client:
    """The connections of one event loop: to the run's limits, and to services."""

    def __init__(
        self,
        access: ServiceAccess,
        http: httpx.AsyncClient,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.access = access
        self._writer = writer
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._http = http
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    @classmethod
    async def open(cls, access: ServiceAccess) -> _Client:
        http = await asyncio.to_thread(_http_client)
        try:
            reader, writer = await asyncio.open_connection(access.host, access.port)
        except OSError as error:
            raise ServiceError(f"{_ENDED} ({reason_of(error)})") from error
        writer.write(access.key.encode() + b"\n")
        return cls(access, http, reader, writer)

    @property
    def is_usable(self) -> bool:
        return self.access is _process.access and not self._reading.done()

    async def begin(self, service: str) -> int:
        """Wait until a request may begin, and return its number."""
        if self._reading.done():
            raise ServiceError(_ENDED)
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, "service": service})
        try:
            await answer
        except asyncio.CancelledError:
            self.end(number, _Outcome())  # it may have been allowed to begin meanwhile
            raise
        finally:
            del self._waiting[number]
        return number

    def end(self, number: int, outcome: _Outcome, patience: float = 0.0) -> None:
        """Report that a request has ended. A pause for which no request has the patience is left out."""
        self._write(
            {
                "id": number,
                "tokens": outcome.tokens,
                "cost": outcome.cost,
                "pause": outcome.pause if outcome.pause <= patience else 0.0,
                "failed": outcome.problem is not None,
            }
        )

    async def send(self, settings: ServiceSettings, path: str, body: Any) -> _Outcome:
        import httpx

        headers = {}
        if settings.key_variable is not None:
            if (key := os.environ.get(settings.key_variable)) is None:
                variable = f"services.{settings.name}.key_variable"
                problem = f"needs the environment variable {settings.key_variable} ({variable})"
                return _Outcome(f"{problem}; set it on every machine", is_temporary=False)
            headers["Authorization"] = f"Bearer {key}"
        url = settings.url.rstrip("/") + path
        try:
            async with asyncio.timeout(settings.timeout):
                response = await self._http.post(url, json=body, headers=headers)
        except TimeoutError:
            return _Outcome(f"did not reply within its timeout of {settings.timeout:g} s", cost=None)
        except httpx.ConnectError as error:
            return _Outcome(f"cannot be reached: {reason_of(error)}")
        except httpx.TransportError as error:
            return _Outcome(f"broke the connection: {reason_of(error)}", cost=None)
        return _read_response(settings, response)

    def _write(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Let requests begin as their answers come."""
        try:
            async for line in reader:
                message = json.loads(line)
                answer = self._waiting.get(message["id"])
                if answer is None or answer.done():
                    continue
                if "problem" in message:
                    answer.set_exception(ServiceError(message["problem"]))
                else:
                    answer.set_result(None)
        except ConnectionError:
            pass
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ServiceError(_ENDED))


async def _client() -> _Client:
    """Return the client of this event loop. Bodies that begin together open one."""
    loop, access = asyncio.get_running_loop(), _process.access
    assert access is not None, "the service is configured"
    opening = _process.clients.get(loop)
    if opening is None or (opening.done() and not _is_usable(opening)):
        opening = _process.clients[loop] = loop.create_task(_Client.open(access))
    return await asyncio.shield(opening)


def _is_usable(opened: asyncio.Task[_Client]) -> bool:
    return not opened.cancelled() and opened.exception() is None and opened.result().is_usable


def _http_client() -> httpx.AsyncClient:
    """Import httpx and read certificates, on a thread: a body that blocks its event loop is killed."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, timeout=None)


def _read_response(settings: ServiceSettings, response: httpx.Response) -> _Outcome:
    status = response.status_code
    if not response.is_success:
        text = shorten(" ".join(response.text.split()), 200)
        is_temporary = status in _TEMPORARY or status >= 500
        pause = _pause(response.headers.get("Retry-After")) if is_temporary else 0.0
        return _Outcome(f"answered with status {status}: {text}", is_temporary=is_temporary, pause=pause)
    try:
        reply = response.json()
    except ValueError:
        text = shorten(" ".join(response.text.split()), 200)
        problem, cost = f"replied with something else than JSON: {text}", None
        return _Outcome(problem, is_temporary=False, cost=cost)
    usage = reply.get("usage") if isinstance(reply, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    used = [
        _tokens(usage, "prompt_tokens", "input_tokens"),
        _tokens(usage, "completion_tokens", "output_tokens"),
    ]
    if settings.counts_tokens and None in used:
        problem = (
            "reports no `usage`, by which tokens are counted. Set request_price in place of input_price and "
            "output_price, and no tokens_per_minute"
        )
        return _Outcome(problem, is_temporary=False, cost=None)
    num_in, num_out = (number or 0 for number in used)
    return _Outcome(reply=reply, tokens=num_in + num_out, cost=settings.cost(num_in, num_out))


def _tokens(usage: Mapping[str, Any], *names: str) -> int | None:
    found = (usage[name] for name in names if type(usage.get(name)) is int)
    return next(found, None)


def _pause(value: str | None) -> float:
    """Return the seconds of a `Retry-After` header; 0 without one."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - datetime.now(UTC)).total_seconds())
