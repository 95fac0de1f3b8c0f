"""Runs the micro-batches of a data index through megatron's pipeline schedule.

The schedule is megatron's own: one forward, one backward (1F1B), or a plain loop with one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from hflow.models.expert_balance import BalancedTokens
from hflow.models.expert_replay import ReplayedExperts
from hflow.models.host_offload import activations_in_host_memory
from hflow.training.loop.inputs import PackedTokens
from hflow.training.megatron.context_parallel import RowDivision
from hflow.training.megatron.experts import forget_routing
from hflow.training.megatron.model import Stage


@dataclass(frozen=True)
class StageTokens:
    """A micro-batch, as a stage computes it."""

    tokens: PackedTokens
    """On the last stage a `PackedBatch`, unless it is a placeholder."""
    division: RowDivision | None
    """The division of the rows over context ranks; None without context parallelism."""
    replayed: ReplayedExperts | None = None
    """The experts that this rank's routers are to choose; None: they choose themselves."""
    balanced: BalancedTokens | None = None
    """What this rank's routers count and balance; None: nothing."""

    @property
    def num_rows(self) -> int:
        """Number of rows that this rank computes."""
        return len(self.tokens.computed_ids if self.division is None else self.division.rows)


Finish = Callable[[StageTokens, Tensor], Any]
"""Computes the last stage's result from a micro-batch and the hidden states of this rank's rows."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Runs micro-batches through the stages of a replica; all its ranks call it together."""

    stage: Stage
    module: nn.Module
    """The stage's module, or its wrapper that sums gradients."""
    offload_activations: bool
    """Whether what a stage saves for its backward pass is in host memory."""
    finish_gather: Callable[[], None]
    """Waits for weights that are still gathered while the layers run, before anything else uses them."""

    def backward(
        self, microbatches: Sequence[StageTokens], microbatch_loss: Callable[[StageTokens, Tensor], Tensor]
    ) -> None:
        """Accumulate the gradients of all micro-batches, summed over data ranks too.

        Every rank has the same number of them. On the last stage `microbatch_loss` returns one's part of the
        loss.
        """

        def finish(tokens: StageTokens, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            # The loss has its weights already, so megatron gets no number of tokens to divide by.
            no_tokens = torch.zeros((), dtype=torch.int, device=hidden.device)
            return microbatch_loss(tokens, hidden), no_tokens, None

        self._run(microbatches, finish, forward_only=False)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[StageTokens], finish: Finish) -> list[Any]:
        """Run forward passes; on the last stage, return what `finish` returned for each micro-batch."""

        def collect(tokens: StageTokens, hidden: Tensor, non_loss_data: bool) -> Any:
            return finish(tokens, hidden)

        return self._run(microbatches, collect, forward_only=True)

    def _run(
        self, microbatches: Sequence[StageTokens], finish: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        if not microbatches:
            return []
        stage, groups = self.stage, self.stage.parallel.groups
        lengths = [self._rows_between(tokens) for tokens in microbatches]
        run = get_forward_backward_func(pp_size=stage.parallel.pipe, vp_size=None)

        def forward_step(rest: Iterator[StageTokens], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            tokens = next(rest)
            packed = tokens.tokens
            inputs = stage.inputs(
                packed.computed_ids,
                packed.position_ids,
                packed.layout,
                tokens.division,
                tokens.replayed,
                tokens.balanced,
            )
            with activations_in_host_memory(self.offload_activations):
                hidden = module(**inputs)
            self.finish_gather()
            return hidden, partial(finish, tokens)

        results: list[Any] = run(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=self.module,
            num_microbatches=len(microbatches),
            seq_length=0,  # micro-batches differ in length
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=groups,
            p2p_communicator=_KnownShapes(stage, lengths) if stage.parallel.pipe > 1 else None,
        )
        forget_routing(self.stage.module)
        return results

    def _rows_between(self, tokens: StageTokens) -> int:
        """Return the number of rows that a tensor rank sends to the next stage."""
        multiple = self.stage.row_multiple
        return -(-tokens.num_rows // multiple) * multiple // self.stage.token_share


class _KnownShapes(P2PCommunicator):  # type: ignore[misc]  # megatron has no types
    """Exchanges activations and gradients between stages without exchanging their shapes first.

    Every stage knows the lengths of all micro-batches, which pass in the same order in both directions.
    """

    def __init__(self, stage: Stage, lengths: Sequence[int]) -> None:
        super().__init__(stage.parallel.groups.pp, stage.config)
        shapes = [(length, 1, stage.config.hidden_size) for length in lengths]
        self._forward, self._backward = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: object, tensor_send_prev: object, recv_prev: bool, recv_next: bool
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the shapes of the next tensors from the previous and from the next stage."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None
