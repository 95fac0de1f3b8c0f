"""A worker of vLLM for CPUs that records the experts of tokens, as vLLM's own workers do on GPUs.

vLLM records through its second model runner only, whose kernels need Triton. Its recorder needs neither: it
listens to routers and is called once before and twice after a step. This worker calls it around the steps of
the first model runner. Everything else is vLLM's: what the scheduler asks for, the recorder, its store of
cached tokens, and how rows reach the output of a request.

It is the `worker_cls` of engines on CPUs that record experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.v1.worker.cpu_worker import CPUWorker


class _StepBatch(NamedTuple):
    """The requests of a step, in the order of its tokens, under the names that the recorder reads."""

    req_ids: list[str]
    num_computed_tokens_np: Any
    """Position of each request's first token in the step."""
    query_start_loc_np: Any
    """Row of each request's first token, and the number of rows."""


class RecordingWorker(CPUWorker):  # type: ignore[misc, unused-ignore]
    """Records the experts of each step."""

    _pending: PendingAuxOutput | None = None
    """Experts of the step whose tokens are not sampled yet. Only the first tensor rank has them."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Listen to the routers, once the sizes of cached blocks are known."""
        super().initialize_from_config(kv_cache_config)
        self._connector = get_aux_output_connector(
            self.model_runner.get_model(), self.vllm_config, kv_cache_config
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute a step's tokens, and take their experts."""
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if output is None:  # tokens are to be sampled
            runner: Any = self.model_runner
            num = runner.input_batch.num_reqs
            batch: Any = _StepBatch(
                req_ids=list(runner.input_batch.req_ids),
                num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:num].copy(),
                query_start_loc_np=runner.query_start_loc.np[: num + 1].copy(),
            )
            self._pending = self._connector.prepare_output(batch)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the step's tokens, and add the experts of those that were computed."""
        output: Any = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, num_rejected=np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
