"""Memory formulas of the torch backend: training and inference, on one rank or sharded by FSDP2.

A step may reach its peak at several moments: at the logits, in the backward pass of the first or the last
layer, or when the gradients outside of the layers are reduced. The moment with the most bytes counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.planner.memory import activations
from hflow.planner.memory.byte_counts import Items, largest
from hflow.planner.memory.microbatch import MicroBatch
from hflow.planner.memory.rank import ADAM_MOMENTS, FP32_BYTES, Rank

MIN_UNIT_BYTES = 4 << 20
"""A layer with fewer bytes of fp32 weights is gathered with the rest (`torch_model/fsdp.py`)."""


def model_state(rank: Rank) -> Items:
    """Return fp32 weights and moments, sharded over the data axis.

    Gradients exist within a step only. With them, training needs 16 bytes a parameter over all ranks. An
    inference replica has weights alone.
    """
    num_weights = rank.sizes.total_shard
    moments = ADAM_MOMENTS * FP32_BYTES * num_weights if rank.replica.role == "train" else 0
    return Items(weights=FP32_BYTES * num_weights) + Items(optimizer=moments)


def train_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of a train node beyond the model state."""
    step = _Sharded(rank, batch) if rank.data > 1 else _Single(rank, batch)
    return largest(step.moments())


def infer_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of an infer node beyond the model state."""
    step = _Sharded(rank, batch) if rank.data > 1 else _Single(rank, batch)
    return largest(step.passing())


def kept_after_infer(rank: Rank) -> Items:
    """Return the weights that stay gathered: FSDP2 reshards the root in a backward pass only."""
    if rank.data == 1:
        return Items()
    return Items({"gathered weights": rank.width * _Units.of(rank).root})


@dataclass(frozen=True)
class _Units:
    """What FSDP2 gathers at once, in entries."""

    layer: int
    """A decoder layer with a unit of its own; 0 where layers are gathered with the root."""
    root: int
    """The rest."""

    @classmethod
    def of(cls, rank: Rank) -> _Units:
        sizes = rank.sizes
        if sizes.layer * FP32_BYTES >= MIN_UNIT_BYTES:
            return cls(sizes.layer, sizes.rest)
        return cls(0, sizes.total)


class _Training:
    """The parts of a training step that are alike on one rank and on many."""

    def __init__(self, rank: Rank, batch: MicroBatch) -> None:
        self.rank, self.batch, self.sizes = rank, batch, rank.sizes
        self.recomputes = rank.config.activation_checkpointing
        self.layer = activations.kept_by_layer(rank, batch)
        self.kept = activations.layer_input(rank, batch) if self.recomputes else self.layer
        self.shard = FP32_BYTES * self.sizes.total_shard
        """Bytes of all gradients in the end."""
        self.earlier = self.shard if batch.num > 1 else 0
        """Bytes of the gradients that earlier micro-batches left."""
        self.output = rank.width * self.sizes.output
        """Bytes of the output matrix's gradient, the first that the backward pass makes."""
        self.is_tied = rank.shape.is_tied and self.sizes.output > 0
        """Whether the output matrix's gradient waits for that of the lookup, the last one."""
        self.lookup = rank.width * self.sizes.embedding * (3 if self.is_tied else 1)
        """Bytes of the lookup's gradient, with what waits for it and the sum."""

    def forward(self) -> Items:
        """Activations at the end of the forward pass, with the logits."""
        ends = activations.kept_by_ends(self.rank, self.batch)
        logits = activations.logits(self.rank, self.batch, with_gradient=True)
        return Items(activations=self.sizes.num_layers * self.kept + ends, logits=logits)

    def final_norm(self) -> Items:
        """Activations while the backward pass is in the final norm, which computes in five rows of fp32."""
        kept = self.sizes.num_layers * self.kept
        buffers = activations.final_norm_buffers(self.rank, self.batch)
        return Items({"activations": kept, "backward buffers": buffers})

    def layer_forward(self) -> Items:
        """A layer without gradient."""
        batch = self.batch
        return Items(activations=activations.passing_layer(self.rank, batch.tokens, pads=batch.pads))

    def head_forward(self) -> Items:
        """The head without gradient: hidden states, the rows that predict learned tokens, and logits."""
        rows = self.rank.width * self.rank.shape.hidden * (self.batch.tokens + self.batch.num_learned)
        logits = activations.logits(self.rank, self.batch, with_gradient=False)
        return Items(activations=rows, logits=logits)

    def backward(self, num_layers: int) -> Items:
        """Activations while the backward pass is in the last of `num_layers` layers that are left."""
        again = self.layer if self.recomputes else 0
        buffers = activations.backward_buffers(self.rank, self.batch)
        return Items({"activations": num_layers * self.kept + again, "backward buffers": buffers})

    def step(self) -> Items:
        """The optimizer's step: it is fused and in place, so that only the gradients are there."""
        return Items(gradients=self.shard)


class _Single(_Training):
    """One rank: whole weights; in bf16 each is cast while it is used, and the casts are kept for backward."""

    def moments(self) -> Iterator[Items]:
        """The bytes at each moment that may be the peak."""
        sizes, width, num_layers = self.sizes, self.rank.width, self.sizes.num_layers
        waiting = self.output if self.is_tied else 0
        yield self.forward() + self.casts(num_layers) + Items(gradients=self.earlier)
        first = self.casts(num_layers) + Items(gradients=self.earlier + self.output)
        yield self.final_norm() + first
        yield self.backward(num_layers) + first
        in_layers = self.earlier or self.shard - FP32_BYTES * (sizes.layer + sizes.embedding)
        yield self.backward(1) + self.casts(1) + Items(gradients=in_layers + waiting)
        all_but_one = self.earlier or self.shard - FP32_BYTES * sizes.embedding
        yield Items(gradients=all_but_one + self.lookup)
        if width < FP32_BYTES:
            yield Items(gradients=all_but_one + (width + FP32_BYTES) * sizes.embedding)
        yield self.step()

    def passing(self) -> Iterator[Items]:
        """The bytes at the moments of a forward without gradient."""
        yield self.layer_forward() + self.casts(1)
        yield self.head_forward() + self.casts(0)

    def casts(self, num_layers: int) -> Items:
        """Weights in bf16 while `num_layers` layers are to go; recomputation casts one at a time."""
        if self.rank.width == FP32_BYTES:
            return Items()
        alive = min(1, num_layers) if self.recomputes else num_layers
        return Items({"weight casts": self.rank.width * (self.sizes.rest + alive * self.sizes.layer)})


class _Sharded(_Training):
    """Several ranks: a unit's weights are gathered before its passes, its gradients scattered after them."""

    def __init__(self, rank: Rank, batch: MicroBatch) -> None:
        super().__init__(rank, batch)
        self.units = _Units.of(rank)
        self.copies = 1 if rank.on_cpu else 0
        """Copies that a collective makes of its larger end: gloo makes one."""

    def moments(self) -> Iterator[Items]:
        """The bytes at each moment that may be the peak."""
        units, num_layers = self.units, self.sizes.num_layers
        earlier = Items(gradients=self.earlier)
        yield self._start() + earlier
        yield self.forward() + self._gathered(num_buffers=1) + earlier
        first = (
            self._gathered(num_layers=1, num_buffers=1, entering=True)
            + earlier
            + Items(gradients=self.output)
        )
        yield self.final_norm() + first
        yield self.backward(num_layers) + first
        if num_layers > 1:
            made = earlier + Items(gradients=self.output + self.rank.width * units.layer)
            gathered = self._gathered(num_layers=1, num_buffers=1)
            yield self.backward(num_layers - 1) + gathered + self._sent(units.layer) + made
        scattered = self.earlier or self.shard - FP32_BYTES * self._root_shard
        last = self._gathered() + self._sent(units.layer)
        yield self.backward(1) + last + Items(gradients=scattered + self.output)
        yield last + Items(gradients=scattered + self.lookup + (0 if self.is_tied else self.output))
        yield self._sent(units.layer) + self._sent(units.root) + Items(gradients=scattered)
        yield self.step()

    def passing(self) -> Iterator[Items]:
        """The bytes at the moments of a forward without gradient."""
        yield self._start()
        if self.units.layer:
            entering = Items(activations=2 * activations.layer_input(self.rank, self.batch))
            yield entering + self._gathered(num_buffers=2, entering=True)
        yield self.layer_forward() + self._gathered(num_layers=1, num_buffers=1)
        yield self.head_forward() + self._gathered(num_buffers=1)

    def _start(self) -> Items:
        """Gathering the first layer, while the buffer that the root was gathered into is still there."""
        buffer = Items({"gathered weights": self.rank.width * self.units.root})
        return self._gathered(num_buffers=1, entering=True) + (buffer if self.units.layer else Items())

    def _gathered(self, num_layers: int = 0, num_buffers: int = 0, *, entering: bool = False) -> Items:
        """Whole weights: the root's, of layers in use, and the buffers that units were gathered into.

        A buffer lives until the next unit is gathered; while a layer is (`entering`), its shard is there in
        the compute dtype, and gloo has a copy of the whole.
        """
        width, units = self.rank.width, self.units
        whole = units.root + num_layers * units.layer + num_buffers * (units.layer or units.root)
        if not entering:
            return Items({"gathered weights": width * whole})
        shard = self.sizes.layer_shard if units.layer and width < FP32_BYTES else 0
        copies = self.copies * width * units.layer
        return Items({"gathered weights": width * (whole + shard), "collective buffers": copies})

    @property
    def _root_shard(self) -> int:
        """Entries of the root's unit that this rank holds."""
        return self.sizes.rest_shard if self.units.layer else self.sizes.total_shard

    def _sent(self, entries: int) -> Items:
        """A unit's gradients on their way to their ranks, in fp32: sent, copied, received."""
        return Items(
            {
                "gradients being scattered": FP32_BYTES * (entries + -(-entries // self.rank.data)),
                "collective buffers": self.copies * FP32_BYTES * entries,
            }
        )
