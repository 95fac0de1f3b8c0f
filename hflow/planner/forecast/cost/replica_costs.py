"""`ReplicaCosts`: what the seconds of one replica depend on.

Seconds in which tokens are sent to the ranks of their experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from hflow.config.schema import ModelConfig
from hflow.planner.forecast.cost.collectives import (
    Axis,
    LinkTime,
    RankPlacement,
    all_to_all,
    axis_ranks,
    dispatch,
)
from hflow.planner.forecast.cost.flops import stage_parameters
from hflow.planner.forecast.cost.roofline import Rates
from hflow.planner.forecast.memory.rank import FP32_BYTES, stage_sizes
from hflow.planner.plan.calibration import HostTimes, MatmulRate, TrainerTimes
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.hardware import GROUPED_PRODUCT, Hardware, Link
from hflow.planner.plan.request import trained_shape
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import (
    DTYPE_BYTES,
    ModelShape,
    expert_layers,
    num_tensors,
)
from hflow.shapes.vision_shape import num_tower_parameters

LOW_BYTES = {"fp8": 1.0, "fp4": 0.5}
"""Bytes of a weight by precision."""


@dataclass(frozen=True)
class ReplicaCosts:
    """A model, how a replica shards it, and the speed of its devices and links."""

    shape: ModelShape
    config: ModelConfig
    layout: Layout
    traits: BackendTraits
    host: HostTimes
    hardware: Hardware
    data: RankPlacement
    """Ranks that hold the same layers and heads, on data and context axes."""
    tensor: RankPlacement
    pipe: RankPlacement
    context: RankPlacement = field(default_factory=RankPlacement)
    """Ranks that divide the tokens of a sequence."""
    expert: RankPlacement = field(default_factory=RankPlacement)
    """Ranks that divide the experts of a layer."""
    expert_data: RankPlacement = field(default_factory=RankPlacement)
    """Ranks that hold the same experts."""
    shard: RankPlacement = field(default_factory=RankPlacement)
    """With a replicate axis, the data ranks that FSDP divides weights over."""
    replicate: RankPlacement = field(default_factory=RankPlacement)
    """Data ranks that hold the same shard of the weights (HSDP)."""
    low_dtype: Literal["fp8", "fp4"] | None = None
    """Precision of the matrices, where it is lower than the compute dtype."""
    has_low_layers_only: bool = False
    """Whether only the matrices of layers have `low_dtype`; else the output matrix and the KV cache too."""
    virtual_stages: int = 1
    """Pieces of a pipeline stage that take turns (interleaved pipeline)."""
    gradient_bytes: int = FP32_BYTES
    """Bytes of a gradient as data ranks sum it."""
    gathers_low: bool = False
    """Whether data ranks gather weights in `low_dtype`."""
    attention_kernel: str = ""
    """The attention kernel, with or without its version; empty: the engine or program has its own."""
    host_name: str = ""
    """The backend or engine of `host` in the calibration."""
    trainer: TrainerTimes = field(default_factory=TrainerTimes)
    """What its passes take besides those of programs that pre-train; an engine's take nothing."""
    has_grouped_product: bool = True
    """Whether a kernel computes all experts of a layer at once."""
    is_uneven: bool = True
    """Whether tokens choose their experts; benchmarks of pre-training divide them evenly."""
    counts_tokens: bool = True
    """Whether the host counts the tokens that are sent to the ranks of their experts, where they are several;
    in a CUDA graph it does not."""

    @classmethod
    def of(
        cls,
        replica: Replica,
        shape: ModelShape,
        config: ModelConfig,
        hardware: Hardware,
        cluster: ClusterSpec,
        attention_kernel: str = "",
    ) -> ReplicaCosts:
        """Return the costs of a replica of the plan."""

        def ranks(axis: Axis) -> RankPlacement:
            return axis_ranks(replica, axis, cluster, hardware)

        data = ranks("data")
        kind, host = traits(replica.backend), hardware.calibration.host_times(replica.backend)
        return cls(
            shape,
            config,
            replica.layout,
            kind,
            host,
            hardware,
            data=data,
            tensor=ranks("tensor"),
            pipe=ranks("pipe"),
            context=ranks("context"),
            expert=ranks("expert"),
            expert_data=data if replica.layout.expert == 1 else ranks("expert data"),
            shard=data if replica.layout.replicate == 1 else ranks("shard"),
            replicate=ranks("replicate"),
            low_dtype=config.gen.quantization if replica.role == "gen" else config.fp8 and "fp8",
            has_low_layers_only=True,
            attention_kernel=attention_kernel,
            host_name=hardware.calibration.host_name(replica.backend),
            trainer=TrainerTimes() if replica.role == "gen" else hardware.calibration.trainer,
            has_grouped_product=(hardware.device.capability or GROUPED_PRODUCT) >= GROUPED_PRODUCT,
        )

    def with_config(self, config: ModelConfig) -> ReplicaCosts:
        """Return the costs with other micro-batches, offloading or running sequences.

        Nothing that is kept here depends on these, so it is not computed again.
        """
        other = object.__new__(ReplicaCosts)
        vars(other).update(vars(self), config=config)
        vars(other).pop("unquantized", None)  # which has a configuration
        return other

    @property
    def dtype(self) -> str:
        """The precision of products of matrices: on a device without `low_dtype`, the compute dtype."""
        has_low = self.low_dtype in self.hardware.device.tflops
        return self.low_dtype if self.low_dtype and has_low else self.config.compute_dtype

    @cached_property
    def rates(self) -> Rates:
        """Attainable rates of one device, with large matrices."""
        return Rates.of(self.hardware, self.dtype)

    @cached_property
    def peak_flops(self) -> float:
        """FLOP/s of one device's data sheet."""
        return self.hardware.device.tflops[self.dtype] * 1e12

    @cached_property
    def matmul(self) -> MatmulRate:
        """The rate that products of matrices reach of that."""
        return self.hardware.calibration.matmul_rate(self.dtype)

    @cached_property
    def captured_matmul(self) -> MatmulRate:
        """The rate of matrix products that a CUDA graph launches, so that a kernel takes no time besides."""
        return replace(self.matmul, kernel_us=0.0)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.config.compute_dtype]

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a weight as data ranks gather it."""
        return self.weight_bytes if self.gathers_low else self.itemsize

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of a weight of a layer."""
        return LOW_BYTES[self.low_dtype] if self.low_dtype else self.itemsize

    @cached_property
    def other_bytes(self) -> float:
        """Bytes of a weight of the output matrix."""
        return self.itemsize if self.has_low_layers_only else self.weight_bytes

    @cached_property
    def cache_bytes(self) -> float:
        """Bytes of a number in the KV cache."""
        asked = self.config.gen.cache_dtype
        return LOW_BYTES[asked] if asked else self.other_bytes

    @cached_property
    def unquantized(self) -> ReplicaCosts:
        """The costs of its matrices beside the layers."""
        return replace(self, low_dtype=None) if self.low_dtype and self.has_low_layers_only else self

    @cached_property
    def stage_weights(self) -> float:
        """Number of weights that a rank of the largest stage holds, or would without sharding over data."""
        experts = self.shape.experts
        num_experts = None if experts is None else experts.num / self.layout.expert
        return stage_parameters(self.shape, self.layout.pipe, num_experts) / self.layout.tensor

    @cached_property
    def trained_weights(self) -> float:
        """Number of trained weights on a rank of the largest stage: of its adapters, if there are any."""
        if self.config.lora is None:
            tower = self.shape.vision
            frozen = 0 if tower is None or self.trains_tower else num_tower_parameters(tower)
            return self.stage_weights - frozen
        return stage_sizes(self.trained_shape, self.traits, self.layout, 0).total

    @cached_property
    def trained_shape(self) -> ModelShape:
        """The part of the model that training changes: its adapters, if it has any, else all of it."""
        return trained_shape(self.shape, self.config.lora)

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained beside frozen weights."""
        return self.config.lora is not None and self.traits.has_adapters

    @property
    def trains_tower(self) -> bool:
        """Whether gradients reach the tower of a model that sees."""
        return self.config.lora is None and self.config.freeze is None

    @cached_property
    def num_trained_tensors(self) -> int:
        """Number of tensors that training changes."""
        return num_tensors(self.trained_shape)

    @property
    def mean_copies(self) -> float:
        """Number of ranks that hold a weight, as the mean over weights, without sharding over data."""
        whole = stage_parameters(self.shape, self.layout.pipe) / self.layout.tensor
        return self.layout.num_copies * self.stage_weights / whole

    @cached_property
    def token_share(self) -> int:
        """Number of ranks that divide the tokens between the matrices (sequence parallelism)."""
        on_cpu, has_experts = self.hardware.device.type == "cpu", self.shape.experts is not None
        return self.layout.tensor if self.config.uses_sequence_parallel(on_cpu, has_experts) else 1

    @property
    def stage_link(self) -> Link:
        """The link between two pipeline stages."""
        return self.pipe.slowest_link(self.hardware)

    @property
    def launches_ahead(self) -> bool:
        """Whether the host launches kernels while the device computes; a CPU device is its own host."""
        return self.hardware.device.type != "cpu"

    @property
    def captures_decode(self) -> bool:
        """Whether decode steps are CUDA graphs, whose kernels the host need not launch."""
        is_captured = self.traits.captures(self.shape.family, self.config.lora is not None)
        return self.launches_ahead and self.config.gen.cuda_graphs and is_captured

    @property
    def schedules_ahead(self) -> bool:
        """Whether the host prepares a decode step while the device computes the one before."""
        return self.hardware.device.type in self.traits.schedules_ahead_on

    @cached_property
    def host_seconds(self) -> float:
        """Seconds that the host needs to launch one pass through the layers of a stage."""
        return self.host.layer_us * 1e-6 * self.shape.num_layers / self.layout.pipe

    @property
    def expert_wait(self) -> float:
        """Seconds of kernels over those with evenly divided tokens (`Calibration.expert_wait`)."""
        return self.hardware.calibration.expert_wait if self.layout.expert > 1 and self.is_uneven else 1.0

    @property
    def trainer_seconds(self) -> float:
        """Seconds in one pass through a stage in which the device waits for the host of a trainer."""
        return self.trainer.layer_us * 1e-6 * self.shape.num_layers / self.layout.pipe

    @property
    def expert_seconds(self) -> float:
        """Seconds in one pass through a stage in which the device waits for the host because of experts."""
        num_layers = expert_layers(self.shape, 0, self.shape.num_layers)
        is_counting = self.counts_tokens and self.layout.expert > 1
        of_layer = self.host.expert_us if is_counting else self.host.expert_launch_us
        if is_counting and not self.traits.has_exchange_kernels:
            of_layer += self.host.exchange_us
        if not self.has_grouped_product and self.shape.experts is not None:
            of_layer += self.host.expert_loop_us * self.shape.experts.num / self.layout.expert
        return of_layer * 1e-6 * num_layers / self.layout.pipe


def expert_exchange(replica: ReplicaCosts, num_tokens: float) -> LinkTime:
    """Return the time of sending tokens to the ranks of their experts and back, in one pass of a stage.

    Tokens are dispatched to the ranks of their experts, and their results return on the same ways, in every
    layer with experts. A backward pass sends gradients likewise. Source: Lepikhin et al. 2020, "GShard",
    section 3.2.

    Args:
        replica: the replica.
        num_tokens: tokens of one rank, before tensor ranks divide them.
    """
    shape, layout = replica.shape, replica.layout
    if shape.experts is None or layout.expert == 1:
        return LinkTime()
    num_layers = max(expert_layers(shape, *layers) for layers in stage_layers(shape.num_layers, layout.pipe))
    num_bytes = num_tokens / replica.token_share * shape.hidden * replica.itemsize
    copies, where = shape.experts.per_token, (replica.expert, replica.hardware)
    has_kernels = replica.traits.has_exchange_kernels
    one_way = dispatch(num_bytes, copies, *where) if has_kernels else all_to_all(copies * num_bytes, *where)
    return one_way.times(2 * num_layers)
