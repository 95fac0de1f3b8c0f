"""Clients of the endpoint of an episode, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from episode_kit import episode, new_effects
from openai import AsyncOpenAI

from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.driver import EngineDriver
from hflow.episodes.endpoint.server import EndpointServer
from hflow.types import Endpoint, Trajectory

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
ASK = [{"role": "user", "content": "1+1="}]
CALLS: dict[str, Any] = {"tools": "[]", "max_tokens": 60}
"""Options with which a model without training sometimes calls a tool."""


@asynccontextmanager
async def client_of(engine: Any) -> AsyncIterator[tuple[AsyncOpenAI, Endpoint]]:
    """Open an episode's endpoint and OpenAI's client of it."""
    async with (
        engine.endpoint() as endpoint,
        AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=60, max_retries=0
        ) as client,
    ):
        yield client, endpoint


def serve(body: Callable[[EndpointServer], Awaitable[Any]], seconds: float = 60) -> Any:
    """Run a body with a server, for so many seconds at most."""

    async def main() -> Any:
        server = EndpointServer()
        try:
            return await asyncio.wait_for(body(server), seconds)
        finally:
            await server.close()

    return asyncio.run(main())


def play(
    body: Callable[[AsyncOpenAI, Endpoint], Awaitable[Any]],
    driver: Any,
    tokenizer: TextTokenizer,
    effects: Any = None,
    **options: Any,
) -> Any:
    """Run a body with the client of an episode's endpoint."""

    async def main(server: EndpointServer) -> Any:
        engine = episode(driver, tokenizer, effects or new_effects(), server=server, **options)
        async with client_of(engine) as (client, endpoint):
            return await body(client, endpoint)

    return serve(main)


def find_calling_sample(tokenizer: TextTokenizer, driver: EngineDriver) -> int:
    """Return a sample in which the random model happens to write `[...]`."""

    async def complete_all() -> list[Trajectory]:
        engines = [episode(driver, tokenizer, new_effects(), sample=i, **CALLS) for i in range(200)]
        return list(await asyncio.gather(*(engine.complete(ASK, tools=[ADD]) for engine in engines)))

    return next(i for i, talk in enumerate(asyncio.run(complete_all())) if talk.tool_calls)
