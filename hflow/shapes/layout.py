"""`Layout`: the sizes of a replica's parallel axes, and the coordinates of each rank.

Ranks have one of two orders: training puts pipeline stages outermost, generation puts data shards outermost.
Tensor ranks are innermost in both, so that they share a machine, and context ranks are next to them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hflow.base.errors import PlanError, shorten

_PATTERN = re.compile(
    r"(?:d(\d{1,9}))?(?:t(\d{1,9}))?(?:p(\d{1,9}))?(?:c(\d{1,9}))?(?:e(\d{1,9}))?(?:r(\d{1,9}))?", re.ASCII
)

Coords = tuple[int, int, int, int]
"""Numbers of the data, tensor, pipeline and context axis, such as a rank's indices."""


class RankOrder(enum.StrEnum):
    """Order of a layout's axes in its ranks, outermost first."""

    TRAIN = "train"
    """[pipe, data, context, tensor]: `rank = ((p * D + d) * C + c) * T + t`."""
    GENERATE = "generate"
    """[data, pipe, context, tensor]: `rank = ((d * P + p) * C + c) * T + t`."""


@dataclass(frozen=True)
class Layout:
    """Sizes of one replica's axes: data (D), tensor (T), pipeline (P), context (C), expert (E), HSDP (R).

    Context ranks divide the tokens of each sequence. The expert axis has no ranks of its own: it divides the
    experts of a layer over E neighbours among the D * C ranks of a stage that have the same tensor index. Nor
    has the replicate axis: FSDP shards weights over D * C / R neighbours, and R sets of them hold the same
    (HSDP).

    `str(layout)` always names the first three axes (`d2t1p1`), and others where they are larger than 1, so
    that a layout has one spelling in plans and digests; `parse` accepts shorter ones.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    replicate: int = 1

    def __post_init__(self) -> None:
        if min(*self.sizes, self.expert, self.replicate) < 1:
            raise PlanError(f"layout {self} has an axis of size 0; sizes must be at least 1, as in d1t1p1")
        if self.data * self.context % self.expert:
            raise PlanError(
                f"layout {self} divides experts over {self.expert} of {self.data * self.context} data and "
                f"context ranks, which is not a whole number of times; e must divide d times c"
            )
        if self.replicate > 1 and (self.num_copies % self.replicate or self.fsdp_size < 2):
            raise PlanError(
                f"layout {self} has {self.replicate} sets of weights on {self.num_copies} data ranks; r must "
                "divide d and be less than d, as in d16r2"
            )
        if self.replicate > 1 and self.expert > 1:
            raise PlanError(f"layout {self} has both e and r, which no backend has; remove one of them")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse `d2t2p1`. Axes are in the order d, t, p, c, e, r; a missing one has size 1.

        Raises:
            PlanError: for text that is not a layout.
        """
        match = _PATTERN.fullmatch(text)
        if not text or match is None:
            raise PlanError(
                f"layout {shorten(text, 80)!r} is not understood; write data, tensor, pipeline, context, "
                "expert and replicate sizes in that order, as in d2t2p1, d4, d8t2e8 or d16r2"
            )
        return cls(*(int(size) if size is not None else 1 for size in match.groups()))

    def __str__(self) -> str:
        others = (("c", self.context), ("e", self.expert), ("r", self.replicate))
        named = "".join(f"{axis}{size}" for axis, size in others if size != 1)
        return f"d{self.data}t{self.tensor}p{self.pipe}{named}"

    @property
    def sizes(self) -> Coords:
        """Sizes of the axes that ranks have coordinates on."""
        return self.data, self.tensor, self.pipe, self.context

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pipe

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.num_copies * self.tensor

    @property
    def num_copies(self) -> int:
        """Number of ranks that compute with the same tensor shard of a stage, on different tokens.

        A sharded optimizer divides the state of weights over all of them.
        """
        return self.data * self.context

    @property
    def fsdp_size(self) -> int:
        """Number of neighbours among those ranks over which FSDP divides weights and their state."""
        return self.num_copies // self.replicate

    @property
    def num_shards(self) -> int:
        """Number of different parts of a model that the ranks of engines hold.

        Generation ranks with equal numbers modulo this hold the same part.
        """
        return self.expert * self.pipe * self.tensor

    @property
    def num_expert_copies(self) -> int:
        """Number of those ranks that compute with the same experts."""
        return self.num_copies // self.expert

    def __contains__(self, coords: Coords) -> bool:
        """Return whether coordinates exist in this layout."""
        return all(0 <= i < size for i, size in zip(coords, self.sizes, strict=True))

    def rank(self, order: RankOrder, d: int, t: int, p: int, c: int = 0) -> int:
        """Return the rank at data index `d`, tensor index `t`, stage `p`, context index `c`."""
        assert (d, t, p, c) in self, f"{(d, t, p, c)} is outside {self}"
        outer = p * self.data + d if order is RankOrder.TRAIN else d * self.pipe + p
        return (outer * self.context + c) * self.tensor + t

    def coords(self, order: RankOrder, rank: int) -> Coords:
        """Return the coordinates of a rank; the inverse of `rank`."""
        assert 0 <= rank < self.world, f"rank {rank} is outside {self}"
        outer, t = divmod(rank, self.tensor)
        outer, c = divmod(outer, self.context)
        if order is RankOrder.TRAIN:
            p, d = divmod(outer, self.data)
        else:
            d, p = divmod(outer, self.pipe)
        return d, t, p, c

    def stage_coords(self, stage: int) -> Iterator[Coords]:
        """Yield the coordinates of a stage's ranks, in the order of their ranks."""
        for index in range(self.stage_size):
            outer, t = divmod(index, self.tensor)
            d, c = divmod(outer, self.context)
            yield d, t, stage, c

    def copy_stride(self, order: RankOrder) -> int:
        """Return by how much ranks with neighbouring copy indices differ.

        Generation has no context axis.
        """
        return self.tensor if order is RankOrder.TRAIN else self.pipe * self.tensor

    def pipe_stride(self, order: RankOrder) -> int:
        """Return by how much ranks of neighbouring stages differ."""
        return self.stage_size if order is RankOrder.TRAIN else self.context * self.tensor

    def copy_index(self, d: int, c: int) -> int:
        """Return the index of a rank among those with the same tensor shard of a stage."""
        return d * self.context + c

    def fsdp_ranks(self, rank: int) -> range:
        """Return the ranks over which FSDP shards weights together with a rank, with data ranks alone."""
        first = rank - rank % self.fsdp_size
        return range(first, first + self.fsdp_size)

    def replicate_ranks(self, rank: int) -> range:
        """Return the ranks that hold the same shard of the weights as a rank, with data ranks alone."""
        return range(rank % self.fsdp_size, self.data, self.fsdp_size)

    def expert_index(self, d: int, c: int) -> int:
        """Return a rank's part of each layer's experts."""
        return self.copy_index(d, c) % self.expert

    def dp_head(self, order: RankOrder, d: int) -> int:
        """Return the dp-head of data index `d`: tensor rank 0 and context rank 0 of the last stage.

        It receives the shard's inputs and returns its outputs.
        """
        return self.rank(order, d, 0, self.pipe - 1)

    def dp_heads(self, order: RankOrder) -> tuple[int, ...]:
        """Return the dp-heads, by data index."""
        first, inner = self.dp_head(order, 0), self.context * self.tensor
        stride = inner if order is RankOrder.TRAIN else self.pipe * inner
        return tuple(range(first, first + self.data * stride, stride))


def even_blocks(num_items: int, num_blocks: int) -> list[range]:
    """Divide items into contiguous blocks whose sizes differ by at most one, the larger blocks first.

    `even_blocks(5, 2)` is `[range(0, 3), range(3, 5)]`.
    """
    size, remainder = divmod(num_items, num_blocks)
    blocks, start = [], 0
    for index in range(num_blocks):
        stop = start + size + (index < remainder)
        blocks.append(range(start, stop))
        start = stop
    return blocks


@lru_cache
def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return `[first, last)` layer of each stage: equal blocks, with the remainder on the first stages."""
    return tuple((block.start, block.stop) for block in even_blocks(num_layers, num_stages))
