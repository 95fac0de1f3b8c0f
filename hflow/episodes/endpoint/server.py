"""`EndpointServer`: the HTTP server of all dialects in a process."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hflow.base.errors import BackendError, ConfigError, DataError, EpisodeError, HflowError
from hflow.base.json_text import parse_json
from hflow.episodes.endpoint.dialects.interface import Dialect, ReplyWriter
from hflow.episodes.endpoint.dialects.registry import DEFAULT_DIALECT, DIALECTS
from hflow.episodes.endpoint.replies import Reply, StreamedTurn
from hflow.episodes.endpoint.requests import CompletionRequest, RequestRefused

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
REFUSALS = (BackendError, DataError, EpisodeError)
"""Errors that concern one request. All others end the run."""

_KEEP_ALIVE = 3600
"""Seconds that an idle connection stays open. An agent may be idle between two requests for minutes."""
REQUEST_SECONDS = 60
"""Seconds in which a request must arrive. The connection of one that does not is closed."""
MAX_BODY_BYTES = 16 << 20
"""The largest body of a request. A million tokens, written with escapes, are half of it."""
_NO_RETRY = {"x-should-retry": "false"}
"""A header by which clients do not repeat a request whose answer would be the same."""
_RETRY = {"retry-after": "5"}
"""The header of an answer that will be another one soon."""


class Responder(Protocol):
    """Completes the requests of one key."""

    @property
    def model(self) -> str:
        """Name of the model that generates."""
        ...

    async def reply(self, request: CompletionRequest, turn: StreamedTurn | None = None) -> Reply:
        """Complete a request, and pass parts of the reply to `turn`. Cancelled if the client disconnects.

        Raises:
            RequestRefused: if the request cannot be completed as it is.
            HflowError: one of `REFUSALS` if the engine refuses it, any other if nothing can be generated.
        """
        ...


class EndpointServer:
    """A server on the running event loop, which starts when it is first used. Port 0 is a free one.

    On `0.0.0.0`, `url` has the machine's address.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        self._host = host
        self._port = port
        self._responders: dict[str | None, Responder] = {}
        """Key -> what completes its requests. None is for requests with any key, or without one."""
        self._tasks: dict[str | None, set[asyncio.Task[Reply]]] = {}
        """Key -> requests that are being completed."""
        self._announced: set[str | None] = set()
        """Keys that will have a responder."""
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return base_url(self._host, self._port)

    async def start(self) -> None:
        """Start listening, unless it does already.

        Raises:
            ConfigError: if the port is in use, the host is not this machine's, or packages are missing.
        """
        if self._serving is None:
            listener = self._listen()
            try:
                self._server = _new_server(self._app())
            except ImportError as error:
                listener.close()
                raise ConfigError(
                    f"an endpoint needs the package {error.name!r}; run `pip install 'hflow-rl[serve]'`"
                ) from error
            self._serving = asyncio.create_task(self._server.serve([listener]))
        await self._server.ready.wait()

    def announce(self, key: str | None) -> None:
        """Answer requests with this key with 503, until there is a responder for it; None: all requests."""
        self._announced.add(key)

    async def close(self) -> None:
        """Stop listening. Safe to call twice."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            await serving

    async def wait(self) -> None:
        """Wait until the server has ended."""
        if self._serving is not None:
            await self._serving

    @asynccontextmanager
    async def admit(self, responder: Responder, *, is_open: bool = False) -> AsyncIterator[str]:
        """Start if necessary, and let a responder complete requests with the returned key during the block.

        Requests that are not completed when the block ends are cancelled.

        `is_open` admits any request, instead of those with the key.
        """
        key = secrets.token_urlsafe(32)
        async with self.admit_key(None if is_open else key, responder):
            yield key

    @asynccontextmanager
    async def admit_key(self, key: str | None, responder: Responder) -> AsyncIterator[None]:
        """Admit requests as `admit` does, with this key; None: all requests."""
        await self.start()
        self._responders[key] = responder
        self._tasks[key] = set()
        try:
            yield
        finally:
            del self._responders[key]
            tasks = self._tasks.pop(key)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio turns off Nagle's algorithm, which costs 40 ms per request, only if the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen on {self._host}, port {self._port}: {error.strerror or error}. Choose "
                "another port or host"
            ) from error
        self._port = listener.getsockname()[1]
        return listener

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        return Starlette(
            routes=[
                *(Route(path, self._complete, methods=["POST"]) for path in DIALECTS),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            ],
            exception_handlers={
                RequestRefused: _failure_response,
                HTTPException: _no_route_response,
                HflowError: _failure_response,
                Exception: _failure_response,
            },
        )

    async def _complete(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        dialect = _dialect(request)
        key = self._key(request)
        self._responder(key)  # before the body is read
        body = await _read_body(request)
        try:
            value = parse_json(body)
        except ValueError as error:
            raise RequestRefused(f"the body of the request is not JSON: {error}") from error
        parsed = dialect.parse(value, request.headers)
        wanted = dataclasses.replace(parsed, session=request.headers.get("x-session-id"))
        _check_model(wanted.model, self._responder(key).model)
        if wanted.is_streamed:
            return await self._stream(key, request, wanted, dialect.writer(wanted))
        task = self._start(key, wanted)
        return JSONResponse(dialect.reply_json(await _while_connected(request, task), wanted))

    async def _stream(
        self, key: str | None, request: Request, wanted: CompletionRequest, writer: ReplyWriter
    ) -> Response:
        """Return a response whose events are sent as tokens are drawn. It begins with the first of them."""
        from starlette.responses import StreamingResponse

        turn = StreamedTurn()
        task = self._start(key, wanted, turn)
        task.add_done_callback(lambda _: turn.end())
        events = _events(task, turn, writer)
        first = await _while_connected(request, asyncio.create_task(_next(events)))

        async def all_events() -> AsyncIterator[str]:
            try:
                yield first
                async for text in events:
                    yield text
            finally:
                task.cancel()

        return StreamingResponse(all_events(), media_type="text/event-stream")

    def _start(
        self, key: str | None, wanted: CompletionRequest, turn: StreamedTurn | None = None
    ) -> asyncio.Task[Reply]:
        """Begin to complete a request. It is cancelled when its key is no longer valid."""
        task = asyncio.create_task(self._responder(key).reply(wanted, turn))
        self._tasks[key].add(task)
        task.add_done_callback(self._tasks[key].discard)
        return task

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        model = self._responder(self._key(request)).model
        return JSONResponse({"object": "list", "data": [_model_json(model)]})

    async def _model(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        model = self._responder(self._key(request)).model
        _check_model(request.path_params["model"], model)
        return JSONResponse(_model_json(model))

    def _key(self, request: Request) -> str | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = self._announced | self._responders.keys()
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        if key in known:
            return key
        if None in known:
            return None
        raise RequestRefused(
            "the API key is wrong or missing; send the endpoint's key, as api_key=endpoint.api_key",
            status=401,
            code="invalid_api_key",
        )

    def _responder(self, key: str | None) -> Responder:
        if key not in self._responders:
            raise RequestRefused(
                "the model is not ready: it is being loaded, or its episode has ended; try again",
                status=503,
                code="model_not_ready",
            )
        return self._responders[key]


async def _read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        RequestRefused: if it has more than `MAX_BODY_BYTES`.
    """
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if int(declared) <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        else:
            return bytes(body)
    raise RequestRefused(f"the body of the request has more than {MAX_BODY_BYTES:,} bytes", status=413)


T = TypeVar("T")


async def _while_connected(request: Request, task: asyncio.Task[T]) -> T:
    """Return the result of a task, which is cancelled if the client disconnects.

    Raises:
        RequestRefused: if the task was cancelled.
    """
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise _cancelled() from None


async def _next(events: AsyncIterator[str]) -> str:
    return await anext(events)


async def _events(task: asyncio.Task[Reply], turn: StreamedTurn, writer: ReplyWriter) -> AsyncIterator[str]:
    """Yield the events of a reply as its parts come, and cancel it if they are no longer wanted.

    Raises:
        Exception: what prevented the first part. A later error is an event.
    """
    sent, num_sent, has_begun = "", 0, False
    try:
        async for part in turn.parts():
            begin = "" if has_begun else writer.begin(turn.reply_id, part.num_prompt_tokens)
            has_begun = True
            sent, num_sent = sent + part.text, num_sent + len(part.ids)
            if events := begin + writer.add(part):
                yield events
        reply = await task
        if not reply.text.startswith(sent):
            raise EpisodeError("the text that was streamed differs from the reply's; request it unstreamed")
        begin = "" if has_begun else writer.begin(reply.reply_id, reply.num_prompt_tokens)
        yield begin + writer.add(reply.part(len(sent), num_sent)) + writer.end(reply)
    except (Exception, asyncio.CancelledError) as error:
        if not has_begun:
            raise
        if isinstance(error, asyncio.CancelledError) and not task.cancelled():
            raise  # the client has gone
        yield writer.fail(_refusal_of(error))
    finally:
        task.cancel()


def _cancelled() -> RequestRefused:
    return RequestRefused(
        "the request was cancelled: its client has gone, or its episode has ended", status=503
    )


def _dialect(request: Request) -> Dialect:
    return DIALECTS.get(request.url.path, DEFAULT_DIALECT)


async def _disconnected(request: Request) -> None:
    with suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _check_model(wanted: str, model: str) -> None:
    if wanted != model:
        raise RequestRefused(
            f"there is no model {wanted!r} here; set model={model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _model_json(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": int(time.time()), "owned_by": "hflow"}


def _failure_response(request: Request, error: Exception) -> Response:
    return _error_response(_refusal_of(error), _dialect(request))


def _refusal_of(error: BaseException) -> RequestRefused:
    """Return the answer to an error. Only errors that concern the request are its client's fault."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, asyncio.CancelledError):
        return _cancelled()
    if isinstance(error, HflowError):
        return RequestRefused(str(error), status=400 if isinstance(error, REFUSALS) else 500)
    return RequestRefused(f"{type(error).__name__}: {error}", status=500)


def _no_route_response(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    known = ", ".join(DIALECTS)
    message = f"there is no {request.method} {request.url.path} here; use {known} or /v1/models"
    return _error_response(RequestRefused(message, status=status))


def _error_response(refusal: RequestRefused, dialect: Dialect = DEFAULT_DIALECT) -> Response:
    from starlette.responses import JSONResponse

    headers = _RETRY if refusal.status == 503 else _NO_RETRY
    return JSONResponse(dialect.error_json(refusal), refusal.status, headers=headers)


def _new_server(app: Starlette) -> Any:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """A connection that is closed if a request does not arrive in time."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._set_deadline()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._set_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._end_deadline()

        def _set_deadline(self) -> None:
            """Let the time of a request begin with its first byte, and end with its last."""
            state = self.conn.their_state
            is_arriving = state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0])
            if not is_arriving:
                self._end_deadline()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

        def _end_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _give_up(self) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
                message = f"the request did not arrive within {REQUEST_SECONDS} seconds"
                response = _error_response(RequestRefused(message, status=408))
                headers = [*response.raw_headers, (b"connection", b"close")]
                for event in (
                    h11.Response(status_code=response.status_code, headers=headers),
                    h11.Data(data=bytes(response.body)),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    class Server(uvicorn.Server):
        """A server that leaves signals to the process it runs in."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.ready = asyncio.Event()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.ready.set()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )
    return Server(config)


def base_url(host: str, port: int) -> str:
    """Return the base URL for clients of a server. One that listens everywhere has the machine's address."""
    host = _own_address() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _own_address() -> str:
    """Return the address by which other machines reach this one."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing; chooses the interface
        return str(probe.getsockname()[0])
    return socket.gethostname()
