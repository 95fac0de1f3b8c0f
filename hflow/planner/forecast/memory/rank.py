"""`Rank`: one rank of a replica on a device, with everything that its memory depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hflow.config.schema import ModelConfig
from hflow.planner.plan.optimizers import optimizer_traits
from hflow.planner.plan.request import trained_shape
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.planner.weights.sharding import is_on_stage, rank_box
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import (
    DTYPE_BYTES,
    ModelShape,
    TensorSpec,
    equal_layers,
    layer_template,
    other_tensors,
)
from hflow.shapes.vision_shape import tower_block
from hflow.types.kernels import has_varlen_kernel
from hflow.types.tensor_slices import numel

FP32_BYTES = DTYPE_BYTES["fp32"]


@dataclass(frozen=True)
class Rank:
    """A rank of a replica.

    The ranks of one pipeline stage are equal, except that rank 0 saves and sends weights.
    """

    replica: Replica
    shape: ModelShape
    config: ModelConfig
    stage: int
    is_first: bool
    """Whether it is rank 0, which writes checkpoints and sends weights to other workers."""
    on_cpu: bool
    """Whether the device's memory is that of the host, and collectives use gloo."""

    @cached_property
    def traits(self) -> BackendTraits:
        """The traits of the replica's backend."""
        return traits(self.replica.backend)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state for each weight, which is in fp32."""
        return FP32_BYTES * len(optimizer_traits(self.config.optim.name).kinds)

    @cached_property
    def sizes(self) -> StageSizes:
        """Elements of the model that the rank holds."""
        return stage_sizes(self.shape, self.traits, self.replica.layout, self.stage)

    @cached_property
    def trained_shape(self) -> ModelShape:
        """The part of the model that training changes: its adapters, if it has any, else all of it."""
        return trained_shape(self.shape, self.config.lora)

    @cached_property
    def trained(self) -> StageSizes:
        """Elements that the rank holds of what training changes. A frozen tower is sent all the same."""
        shape = self.trained_shape
        if self.config.freeze == "vision" and shape.vision is not None:
            shape = replace(shape, vision=replace(shape.vision, is_frozen=True))
        return stage_sizes(shape, self.traits, self.replica.layout, self.stage)

    @property
    def adapts(self) -> bool:
        """Whether the replica trains adapters in place of its weights."""
        return self.config.lora is not None and self.replica.role == "train"

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return DTYPE_BYTES[self.config.compute_dtype]

    @property
    def data(self) -> int:
        """Size of the data axis."""
        return self.replica.layout.data

    @property
    def fsdp_size(self) -> int:
        """Number of ranks over which FSDP divides weights."""
        return self.replica.layout.fsdp_size

    def optimizer_share(self, per_element: int) -> int:
        """Return this rank's bytes of sharded optimizer state, where the data axis does not divide weights.

        Args:
            per_element: bytes of the state for each element of the rank's trained weights.
        """
        layout, experts = self.replica.layout, self.trained.experts
        others = self.trained.total - experts
        return -(-per_element * others // layout.num_copies) + -(
            -per_element * experts // layout.num_expert_copies
        )

    @property
    def tensor(self) -> int:
        """Size of the tensor axis."""
        return self.replica.layout.tensor

    @property
    def context(self) -> int:
        """Number of ranks that divide each sequence."""
        return self.replica.layout.context

    @property
    def token_share(self) -> int:
        """Number of ranks that divide the tokens between the matrices (sequence parallelism)."""
        if self.replica.role == "gen":
            return 1 if self.on_cpu else self.tensor
        has_experts = self.shape.experts is not None
        return self.tensor if self.config.uses_sequence_parallel(self.on_cpu, has_experts) else 1

    @property
    def query_size(self) -> int:
        """Elements of one token's queries, over all tensor ranks."""
        return self.shape.num_heads * self.shape.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of one token's keys, over all tensor ranks, of which several may hold the same head."""
        return max(self.shape.num_kv_heads, self.tensor) * self.shape.head_dim

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.stage == self.replica.layout.pipe - 1

    @property
    def has_varlen_kernel(self) -> bool:
        """Whether attention reads packed sequences directly. Otherwise they are padded in buckets."""
        return has_varlen_kernel("cpu" if self.on_cpu else "cuda", self.config.compute_dtype)


@dataclass(frozen=True)
class StageSizes:
    """Elements of a model on one rank of a pipeline stage.

    All numbers are those of data rank 0 and tensor rank 0. No other rank of the stage holds more: blocks are
    equal except for the last ones, and the padding of a vocabulary takes memory too.
    """

    num_layers: int
    """Decoder layers of the stage."""
    layer: int
    """The largest decoder layer, not sharded over the data axis."""
    layer_shard: int
    """The data rank's part of that layer."""
    layers: int
    """All decoder layers, not sharded over the data axis."""
    layers_shard: int
    """The data rank's part of all layers."""
    experts: int
    """The experts in all layers, not sharded over the data axis, which counts them in `layers` too."""
    quantizable: int
    """The matrices of `layers` without routers."""
    rest: int
    """Embedding, final norm, head and what a tower has outside its blocks, if the stage has them, not sharded
    over the data axis."""
    rest_shard: int
    """The data rank's part of the rest."""
    embedding: int
    """The embedding if the stage looks tokens up, else 0."""
    tower_layer: int
    """A block of the tower, not sharded over the data axis; 0 without a tower."""
    tower_layers: int
    """All blocks of the tower, not sharded over the data axis."""
    tower_layers_shard: int
    """The data rank's part of all of them."""
    output: int
    """The matrix that computes logits (the embedding if tied) if the stage does, else 0."""

    @property
    def total(self) -> int:
        """All elements of the stage, not sharded over the data axis."""
        return self.layers + self.rest + self.tower_layers

    @property
    def total_shard(self) -> int:
        """The data rank's part of all elements."""
        return self.layers_shard + self.rest_shard + self.tower_layers_shard


def stage_sizes(shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int) -> StageSizes:
    """Return the elements of a stage.

    Raises:
        PlanError: when the tensor axis does not divide the model.
    """
    if not traits.shards_weights:  # data and context ranks hold the same
        layout = Layout(data=layout.expert, tensor=layout.tensor, pipe=layout.pipe, expert=layout.expert)
    return _stage_sizes(shape, traits, layout, stage)


@lru_cache(maxsize=4096)
def _stage_sizes(shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int) -> StageSizes:
    first, last = stage_layers(shape.num_layers, layout.pipe)[stage]
    rest = [spec for spec in other_tensors(shape) if is_on_stage(spec, shape, stage, layout.pipe)]
    tower_blocks = _tower_blocks(shape, stage)
    in_blocks = {spec.name for block in tower_blocks for spec in block}
    rest = [spec for spec in rest if spec.name not in in_blocks]
    whole_traits = replace(traits, sharded_over_data="nothing")
    is_last = stage == layout.pipe - 1
    output_place = "embedding" if shape.is_tied else "head"
    embedding = [spec for spec in rest if spec.location == "embedding" and stage == 0]
    output = [spec for spec in rest if spec.location == output_place and is_last and shape.head == "lm"]
    runs = equal_layers(shape, first, last)
    templates = [layer_template(shape, start) for start, _ in runs]
    whole = [_num_elements(template, whole_traits, layout) for template in templates]
    experts, quantizable = (
        [_num_elements(filter(is_counted, template), whole_traits, layout) for template in templates]
        for is_counted in (lambda spec: spec.num_experts > 1, lambda spec: spec.is_quantizable)
    )
    shards = [_num_elements(template, traits, layout) for template in templates]
    return StageSizes(
        num_layers=last - first,
        layer=max(whole),
        layer_shard=max(shards),
        layers=sum((stop - start) * size for (start, stop), size in zip(runs, whole, strict=True)),
        layers_shard=sum((stop - start) * size for (start, stop), size in zip(runs, shards, strict=True)),
        experts=sum((stop - start) * size for (start, stop), size in zip(runs, experts, strict=True)),
        quantizable=sum((stop - start) * size for (start, stop), size in zip(runs, quantizable, strict=True)),
        rest=_num_elements(rest, whole_traits, layout),
        rest_shard=_num_elements(rest, traits, layout),
        embedding=_num_elements(embedding, whole_traits, layout),
        tower_layer=max((_num_elements(block, whole_traits, layout) for block in tower_blocks), default=0),
        tower_layers=sum(_num_elements(block, whole_traits, layout) for block in tower_blocks),
        tower_layers_shard=sum(_num_elements(block, traits, layout) for block in tower_blocks),
        output=_num_elements(output, whole_traits, layout),
    )


def _tower_blocks(shape: ModelShape, stage: int) -> list[list[TensorSpec]]:
    """Return the tensors of each block of a tower, if the stage has them and they count."""
    tower = shape.vision
    if tower is None or tower.is_frozen or shape.adapter is not None or stage:
        return []
    return [
        [TensorSpec(name, sizes, None, "tower") for name, sizes in tower_block(tower, index)]
        for index in range(tower.num_layers)
    ]


def _num_elements(specs: Iterable[TensorSpec], traits: BackendTraits, layout: Layout) -> int:
    boxes = (rank_box(spec, traits, layout, (0, 0, 0, 0)) for spec in specs)
    return sum(numel(box) for box in boxes if box is not None)
