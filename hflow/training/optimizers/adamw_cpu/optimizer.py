"""`GroupAdamWCpu`: AdamW whose moments are in host memory, where the CPU computes its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.base.devices import is_gpu
from hflow.models.host_copy import HostCopies
from hflow.planner.plan.optimizers import CHUNK
from hflow.training.optimizers.adamw.optimizer import update_adamw
from hflow.training.optimizers.base import BaseOptimizer

NUM_BUFFERS = 2
"""Chunks in host memory: while the CPU updates one, the next one arrives."""


class GroupAdamWCpu(BaseOptimizer):
    """AdamW whose moments are in (pinned) host memory, where the CPU computes its steps.

    Weights and gradients are copied to the host in chunks, and new weights back. Copies have a stream of
    their own, so that they run while the CPU updates another chunk.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        """Take groups of parameters, and options of AdamW."""
        super().__init__(groups, **options)
        self._memory = HostCopies()
        """Host memory of the moments. What torch pins it rounds up to a power of two."""
        self._buffers: list[Tensor] = []
        """Each has room for the weights and the gradients of a chunk."""

    @override
    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        device = weights[0].device
        if not is_gpu(device.type):
            means, squares = map(list, zip(*map(self.states_of, weights), strict=True))
            update_adamw(group, weights, gradients, means, squares)
            return
        module = torch.get_device_module(device)
        copies, current = module.Stream(), module.current_stream()
        copies.wait_stream(current)
        chunks = [
            tuple(x.view(-1)[start : start + CHUNK] for x in (weight, gradient, *self.states_of(weight)))
            for weight, gradient in zip(weights, gradients, strict=True)
            for start in range(0, weight.numel(), CHUNK)
        ]
        arriving = [self._to_host(chunks, index, copies) for index in range(min(NUM_BUFFERS, len(chunks)))]
        for index, (weight, _, mean, square) in enumerate(chunks):
            arrived, there = arriving[index]
            arrived.synchronize()  # waits: once per chunk, for the copy that the CPU computes with
            update_adamw(group, [there[0]], [there[1]], [mean], [square])
            with module.stream(copies):
                weight.copy_(there[0], non_blocking=True)
            if index + NUM_BUFFERS < len(chunks):
                arriving.append(self._to_host(chunks, index + NUM_BUFFERS, copies))
        current.wait_stream(copies)

    def _to_host(self, chunks: list[Any], index: int, copies: Any) -> tuple[Any, Tensor]:
        """Start copying a chunk into a buffer, after what is copied out of it; return event and copy."""
        weight, gradient, *_ = chunks[index]
        while len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(torch.empty(2, CHUNK, pin_memory=True))
        there = self._buffers[index % NUM_BUFFERS][:, : weight.numel()]
        module = torch.get_device_module(weight.device)
        with module.stream(copies):
            there[0].copy_(weight, non_blocking=True)
            there[1].copy_(gradient, non_blocking=True)
            event = module.Event()
            event.record(copies)
        return event, there

    @override
    def states_of(self, weight: Tensor) -> tuple[Tensor, ...]:
        state = self.state[weight]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self._memory.empty(weight.shape, torch.float32, weight.device).zero_()
        return state["exp_avg"], state["exp_avg_sq"]
