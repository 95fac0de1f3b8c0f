"""Loading of incoming weights into a model, with the checks that it then holds what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hflow.errors import RunError
from hflow.types.tensor_slices import Box, intersect, numel, slices_within, whole_box
from hflow.weights.checksum import box_checksum
from hflow.weights.incoming import IncomingWeights

_NONE = -1
"""Equals no checksum."""
HeldBoxes = Sequence[tuple[Box, Tensor]]
"""The boxes of one tensor that a rank holds, each with a view of the rank's storage, in the box's shape."""


@dataclass(frozen=True)
class LoadedWeights:
    """What the ranks of an engine loaded, tensor ranks in order. Checksums are those of `checksum`."""

    num_bytes: tuple[int, ...]
    """Bytes that each rank received from other processes."""
    local_checksums: tuple[int, ...]
    """Of the slices that did not come from other processes."""
    checksums: tuple[int, ...]
    """Of everything that reached the rank. The rank holds it, as far as it holds these entries at all."""

    @classmethod
    def of_ranks(cls, ranks: Iterable[LoadedWeights]) -> LoadedWeights:
        """Join what the ranks of an engine loaded."""
        ranks = tuple(ranks)
        return cls(
            tuple(n for rank in ranks for n in rank.num_bytes),
            tuple(c for rank in ranks for c in rank.local_checksums),
            tuple(c for rank in ranks for c in rank.checksums),
        )


def load_verified(
    incoming: IncomingWeights,
    load: Callable[[Iterator[tuple[str, Tensor]]], object],
    held: Callable[[str], HeldBoxes],
) -> LoadedWeights:
    """Load weights into one rank of an engine, and check that the rank holds them afterwards.

    Args:
        incoming: the rank's.
        load: copies `(HF name, full-shape tensor)` pairs into the model. It may read only the boxes that the
            rank holds.
        held: returns the boxes of a tensor that the rank holds; called before and after loading. A tensor
            that is unknown has none.

    Raises:
        RunError: when a box that the rank holds did not arrive, or has other values than those that arrived.
    """
    arrived: list[tuple[str, tuple[int, ...], list[int]]] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor, boxes in incoming:
            arrived.append((name, tuple(tensor.shape), _arrived_checksums(name, tensor, boxes, held(name))))
            yield name, tensor

    load(tensors())
    for name, shape, checksums in arrived:
        for checksum, (box, view) in zip(checksums, held(name), strict=True):
            if box_checksum(name, shape, box, view) != checksum:
                raise RunError(
                    f"the engine does not hold {_text(box)} of {name!r} as received: the weights changed "
                    "while they were loaded. If it happens again, the engine's weight loader has a bug"
                )
    return LoadedWeights((incoming.num_bytes,), (incoming.local_checksum,), (incoming.checksum,))


def _arrived_checksums(name: str, tensor: Tensor, boxes: Sequence[Box], held: HeldBoxes) -> list[int]:
    """Return the checksums of what arrived for the boxes that a rank holds, in the dtype that it holds.

    Raises:
        RunError: when a part of them did not arrive.
    """
    shape = tuple(tensor.shape)
    checksums = []
    for box, view in held:
        if len(box) != len(shape) or intersect(box, whole_box(shape)) != box:
            checksums.append(_NONE)  # a tensor of another shape, which `load` refuses
            continue
        num_arrived = sum(numel(part) for other in boxes if (part := intersect(box, other)) is not None)
        if num_arrived != numel(box):
            raise RunError(
                f"received incomplete weights: {num_arrived} of the {numel(box)} entries of {name!r} in "
                f"{_text(box)}. If it happens again, the weight route has a bug"
            )
        values = tensor[slices_within(box, whole_box(shape))]
        checksums.append(box_checksum(name, shape, box, values.to(view.dtype)))
    return checksums


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
