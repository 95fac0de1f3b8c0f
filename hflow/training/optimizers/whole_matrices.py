"""`WholeMatrices`: a function of whole matrices of which each rank holds parts.

A matrix that every holder has whole is computed by each of them. Others have an owner, one of their holders:
the parts are sent to it, and it sends parts of the result back. Matrices are divided over owners by the
arithmetic that they take. In each round a rank computes one of them, so that few are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.planner.plan.optimizers import is_layer_matrix
from hflow.types.tensor_slices import BUCKET_BYTES, Block, Box, box_shape, box_slices, numel, whole_box

BlocksOf = Callable[[Tensor], Iterable[Block]]
"""A tensor in the shape of a shard -> the boxes of Hugging Face tensors that it is, as views of it."""
Updates = Callable[[Tensor], Tensor]
"""`[matrices, rows, columns]`, which may be overwritten -> the update of each matrix, in the same shape."""


class _Matrix(NamedTuple):
    """A matrix of a layer, or of one expert."""

    tensor: str
    expert: int
    rows: int
    columns: int

    @property
    def cost(self) -> int:
        """What products with its Gram matrix take."""
        return self.rows * self.columns * min(self.rows, self.columns)


@dataclass(frozen=True)
class _Round:
    """The matrices that ranks compute at the same time."""

    matrices: tuple[_Matrix | None, ...]
    """The matrix of each rank; None: it has no more."""


class WholeMatrices:
    """Replaces the gradients of matrices by updates that depend on whole matrices.

    Args:
        group: the ranks that hold the parts; None for one. Making it is a collective.
    """

    def __init__(self, blocks: Mapping[Any, BlocksOf], group: ProcessGroup | None) -> None:
        self._blocks, self._group = blocks, group
        self._rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        held = {matrix: [box for box, _ in parts] for matrix, parts in self._parts(with_values=False).items()}
        self._held = [held]
        if group is not None:
            self._held = [{} for _ in range(num_ranks)]
            dist.all_gather_object(self._held, held, group=group)
        holders: dict[_Matrix, list[int]] = {}
        for rank, boxes in enumerate(self._held):
            for matrix in boxes:
                holders.setdefault(matrix, []).append(rank)
        self._alone = {
            matrix
            for matrix, ranks in holders.items()
            if all(whole_box((matrix.rows, matrix.columns)) in self._held[rank][matrix] for rank in ranks)
        }
        shared = [matrix for matrix in holders if matrix not in self._alone]
        loads, owned = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: ignore[var-annotated]
        for matrix in sorted(shared, key=lambda one: (-one.cost, one)):
            owner = min(holders[matrix], key=lambda rank: (loads[rank], rank))
            loads[owner] += matrix.cost
            owned[owner].append(matrix)
        self._rounds = [_Round(matrices) for matrices in zip_longest(*owned)]

    @torch.no_grad()
    def update(self, updates: Updates, scale: Callable[[int, int], float], dtype: torch.dtype) -> None:
        """Replace the gradient of each matrix by its update, sent and computed in `dtype`; a collective.

        The factor of an update is the `scale` of rows and columns of its matrix.
        """
        parts = self._parts(with_values=True)
        alone = sorted(self._alone & parts.keys(), key=lambda one: (one.rows, one.columns, one))
        for (rows, columns), equal in groupby(alone, key=lambda one: (one.rows, one.columns)):
            for batch in _batches(list(equal), BUCKET_BYTES // (rows * columns * dtype.itemsize)):
                views = [parts[matrix][0][1] for matrix in batch]
                results = updates(_stack(views, dtype))
                for index, view in enumerate(views):
                    view.copy_(results[index]).mul_(scale(rows, columns))
                del results  # before those of the next batch are made
        for turn in self._rounds:
            self._run(turn, parts, updates, scale, dtype)

    def _run(
        self,
        turn: _Round,
        parts: Mapping[_Matrix, list[tuple[Box, Tensor]]],
        updates: Updates,
        scale: Callable[[int, int], float],
        dtype: torch.dtype,
    ) -> None:
        mine, device = turn.matrices[self._rank], next(iter(self._blocks)).device

        def flat(size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        held = [parts.get(matrix, []) if matrix is not None else [] for matrix in turn.matrices]
        ranks = range(len(self._held))
        arrived = [flat(sum(map(numel, self._boxes(rank, mine)))) for rank in ranks]
        _exchange([_concatenate(views, dtype, device) for views in held], arrived, self._group)
        answers = [flat(0) for _ in self._held]
        if mine is not None:
            whole = updates(self._assembled(mine, arrived))[0]
            answers = [
                _concatenate(
                    [(box, whole[box_slices(box)]) for box in self._boxes(rank, mine)], dtype, device
                )
                for rank in ranks
            ]
            del whole
        results = [flat(sum(view.numel() for _, view in views)) for views in held]
        _exchange(answers, results, self._group)
        for matrix, views, values in zip(turn.matrices, held, results, strict=True):
            if matrix is not None:
                pieces = values.split([view.numel() for _, view in views])
                for (_, view), piece in zip(views, pieces, strict=True):
                    view.copy_(piece.view(view.shape)).mul_(scale(matrix.rows, matrix.columns))

    def _assembled(self, matrix: _Matrix, arrived: list[Tensor]) -> Tensor:
        """Return a matrix `[1, rows, columns]` of the parts that each rank has sent, which are dropped."""
        whole = arrived[0].new_empty(1, matrix.rows, matrix.columns)
        for rank, values in enumerate(arrived):
            boxes = self._boxes(rank, matrix)
            for box, part in zip(boxes, values.split([numel(box) for box in boxes]), strict=True):
                whole[0][box_slices(box)] = part.view(box_shape(box))
        arrived.clear()
        return whole

    def _boxes(self, rank: int, matrix: _Matrix | None) -> list[Box]:
        """Return the boxes of a matrix that a rank holds."""
        return [] if matrix is None else self._held[rank].get(matrix, [])

    def _parts(self, *, with_values: bool) -> dict[_Matrix, list[tuple[Box, Tensor]]]:
        """Return this rank's boxes of each matrix, with views of the gradients, or of the weights."""
        parts: dict[_Matrix, list[tuple[Box, Tensor]]] = {}
        for shard, blocks_of in self._blocks.items():
            values = shard.detach()
            if with_values:
                # A weight that nothing used has no gradient, and no update, but other ranks may wait for it.
                values = torch.zeros_like(values) if shard.grad is None else shard.grad
            for matrix, box, view in _split(blocks_of(values)):
                parts.setdefault(matrix, []).append((box, view))
        return parts


def _split(blocks: Iterable[Block]) -> Iterator[tuple[_Matrix, Box, Tensor]]:
    """Yield the parts of matrices that blocks consist of. Others of their tensors are left out."""
    for block in blocks:
        if not is_layer_matrix(block.tensor, len(block.shape)) or not numel(block.box):
            continue
        rows, columns = block.shape[-2:]
        if len(block.shape) == 2:
            yield _Matrix(block.tensor, 0, rows, columns), block.box, block.values
            continue
        (first, _), *box = block.box
        for expert, values in enumerate(block.values, first):
            yield _Matrix(block.tensor, expert, rows, columns), tuple(box), values


def _batches(matrices: Sequence[_Matrix], size: int) -> Iterator[Sequence[_Matrix]]:
    size = max(1, size)
    return (matrices[first : first + size] for first in range(0, len(matrices), size))


def _stack(views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    stacked = torch.empty(len(views), *views[0].shape, dtype=dtype, device=views[0].device)
    for row, view in zip(stacked, views, strict=True):
        row.copy_(view)
    return stacked


def _concatenate(parts: Sequence[tuple[Box, Tensor]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the entries of some parts, one after the other."""
    flat = torch.empty(sum(view.numel() for _, view in parts), dtype=dtype, device=device)
    for piece, (_, view) in zip(flat.split([view.numel() for _, view in parts]), parts, strict=True):
        piece.view(view.shape).copy_(view)
    return flat


def _exchange(sent: list[Tensor], received: list[Tensor], group: ProcessGroup | None) -> None:
    """Send a tensor to each rank, and receive one from each; empty ones are not sent."""
    if group is None:  # the rank has all parts of a matrix, but not in one piece
        received[0].copy_(sent[0])
        return
    if dist.get_backend(group) != "gloo":
        dist.all_to_all(received, sent, group=group)
        return
    num, rank = group.size(), group.rank()
    received[rank].copy_(sent[rank])
    works = []
    for step in range(1, num):
        to, source = (rank + step) % num, (rank - step) % num
        if sent[to].numel():
            works.append(dist.isend(sent[to], group=group, group_dst=to))
        if received[source].numel():
            works.append(dist.irecv(received[source], group=group, group_src=source))
    for work in works:
        assert work is not None, "only members of a group take part"
        work.wait()
