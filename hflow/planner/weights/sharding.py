"""Which part of each checkpoint tensor a rank holds: boxes in the tensor's own index space.

A box says `[start, stop)` for each axis. Pipeline stages own whole layers; the tensor axis cuts
`TensorSpec.cut_axis` in whole units; FSDP cuts what is left over the data axis, by rows. Padding has
no box: it is no part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from hflow.errors import PlanError
from hflow.planner.backends import BackendTraits
from hflow.planner.layout import Layout, even_blocks
from hflow.planner.model_shape import ModelShape, TensorSpec, tensors
from hflow.types.tensor_slices import Box, numel, whole_box


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and who holds exactly this part on a pipeline stage that has the tensor."""

    box: Box
    places: tuple[int, ...]
    """`d * T + t` of the holders, ascending."""


@lru_cache
def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """`[first, last)` layer of each stage: equal blocks, the remainder to the first stages."""
    return tuple((block.start, block.stop) for block in even_blocks(num_layers, num_stages))


def is_on_stage(spec: TensorSpec, shape: ModelShape, stage: int, num_stages: int) -> bool:
    """Whether a pipeline stage holds a tensor."""
    if spec.layer is not None:
        first, last = stage_layers(shape.num_layers, num_stages)[stage]
        return first <= spec.layer < last
    if spec.place == "embedding":
        return stage == 0 or (shape.is_tied and stage == num_stages - 1)
    return stage == num_stages - 1


def held(
    shape: ModelShape, traits: BackendTraits, layout: Layout, coords: tuple[int, int, int]
) -> Iterator[tuple[TensorSpec, Box]]:
    """Every tensor that the rank at (data, tensor, pipe) coordinates holds, with its box.

    Raises:
        PlanError: when the tensor axis does not divide what it cuts.
    """
    _, _, p = coords
    for spec in tensors(shape):
        if is_on_stage(spec, shape, p, layout.pipe):
            box = box_of(spec, traits, layout, coords)
            if box is not None:
                yield spec, box


def pieces(spec: TensorSpec, traits: BackendTraits, layout: Layout) -> tuple[Piece, ...]:
    """The distinct boxes of a tensor: together they are the tensor, and no two overlap.

    Raises:
        PlanError: when the tensor axis does not divide what it cuts.
    """
    _check_shares(spec, traits, layout.tensor)
    return _pieces(replace(spec, name="", layer=None, place=""), traits, layout)


def box_of(
    spec: TensorSpec, traits: BackendTraits, layout: Layout, coords: tuple[int, int, int]
) -> Box | None:
    """The part of a tensor that a rank of its stage holds; None where nothing is left for it.

    Raises:
        PlanError: when the tensor axis does not divide what it cuts.
    """
    _check_shares(spec, traits, layout.tensor)
    d, t, _ = coords
    box = whole_box(spec.shape)
    if layout.tensor > 1 and spec.cut_axis is not None:
        box = _with_edges(box, spec.cut_axis, _tensor_cut(spec, traits, layout.tensor, t))
    if traits.sharded_over_data == "everything" and layout.data > 1:
        start, stop = box[0]
        block = -(-(stop - start) // layout.data)
        box = _with_edges(box, 0, (min(stop, start + d * block), min(stop, start + (d + 1) * block)))
    return box if numel(box) else None


def padded(units: int, traits: BackendTraits, num_ranks: int) -> int:
    """The units of a vocabulary that a backend holds on all tensor ranks together."""
    if traits.vocab_multiple is None:
        return units
    multiple = traits.vocab_multiple * (1 if traits.pads_whole_vocab else num_ranks)
    return -(-units // multiple) * multiple


def can_share(spec: TensorSpec, traits: BackendTraits, num_ranks: int) -> bool:
    """Whether tensor ranks can share a tensor without splitting one of its units."""
    if spec.cut_axis is None:
        return True
    if spec.may_repeat and num_ranks % spec.cut_units == 0:
        return True
    units = padded(spec.cut_units, traits, num_ranks) if spec.may_pad else spec.cut_units
    return units % num_ranks == 0


def _check_shares(spec: TensorSpec, traits: BackendTraits, num_ranks: int) -> None:
    if not can_share(spec, traits, num_ranks):
        raise PlanError(
            f"{spec.name} has {spec.cut_units} units, which {num_ranks} tensor ranks cannot share"
        )


def _tensor_cut(spec: TensorSpec, traits: BackendTraits, num_ranks: int, rank: int) -> tuple[int, int]:
    """`[start, stop)` on the cut axis."""
    assert spec.cut_axis is not None
    size, units = spec.shape[spec.cut_axis], spec.cut_units
    length = size // units
    if units < num_ranks and spec.may_repeat:
        unit = rank // (num_ranks // units)
        return unit * length, (unit + 1) * length
    units = padded(units, traits, num_ranks) if spec.may_pad else units
    block = units // num_ranks * length
    return min(size, rank * block), min(size, (rank + 1) * block)


@lru_cache(maxsize=256)
def _pieces(spec: TensorSpec, traits: BackendTraits, layout: Layout) -> tuple[Piece, ...]:
    places: dict[Box, list[int]] = {}
    for place in range(layout.data * layout.tensor):
        box = box_of(spec, traits, layout, (*divmod(place, layout.tensor), 0))
        if box is not None:
            places.setdefault(box, []).append(place)
    return tuple(Piece(box, tuple(held)) for box, held in places.items())


def _with_edges(box: Box, axis: int, edges: tuple[int, int]) -> Box:
    return (*box[:axis], edges, *box[axis + 1 :])
