"""`VllmEngine`: vLLM in a process of its own."""

from __future__ import annotations

from typing import Any

from hflow.engines.interface import EngineSetup
from hflow.engines.process.engine import EngineLaunch, ProcessEngine
from hflow.engines.vllm.launch_options import engine_arguments, environment
from hflow.engines.vllm.vision_options import image_options

_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine's core runs in the process that steps it, not in a further one."""


class VllmEngine(ProcessEngine):
    """Generates by vLLM."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start the process and build vLLM's engine in it.

        Raises:
            BackendError: if vLLM cannot build the model.
        """
        super().__init__(setup, vllm_launch(setup))


def vllm_launch(setup: EngineSetup) -> EngineLaunch:
    """Return the stepper, environment and arguments with which vLLM serves a model.

    Raises:
        BackendError: if vLLM cannot take the images of a model that sees.
    """
    of_images = image_options(setup)

    def arguments(directory: str, max_length: int) -> dict[str, Any]:
        return {**engine_arguments(setup, directory, max_length), **of_images}

    return EngineLaunch(
        library="vLLM",
        stepper="hflow.engines.vllm.stepper:VllmStepper",
        environment=environment(setup) | _IN_PROCESS,
        arguments=arguments,
    )
