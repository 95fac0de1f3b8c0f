"""The torch backend's optimizer: updates of this rank's shards, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from typing_extensions import override

from hflow.data.batches.device_copy import to_device
from hflow.models.settings import ModelSettings
from hflow.training.fsdp.shard_collectives import shard_group
from hflow.training.gradient_norm import total_norm
from hflow.training.optimizers.interface import NamedWeight, StepOptimizer
from hflow.types.tensor_slices import Block


class TorchOptimizer(StepOptimizer):
    """Updates this rank's shards as plain tensors."""

    def __init__(
        self,
        named: Iterable[NamedWeight],
        model: ModelSettings,
        group: ProcessGroup | None,
        replicate: int,
        blocks_of: Callable[[nn.Parameter, Tensor], Sequence[Block]],
    ) -> None:
        """Prepare the optimizer, and allocate its state.

        State that the first step allocated would be among its freed activations, so that torch could not
        return that memory to an engine on the same device.

        Args:
            group: the ranks that the weights are sharded over; None for one.
            replicate: number of these ranks that hold the same shard.
            blocks_of: a weight, and numbers for the rows of it that this rank holds -> their blocks.
        """
        super().__init__(model)
        self._group, self._replicate = group, replicate
        named = list(named)
        self._weights = [weight for weight, *_ in named]
        self._shards = [nn.Parameter(local_shard(weight.detach())) for weight in self._weights]
        self._shard_of = dict(zip(self._weights, self._shards, strict=True))
        held = [
            one._replace(weight=shard)
            for one, shard in zip(named, self._shards, strict=True)
            if shard.numel()
        ]
        self._optimizer = self._build(self._groups(held, {tensor for one in named for tensor in one.tensors}))
        for shard, *_ in held:
            self._optimizer.states_of(shard)
        blocks = {self._shard_of[weight]: partial(blocks_of, weight) for weight in self._weights}
        sharded = next((shard_group(weight) for weight in self._weights if isinstance(weight, DTensor)), None)
        self._find_matrices(blocks, sharded)

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient over all ranks; a collective."""
        for weight, shard in zip(self._weights, self._shards, strict=True):
            shard.grad = None if weight.grad is None else local_shard(weight.grad)
        gradients = [shard.grad for shard in self._shards if shard.grad is not None]
        # Over all ranks, also those with copies of the same shard, so that all step by the same number.
        return total_norm(gradients, self._shards[0].device, self._group, self._replicate)

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, update the weights, and drop the gradients."""
        if self.optim.clip_grad > 0:
            whole = to_device(torch.tensor(norm), self._shards[0].device)
            clip_grads_with_norm_(self._shards, self.optim.clip_grad, whole)
        self._set_lr()
        self._update_matrices([self._optimizer])
        self._optimizer.step()
        self.num_steps += 1
        self._zero_grad()

    def skip(self) -> None:
        """Drop the gradients without an update."""
        self._zero_grad()

    def states_of(self, weight: nn.Parameter, num: int) -> tuple[Tensor, ...]:
        """Return the states of this rank's shard of a weight, of which there are `num`; 0 of a frozen one."""
        if weight not in self._shard_of:
            shard = local_shard(weight.detach())
            return tuple(torch.zeros_like(shard) for _ in range(num))
        return tuple(state.detach() for state in self._optimizer.states_of(self._shard_of[weight]))

    def load_states(self, weight: nn.Parameter, states: Sequence[Tensor]) -> None:
        """Take the states of a weight that `states_of` returned, after they were read."""
        shard = self._shard_of.get(weight)
        if shard is not None and shard.numel():
            self._optimizer.load_states(shard, states)

    def states(self) -> list[Tensor]:
        """Return the state of all shards, if it is on their device."""
        states = (value for state in self._optimizer.state.values() for value in state.values())
        return [value for value in states if value.device == self._shards[0].device]

    @override
    def _param_groups(self) -> Iterator[dict[str, Any]]:
        yield from self._optimizer.param_groups

    def _zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self._weights, *self._shards):
            tensor.grad = None


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor that this rank holds; it shares the tensor's storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
