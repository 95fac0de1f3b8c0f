"""The distributed optimizer: AdamW on this rank's share of its stage's weights, clipped over all axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from hflow.backends.common.learning_rate import check_schedule, learning_rate
from hflow.backends.interface import ModelSettings, OptimSettings
from hflow.backends.megatron.master_weights import load, ranges_of, separate_master_weights
from hflow.backends.megatron.model import Stage

# -------------------- AdamW with the state of fused kernels: one step count for each group of
# parameters.
# Megatron's distributed checkpoints expect this layout. With torch's own AdamW, which counts steps for each
# parameter, loading them leaves all parameters with one shared count.


class GroupAdamW(torch.optim.AdamW):
    """Computes what torch's fused AdamW does, by the same kernel.

    It is an AdamW because megatron's optimizer takes no other.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state as it is; AdamW would look for its own step counts."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None, "closures are not called"
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if pairs:
                group["step"] = group.get("step", 0) + 1
                weights, gradients = map(list, zip(*pairs, strict=True))
                self._step(group, weights, gradients)

    def _step(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        means, squares = self.moments(weights)
        beta1, beta2 = group["betas"]
        count = torch.tensor(float(group["step"]), device=weights[0].device)
        torch._fused_adamw_(
            weights,
            gradients,
            means,
            squares,
            max_exp_avg_sqs=[],
            state_steps=[count] * len(weights),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def moments(self, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The averages of each weight's gradient, and of the gradient's square."""
        for p in weights:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [self.state[p] for p in weights]
        return [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]


class MegatronOptimizer:
    """Sums gradients over data parallelism and steps; vectors (norms, biases) are not decayed.

    Every rank keeps fp32 weights and moments of its part only; the stepped weights are gathered.
    """

    def __init__(self, stage: Stage, model: ModelSettings) -> None:
        """Take the stage's weights into contiguous buffers, where gradients are in fp32."""
        settings = model.optim
        check_schedule(settings)
        self._settings = settings
        self.module = _summing(stage)
        """The stage's module with its gradients' buffers: what forward and backward passes go through."""
        self._inner = _distributed(stage, self.module, settings)
        self.ranges = ranges_of(stage, self._inner)
        """What this rank steps of each parameter."""
        self.master_weights = separate_master_weights(stage, self.ranges)
        """What is stepped in place of this rank's parameters in half precision."""
        load(stage, model, self.master_weights)
        self.num_steps = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._settings, self.num_steps)

    def forget(self) -> None:
        """Make all gradients zero, before the first backward pass of a minibatch."""
        self.module.zero_grad_buffer()
        self._inner.zero_grad()

    def gradient_norm(self) -> float:
        """Norm of the whole gradient, copies counted once (a collective over the replica)."""
        self._inner.prepare_grads()
        norm: float = self._inner.get_grad_norm()
        return norm

    def step(self, norm: float) -> None:
        """Clip by the norm that `gradient_norm` returned, step, and gather the weights (a collective)."""
        if self._settings.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self._inner.get_parameters(), self._settings.clip_grad, norm)
        for group in self._inner.param_groups:
            group["lr"] = self.lr
        self._inner.step_with_ready_grads()
        self.num_steps += 1

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Adam's averages of what this rank steps of a parameter, flat as the range of it."""
        (mean,), (square,) = self._inner.optimizer.moments([self.ranges[name].shard])
        return mean, square

    def resume(self, num_steps: int) -> None:
        """Count steps from here on, once the moments are those after so many."""
        self.num_steps = num_steps
        for group in self._inner.param_groups:
            group["step"] = num_steps


def _summing(stage: Stage) -> Any:
    """The module within megatron's data parallelism, which sums gradients and averages nothing."""
    config = stage.config
    assert config.calculate_per_token_loss, "megatron would divide gradients by the number of ranks"
    config.finalize_model_grads_func = _finalize
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, buffers, stage.module, pg_collection=stage.parallel.groups)


def _finalize(
    model: Sequence[nn.Module], num_tokens: object, pg_collection: object, force_all_reduce: bool
) -> None:
    """Sum over data parallelism, and what stages and tensor ranks share; divide by no number of tokens."""
    finalize_model_grads(list(model), None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


@torch.no_grad()  # it steps views of the weights, which would not be leaves
def _distributed(stage: Stage, module: Any, settings: OptimSettings) -> Any:
    groups = stage.parallel.groups
    adam = GroupAdamW(
        _parts(stage.module, settings.weight_decay), lr=settings.lr, betas=settings.betas, eps=settings.eps
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        bf16=stage.dtype == torch.bfloat16,
        params_dtype=stage.dtype,
        use_distributed_optimizer=True,
        clip_grad=settings.clip_grad,
    )
    # It asks its modules, not the optimizer, in which layout states are kept.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    optimizer = DistributedOptimizer(
        adam,
        config,
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=[module],
        per_model_buffers={0: module.buffers},
        data_parallel_group=groups.intra_dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups.mp.rank(),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer


def _parts(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay; the other keys are those that megatron tells groups by."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for weight in module.parameters():
        if weight.requires_grad:
            (matrices if weight.dim() >= 2 else vectors).append(weight)
    common = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return [
        {"params": matrices, "weight_decay": weight_decay, "wd_mult": 1.0, **common},
        {"params": vectors, "weight_decay": 0.0, "wd_mult": 0.0, **common},
    ]
