"""The megatron backend's optimizer: it updates this rank's part of its stage, clipped over all axes.

Weights are in buckets, in the order in which a backward pass reaches them. The gradients of a bucket are
summed over data ranks while the last micro-batch's backward pass computes those of earlier layers. New
weights are gathered while the next forward pass runs, in the opposite order: a layer waits for its own
bucket, and then the next bucket is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from hflow.models.settings import ModelSettings
from hflow.shapes.model_shape import MAGNITUDE
from hflow.training.gradient_norm import total_norm
from hflow.training.megatron.checkpoint_reader import load_parameters, open_weights
from hflow.training.megatron.hf_ranges import range_blocks
from hflow.training.megatron.model import Stage
from hflow.training.optimizers.interface import NamedWeight, StepOptimizer

BUCKET_PARAMETERS: int | None = None
"""Most parameters of a bucket; None: megatron's choice, 40 million or a million for each data rank."""


class MegatronOptimizer(StepOptimizer):
    """Megatron's distributed optimizer: sums gradients over data ranks and updates the weights.

    Every rank keeps fp32 weights and the optimizer's state of its part only;
    updated weights are gathered. Between `step` and `finish_gather`, only passes through `module` may use
    the weights.
    """

    def __init__(self, stage: Stage, model: ModelSettings) -> None:
        """Move the stage's weights into contiguous buffers, with fp32 gradients, and load master weights.

        State is allocated here: that which the first step allocated would be among its freed activations,
        so that torch could not return that memory to an engine on the same device.
        """
        super().__init__(model)
        self.module = wrap_for_gradient_sums(stage)
        """The stage's module with its gradient buffers, through which forward and backward passes run."""
        self._parts = self._distributed_optimizers(stage)
        """Optimizers of the weights that all data ranks have, and of the experts that expert ranks divide."""
        self._all_ranks, self._device = stage.parallel.group, stage.device
        self.ranges = updated_ranges(stage, self._parts)
        """Parameter name -> the range that this rank updates."""
        self.master_weights = separate_master_weights(stage, self.ranges)
        """The ranges that are stored separately, where the model computes in half precision."""
        load_master_weights(stage, model, self.master_weights)
        for part in self._parts:
            for shard in part.get_parameters():
                part.optimizer.states_of(shard)
        blocks = {
            self.ranges[one.name].shard: partial(range_blocks, one, self.ranges[one.name].start)
            for one in stage.parameters
            if one.name in self.ranges
        }
        self._find_matrices(blocks, stage.parallel.group)
        self._is_gathering = False

    @property
    def _buckets(self) -> list[list[Any]]:
        """Buckets of the weights that all data ranks have, and of divided experts, if there are any."""
        kinds = (self.module.bucket_groups, self.module.expert_parallel_bucket_groups)
        return [buckets for buckets in kinds if buckets]

    def zero_grad(self) -> None:
        """Set all gradients to 0, before the first backward pass of a minibatch."""
        self.module.zero_grad_buffer()
        for part in self._parts:
            part.zero_grad()

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient, copies counted once; a collective over the replica."""
        gradients: list[Tensor] = []
        for part in self._parts:
            part.prepare_grads()
            gradients += part.get_main_grads_for_grad_norm()
        # Megatron's own function waits once for each tensor where neither Apex nor Transformer Engine is.
        return total_norm(gradients, self._device, self._all_ranks)

    def step(self, norm: float) -> None:
        """Clip by the norm of `gradient_norm`, update, and begin to gather the weights; a collective."""
        self._set_lr()
        for part in self._parts:
            if self.optim.clip_grad > 0:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.optim.clip_grad, norm)
        self._update_matrices([part.optimizer for part in self._parts])
        for part in self._parts:
            # DistributedOptimizer's own step would also gather the weights. They are gathered once, below.
            MixedPrecisionOptimizer.step_with_ready_grads(part)
        for buckets in self._buckets:
            # A forward pass needs the last bucket first. The hook that waits for it starts the next gather.
            buckets[-1].start_param_sync()
        self.module.enable_forward_pre_hook()
        self._is_gathering = True
        self.num_steps += 1

    def finish_gather(self) -> None:
        """Wait for the weights that the last step began to gather."""
        if self._is_gathering:
            self.module.disable_forward_pre_hook(param_sync=False)
            for buckets in self._buckets:
                for bucket in reversed(buckets):
                    bucket.finish_param_sync(skip_next_bucket_dispatch=True)
            self._is_gathering = False

    def skip(self) -> None:
        """Drop the gradients without an update."""
        self.zero_grad()

    def states_of(self, name: str) -> tuple[Tensor, ...]:
        """Return the state of what this rank updates of a parameter, flattened, in the order of its kinds."""
        states: tuple[Tensor, ...] = self._optimizer_of(name).states_of(self.ranges[name].shard)
        return states

    def load_states(self, name: str, states: Sequence[Tensor]) -> None:
        """Take what `states_of` returned, after it was read."""
        self._optimizer_of(name).load_states(self.ranges[name].shard, states)

    def states(self) -> list[Tensor]:
        """Return separate master weights, and the optimizer's state, if it is on their device."""
        masters = [master.shard for master in self.master_weights.values()]
        states = (state for part in self._parts for state in part.optimizer.state.values())
        return [*masters, *(x for state in states for x in state.values() if x.device == self._device)]

    def gradients(self) -> list[Tensor]:
        """Return the buffers of gradients, whose values count within a minibatch only."""
        buffers = (*self.module.buffers, *self.module.expert_parallel_buffers)
        return [buffer.grad_data for buffer in buffers]

    @override
    def _param_groups(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.param_groups

    def _optimizer_of(self, name: str) -> Any:
        """Return the `GroupOptimizer` that updates a parameter."""
        shard = self.ranges[name].shard
        (part,) = (part for part in self._parts if any(x is shard for x in part.get_parameters()))
        return part.optimizer

    def _distributed_optimizers(self, stage: Stage) -> list[Any]:
        """Return the optimizers of weights that all data ranks have, and of divided experts, if any."""
        groups = stage.parallel.groups
        kinds = [
            (self.module.buffers, groups.intra_dp_cp, groups.mp),
            (self.module.expert_parallel_buffers, groups.intra_expt_dp, groups.tp_ep_pp),
        ]
        return [self._distributed_optimizer(stage, *kind) for kind in kinds if kind[0]]

    @torch.no_grad()  # the optimizer gets views of the weights, which must be leaf tensors
    def _distributed_optimizer(
        self,
        stage: Stage,
        buffers: Sequence[Any],
        copies: ProcessGroup,
        others: ProcessGroup,
    ) -> Any:
        """Return the optimizer of the weights in some buffers of the wrapper that sums gradients.

        Args:
            copies: the ranks that have the same weights, which divide their optimizer state.
            others: the ranks that have the other weights of a copy of the model.
        """
        optim = self.optim
        buffered = {id(weight) for buffer in buffers for weight in buffer.params}
        tensors = {
            p.name: tuple({part.tensor: len(part.shape) for part in p.parts}.items())
            for p in stage.parameters
        }
        weights = [
            NamedWeight(weight, tuple(tensor for tensor, _ in tensors[name]), tensors[name][0][1])
            for name, weight in stage.module.named_parameters()
            if id(weight) in buffered
        ]
        keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        groups = [group | keys for group in self._groups(weights, stage.optimized_shapes)]
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            bf16=stage.dtype == torch.bfloat16,
            params_dtype=stage.dtype,
            use_distributed_optimizer=True,
            clip_grad=optim.clip_grad,
        )
        # DistributedOptimizer reads from these module globals how the optimizer stores its state.
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
        optimizer = DistributedOptimizer(
            self._build(groups),
            config,
            grad_scaler=None,
            init_state_fn=None,
            model_chunks=[self.module],
            per_model_buffers={0: buffers},
            data_parallel_group=copies,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=others.rank(),
            distributed_optimizer_instance_id=0,
        )
        optimizer.tp_group = stage.parallel.groups.tp
        return optimizer


def wrap_for_gradient_sums(stage: Stage) -> Any:
    """Wrap the module in megatron's data parallelism, which sums gradients without averaging."""
    config = stage.config
    assert config.calculate_per_token_loss, "megatron would divide gradients by the number of ranks"
    config.finalize_model_grads_func = _finalize_gradients
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        bucket_size=BUCKET_PARAMETERS,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    module = DistributedDataParallel(config, buffers, stage.module, pg_collection=stage.parallel.groups)
    module.disable_forward_pre_hook(param_sync=False)  # nothing is gathered yet
    config.no_sync_func = module.no_sync
    return module


def _finalize_gradients(
    model: Sequence[nn.Module], num_tokens: object, pg_collection: object, force_all_reduce: bool
) -> None:
    """Sum gradients over data ranks and shared weights, without dividing by a number of tokens."""
    finalize_model_grads(list(model), None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


@dataclass(frozen=True)
class MasterWeight:
    """The fp32 master weights of the range of one flattened parameter that a data rank updates.

    Where the model computes in half precision, master weights are stored separately from it: rounded and
    gathered, they are the model's weights. Checkpoints are read into them, and their shards are part of
    sharded checkpoints, so that no precision is lost.
    """

    shard: Tensor
    """fp32 `[stop - start]`; the parameter's own storage if that is fp32."""
    start: int
    stop: int


def updated_ranges(stage: Stage, optimizers: Sequence[Any]) -> dict[str, MasterWeight]:
    """Return the tensors of the stage that this rank updates, by parameter name. Others are left out.

    The optimizers are megatron's distributed ones of the stage, which update different parameters.
    """
    ranges = {}
    for optimizer in optimizers:
        fp32_shards = {
            weight: shard
            for weights, shards in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)
            for weight, shard in zip(weights, shards, strict=True)
        }
        for name, weight in stage.module.named_parameters():
            shard: Tensor | None = fp32_shards.get(weight, getattr(weight, "main_param", None))
            if shard is not None and weight in optimizer.model_param_gbuf_map:
                span = optimizer._get_model_param_range_map(weight)["param"]
                ranges[name] = MasterWeight(shard, span.start, span.end)
    return ranges


def separate_master_weights(stage: Stage, ranges: dict[str, MasterWeight]) -> dict[str, MasterWeight]:
    """Return the ranges that are stored separately from the model; none where it computes in fp32."""
    half = {n for n, weight in stage.module.named_parameters() if weight.dtype != torch.float32}
    return {name: master for name, master in ranges.items() if name in half}


@torch.no_grad()
def load_master_weights(
    stage: Stage, settings: ModelSettings, master_weights: dict[str, MasterWeight]
) -> None:
    """Read separate master weights from the model's checkpoint, one parameter at a time.

    Magnitudes are those of the model, which has measured them.
    """
    if not master_weights:
        return
    parameters = [parameter for parameter in stage.parameters if parameter.name in master_weights]
    with open_weights(settings, stage.shape, parameters) as read:
        for parameter in parameters:
            master = master_weights[parameter.name]
            if parameter.parts[0].tensor.endswith(MAGNITUDE):
                whole = stage.module.get_parameter(parameter.name).float()
            else:
                whole = torch.empty(parameter.shape, dtype=torch.float32)
                load_parameters([parameter], {parameter.name: whole}, read)
            master.shard.copy_(whole.view(-1)[master.start : master.stop])
