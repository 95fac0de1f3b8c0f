"""Which part of each checkpoint tensor a rank holds, as boxes in the tensor's own index space.

A box has `[start, stop)` for each axis. Pipeline stages hold whole layers. The tensor axis splits
`TensorSpec.split_axis` in whole units, and the expert axis the experts of a layer. FSDP splits the rest over
the data and context axes, by rows, once for each index of the replicate axis. Padding is not part of the
checkpoint, so no box contains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hflow.base.errors import PlanError
from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.layout import Coords, Layout, stage_layers
from hflow.shapes.model_shape import ModelShape, TensorSpec, expert_parameters, num_parameters, tensors
from hflow.types.tensor_slices import Box, numel, whole_box


@dataclass(frozen=True)
class TensorShard:
    """A part of a tensor, and the ranks of a pipeline stage that hold exactly this part."""

    box: Box
    stage_ranks: tuple[int, ...]
    """`(d * C + c) * T + t` of each holder, ascending."""


def is_on_stage(spec: TensorSpec, shape: ModelShape, stage: int, num_stages: int) -> bool:
    """Return whether a pipeline stage holds a tensor."""
    if spec.layer is not None:
        first, last = stage_layers(shape.num_layers, num_stages)[stage]
        return first <= spec.layer < last
    if spec.location == "embedding":
        return stage == 0 or (shape.is_tied and stage == num_stages - 1)
    return stage == num_stages - 1


def mean_copies(shape: ModelShape, layout: Layout) -> float:
    """Return the ranks of a layout that compute with a parameter, on average."""
    experts = expert_parameters(shape) / num_parameters(shape)
    return (1 - experts) * layout.num_copies + experts * layout.num_expert_copies


def num_publishers(traits: BackendTraits, layout: Layout) -> int:
    """Return the number of a trainer's ranks that together publish each slice of the weights once.

    With a replicate axis, engines near each set of ranks take the slices of that set.
    """
    return layout.fsdp_size if traits.shards_weights else layout.world


def num_slices(traits: BackendTraits, layout: Layout) -> int:
    """Return the number of parts into which a replica's ranks divide each tensor."""
    return layout.fsdp_size if traits.shards_weights else layout.tensor


def rank_tensors(
    shape: ModelShape, traits: BackendTraits, layout: Layout, coords: Coords
) -> Iterator[tuple[TensorSpec, Box]]:
    """Yield every tensor that the rank at some coordinates holds, with each of its boxes.

    Raises:
        PlanError: if the tensor axis does not divide a tensor that it splits.
    """
    p = coords[2]
    for spec in tensors(shape):
        if is_on_stage(spec, shape, p, layout.pipe):
            for box in rank_boxes(spec, traits, layout, coords):
                yield spec, box


def tensor_shards(spec: TensorSpec, traits: BackendTraits, layout: Layout) -> tuple[TensorShard, ...]:
    """Return the distinct boxes of a tensor. They do not overlap, and together they are the whole tensor.

    Raises:
        PlanError: if the tensor axis does not divide the tensor.
    """
    _check_split(spec, traits, layout)
    return _tensor_shards(replace(spec, name="", layer=None, location=""), traits, layout)


def rank_boxes(spec: TensorSpec, traits: BackendTraits, layout: Layout, coords: Coords) -> tuple[Box, ...]:
    """Return the boxes of a tensor that a rank of its stage holds, in their order, without empty ones.

    Raises:
        PlanError: if the tensor axis does not divide the tensor.
    """
    _check_split(spec, traits, layout)
    d, t, _, c = coords
    boxes = [whole_box(spec.shape)]
    if layout.tensor > 1 and spec.split_axis is not None:
        ranges = _tensor_ranges(spec, traits, layout.tensor, t)
        boxes = [_with_range(boxes[0], spec.split_axis, bounds) for bounds in ranges]
    num_copies, index = layout.num_copies, layout.copy_index(d, c)
    if layout.expert > 1 and spec.num_experts > 1:
        num, part = spec.num_experts // layout.expert, layout.expert_index(d, c)
        boxes = [_with_range(box, 0, (part * num, (part + 1) * num)) for box in boxes]
        num_copies, index = layout.num_expert_copies, index // layout.expert
    if layout.replicate > 1:
        num_copies, index = layout.fsdp_size, index % layout.fsdp_size
    if traits.shards_weights and num_copies > 1:
        block = -(-sum(stop - start for (start, stop), *_ in boxes) // num_copies)
        boxes = list(_cut_rows(boxes, index * block, (index + 1) * block))
    return tuple(box for box in boxes if numel(box))


def _cut_rows(boxes: Iterable[Box], first: int, last: int) -> Iterator[Box]:
    """Yield rows `[first, last)` of boxes that are stacked."""
    for box in boxes:
        start, stop = box[0]
        yield _with_range(box, 0, (min(stop, start + max(0, first)), min(stop, start + max(0, last))))
        first, last = first - (stop - start), last - (stop - start)


def padded_units(num_units: int, traits: BackendTraits, num_ranks: int) -> int:
    """Return the units of a vocabulary, with a backend's padding, on all tensor ranks together."""
    if traits.vocab_multiple is None:
        return num_units
    multiple = traits.vocab_multiple * (1 if traits.pads_whole_vocab else num_ranks)
    return -(-num_units // multiple) * multiple


def can_split(spec: TensorSpec, traits: BackendTraits, num_ranks: int) -> bool:
    """Return whether a tensor can be split over tensor ranks in whole units."""
    if spec.split_axis is None:
        return True
    if spec.may_repeat and num_ranks % spec.split_units == 0:
        return True
    num_units = padded_units(spec.split_units, traits, num_ranks) if spec.may_pad else spec.split_units
    return num_units % num_ranks == 0


def _check_split(spec: TensorSpec, traits: BackendTraits, layout: Layout) -> None:
    if not can_split(spec, traits, layout.tensor):
        raise PlanError(
            f"{spec.name} has {spec.split_units} units, which cannot be split over {layout.tensor} tensor "
            "ranks; choose a tensor size that divides them"
        )
    if spec.num_experts > 1 and spec.num_experts % layout.expert:
        raise PlanError(
            f"{spec.name} has {spec.num_experts} experts, which cannot be split over {layout.expert} expert "
            "ranks; choose an expert size that divides them"
        )


def _tensor_ranges(
    spec: TensorSpec, traits: BackendTraits, num_ranks: int, rank: int
) -> list[tuple[int, int]]:
    """Return `[start, stop)` of a tensor rank on the split axis, in each of its parts."""
    assert spec.split_axis is not None
    size, num_units = spec.shape[spec.split_axis] // spec.split_parts, spec.split_units
    length = size // num_units
    if num_units < num_ranks and spec.may_repeat:
        unit = rank // (num_ranks // num_units)
        start, stop = unit * length, (unit + 1) * length
    else:
        num_units = padded_units(num_units, traits, num_ranks) if spec.may_pad else num_units
        block = num_units // num_ranks * length
        start, stop = min(size, rank * block), min(size, (rank + 1) * block)
    return [(start + part * size, stop + part * size) for part in range(spec.split_parts)]


@lru_cache(maxsize=256)
def _tensor_shards(spec: TensorSpec, traits: BackendTraits, layout: Layout) -> tuple[TensorShard, ...]:
    stage_ranks: dict[Box, list[int]] = {}
    num_kinds = layout.fsdp_size if traits.shards_weights else layout.expert
    boxes = {
        (copy, t): rank_boxes(spec, traits, layout, (copy // layout.context, t, 0, copy % layout.context))
        for copy in range(num_kinds)
        for t in range(layout.tensor)
    }
    for stage_rank in range(layout.stage_size):
        copy, t = divmod(stage_rank, layout.tensor)
        for box in boxes[copy % num_kinds, t]:
            stage_ranks.setdefault(box, []).append(stage_rank)
    return tuple(TensorShard(box, tuple(ranks)) for box, ranks in stage_ranks.items())


def _with_range(box: Box, axis: int, bounds: tuple[int, int]) -> Box:
    return (*box[:axis], bounds, *box[axis + 1 :])
