"""The torch backend's optimizer: AdamW, a learning-rate schedule and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hflow.data.batches.device_copy import to_device
from hflow.models.settings import ModelSettings
from hflow.training.learning_rate import learning_rate


class TorchOptimizer:
    """AdamW on this rank's shards as plain tensors. Vectors (norms, biases) have no weight decay."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], model: ModelSettings, group: ProcessGroup | None
    ) -> None:
        """Prepare AdamW, and allocate its moments.

        Moments that the first step allocated would be among its freed activations, so that torch could not
        return that memory to an engine on the same device.

        Args:
            parameters: the model's weights.
            model: its settings, with those of AdamW and its schedule.
            group: the ranks that the weights are sharded over; None for one.
        """
        optim = model.optim
        self._optim, self._num_updates = optim, model.num_updates
        self._group = group
        self._weights = list(parameters)
        self._shards = [nn.Parameter(local_shard(weight.detach())) for weight in self._weights]
        self._shard_of = dict(zip(self._weights, self._shards, strict=True))
        nonempty = [shard for shard in self._shards if shard.numel()]
        param_groups: list[dict[str, Any]] = [
            {"params": [shard for shard in nonempty if shard.dim() >= 2]},
            {"params": [shard for shard in nonempty if shard.dim() < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            param_groups,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        for shard in nonempty:
            self._state(shard)
        self.num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._optim, self.num_steps, self._num_updates)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether an update whose gradient is not finite is skipped."""
        return self._optim.on_nonfinite == "skip"

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient over all ranks; a collective."""
        for weight, shard in zip(self._weights, self._shards, strict=True):
            shard.grad = None if weight.grad is None else local_shard(weight.grad)
        norm = get_total_norm([shard.grad for shard in self._shards if shard.grad is not None])
        if self._group is None:
            return norm.item()  # waits: once per update
        # Without any gradient the norm is on the CPU, which NCCL cannot reduce.
        square = to_device(norm, self._shards[0].device).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt().item()  # waits: once per update

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, update the weights, and drop the gradients."""
        if self._optim.clip_grad > 0:
            whole = to_device(torch.tensor(norm), self._shards[0].device)
            clip_grads_with_norm_(self._shards, self._optim.clip_grad, whole)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.num_steps += 1
        self._zero_grad()

    def skip(self) -> None:
        """Drop the gradients without an update."""
        self._zero_grad()

    def moments(self, weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return Adam's averages of the gradient and its square, of this rank's shard of a weight."""
        state = self._state(self._shard_of[weight])
        return state["exp_avg"].detach(), state["exp_avg_sq"].detach()

    def states(self) -> list[Tensor]:
        """Return the moments."""
        states = self._adamw.state.values()
        return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]

    def resume(self, num_steps: int) -> None:
        """Set the number of steps made, after the moments of that many steps have been loaded."""
        self.num_steps = num_steps
        for state in self._adamw.state.values():
            state["step"].fill_(num_steps)

    def _state(self, shard: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state of a shard: at first the one that AdamW would start with."""
        state: dict[str, Tensor] = self._adamw.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(shard), torch.zeros_like(shard)
        return state

    def _zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self._weights, *self._shards):
            tensor.grad = None


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor that this rank holds; it shares the tensor's storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
