"""`Rank`: one rank of a replica on a device, with all that its memory depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hflow.config.schema import ModelConfig
from hflow.planner.backends import BackendTraits, traits
from hflow.planner.ir import Replica
from hflow.planner.layout import Layout
from hflow.planner.model_shape import DTYPE_BYTES, ModelShape, TensorSpec, layer_template, other_tensors
from hflow.planner.weights.sharding import box_of, is_on_stage, stage_layers
from hflow.types.tensor_slices import numel

FP32_BYTES = DTYPE_BYTES["fp32"]
ADAM_MOMENTS = 2
"""AdamW keeps running means of the gradient and of its square, in fp32."""

# -------------------- How many entries of a model one rank holds, stage by stage.
# All numbers are those of data rank 0 and tensor rank 0, as no other rank of the stage holds more: equal
# blocks leave only the last ranks less, and a padded vocabulary's padding takes memory all the same.


@dataclass(frozen=True)
class StageSizes:
    """Entries of a model on one rank of a pipeline stage."""

    num_layers: int
    """Decoder layers of the stage."""
    layer: int
    """One decoder layer, whole over the data axis."""
    layer_shard: int
    """The data rank's part of it."""
    rest: int
    """Embedding, final norm and head, as far as the stage has them, whole over the data axis."""
    rest_shard: int
    """The data rank's part of it."""
    embedding: int
    """The embedding where the stage looks tokens up, else 0."""
    output: int
    """The matrix that makes logits (a tied embedding too) where the stage does, else 0."""

    @property
    def total(self) -> int:
        """All entries of the stage, whole over the data axis."""
        return self.num_layers * self.layer + self.rest

    @property
    def total_shard(self) -> int:
        """The data rank's part of them."""
        return self.num_layers * self.layer_shard + self.rest_shard


@lru_cache
def stage_sizes(shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int) -> StageSizes:
    """The entries of a stage.

    Raises:
        PlanError: when the tensor axis does not divide what it cuts.
    """
    first, last = stage_layers(shape.num_layers, layout.pipe)[stage]
    rest = [spec for spec in other_tensors(shape) if is_on_stage(spec, shape, stage, layout.pipe)]
    undivided = replace(layout, data=1)
    is_last = stage == layout.pipe - 1
    makes_logits = "embedding" if shape.is_tied else "head"
    return StageSizes(
        num_layers=last - first,
        layer=_entries(layer_template(shape), traits, undivided),
        layer_shard=_entries(layer_template(shape), traits, layout),
        rest=_entries(rest, traits, undivided),
        rest_shard=_entries(rest, traits, layout),
        embedding=_entries([s for s in rest if s.place == "embedding" and stage == 0], traits, undivided),
        output=_entries([s for s in rest if s.place == makes_logits and is_last], traits, undivided)
        if shape.head == "lm"
        else 0,
    )


def _entries(specs: Iterable[TensorSpec], traits: BackendTraits, layout: Layout) -> int:
    boxes = (box_of(spec, traits, layout, (0, 0, 0)) for spec in specs)
    return sum(numel(box) for box in boxes if box is not None)


@dataclass(frozen=True)
class Rank:
    """A rank of a replica. Ranks of one pipeline stage are alike, but that the first one saves and sends."""

    replica: Replica
    shape: ModelShape
    config: ModelConfig
    stage: int
    is_first: bool
    """Whether it is rank 0, which writes checkpoints and sends weights to other workers."""
    on_cpu: bool
    """Whether the device's memory is the host's, and its collectives are gloo's."""

    @cached_property
    def traits(self) -> BackendTraits:
        """The traits of the replica's backend."""
        return traits(self.replica.backend)

    @cached_property
    def sizes(self) -> StageSizes:
        """Entries that the rank holds."""
        return stage_sizes(self.shape, self.traits, self.replica.layout, self.stage)

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return DTYPE_BYTES[self.config.compute_dtype]

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
        if self.replica.role == "gen":
            return 1 if self.on_cpu else self.tensor
        return self.tensor if self.config.uses_sequence_parallel(self.on_cpu) else 1

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
