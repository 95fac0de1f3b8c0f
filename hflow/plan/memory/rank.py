"""`Rank`: one rank of a replica on a device, with all that its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hflow.plan.ir import Replica
from hflow.plan.memory.sizes import StageSizes, stage_sizes
from hflow.plan.request import ModelRequest
from hflow.plan.shape import DTYPE_BYTES, ModelShape
from hflow.plan.traits import BackendTraits, traits


@dataclass(frozen=True)
class Rank:
    """A rank of a replica. Ranks of one pipeline stage are alike, but that the first one saves and sends."""

    replica: Replica
    shape: ModelShape
    asked: ModelRequest
    stage: int
    is_first: bool
    """Whether it is rank 0, which writes checkpoints and sends weights to other workers."""
    on_cpu: bool
    """Whether the device's memory is the host's, and its collectives are gloo's."""

    @cached_property
    def facts(self) -> BackendTraits:
        """The backend's traits."""
        return traits(self.replica.backend)

    @cached_property
    def sizes(self) -> StageSizes:
        """Entries that the rank holds."""
        return stage_sizes(self.shape, self.facts, self.replica.layout, self.stage)

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return DTYPE_BYTES[self.asked.dtype]

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.replica.layout.data

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.replica.layout.tensor

    @property
    def token_share(self) -> int:
        """By how many ranks the tokens between the matrices are shared (sequence parallelism)."""
        if self.facts.kind == "generate":
            return 1 if self.on_cpu else self.tensor
        return self.tensor if self.asked.shares_tokens(self.on_cpu) else 1

    @property
    def query_size(self) -> int:
        """Numbers of one token's queries, over all tensor ranks."""
        return self.shape.num_heads * self.shape.head_dim

    @property
    def key_value_size(self) -> int:
        """Numbers of one token's keys, over all tensor ranks, of which some may have the same head."""
        return max(self.shape.num_kv_heads, self.tensor) * self.shape.head_dim

    @property
    def is_last_stage(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.stage == self.replica.layout.pipe - 1

    @property
    def has_varlen_kernel(self) -> bool:
        """Whether attention takes packed sequences as they are; elsewhere they are padded in buckets."""
        return not self.on_cpu and self.width < DTYPE_BYTES["fp32"]
