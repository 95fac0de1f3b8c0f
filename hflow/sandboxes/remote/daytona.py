"""`DaytonaSandboxes`: a sandbox of Daytona for each call, by Daytona's own package."""

from __future__ import annotations

import math

from hflow.sandboxes.remote.provider import PROGRAM_PATH, ServiceSandboxes, longest_life
from hflow.types.sandbox import Sandbox


class DaytonaSandboxes(ServiceSandboxes):
    """Sandboxes without a network, of an image. Daytona deletes one when its time is over."""

    name = "daytona"
    key_variables = ("DAYTONA_API_KEY",)

    async def execute(self, program: bytes, limits: Sandbox) -> bytes:
        """Run a program in a new sandbox, and return its standard output.

        Raises:
            Exception: the errors of daytona, and of its connection.
        """
        from daytona import AsyncDaytona, CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

        life = longest_life(limits)
        common = {
            "language": "python",
            "network_block_all": True,
            "ephemeral": True,
            "ttl_minutes": math.ceil(life / 60),
            "labels": {"hflow": "sandbox"},
        }
        async with AsyncDaytona() as client:
            params = (
                CreateSandboxFromImageParams(image=limits.image, **common)
                if limits.image
                else CreateSandboxFromSnapshotParams(**common)
            )
            made = await client.create(params, timeout=life)
            try:
                await made.fs.upload_file(program, PROGRAM_PATH)
                done = await made.process.exec(f"python3 {PROGRAM_PATH}", timeout=life)
                output: str = done.result
                return output.encode()
            finally:
                await made.delete()
