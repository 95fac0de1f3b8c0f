"""`LimitServer`: lets the requests of all processes of a run begin when the limits of their service allow it.

A client opens one connection, sends its key, and then one line of JSON for each of:

- `{"id": 7, "service": "judge"}`: a request wants to begin. The answer is `{"id": 7}` when it may, or
  `{"id": 7, "problem": "..."}`.
- `{"id": 7, "tokens": 300, "cost": 0.01, "pause": 0, "failed": false}`: it has ended, or does not want to
  begin any more. A connection that breaks ends its requests, at the mean cost.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hflow.base.durable_files import write_error
from hflow.base.errors import ConfigError
from hflow.base.json_text import parse_json
from hflow.services.client import ServiceAccess
from hflow.services.limits import (
    COST,
    FAILURES,
    REQUESTS,
    WAIT_SECONDS,
    ServiceLimits,
    ServiceSettings,
    Spending,
)

LOOPBACK = "127.0.0.1"


@dataclass(eq=False)
class _Request:
    """A request that waits or is under way."""

    limits: ServiceLimits
    number: int
    writer: asyncio.StreamWriter
    asked_at: float
    has_begun: bool = False


class LimitServer:
    """Holds the limits of a run's services. It belongs to the running event loop.

    Args:
        file: where the run keeps what it has spent. It is never taken back to a checkpoint, as requests that
            are made again cost again.
        host: the address of this machine at which workers reach it.

    Attributes:
        file: the argument; set it before the server begins to listen.

    Raises:
        ConfigError: when the file is damaged, or a budget is used up already.
    """

    def __init__(
        self, services: Iterable[ServiceSettings], file: Path | None = None, host: str = LOOPBACK
    ) -> None:
        self._spending = {} if file is None else read_spending(file)
        """Service -> what the run has spent; also those that are no longer configured."""
        self._limits = {
            service.name: ServiceLimits(service, self._spending.setdefault(service.name, Spending()))
            for service in services
        }
        for limits in self._limits.values():
            if limits.problem is not None:
                raise ConfigError(limits.problem)
        self.file = file
        self._host = host
        self._on_problem: Callable[[str], None] = lambda _: None
        self._key = secrets.token_urlsafe(32)
        self._problem: str | None = None
        self._queues: dict[str, deque[_Request]] = {name: deque() for name in self._limits}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reported = {name: Spending(**asdict(one.spending)) for name, one in self._limits.items()}
        """What the rows of metrics have."""
        self._descriptor: int | None = None
        self._size = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> LimitServer:
        """Begin to listen."""
        if self.file is not None:
            self._descriptor = os.open(self.file, os.O_CREAT | os.O_RDWR, 0o644)
            self._size = os.fstat(self._descriptor).st_size
            self._save()
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, with all connections."""
        for timer in self._timers.values():
            timer.cancel()
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        await asyncio.sleep(0)  # connections end
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def access(self) -> ServiceAccess:
        """What processes need to ask."""
        assert self._server is not None, "it listens"
        port: int = self._server.sockets[0].getsockname()[1]
        return ServiceAccess(
            self._host, port, self._key, {name: limits.settings for name, limits in self._limits.items()}
        )

    def stop_by(self, stop: Callable[[str], None]) -> None:
        """Call a function with the reason when a service takes no further requests; at once if it is so.

        All requests are refused from then on.
        """
        self._on_problem = stop
        if self._problem is not None:
            stop(self._problem)

    def row_values(self) -> dict[str, float]:
        """Return the metrics of the services since the call before."""
        values: dict[str, float] = {}
        for name, limits in self._limits.items():
            now, before = limits.spending, self._reported[name]
            num_requests = now.requests - before.requests
            values[COST.member(name)] = now.cost
            values[REQUESTS.member(name)] = num_requests
            values[FAILURES.member(name)] = now.failures - before.failures
            waited = now.seconds_waited - before.seconds_waited
            values[WAIT_SECONDS.member(name)] = waited / max(1, num_requests)
            self._reported[name] = Spending(**asdict(now))
        return values

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: dict[int, _Request] = {}
        self._writers.add(writer)
        try:
            key = (await reader.readline()).strip()
            if not hmac.compare_digest(key, self._key.encode()):
                return
            async for line in reader:
                message = json.loads(line)
                number = message["id"]
                if "service" in message:
                    limits = self._limits[message["service"]]
                    requests[number] = _Request(limits, number, writer, time.monotonic())
                    self._queues[limits.settings.name].append(requests[number])
                    self._begin(limits)
                else:
                    self._end(requests.pop(number), message)
        except (ConnectionError, ValueError, KeyError):  # a process that ended, or that is none of the run
            pass
        finally:
            self._writers.discard(writer)
            for request in requests.values():
                self._end(request, {"cost": None, "failed": True})
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _begin(self, limits: ServiceLimits) -> None:
        """Let those requests of a service begin that may, in the order in which they came."""
        name = limits.settings.name
        queue = self._queues[name]
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        while queue and self._problem is None:
            if wait := limits.begin():
                self._timers[name] = asyncio.get_running_loop().call_later(wait, self._begin, limits)
                return
            if wait is None:
                if limits.problem is not None:
                    self._refuse(limits.problem)
                return
            request = queue.popleft()
            request.has_begun = True
            limits.spending.seconds_waited += time.monotonic() - request.asked_at
            self._save()
            _send(request, {})
        if self._problem is not None:
            self._refuse(self._problem)

    def _end(self, request: _Request, message: Mapping[str, Any]) -> None:
        limits = request.limits
        if request.has_begun:
            limits.spending.failures += bool(message.get("failed"))
            limits.end(message.get("tokens", 0), message["cost"], message.get("pause", 0.0))
            self._save()
        else:
            with suppress(ValueError):  # it was refused
                self._queues[limits.settings.name].remove(request)
        self._begin(limits)

    def _refuse(self, problem: str) -> None:
        if self._problem is None:
            self._problem = problem
            self._on_problem(problem)
        for queue in self._queues.values():
            while queue:
                _send(queue.popleft(), {"problem": self._problem})

    def _save(self) -> None:
        """Write what was spent, in place: to replace and sync the file each time would take too long.

        Requests under way count, as the run may be killed before they end.
        """
        if self._descriptor is None:
            return
        spent = {name: asdict(spending) for name, spending in self._spending.items()}
        for name, limits in self._limits.items():
            spent[name]["cost"] = limits.expected_cost
        text = json.dumps(spent)
        self._size = max(self._size, len(text))
        try:
            os.pwrite(self._descriptor, text.ljust(self._size).encode(), 0)
        except OSError as error:
            self._refuse(str(write_error(self.file or Path(), error)))


def _send(request: _Request, answer: Mapping[str, Any]) -> None:
    if not request.writer.is_closing():
        request.writer.write(json.dumps({"id": request.number, **answer}).encode() + b"\n")


def read_spending(file: Path) -> dict[str, Spending]:
    """Return the spending of a run at each service; empty if it has no such file.

    Raises:
        ConfigError: when the file is damaged.
    """
    if not file.is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8").strip()
        return {name: Spending(**values) for name, values in parse_json(text).items()} if text else {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}, which has what the run has spent, is damaged: {error}; correct it, or delete it to "
            "count from 0"
        ) from error
