"""`DockerSandboxes`: a container of this machine's Docker for each call, by the command `docker`."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE

from hflow.sandboxes.calls import LONGEST_REPLY
from hflow.sandboxes.remote.provider import PYTHON, RemoteSandboxes, refuse_local
from hflow.types.sandbox import Sandbox, ToolFailed

DEFAULT_IMAGE = f"python:{PYTHON}-slim"
_OWN_MB = 256
"""MiB of a container beyond those of its call: for Python."""
_NOBODY = "65534:65534"
_REFUSALS = {125: "Docker", 126: "the image", 127: "the image"}
"""Exit code of `docker run` -> what refused to run the program."""


class DockerSandboxes(RemoteSandboxes):
    """Containers without network and privileges, as another user.

    A container ends with its standard input, which this process holds, and Docker removes it then.
    """

    name = "docker"
    watches_input = True

    @staticmethod
    def find_problem(limits: Sandbox) -> str | None:
        """Return the reason why calls cannot run in containers of this machine; None if they may."""
        if shutil.which("docker") is None:
            return (
                "provider='docker' needs the command docker, which is not installed. Install Docker, or use "
                "provider='process'"
            )
        return refuse_local("docker", limits)

    async def execute(self, program: bytes, limits: Sandbox) -> bytes:
        """Run a program in a new container, and return its standard output.

        Raises:
            RuntimeError: when the container cannot be started.
            ToolFailed: when it writes too much.
        """
        # Standard input stays open after the program, as its end is the end of the container.
        read = f"import sys; exec(sys.stdin.buffer.read({len(program)}))"
        command = [*_docker_run(limits), "python3", "-c", read]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.ensure_future(process.stderr.read(2**16))
        try:
            process.stdin.write(program)
            output = bytearray()
            while part := await process.stdout.read(2**16):
                output += part
                if len(output) > 2 * LONGEST_REPLY:
                    raise ToolFailed(f"wrote more than {2 * LONGEST_REPLY >> 20} MiB")
            process.stdin.close()
            code = await process.wait()
            if code in _REFUSALS:
                said = (await errors).decode(errors="replace").strip() or f"exit code {code}"
                raise RuntimeError(f"{_REFUSALS[code]} refused: {said}")
            return bytes(output)
        finally:
            errors.cancel()
            if process.returncode is None:
                process.stdin.close()
                process.kill()
                await process.wait()


def _docker_run(limits: Sandbox) -> list[str]:
    memory = f"{limits.memory_mb + _OWN_MB}m"
    return [
        *("docker", "run", "--rm", "--interactive", "--label", "hflow.sandbox"),
        *("--network", "none", "--memory", memory, "--memory-swap", memory, "--pids-limit", "512"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", _NOBODY),
        *("--read-only", "--tmpfs", f"/tmp:rw,exec,mode=1777,size={limits.memory_mb}m"),
        limits.image or DEFAULT_IMAGE,
    ]
