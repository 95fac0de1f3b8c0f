"""vLLM with asynchronous scheduling on a CPU, as hflow has it on GPUs.

vLLM turns it off on CPUs, as its model runner then copies tokens on a second CUDA stream. Here streams and
events do nothing. Scheduler, executors, model runner and hflow's stepper are the real ones: a step is
launched before the tokens of the one before are read. With two tensor ranks, it is also computed meanwhile.

The process of the engine and its ranks import this module.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.request import Decode
from hflow.engines.vllm.cpu_recording import RecordingWorker
from hflow.engines.vllm.stepper import VllmStepper


class _Nothing:
    """A stream, or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


_cuda: Any = torch.cuda
_cuda.Stream = _cuda.Event = _cuda.current_stream = _Nothing
_cuda.stream = nullcontext


class AsyncStepper(VllmStepper):
    """Keeps asynchronous scheduling in the configuration."""

    def __init__(self, settings: ProcessSettings, decode: Decode | None) -> None:
        """Build vLLM's engine."""
        platform: Any = CpuPlatform
        check = platform.check_and_update_config

        def check_and_keep(config: Any) -> None:
            wanted = config.scheduler_config.async_scheduling
            check(config)
            config.scheduler_config.async_scheduling = wanted

        platform.check_and_update_config = staticmethod(check_and_keep)
        super().__init__(settings, decode)
        core = self._core.engine_core
        assert core.async_scheduling
        assert core.batch_queue is not None


class AsyncWorker(CPUWorker):  # type: ignore[misc, unused-ignore]
    """A rank, which imports this module."""


class AsyncRecordingWorker(RecordingWorker):  # type: ignore[misc, unused-ignore]
    """A rank that records experts, whose copies are read with the step's tokens."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens; add the experts when they are read."""
        output: Any = CPUWorker.sample_tokens(self, grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            num_sampled = np.ones(len(pending.request_ids), np.int64)
            pending.enqueue_cpu_copy(num_sampled, num_rejected=np.zeros_like(num_sampled))
            read = output.get_output

            def read_with_experts() -> Any:
                tokens = read()
                tokens.aux_output_connector_output = pending.process_output()
                return tokens

            output.get_output = read_with_experts
        return output
