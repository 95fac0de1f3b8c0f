"""`ReplicaCosts`: what the seconds of one replica depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hflow.config.schema import ModelConfig
from hflow.planner.backends import BackendTraits, traits
from hflow.planner.calibration import HostTimes, MatmulRate
from hflow.planner.cost.collectives import RankPlacement, axis_ranks
from hflow.planner.cost.roofline import Rates
from hflow.planner.hardware import Hardware, Link
from hflow.planner.ir import ClusterSpec, Replica
from hflow.planner.layout import Layout
from hflow.planner.model_shape import DTYPE_BYTES, ModelShape

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
    """Ranks that hold the same layers and heads."""
    tensor: RankPlacement
    pipe: RankPlacement
    low_dtype: Literal["fp8", "fp4"] | None = None
    """Precision of the matrices, where it is lower than the compute dtype."""
    virtual_stages: int = 1
    """Pieces of a pipeline stage that take turns (interleaved pipeline)."""

    @classmethod
    def of(
        cls,
        replica: Replica,
        shape: ModelShape,
        config: ModelConfig,
        hardware: Hardware,
        cluster: ClusterSpec,
    ) -> ReplicaCosts:
        """Return the costs of a replica of the plan."""
        data, tensor, pipe = (axis_ranks(replica, axis, cluster, hardware) for axis in range(3))
        kind, host = traits(replica.backend), hardware.calibration.host[replica.backend]
        return cls(shape, config, replica.layout, kind, host, hardware, data, tensor, pipe)

    @property
    def dtype(self) -> str:
        """The precision of its matrices."""
        return self.low_dtype or self.config.compute_dtype

    @property
    def rates(self) -> Rates:
        """Attainable rates of one device, with large matrices."""
        return Rates.of(self.hardware, self.dtype)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one device's data sheet."""
        return self.hardware.device.tflops[self.dtype] * 1e12

    @property
    def matmul(self) -> MatmulRate:
        """What products of matrices reach of that."""
        return self.hardware.calibration.matmul_rate(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.config.compute_dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight, and of a number in the KV cache."""
        return LOW_BYTES[self.low_dtype] if self.low_dtype else self.itemsize

    @property
    def token_share(self) -> int:
        """Number of ranks that divide the tokens between the matrices (sequence parallelism)."""
        on_cpu = self.hardware.device.type == "cpu"
        return self.layout.tensor if self.config.uses_sequence_parallel(on_cpu) else 1

    @property
    def stage_link(self) -> Link:
        """The link between two pipeline stages."""
        return self.pipe.slowest_link(self.hardware)

    @property
    def host_seconds(self) -> float:
        """Seconds that the host needs to launch one pass through the layers of a stage."""
        return self.host.layer_us * 1e-6 * self.shape.num_layers / self.layout.pipe
