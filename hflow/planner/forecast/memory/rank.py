"""`Rank`: one rank of a replica on a device, with everything that its memory depends on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hflow.config.schema import ModelConfig
from hflow.planner.plan.optimizers import CHUNK, CPU_CHUNK, is_layer_matrix, optimizer_traits, states_of
from hflow.planner.plan.request import trained_shape
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.planner.weights.sharding import is_on_stage, rank_boxes
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import (
    DTYPE_BYTES,
    ModelShape,
    TensorSpec,
    equal_layers,
    layer_template,
    other_tensors,
    tensors,
)
from hflow.shapes.vision_shape import tower_block
from hflow.types.kernels import flash_versions, has_varlen_kernel, varlen_groups_queries
from hflow.types.tensor_slices import BUCKET_BYTES, numel

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

    def with_config(self, config: ModelConfig) -> Rank:
        """Return the rank with other micro-batches, recomputation, offloading, stages of ZeRO or sequences.

        Nothing that is kept here depends on these, so it is not computed again.
        """
        other = object.__new__(Rank)
        vars(other).update(vars(self), config=config)
        return other

    @cached_property
    def traits(self) -> BackendTraits:
        """The traits of the replica's backend."""
        return traits(self.replica.backend)

    @property
    def state_bytes(self) -> tuple[float, float]:
        """Bytes of the optimizer's states for each weight: of a matrix of a layer, and of others."""
        of_matrix, of_other = (
            sum(state.num_bytes for state in states_of(self.config.optim, is_matrix))
            for is_matrix in (True, False)
        )
        return of_matrix, of_other

    @cached_property
    def sizes(self) -> StageSizes:
        """Elements of the model that the rank holds."""
        return stage_sizes(self.shape, self.traits, self.replica.layout, self.stage)

    @property
    def rounds_base(self) -> bool:
        """Whether it has the matrices beside adapters in 4 bits, whole on every rank."""
        lora = self.config.lora
        return lora is not None and lora.base is not None and not self.replica.merges_adapters

    @cached_property
    def stored(self) -> StageSizes:
        """Elements that the rank holds in the compute dtype: all, or those that are not in 4 bits."""
        layout = self.replica.layout
        return stage_sizes(self.shape, self.traits, layout, self.stage, without_matrices=self.rounds_base)

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
    def is_bare_base(self) -> bool:
        """Whether the replica is a trainer's weights without adapters, and so has no weights at all."""
        return bool(self.replica.base_of) and not self.adapts

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

    def optimizer_share(self, of_matrix: float, of_other: float) -> int:
        """Return this rank's bytes of sharded optimizer state, where the data axis does not divide weights.

        Args:
            of_matrix: bytes of the state for each element of a matrix of a layer.
            of_other: bytes for each element of other weights.
        """
        layout, sizes = self.replica.layout, self.trained
        matrices, others = sizes.matrices - sizes.experts, sizes.total - sizes.matrices
        shared = math.ceil((of_matrix * matrices + of_other * others) / layout.num_copies)
        return shared + math.ceil(of_matrix * sizes.experts / layout.num_expert_copies)

    @property
    def num_optimizers(self) -> int:
        """Number of the rank's optimizers: experts that ranks divide have one of their own."""
        return 1 + (self.replica.layout.expert > 1 and self.trained.experts > 0)

    @cached_property
    def sends_matrices(self) -> bool:
        """Whether its updates depend on whole matrices, of which other ranks hold parts."""
        if self.replica.role != "train" or not optimizer_traits(self.config.optim.name).needs_whole_matrix:
            return False
        kinds = {is_expert for _, _, is_expert in layer_matrices(self.trained_shape)}
        return any(divides_matrices(self.traits, self.replica.layout, is_expert=kind) for kind in kinds)

    @cached_property
    def update_buffers(self) -> int:
        """Bytes beside the gradients and states while an optimizer computes updates."""
        optimizer = optimizer_traits(self.config.optim.name)
        if optimizer.needs_whole_matrix:
            return self._matrix_buffers()
        return optimizer.buffer_bytes * min(CPU_CHUNK if self.on_cpu else CHUNK, self.largest_converted)

    @cached_property
    def largest_converted(self) -> int:
        """Entries of the largest part of a weight that a rank updates and whose states are not fp32.

        Megatron leaves a weight that is small whole on one data rank, and has two matrices in some.
        """
        layout, most = self.replica.layout, 0
        for num, has_experts, is_matrix in _kinds_of_tensors(self.trained_shape):
            if any(state.num_bytes < FP32_BYTES for state in states_of(self.config.optim, is_matrix)):
                if self.traits.shards_weights:
                    part = -(-num // layout.fsdp_size)
                else:
                    num_parts = layout.tensor * (layout.expert if has_experts else 1)
                    part = (1 + is_matrix) * -(-num // num_parts)
                most = max(most, part)
        return most

    def _matrix_buffers(self) -> int:
        """Return the bytes beside the gradients while updates of whole matrices are computed.

        Matrices that a rank has whole are computed together where they have one size, up to `BUCKET_BYTES`:
        given and new ones, and two products of the size of a Gram matrix. Of others the parts that arrive or
        are sent back exist beside each (`training/optimizers/whole_matrices.py`).
        """
        layout, most, whole = self.replica.layout, 0, Counter[tuple[int, int]]()
        for (rows, columns, is_expert), num in layer_matrices(self.trained_shape).items():
            size, gram = self._matrix_bytes(rows, columns)
            if divides_matrices(self.traits, layout, is_expert=is_expert):
                most = max(most, 2 * size + 2 * gram, 3 * size)
            else:
                whole[rows, columns] += -(-num // layout.pipe // (layout.fsdp_size if is_expert else 1))
        for (rows, columns), num in whole.items():
            size, gram = self._matrix_bytes(rows, columns)
            most = max(most, min(num, max(1, BUCKET_BYTES // size)) * (2 * size + 2 * gram))
        return most

    def _matrix_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the bytes of a matrix, and of its Gram matrix."""
        return self.width * rows * columns, self.width * min(rows, columns) ** 2

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

    @property
    def key_copies(self) -> int:
        """How often attention has keys and values: once, or for each query head that shares them."""
        if self.has_varlen_kernel:
            is_grouped = self.shape.has_sinks or varlen_groups_queries() or bool(flash_versions())
        else:
            is_grouped = self.on_cpu  # see `padded_attention`
        return 1 if is_grouped else self.shape.num_heads // self.shape.num_kv_heads


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
    matrices: int
    """All matrices that optimizers treat as those of layers, not sharded over the data axis."""
    matrices_shard: int
    """The data rank's part of them."""
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


def stage_sizes(
    shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int, *, without_matrices: bool = False
) -> StageSizes:
    """Return the elements of a stage, if asked without the matrices of layers.

    Raises:
        PlanError: when the tensor axis does not divide the model.
    """
    if not traits.shards_weights:  # data and context ranks hold the same
        layout = Layout(data=layout.expert, tensor=layout.tensor, pipe=layout.pipe, expert=layout.expert)
    return _stage_sizes(shape, traits, layout, stage, without_matrices)


@lru_cache(maxsize=4096)
def _stage_sizes(
    shape: ModelShape, traits: BackendTraits, layout: Layout, stage: int, without_matrices: bool
) -> StageSizes:
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
    templates = [
        [spec for spec in layer_template(shape, start) if not (without_matrices and spec.is_quantizable)]
        for start, _ in runs
    ]
    whole = [_num_elements(template, whole_traits, layout) for template in templates]
    experts, quantizable = (
        [_num_elements(filter(is_counted, template), whole_traits, layout) for template in templates]
        for is_counted in (lambda spec: spec.num_experts > 1, lambda spec: spec.is_quantizable)
    )
    shards = [_num_elements(template, traits, layout) for template in templates]
    matrices, matrices_shard = (
        sum(
            (stop - start) * _num_elements(filter(_is_layer_matrix, template), one, layout)
            for (start, stop), template in zip(runs, templates, strict=True)
        )
        + sum(_num_elements(filter(_is_layer_matrix, group), one, layout) for group in (rest, *tower_blocks))
        for one in (whole_traits, traits)
    )
    return StageSizes(
        num_layers=last - first,
        layer=max(whole),
        layer_shard=max(shards),
        layers=sum((stop - start) * size for (start, stop), size in zip(runs, whole, strict=True)),
        layers_shard=sum((stop - start) * size for (start, stop), size in zip(runs, shards, strict=True)),
        experts=sum((stop - start) * size for (start, stop), size in zip(runs, experts, strict=True)),
        quantizable=sum((stop - start) * size for (start, stop), size in zip(runs, quantizable, strict=True)),
        matrices=matrices,
        matrices_shard=matrices_shard,
        rest=_num_elements(rest, whole_traits, layout),
        rest_shard=_num_elements(rest, traits, layout),
        embedding=_num_elements(embedding, whole_traits, layout),
        tower_layer=max((_num_elements(block, whole_traits, layout) for block in tower_blocks), default=0),
        tower_layers=sum(_num_elements(block, whole_traits, layout) for block in tower_blocks),
        tower_layers_shard=sum(_num_elements(block, traits, layout) for block in tower_blocks),
        output=_num_elements(output, whole_traits, layout),
    )


@lru_cache(maxsize=256)
def layer_matrices(shape: ModelShape) -> Counter[tuple[int, int, bool]]:
    """Return the number of matrices that optimizers treat as those of layers.

    By rows, columns, and whether they are those of an expert.
    """
    counted: Counter[tuple[int, int, bool]] = Counter()
    runs = [
        (stop - start, layer_template(shape, start))
        for start, stop in equal_layers(shape, 0, shape.num_layers)
    ]
    for num, specs in (*runs, (1, other_tensors(shape))):
        for spec in filter(_is_layer_matrix, specs):
            rows, columns = spec.shape[-2:]
            counted[rows, columns, spec.num_experts > 1] += num * spec.num_experts
    return counted


@lru_cache(maxsize=256)
def _kinds_of_tensors(shape: ModelShape) -> frozenset[tuple[int, bool, bool]]:
    """Return the entries of each tensor, whether it has experts, and whether it is a matrix of a layer."""
    return frozenset((s.numel, s.num_experts > 1, _is_layer_matrix(s)) for s in tensors(shape))


def num_in_matrices(shape: ModelShape) -> int:
    """Return the number of parameters in these matrices."""
    return sum(num * rows * columns for (rows, columns, _), num in layer_matrices(shape).items())


def divides_matrices(traits: BackendTraits, layout: Layout, *, is_expert: bool) -> bool:
    """Return whether ranks update parts of the matrices of layers. FSDP leaves those of an expert whole."""
    if traits.shards_weights:
        return layout.fsdp_size > 1 and not is_expert
    return layout.world > layout.pipe


def _is_layer_matrix(spec: TensorSpec) -> bool:
    return is_layer_matrix(spec.name, len(spec.shape))


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
    return sum(numel(box) for spec in specs for box in rank_boxes(spec, traits, layout, (0, 0, 0, 0)))
