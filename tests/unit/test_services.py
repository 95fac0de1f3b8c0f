"""Remote services: limits on a clock of the test's own, and requests over real HTTP."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chat_stub import Answer, ChatStub
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow import Service, ServiceError
from hflow.base.errors import ConfigError
from hflow.services.client import use_services
from hflow.services.limits import WINDOW_SECONDS, ServiceLimits, ServiceSettings, Spending
from hflow.services.server import LimitServer, read_spending
from hflow.testing import services

URL = "http://127.0.0.1:9/v1"


def limits(**keys: Any) -> tuple[ServiceLimits, list[float]]:
    """Limits, and their clock: the only entry of the list."""
    now = [0.0]
    return ServiceLimits(ServiceSettings("judge", URL, **keys), clock=lambda: now[0]), now


@settings(max_examples=100, deadline=None)
@given(
    most=st.integers(1, 5),
    connections=st.integers(1, 4),
    waits=st.lists(st.floats(0, 40) | st.sampled_from([0.0, 30.0, 60.0]), min_size=1, max_size=30),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 7.0]), min_size=30, max_size=30),
)
def test_no_minute_has_more_requests_than_allowed(most, connections, waits, pauses):
    service, now = limits(requests_per_minute=most, connections=connections)
    begun: list[float] = []
    num_open, free_at = 0, 0.0
    for seconds, pause in zip(waits, pauses, strict=False):
        while (wait := service.begin()) == 0.0:
            assert now[0] >= free_at
            begun.append(now[0])
            num_open += 1
            assert num_open <= connections
        if wait is None:
            assert num_open == connections
            service.end(pause=pause)
            num_open, free_at = num_open - 1, max(free_at, now[0] + pause)
            now[0] += seconds
        else:  # a request may begin then, and not before
            now[0] += wait
    for i, start in enumerate(begun):
        assert bisect_left(begun, start + WINDOW_SECONDS) - i <= most


def test_a_request_begins_as_soon_as_the_minute_allows_it():
    service, now = limits(requests_per_minute=2)
    assert [service.begin(), service.begin(), service.begin()] == [0.0, 0.0, 60.0]
    now[0] = 45.0
    assert service.begin() == 15.0
    now[0] = 60.0
    assert [service.begin(), service.begin(), service.begin()] == [0.0, 0.0, 60.0]


def test_tokens_of_a_minute():
    service, now = limits(tokens_per_minute=1000)
    assert service.begin() == 0.0
    assert service.begin() is None  # no request has told yet how many it uses
    service.end(tokens=400, cost=0.0)
    assert service.begin() == 0.0
    now[0] = 10.0
    service.end(tokens=400, cost=0.0)
    assert service.begin() == 50.0
    now[0] = 60.0
    assert service.begin() == 0.0


def test_a_budget_counts_requests_under_way_and_ends():
    service, _ = limits(budget=1.0, input_price=1e6 / 1000)
    assert service.begin() == 0.0
    service.end(tokens=400, cost=0.4)
    assert [service.begin(), service.begin(), service.begin()] == [0.0, 0.0, None]
    assert service.problem is None
    service.end(tokens=300, cost=0.3)
    service.end(cost=None)  # it broke: the mean of 0.4 and 0.3
    assert service.spending.cost == pytest.approx(1.05)
    assert service.begin() is None
    assert service.problem is not None
    assert "services.judge.budget is used up: the run has spent 1.05 for 3 requests" in service.problem


def test_a_number_of_requests_is_exact():
    service, _ = limits(max_requests=2)
    assert [service.begin(), service.begin(), service.begin()] == [0.0, 0.0, None]
    service.end()
    assert service.problem is None
    service.end()
    assert "Raise services.judge.max_requests" in str(service.problem)


def call(server: ChatStub, body: Callable[[], Awaitable[Any]], **keys: Any) -> Any:
    """Call a body with the server as its service."""

    async def run() -> Any:
        async with services(judge={"url": server.url, "backoff": 0.01, **keys}):
            return await body()

    return asyncio.run(run())


async def ask() -> str:
    return await Service("judge").chat("hello", temperature=0.0)


def test_a_chat_sends_the_key_and_what_is_asked(monkeypatch):
    monkeypatch.setenv("STUB_KEY", "secret-of-the-stub")
    with ChatStub(lambda messages: messages[-1]["content"].upper()) as server:
        assert call(server, ask, model="m", key_variable="STUB_KEY") == "HELLO"
        assert server.requests == [
            {"model": "m", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.0}
        ]
        assert server.headers[0]["Authorization"] == "Bearer secret-of-the-stub"
        monkeypatch.delenv("STUB_KEY")
        with pytest.raises(ServiceError, match=r"needs the environment variable STUB_KEY"):
            call(server, ask, key_variable="STUB_KEY")


def test_failures_that_pass_are_tried_again_when_the_service_asks_for_it():
    with ChatStub(lambda _: "yes") as server:
        server.first = [500, (429, {"Retry-After": "0.3"}), 0.6]
        assert call(server, ask, timeout=0.4) == "yes"
        assert len(server.requests) == 4
        assert server.times[2] - server.times[1] >= 0.3


@pytest.mark.parametrize(
    ("first", "keys", "message", "num_requests"),
    [
        ([503] * 9, {"patience": 0.1, "backoff": 0.1}, r"answered with status 503", 1),
        ([(429, {"Retry-After": "3600"})], {}, r"answered with status 429", 1),
        ([401], {}, r"services.judge answered with status 401: $", 1),
    ],
)
def test_failures_that_stay_are_errors(first: list[Answer], keys, message, num_requests):
    with ChatStub(lambda _: "yes") as server:
        server.first = [*first]
        with pytest.raises(ServiceError, match=message):
            call(server, ask, **keys)
        assert len(server.requests) >= num_requests
        assert (
            429 not in [answer[0] for answer in first if isinstance(answer, tuple)] or len(server.times) == 1
        )


def test_tokens_with_a_price_must_be_reported():
    with ChatStub(lambda _: "yes") as server:
        server.usage = None
        with pytest.raises(ServiceError, match=r"reports no `usage`"):
            call(server, ask, input_price=1.0)
        assert call(server, ask, request_price=1.0) == "yes"


def test_nobody_listens_or_nothing_is_configured():
    async def misspelt() -> None:
        await Service("jugde").chat("hello")

    with (
        ChatStub(lambda _: "yes") as server,
        pytest.raises(ServiceError, match=r"no service 'jugde'; did you mean 'judge'"),
    ):
        call(server, misspelt)
    with pytest.raises(ServiceError, match=r"cannot be reached"):
        call(server, ask, patience=0.0)
    with pytest.raises(ServiceError, match=r"hflow.testing.services"):
        asyncio.run(ask())


def test_the_record_has_the_cost_of_requests_under_way(tmp_path: Path):
    """A run that is killed then has paid for them."""
    file = tmp_path / "services.json"

    async def spend() -> str:
        async with LimitServer([ServiceSettings("judge", server.url, request_price=0.5)], file) as limits:
            use_services(limits.access)
            reply = await ask()
        use_services(None)
        return reply

    with ChatStub(lambda _: f"{read_spending(file)['judge'].cost}") as server:
        assert [asyncio.run(spend()) for _ in range(2)] == ["0.5", "1.0"]
    assert read_spending(file)["judge"].cost == 1.0


def test_limits_hold_for_all_clients_and_their_record_for_all_runs(tmp_path: Path):
    """Two connections share them, a client that breaks off costs the mean, and a later run continues."""
    file = tmp_path / "services.json"

    def service(**keys: Any) -> list[ServiceSettings]:
        prices = {"input_price": 1e3, "output_price": 1e4}  # 0.3 for each request
        return [ServiceSettings("judge", server.url, connections=3, **prices, **keys)]

    async def spend() -> list[Any]:
        problems: list[str] = []
        async with LimitServer(service(budget=2.9), file) as limit_server:
            limit_server.stop_by(problems.append)
            use_services(limit_server.access)
            slow = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(many(7)))
            results = [*await many(7), *await slow]
            assert limit_server.row_values()["service_requests/judge"] == 10
            assert problems == [
                "services.judge.budget is used up: the run has spent 3 for 10 requests. Raise "
                "services.judge.budget to continue"
            ]
        use_services(None)
        return results

    async def many(number: int) -> list[Any]:
        return await asyncio.gather(*(ask() for _ in range(number)), return_exceptions=True)

    with ChatStub(lambda _: 0.05) as server:
        server.reply = lambda _: "yes"
        server.first = [0.05] * 10
        results = asyncio.run(spend())
        assert results.count("yes") == 10
        assert sum(isinstance(result, ServiceError) for result in results) == 4
        assert server.most_open <= 3
    assert read_spending(file)["judge"] == Spending(10, 0, 1200, pytest.approx(3.0), pytest.approx(0, abs=99))
    with pytest.raises(ConfigError, match=r"budget is used up"):
        LimitServer(service(budget=2.9), file)
    assert LimitServer(service(budget=3.5), file)

    async def continue_with_another() -> None:
        async with LimitServer([ServiceSettings("other", URL)], file):
            pass

    asyncio.run(continue_with_another())
    assert {name: spent.requests for name, spent in read_spending(file).items()} == {"judge": 10, "other": 0}
    file.write_text(json.dumps({"judge": {"cots": 1}}))
    with pytest.raises(ConfigError, match=r"services.json, which has what the run has spent, is damaged"):
        LimitServer(service(), file)


def test_a_process_that_ends_gives_its_requests_back_at_the_mean_cost():
    async def run() -> Spending:
        settings = ServiceSettings("judge", URL, connections=1, request_price=2.0)
        async with LimitServer([settings]) as server:
            access = server.access
            for number in range(2):
                reader, writer = await asyncio.open_connection(access.host, access.port)
                writer.write(access.key.encode() + b'\n{"id": 1, "service": "judge"}\n')
                assert json.loads(await asyncio.wait_for(reader.readline(), 10)) == {"id": 1}, number
                writer.close()
            reader, writer = await asyncio.open_connection(access.host, access.port)
            writer.write(b'no key\n{"id": 1, "service": "judge"}\n')
            assert not await asyncio.wait_for(reader.read(), 10)
            writer.close()
            while server.access and server._limits["judge"].spending.cost < 4.0:
                await asyncio.sleep(0.01)
            return server._limits["judge"].spending

    assert asyncio.run(run()).failures == 2
