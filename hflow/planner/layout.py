"""`Layout`: the sizes of a replica's parallel axes, and the coordinates of each rank.

Ranks have one of two orders: training puts pipeline stages outermost, generation puts data shards outermost.
Tensor ranks are innermost in both, so that they share a machine.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from hflow.errors import PlanError

_PATTERN = re.compile(r"(?:d(\d+))?(?:t(\d+))?(?:p(\d+))?")


class RankOrder(enum.StrEnum):
    """Order of a layout's axes in its ranks, outermost first."""

    TRAIN = "train"
    """[pipe, data, tensor]: `rank = p * (D * T) + d * T + t`."""
    GENERATE = "generate"
    """[data, pipe, tensor]: `rank = d * (P * T) + p * T + t`."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the data (D), tensor (T) and pipeline (P) axes of one replica.

    `str(layout)` always names all three axes (`d2t1p1`), so that a layout has one spelling in plans and
    digests; `parse` accepts shorter ones.
    """

    data: int = 1
    tensor: int = 1
    pipe: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipe) < 1:
            raise PlanError(f"layout {self} has an axis of size 0; sizes must be at least 1, as in d1t1p1")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse `d2t2p1`. Axes are in the order d, t, p; a missing one has size 1.

        Raises:
            PlanError: for text that is not a layout.
        """
        match = _PATTERN.fullmatch(text)
        if not text or match is None:
            raise PlanError(
                f"layout {text!r} is not understood; write data, tensor and pipeline sizes "
                "in that order, as in d2t2p1 or d4"
            )
        return cls(*(int(size) if size is not None else 1 for size in match.groups()))

    def __str__(self) -> str:
        return f"d{self.data}t{self.tensor}p{self.pipe}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipe

    def __contains__(self, coords: tuple[int, int, int]) -> bool:
        """Return whether (data, tensor, pipe) coordinates exist in this layout."""
        sizes = (self.data, self.tensor, self.pipe)
        return all(0 <= i < size for i, size in zip(coords, sizes, strict=True))

    def rank(self, order: RankOrder, d: int, t: int, p: int) -> int:
        """Return the rank at data index `d`, tensor index `t`, stage `p`."""
        assert (d, t, p) in self, f"({d}, {t}, {p}) is outside {self}"
        if order is RankOrder.TRAIN:
            return p * (self.data * self.tensor) + d * self.tensor + t
        return d * (self.pipe * self.tensor) + p * self.tensor + t

    def coords(self, order: RankOrder, rank: int) -> tuple[int, int, int]:
        """Return the (data, tensor, pipe) coordinates of a rank; the inverse of `rank`."""
        assert 0 <= rank < self.world, f"rank {rank} is outside {self}"
        outer, t = divmod(rank, self.tensor)
        if order is RankOrder.TRAIN:
            p, d = divmod(outer, self.data)
        else:
            d, p = divmod(outer, self.pipe)
        return d, t, p

    def head(self, order: RankOrder, d: int) -> int:
        """Return the dp-head of data index `d`: tensor rank 0 of the last stage.

        It receives the shard's inputs and returns its outputs.
        """
        return self.rank(order, d, 0, self.pipe - 1)

    def heads(self, order: RankOrder) -> tuple[int, ...]:
        """Return the dp-heads, by data index."""
        return tuple(self.head(order, d) for d in range(self.data))


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
