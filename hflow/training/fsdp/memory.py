"""Memory formulas of the torch backend: training and inference, on one rank or sharded by FSDP2.

A step may reach its peak at several moments: at the logits, in the backward pass of the first or the last
layer, or when the gradients outside of the layers are reduced. The moment with the most bytes counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hflow.planner.forecast.memory import activations
from hflow.planner.forecast.memory.parts import Items, MicroBatch, item, largest
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.shapes.model_shape import GATES_AND_UPS, nf4_bytes

TOWER = "activations of the tower"
NUM_MLP, NUM_CLAMPED = 4, 7
"""Tensors of an MLP's rows that transformers keeps: see `activations.kept_per_token`; and with clamped gates
(gpt-oss) gate and up, both clamped, the sigmoid of the gate, their product, and that with ups."""
MIN_UNIT_BYTES = 4 << 20
"""A layer with fewer bytes of fp32 weights is gathered with the rest (`training/fsdp/sharding.py`)."""


def model_state(rank: Rank) -> Items:
    """Return fp32 weights and the optimizer's states, sharded over the data axis.

    Gradients exist within a step only. With them, training with AdamW needs 16 bytes a parameter over all
    ranks. An inference replica has weights alone. A model with adapters has its other weights in the compute
    dtype, or in 4 bits, which are not sharded. Those that are a trainer's count there.
    """
    if rank.is_bare_base:
        return Items()
    num_trained = rank.trained.total_shard
    num_stored = num_trained if rank.adapts else rank.stored.total_shard
    matrices, (of_matrix, of_other) = rank.trained.matrices_shard, rank.state_bytes
    states = math.ceil(of_matrix * matrices + of_other * (num_trained - matrices))
    weights = item(MemoryCategory.WEIGHTS, FP32_BYTES * num_stored, "adapters" if rank.adapts else "")
    if rank.adapts and not rank.replica.base_of:
        weights += item(MemoryCategory.WEIGHTS, rank.width * rank.stored.total_shard)
        if rank.rounds_base:
            weights += item(MemoryCategory.WEIGHTS, nf4_bytes(rank.shape), "weights in 4 bits")
    return weights + item(MemoryCategory.OPTIMIZER, states if rank.replica.role == "train" else 0)


def train_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of a train node beyond the model state."""
    return largest(_step(rank, batch).train_moments())


def infer_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of an infer node beyond the model state."""
    return largest(_step(rank, batch).infer_moments())


def kept_after_infer(rank: Rank) -> Items:
    """Return the weights that stay gathered: FSDP2 reshards the root in a backward pass only.

    Those of a trainer's base model are the trainer's.
    """
    if rank.fsdp_size == 1 or rank.is_bare_base:
        return Items()
    return _gathered_weights(rank.width * _Units.of(rank).root)


def _step(rank: Rank, batch: MicroBatch) -> _SingleRankStep | ShardedStep:
    return ShardedStep(rank, batch) if rank.fsdp_size > 1 else _SingleRankStep(rank, batch)


@dataclass(frozen=True)
class _Units:
    """Elements that FSDP2 gathers at once."""

    layer: int
    """A decoder layer with a unit of its own; 0 if layers are gathered with the root."""
    root: int
    """Everything else."""
    tower: int = 0
    """A block of the tower with a unit of its own; 0 if blocks are gathered with the root."""

    @classmethod
    def of(cls, rank: Rank) -> _Units:
        """Return the units of all weights."""
        sizes, adapters = rank.stored, rank.trained if rank.adapts else None
        layer, rest, total = sizes.layer, sizes.rest, sizes.total
        if adapters is not None:
            layer, rest, total = layer + adapters.layer, rest + adapters.rest, total + adapters.total
        tower = sizes.tower_layer if sizes.tower_layer * FP32_BYTES >= MIN_UNIT_BYTES else 0
        rest += 0 if tower else sizes.tower_layers
        if layer * FP32_BYTES < MIN_UNIT_BYTES:
            layer, rest = 0, total - (sizes.tower_layers if tower else 0)
        return cls(layer, rest, tower)

    def trained(self, rank: Rank) -> _Units:
        """Return the trained elements of these units."""
        trained = rank.trained
        apart = trained.tower_layers if self.tower else 0
        root = trained.rest + trained.tower_layers if self.layer else trained.total
        return _Units(trained.layer if self.layer else 0, root - apart, trained.tower_layer if apart else 0)


class _Step:
    """What a step needs on one rank as well as on many."""

    def __init__(self, rank: Rank, batch: MicroBatch) -> None:
        self.rank, self.batch, self.sizes, self.trained = rank, batch, rank.sizes, rank.trained
        self.recomputes = rank.config.activation_checkpointing
        experts = rank.shape.experts
        num_mlp = NUM_CLAMPED if experts is not None and experts.has_bias else NUM_MLP
        self.layer = activations.kept_by_layer(rank, batch, num_mlp)
        self.layer += activations.kept_by_adapters(rank, batch)
        self.tower = activations.tower_activations(rank, batch)
        """Bytes that the tower keeps until its backward pass."""
        self.all_gradients = FP32_BYTES * self.trained.total_shard
        """Bytes of all gradients at the end."""
        self.accumulated = self.all_gradients if batch.num > 1 else 0
        """Bytes of the gradients of earlier micro-batches."""
        self.output = rank.width * self.trained.output
        """Bytes of the output matrix's gradient, the first of the backward pass."""
        self.is_tied = rank.shape.is_tied and self.trained.output > 0
        """Whether the output matrix's gradient is kept until that of the lookup, the last one."""
        self.lookup = rank.width * self.trained.embedding * (3 if self.is_tied else 1)
        """Bytes of the lookup's gradient; if tied, with the output matrix's gradient and the sum."""

    def head(self) -> Items:
        """Return the activations between the forward and the backward pass, with the logits."""
        kept = activations.kept_outside_layers(self.rank, self.batch)
        layers = item(MemoryCategory.ACTIVATIONS, self._kept(self.sizes.num_layers) + kept)
        return layers + activations.trained_logits(self.rank, self.batch, self.output) + self._seen()

    def _seen(self) -> Items:
        """Return the activations that the tower keeps."""
        return item(MemoryCategory.ACTIVATIONS, self.tower, TOWER)

    def tower_forward(self, *, kept: bool = False) -> Items:
        """Return the activations of the tower's forward pass, beside what is kept."""
        num_bytes = activations.tower_without_gradient(self.rank, self.batch.patches)
        return item(MemoryCategory.ACTIVATIONS, num_bytes + (self.tower if kept else 0), TOWER)

    def _tower_gradients(self) -> int:
        """Return the bytes of a block's gradient, less those of the blocks that still have none."""
        waiting = 0
        if self.recomputes and not self.accumulated:
            waiting = FP32_BYTES * self.trained.tower_layers_shard
        return self.rank.width * self.trained.tower_layer - waiting

    def tower_backward(self) -> Items:
        """Return the activations of the backward pass of the tower's last block."""
        if not self.tower or not activations.trains_tower(self.rank):
            return Items()
        tower, patches = self.rank.shape.vision, self.batch.patches
        assert tower is not None
        recomputed = 0
        if self.recomputes:  # when the last block is computed again, nothing is left of merging
            merged = activations.merged_activations(self.rank, self.batch)
            recomputed = activations.kept_by_tower_block(self.rank) * patches - merged
        rows = (tower.num_mlp - 1) * tower.intermediate + tower.hidden
        buffers = self.rank.width * rows * patches
        return item(MemoryCategory.ACTIVATIONS, self.tower + recomputed, TOWER) + _backward_buffers(buffers)

    def final_norm(self) -> Items:
        """Return the activations during the backward pass of the final norm."""
        layers = item(MemoryCategory.ACTIVATIONS, self._kept(self.sizes.num_layers)) + self._seen()
        return layers + _backward_buffers(activations.final_norm_buffers(self.rank, self.batch))

    def layer_without_gradient(self) -> Items:
        """Return the activations of a layer's forward pass without gradient."""
        batch = self.batch
        layer = activations.layer_without_gradient(
            self.rank, batch.tokens, pads=batch.pads, repeated=batch.repeated
        )
        layer += activations.added_by_adapter(self.rank, batch.tokens, "up_proj", GATES_AND_UPS)
        layer = max(layer, activations.weighted_copies(self.rank, batch.tokens, has_gradient=False))
        measured = item(MemoryCategory.BUFFERS, activations.measured_matrix(self.rank), activations.MEASURED)
        return item(MemoryCategory.ACTIVATIONS, layer) + measured + self._whole_matrix()

    def _whole_matrix(self) -> Items:
        """Return the largest matrix in 4 bits while it is whole, with its factors in fp32."""
        return item(MemoryCategory.BUFFERS, activations.whole_matrix(self.rank), "matrix in 4 bits, whole")

    def _features(self) -> Items:
        """Return the embeddings of images."""
        features = activations.image_features(self.rank, self.batch.image_tokens)
        return item(MemoryCategory.ACTIVATIONS, features, TOWER)

    def head_without_gradient(self) -> Items:
        """Return hidden states, the rows that predict learned tokens, and logits, without gradient."""
        rows = self.rank.width * self.rank.shape.hidden * (self.batch.tokens + self.batch.num_learned)
        logits = activations.logits(self.rank, self.batch, num_tiles=1)
        return item(MemoryCategory.ACTIVATIONS, rows) + item(MemoryCategory.LOGITS, logits)

    def backward(self, num_layers: int) -> Items:
        """Return the activations during the backward pass of a layer, the last of `num_layers` to go.

        As much is kept when its forward pass measures rows of matrices.
        """
        recomputed = self.layer if self.recomputes else 0
        layers = item(MemoryCategory.ACTIVATIONS, self._kept(num_layers) + recomputed) + self._seen()
        buffers = activations.backward_buffers(self.rank, self.batch)
        weighted = activations.weighted_copies(self.rank, self.batch.tokens, has_gradient=True)
        measured = activations.measured_matrix(self.rank)
        return layers + _backward_buffers(max(buffers, weighted, measured)) + self._whole_matrix()

    def _kept(self, num_layers: int) -> int:
        """Return the bytes that are kept of layers until their backward pass."""
        return activations.kept_by_layers(self.rank, self.batch, num_layers, self.layer)

    def optimizer_step(self) -> Items:
        """Return the gradients, and what updates need that are not in place."""
        updates = item(MemoryCategory.BUFFERS, self.rank.update_buffers, "updates of weights")
        return _gradients(self.all_gradients) + updates


class _SingleRankStep(_Step):
    """A step on one rank. In bf16 each weight is cast while it is used, and kept for the backward pass."""

    def train_moments(self) -> Iterator[Items]:
        """Yield the bytes at each moment of training that may be the peak."""
        trained, width, num_layers = self.trained, self.rank.width, self.sizes.num_layers
        waiting = self.output if self.is_tied else 0
        yield self.tower_forward(kept=True) + _gradients(self.accumulated)
        yield self.head() + self._casts(num_layers) + _gradients(self.accumulated)
        at_start = self._casts(num_layers) + _gradients(self.accumulated + self.output)
        yield self.final_norm() + at_start
        yield self.backward(num_layers) + at_start
        in_layers = self.accumulated or self.all_gradients - FP32_BYTES * (trained.layer + trained.embedding)
        yield self.backward(1) + self._casts(1) + _gradients(in_layers + waiting)
        all_but_embedding = self.accumulated or self.all_gradients - FP32_BYTES * trained.embedding
        of_tower, of_block = self._tower_gradients(), width * self.sizes.tower_layer
        casts = item(MemoryCategory.WEIGHTS, of_block, "weight casts") if width < FP32_BYTES else Items()
        yield self.tower_backward() + casts + _gradients(all_but_embedding + self.lookup + of_tower)
        yield _gradients(all_but_embedding + self.lookup)
        if width < FP32_BYTES:
            yield _gradients(all_but_embedding + (width + FP32_BYTES) * trained.embedding)
        yield self.optimizer_step()

    def infer_moments(self) -> Iterator[Items]:
        """Yield the bytes at each moment of a forward pass without gradient that may be the peak."""
        yield self.tower_forward() + self._tower_casts()
        yield self.layer_without_gradient() + self._casts(1) + self._features()
        yield self.head_without_gradient() + self._casts(0)

    def _tower_casts(self) -> Items:
        """Return the weights of a block of the tower in bf16, with those outside of blocks."""
        if self.rank.width == FP32_BYTES:
            return Items()
        num = self.sizes.rest + self.sizes.tower_layer
        return item(MemoryCategory.WEIGHTS, self.rank.width * num, "weight casts")

    def _casts(self, num_layers: int) -> Items:
        """Return weights in bf16 while `num_layers` layers are to go; recomputation casts one at a time.

        Weights that are not trained beside adapters are stored in bf16.
        """
        if self.rank.width == FP32_BYTES:
            return Items()
        num_cast = min(1, num_layers) if self.recomputes else num_layers
        blocks = 0 if self.recomputes or not num_layers else self.trained.tower_layers
        num_bytes = self.rank.width * (self.trained.rest + num_cast * self.trained.layer + blocks)
        return item(MemoryCategory.WEIGHTS, num_bytes, "weight casts")


class ShardedStep(_Step):
    """A step on several ranks: a unit's weights are gathered before it runs, its gradients scattered then.

    With a replicate axis, scattered gradients wait for those of the last micro-batch, in the memory that they
    accumulate in without one, and are summed in place.
    """

    def __init__(self, rank: Rank, batch: MicroBatch) -> None:
        super().__init__(rank, batch)
        self.units = _Units.of(rank)
        self.trained_units = self.units.trained(rank)
        self.num_copies = 1 if rank.on_cpu else 0
        """Copies that a collective makes of its larger end: gloo makes one."""
        self.keeps_weights = rank.config.zero_stage < 3
        """Whether gathered layers stay so until the last micro-batch's backward pass."""
        self.keeps_gradients = rank.config.zero_stage == 1 and batch.num > 1
        """Whether whole gradients are summed in fp32 until the last micro-batch."""
        if self.keeps_gradients:
            self.accumulated = FP32_BYTES * self.trained.total

    def train_moments(self) -> Iterator[Items]:
        """Yield the bytes at each moment of training that may be the peak."""
        yield self._first_gather() + _gradients(self.accumulated)
        yield self.tower_forward(kept=True) + self._gathered_tower() + _gradients(self.accumulated)
        if self.keeps_weights and self.batch.num > 1:
            yield from self._backward_moments(is_last=False)
        yield from self._backward_moments(is_last=True)
        yield self.optimizer_step()

    def _backward_moments(self, *, is_last: bool) -> Iterator[Items]:
        """Yield the moments from the logits on, in the last micro-batch or in one before it."""
        trained, num_layers = self.trained_units, self.sizes.num_layers
        accumulated = _gradients(self.accumulated)
        scatters = is_last or not self.keeps_gradients
        scattered = self._scattered(trained.layer) if scatters else Items()

        def whole(num_left: int) -> int:
            """Return the layers whose weights are gathered while so many are to go."""
            return (num_left if is_last else num_layers) if self.keeps_weights else min(num_left, 1)

        gathered = self._gathered(num_layers if self.keeps_weights else 0, num_buffers=1)
        yield self.head() + gathered + accumulated
        gathered = self._gathered(whole(num_layers), num_buffers=1, gathers_layer=not self.keeps_weights)
        at_start = gathered + accumulated + _gradients(self.output)
        yield self.final_norm() + at_start
        yield self.backward(num_layers) + at_start
        if num_layers > 1:
            layer_gradients = accumulated + _gradients(self.output + self.rank.width * trained.layer)
            gathered = self._gathered(whole(num_layers - 1), num_buffers=1)
            yield self.backward(num_layers - 1) + gathered + scattered + layer_gradients
        if self.keeps_gradients and is_last:  # layers' are scattered, those of the root are still whole
            whole_root = self.trained.total if not self.units.layer else self.trained.rest
            shards = self.all_gradients + FP32_BYTES * (whole_root - self._root_shard)
        else:
            shards = self.accumulated or self.all_gradients - FP32_BYTES * self._root_shard
        at_end = self._gathered(whole(0)) + scattered
        yield self.backward(1) + at_end + _gradients(shards + self.output)
        gradients = _gradients(shards + self.lookup + self._tower_gradients())
        yield self.tower_backward() + self._gathered_tower() + gradients
        yield at_end + _gradients(shards + self.lookup + (0 if self.is_tied else self.output))
        if scatters:
            yield scattered + self._scattered(trained.root) + _gradients(shards)

    def infer_moments(self) -> Iterator[Items]:
        """Yield the bytes at each moment of a forward pass without gradient that may be the peak."""
        yield self._first_gather()
        yield self.tower_forward() + self._gathered_tower()
        if self.units.layer:
            inputs = 2 * activations.layer_input(self.rank, self.batch)
            gathered = self._gathered(num_buffers=2, gathers_layer=True)
            yield item(MemoryCategory.ACTIVATIONS, inputs) + gathered
        yield self.layer_without_gradient() + self._features() + self._gathered(num_layers=1, num_buffers=1)
        yield self.head_without_gradient() + self._gathered(num_buffers=1)

    def _first_gather(self) -> Items:
        """Return the memory for gathering the first layer, while the buffer of the root still exists."""
        gathered = self._gathered(num_buffers=1, gathers_layer=True)
        if not self.units.layer or not self.rank.on_cpu:
            return gathered
        return gathered + _gathered_weights(self.rank.width * self.units.root)

    def _gathered(self, num_layers: int = 0, num_buffers: int = 0, *, gathers_layer: bool = False) -> Items:
        """Return unsharded weights: of the root, of layers in use, and buffers that units were gathered into.

        A buffer lives until the next unit is gathered. While a layer is being gathered (`gathers_layer`), its
        shard exists in the compute dtype, and gloo has a copy of the whole.
        """
        width, units = self.rank.width, self.units
        num_weights = units.root + num_layers * units.layer + self._buffers(num_buffers)
        num_weights += self.sizes.tower_layers if self.keeps_weights and units.tower else 0
        if not gathers_layer:
            return _gathered_weights(width * num_weights)
        shard = self.trained.layer_shard if units.layer and width < FP32_BYTES else 0
        copies = self.num_copies * width * units.layer
        return _gathered_weights(width * (num_weights + shard)) + _collective_buffers(copies)

    def _buffers(self, num: int) -> int:
        """Return the elements of buffers of which `num` exist.

        On a GPU they are memory of a stream of their own, which the allocator gives to no other stream until
        an allocation fails and training stalls. So those of the two units with most that follow each other
        count at all moments. A single rank copies without buffers. Source: `get_all_gather_streams`,
        `AllGatherState` and `wait_for_unshard` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
        """
        if self.rank.on_cpu:
            return num * (self.units.layer or self.units.root)
        return self.units.layer + max(self.units.layer, self.units.root) if self.rank.fsdp_size > 1 else 0

    def _gathered_tower(self) -> Items:
        """Return the root's weights, and those of a block of the tower with the next one."""
        num_weights = self.units.root + 2 * self.units.tower
        num_weights += self.units.tower if self.rank.on_cpu else self._buffers(1)
        return _gathered_weights(self.rank.width * num_weights)

    @property
    def _root_shard(self) -> int:
        """Trained elements of the root's unit that this rank holds."""
        trained = self.trained
        apart = trained.tower_layers_shard if self.units.tower else 0
        return (trained.rest_shard if self.units.layer else trained.total_shard - apart) + (
            trained.tower_layers_shard - apart if self.units.layer else 0
        )

    def _scattered(self, num_elements: int) -> Items:
        """Return a unit's gradients while they are reduced and scattered in fp32: sent, copied, received."""
        num_bytes = FP32_BYTES * (num_elements + -(-num_elements // self.rank.fsdp_size))
        scattered = item(MemoryCategory.GRADIENTS, num_bytes, "gradients being scattered")
        return scattered + _collective_buffers(self.num_copies * FP32_BYTES * num_elements)


def _gradients(num_bytes: int) -> Items:
    return item(MemoryCategory.GRADIENTS, num_bytes)


def _backward_buffers(num_bytes: int) -> Items:
    return item(MemoryCategory.BUFFERS, num_bytes, "backward buffers")


def _collective_buffers(num_bytes: int) -> Items:
    return item(MemoryCategory.BUFFERS, num_bytes, "collective buffers")


def _gathered_weights(num_bytes: int) -> Items:
    return item(MemoryCategory.WEIGHTS, num_bytes, "gathered weights")
