"""Adapters on their way into an engine that has them beside its weights, or adds them to these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from hflow.base.errors import RunError
from hflow.shapes.model_shape import (
    ADAPTER_ENDS,
    EMBEDDING_A,
    EMBEDDING_B,
    MAGNITUDE,
    A,
    AdapterPaths,
    B,
    adapter_paths,
)
from hflow.types.tensor_slices import (
    Block,
    Box,
    box_slices,
    intersect,
    numel,
    slices_within,
    whole_box,
)
from hflow.weights.buckets import IncomingTensor
from hflow.weights.checksum import block_checksum, checksums_of
from hflow.weights.incoming import IncomingWeights

SumOverRanks = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over the ranks that divide the columns of a matrix."""


def merge(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    magnitude: Tensor | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """Return `base + scale * b @ a`, computed in fp32, in the dtype of `base`.

    Args:
        base: some rows and columns of a matrix, `[outputs, inputs]`; those of experts are stacked.
        a: the adapter's first matrix, `[r, inputs]`, likewise.
        b: the adapter's second matrix, `[outputs, r]`, likewise.
        scale: the factor of adapters' output.
        magnitude: the lengths `[outputs]` that rows get (DoRA); None: they keep theirs.
        sum_over_ranks: sums squares over the ranks with the other columns; None: there are none.
    """
    merged = base.float() + scale * (b.float() @ a.float())
    if magnitude is not None:
        squares = merged.square().sum(1)
        lengths = (squares if sum_over_ranks is None else sum_over_ranks(squares)).sqrt()
        merged *= (magnitude.float() / lengths)[:, None]
    return merged.to(base.dtype)


def with_adapter(adapters: Mapping[str, Tensor], scale: float, name: str, tensor: Tensor) -> Tensor:
    """Return a whole tensor of a model with its adapter added, if it has one among all adapters."""
    of_a, of_b = adapter_paths(name)
    if of_a + EMBEDDING_A in adapters:
        return merge(tensor, adapters[of_b + EMBEDDING_B].T, adapters[of_a + EMBEDDING_A].T, scale)
    if of_a + A not in adapters:
        return tensor
    return merge(tensor, adapters[of_a + A], adapters[of_b + B], scale, adapters.get(of_b + MAGNITUDE))


class _Adapters(IncomingWeights):
    """What a rank makes of the adapters that it receives, with the factor `scale`, alpha / r.

    The bytes and checksums are those of what arrives.
    """

    def __init__(self, adapters: IncomingWeights, scale: float) -> None:
        super().__init__(None)
        self._adapters = adapters
        self._scale = scale

    def _arrivals(self) -> Iterator[IncomingTensor]:
        yield from self._adapters
        self.num_bytes, self.checksum = self._adapters.num_bytes, self._adapters.checksum
        self.local_checksum = self._adapters.local_checksum


class ScaledAdapters(_Adapters):
    """The adapters that a rank receives, with their scale as a factor of B. Iterate only once."""

    def __iter__(self) -> Iterator[IncomingTensor]:
        """Yield the matrices of all adapters; B is scaled in fp32."""
        for arrived in self._arrivals():
            if self._scale == 1 or not arrived.name.endswith(B):
                yield arrived
                continue
            name, tensor, boxes, _ = arrived
            scaled = (self._scale * tensor.float()).to(tensor.dtype)
            shape = tuple(tensor.shape)
            blocks = [Block(name, shape, box, scaled[box_slices(box)]) for box in boxes]
            yield IncomingTensor(name, scaled, boxes, tuple(checksums_of(blocks)))


class MergedWeights(_Adapters):
    """The weights of a rank with the adapters that it receives, tensor by tensor. Iterate only once.

    Args:
        base: the rank's blocks of the model without adapters, in host memory, by their tensor's name.
        sum_over_ranks: sums over the tensor ranks, which merge the same tensors one after the other.
    """

    def __init__(
        self,
        adapters: IncomingWeights,
        base: Mapping[str, Block],
        scale: float,
        device: torch.device,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        super().__init__(adapters, scale)
        self._base = base
        self._target = device
        self._sum_over_ranks = sum_over_ranks

    def __iter__(self) -> Iterator[IncomingTensor]:
        """Receive all adapters, then yield every tensor of the model.

        Raises:
            RunError: when an adapter lacks a matrix, or a part that the rank needs, or is of a tensor that it
                does not have.
        """
        arrived = {tensor.name: tensor for tensor in self._arrivals()}
        targets = {x.removesuffix(end) for x in arrived for end in ADAPTER_ENDS if x.endswith(end)}
        adapted = {name: adapter_paths(name) for name in self._base}
        adapted = {name: paths for name, paths in adapted.items() if targets.intersection(paths)}
        complete = {
            path
            for of_a, of_b in adapted.values()
            if any({of_a + a, of_b + b} <= arrived.keys() for a, b in ((A, B), (EMBEDDING_A, EMBEDDING_B)))
            for path in (of_a, of_b)
        }
        for path in sorted(targets - complete):
            raise RunError(
                f"received an adapter of {path}weight, of which the engine lacks the weight or a matrix. "
                "If it happens again, the weight route has a bug"
            )
        for name, held in self._base.items():
            values = held.values.to(self._target)
            if name in adapted:
                values = self._merge(adapted[name], held, values, arrived)
            whole = whole_box(held.shape)
            shaped = values
            if held.box != whole:
                shaped = values.new_empty(held.shape)
                shaped[slices_within(held.box, whole)] = values
            yield IncomingTensor(name, shaped, (held.box,), (block_checksum(held.block(values)),))

    def _merge(
        self, paths: AdapterPaths, held: Block, values: Tensor, arrived: Mapping[str, IncomingTensor]
    ) -> Tensor:
        """Return a rank's part of a matrix, or of those of experts, with its adapter added."""
        (of_a, of_b), (*experts, rows, columns) = paths, held.box
        if of_a + EMBEDDING_A in arrived:
            r = arrived[of_a + EMBEDDING_A].tensor.shape[0]
            a = _part(arrived[of_b + EMBEDDING_B], (columns, (0, r))).to(self._target)
            b = _part(arrived[of_a + EMBEDDING_A], ((0, r), rows)).to(self._target)
            return merge(values, a.T, b.T, self._scale)
        r = arrived[of_a + A].tensor.shape[-2]
        a = _part(arrived[of_a + A], (*experts, (0, r), columns)).to(self._target)
        b = _part(arrived[of_b + B], (*experts, rows, (0, r))).to(self._target)
        magnitude = None
        if of_b + MAGNITUDE in arrived:
            magnitude = _part(arrived[of_b + MAGNITUDE], (rows,)).to(self._target)
        is_divided = columns != (0, held.shape[-1])
        return merge(values, a, b, self._scale, magnitude, self._sum_over_ranks if is_divided else None)


def _part(arrived: IncomingTensor, box: Box) -> Tensor:
    """Return a box of a matrix, of which each tensor rank receives what it needs.

    Raises:
        RunError: when a part of the box has not arrived.
    """
    overlaps = (intersect(other, box) for other in arrived.boxes)
    if sum(numel(overlap) for overlap in overlaps if overlap is not None) < numel(box):
        raise RunError(
            f"{box} of {arrived.name} has not arrived, only {arrived.boxes}. If it happens again, the weight "
            "route has a bug"
        )
    return arrived.tensor[slices_within(box, whole_box(tuple(arrived.tensor.shape)))]
