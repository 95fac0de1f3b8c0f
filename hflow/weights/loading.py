"""Loading of incoming weights into a model, with the checks that it then holds what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hflow.base.errors import RunError
from hflow.types.tensor_slices import Block, Box, box_slices, intersect, numel
from hflow.weights.buckets import IncomingTensor, box_text
from hflow.weights.checksum import MODULUS, block_checksum, checksums_of
from hflow.weights.incoming import IncomingWeights

HeldBoxes = Sequence[tuple[Box, Tensor]]
"""The boxes of one tensor that a rank holds, each with a view of the rank's storage, in the box's shape."""


@dataclass(frozen=True)
class LoadedWeights:
    """What the ranks of an engine loaded, tensor ranks in order. Checksums are those of `checksum`."""

    num_bytes: tuple[int, ...]
    """Bytes that each rank received from other processes."""
    local_checksums: tuple[int, ...]
    """The checksums of the slices that did not come from other processes."""
    checksums: tuple[int, ...]
    """The checksum of everything that reached the rank, which it holds as far as it needs these entries."""

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
    checksums: Callable[[Sequence[Block]], list[int]] = checksums_of,
) -> LoadedWeights:
    """Load weights into one rank of an engine, and check that the rank holds them afterwards.

    Args:
        load: copies `(HF name, full-shape tensor)` pairs into the model. It may read only the boxes that the
            rank holds. A tensor that the rank holds whole may be the rank's own, with the new values.
        held: returns the boxes of a tensor that the rank holds; called before and after loading. A tensor
            that is unknown has none.
        checksums: returns the checksums of boxes after loading. An engine that stores some in another form
            returns those that it had before it converted them.

    Raises:
        RunError: when a box that the rank holds did not arrive, or has other values than those that arrived.
    """
    arrived: list[tuple[str, tuple[int, ...], list[int | None]]] = []

    def storage(name: str) -> Tensor | None:
        boxes = held(name)
        return boxes[0][1] if len(boxes) == 1 else None

    incoming.storage = storage

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for tensor in incoming:
            shape = tuple(tensor.tensor.shape)
            arrived.append((tensor.name, shape, [_arrived(tensor, *box) for box in held(tensor.name)]))
            yield tensor.name, tensor.tensor

    load(tensors())
    blocks = [Block(name, shape, box, view) for name, shape, _ in arrived for box, view in held(name)]
    expected = [checksum for _, _, of_tensor in arrived for checksum in of_tensor]
    for block, checksum, wanted in zip(blocks, checksums(blocks), expected, strict=True):
        if checksum != wanted:
            raise RunError(
                f"the engine does not hold {box_text(block.box)} of {block.tensor!r} as received: the "
                "weights changed while they were loaded. If it happens again, the engine's weight loader has "
                "a bug"
            )
    return LoadedWeights((incoming.num_bytes,), (incoming.local_checksum,), (incoming.checksum,))


def _arrived(arrived: IncomingTensor, box: Box, view: Tensor) -> int | None:
    """Return the checksum of what arrived for a box that a rank holds, in the dtype that it holds.

    None if the tensor has another shape than the rank's, which `load` refuses.

    Raises:
        RunError: when a part of the box did not arrive.
    """
    shape = tuple(arrived.tensor.shape)
    if len(box) != len(shape) or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        return None
    parts = [
        (other, checksum)
        for other, checksum in zip(arrived.boxes, arrived.checksums, strict=True)
        if intersect(box, other) is not None
    ]
    num_arrived = sum(numel(part) for other, _ in parts if (part := intersect(box, other)) is not None)
    if num_arrived != numel(box):
        raise RunError(
            f"received incomplete weights: {num_arrived} of the {numel(box)} entries of {arrived.name!r} in "
            f"{box_text(box)}. If it happens again, the weight route has a bug"
        )
    if view.dtype == arrived.tensor.dtype and all(intersect(box, other) == other for other, _ in parts):
        return sum(checksum for _, checksum in parts) % MODULUS
    values = arrived.tensor[box_slices(box)].to(view.dtype)
    return block_checksum(Block(arrived.name, shape, box, values))
