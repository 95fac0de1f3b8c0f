"""`Items`: named bytes of memory that add up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from hflow.planner.forecast import MemoryCategory


class ItemKey(NamedTuple):
    """What the bytes of an item are."""

    name: str
    category: MemoryCategory


class Items(dict[ItemKey, int]):
    """Bytes by name and category. The sum of two adds items of one name.

    A search adds many of them, for which `Counter` takes twice as long.
    """

    __slots__ = ()

    def __missing__(self, key: ItemKey) -> int:
        return 0

    def __add__(self, other: Items) -> Items:
        return Items(self).__iadd__(other)

    def __iadd__(self, other: Items) -> Self:
        for key, num_bytes in other.items():
            if num_bytes:
                self[key] = self.get(key, 0) + num_bytes
        return self

    def total(self) -> int:
        """Return the bytes of all items."""
        return sum(self.values())


def item(category: MemoryCategory, num_bytes: int, name: str | None = None) -> Items:
    """Return a single item, or none if it has 0 bytes. Without a name it is called like its category."""
    return Items({ItemKey(name or category.value, category): num_bytes} if num_bytes else {})


def largest(moments: Iterable[Items]) -> Items:
    """Return the moment with the most bytes."""
    return max(moments, key=Items.total)
