"""`Dialect`: an API of the endpoint, as a translation of requests, replies, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from hflow.episodes.endpoint.replies import Reply, ReplyPart
from hflow.episodes.endpoint.requests import CompletionRequest, RequestRefused


class ReplyWriter(Protocol):
    """Writes one reply as server-sent events, in parts."""

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        """Return the events before the first part."""
        ...

    def add(self, part: ReplyPart) -> str:
        """Return the events of a part; nothing for one without text, unless its tokens are wanted."""
        ...

    def end(self, reply: Reply) -> str:
        """Return the events after the last part: tool calls, and why it ended."""
        ...

    def fail(self, refusal: RequestRefused) -> str:
        """Return the event of an error after the first part."""
        ...


class Dialect(Protocol):
    """An API."""

    @property
    def path(self) -> str:
        """The path of its requests."""
        ...

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request: its JSON, and its HTTP headers, whose names are found in any case.

        Raises:
            RequestRefused: for an option that is unknown, not supported or wrong.
        """
        ...

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return the JSON of a reply."""
        ...

    def writer(self, request: CompletionRequest) -> ReplyWriter:
        """Return the writer of a reply that is streamed."""
        ...

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return the JSON of an error."""
        ...


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event."""
    first = "" if name is None else f"event: {name}\n"
    return f"{first}data: {json.dumps(data)}\n\n"
