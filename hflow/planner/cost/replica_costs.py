"""`ReplicaCosts`: one replica as the cost model sees it."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.config.schema import ModelConfig
from hflow.planner.backends import BackendTraits, traits
from hflow.planner.cost.collectives import Ranks, axis_ranks
from hflow.planner.cost.roofline import Rates
from hflow.planner.hardware import Hardware, Link
from hflow.planner.ir import ClusterSpec, Replica
from hflow.planner.layout import Layout
from hflow.planner.model_shape import DTYPE_BYTES, ModelShape


@dataclass(frozen=True)
class ReplicaCosts:
    """A model, how a replica cuts it, and what its devices and links can do."""

    shape: ModelShape
    asked: ModelConfig
    layout: Layout
    backend: BackendTraits
    hardware: Hardware
    data: Ranks
    """The ranks that hold the same layers and heads."""
    tensor: Ranks
    pipe: Ranks

    @classmethod
    def of(
        cls,
        replica: Replica,
        shape: ModelShape,
        asked: ModelConfig,
        hardware: Hardware,
        cluster: ClusterSpec,
    ) -> ReplicaCosts:
        """A replica of the plan."""
        data, tensor, pipe = (axis_ranks(replica, axis, cluster) for axis in range(3))
        return cls(shape, asked, replica.layout, traits(replica.backend), hardware, data, tensor, pipe)

    @property
    def rates(self) -> Rates:
        """What one device reaches in the dtype that the model computes in."""
        return Rates.of(self.hardware, self.asked.compute_dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in that dtype."""
        return DTYPE_BYTES[self.asked.compute_dtype]

    @property
    def token_share(self) -> int:
        """By how many ranks the tokens between the matrices are shared (sequence parallelism)."""
        on_cpu = self.hardware.device.type == "cpu"
        return self.layout.tensor if self.asked.uses_sequence_parallel(on_cpu) else 1

    @property
    def stage_link(self) -> Link:
        """Between two pipeline stages."""
        return self.hardware.inter if self.pipe.machines > 1 else self.hardware.intra

    @property
    def host_seconds(self) -> float:
        """What the host needs to issue one pass through a stage's layers."""
        return self.backend.layer_host_ms * 1e-3 * self.shape.num_layers / self.layout.pipe
