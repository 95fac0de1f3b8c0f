"""A server with the parts of Modal's gRPC API that one call needs, by the classes of Modal's package.

It runs commands here. Import it where `modal` is installed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

TOKEN = "e30.eyJleHAiOiA5OTk5OTk5OTk5fQ.x"
"""A token whose time is never over."""
BUILDER = "2025.06"


class ModalService(api_grpc.ModalClientBase):  # type: ignore[misc]
    """The service. `refused` is the reason for which the next sandbox is refused."""

    def __init__(self) -> None:
        self.url = ""
        self.refused = ""
        self.images: list[list[str]] = []
        self.made: list[Any] = []
        self.ended: list[str] = []

    async def ClientHello(self, stream: Any) -> None:
        await _answer(stream, api_pb2.ClientHelloResponse())

    async def AuthTokenGet(self, stream: Any) -> None:
        await _answer(stream, api_pb2.AuthTokenGetResponse(token=TOKEN))

    async def AppGetOrCreate(self, stream: Any) -> None:
        await _answer(stream, api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await _answer(
            stream, api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)
        )

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.images.append(list(request.image.dockerfile_commands))
        made = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        metadata = api_pb2.ImageMetadata(image_builder_version=BUILDER)
        await stream.send_message(
            api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=made, metadata=metadata)
        )

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        if self.refused:
            raise GRPCError(Status.PERMISSION_DENIED, self.refused)
        self.made.append(request.definition)
        number = len(self.made)
        access = api_pb2.CommandRouterAccess(url=self.url, jwt=TOKEN)
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=f"sb-{number}", task_id=f"ta-{number}", command_router_access=access
            )
        )

    async def SandboxTerminateV2(self, stream: Any) -> None:
        self.ended.append((await stream.recv_message()).sandbox_id)
        await stream.send_message(api_pb2.SandboxTerminateResponse())


class _Router(task_command_router_grpc.TaskCommandRouterBase):  # type: ignore[misc]
    """What runs the commands of sandboxes."""

    def __init__(self) -> None:
        self._running: dict[str, Process] = {}

    async def TaskExecStart(self, stream: Any) -> None:
        request = await stream.recv_message()
        program, *arguments = request.command_args
        assert program == "python3"
        self._running[request.exec_id] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", *arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={"PATH": os.defpath},
        )
        await stream.send_message(task_command_router_pb2.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        request = await stream.recv_message()
        stdin: Any = self._running[request.exec_id].stdin
        stdin.write(request.data)
        await stdin.drain()
        if request.eof:
            stdin.close()
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        stdout: Any = self._running[request.exec_id].stdout
        if request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT:
            while part := await stdout.read(2**16):
                await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=part))


for _base in (ModalService, _Router):
    _base.__abstractmethods__ = frozenset()  # the calls that hflow does not make


async def _answer(stream: Any, reply: Any) -> None:
    await stream.recv_message()
    await stream.send_message(reply)


@contextmanager
def serve_modal() -> Iterator[ModalService]:
    service, ready = ModalService(), Event()

    async def main() -> None:
        server = Server([service, _Router()])
        await server.start("127.0.0.1", 0)
        (listening,) = server._server.sockets
        service.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        ready.set()
        await asyncio.Event().wait()

    Thread(target=asyncio.run, args=[main()], daemon=True).start()
    ready.wait()
    yield service
