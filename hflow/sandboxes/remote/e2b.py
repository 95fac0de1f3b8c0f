"""`E2BSandboxes`: a virtual machine of E2B for each call, by E2B's own package."""

from __future__ import annotations

from hflow.sandboxes.remote.provider import PROGRAM_PATH, ServiceSandboxes, longest_life
from hflow.types.sandbox import Sandbox


class E2BSandboxes(ServiceSandboxes):
    """Machines without access to the internet, of a template. E2B ends a machine when its time is over."""

    name = "e2b"
    key_variables = ("E2B_API_KEY",)

    async def execute(self, program: bytes, limits: Sandbox) -> bytes:
        """Run a program in a new machine, and return its standard output.

        Raises:
            Exception: the errors of e2b, and of its connection.
        """
        from e2b import AsyncSandbox

        life = longest_life(limits)
        machine = await AsyncSandbox.create(
            limits.image or None, timeout=life, allow_internet_access=False, metadata={"hflow": "sandbox"}
        )
        try:
            await machine.files.write(PROGRAM_PATH, program)
            done = await machine.commands.run(f"python3 {PROGRAM_PATH}", timeout=life)
            output: str = done.stdout
            return output.encode()
        finally:
            await machine.kill()
