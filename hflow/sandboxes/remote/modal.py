"""`ModalSandboxes`: a sandbox of Modal for each call, by Modal's own package."""

from __future__ import annotations

from hflow.sandboxes.remote.provider import PYTHON, ServiceSandboxes, longest_life
from hflow.types.sandbox import Sandbox

APP = "hflow-sandboxes"
"""The app of Modal that has the sandboxes. It is made if it does not exist."""


class ModalSandboxes(ServiceSandboxes):
    """Sandboxes without a network, of an image. Modal ends one when its time is over."""

    name = "modal"
    key_variables = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")

    async def execute(self, program: bytes, limits: Sandbox) -> bytes:
        """Run a program in a new sandbox, and return its standard output.

        Raises:
            Exception: the errors of modal, and of its connection.
        """
        from modal import App, Image
        from modal import Sandbox as ModalSandbox

        life = longest_life(limits)
        app = await App.lookup.aio(APP, create_if_missing=True)
        image = Image.from_registry(limits.image) if limits.image else Image.debian_slim(PYTHON)
        made = await ModalSandbox.create.aio(app=app, image=image, timeout=life, block_network=True)
        try:
            running = await made.exec.aio("python3", "-", timeout=life, text=False)
            running.stdin.write(program)
            running.stdin.write_eof()
            await running.stdin.drain.aio()
            output: bytes = await running.stdout.read.aio()
            return output
        finally:
            await made.terminate.aio()
