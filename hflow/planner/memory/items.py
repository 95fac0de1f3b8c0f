"""`Items`: named bytes of memory that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hflow.planner.forecast import MemoryCategory


class ItemKey(NamedTuple):
    """What the bytes of an item are."""

    name: str
    category: MemoryCategory


Items = Counter[ItemKey]
"""Bytes by name and category. The sum of two adds items of one name and drops those of 0 bytes."""


def item(category: MemoryCategory, num_bytes: int, name: str | None = None) -> Items:
    """Return a single item, or none if it has 0 bytes. Without a name it is called like its category."""
    return Items({ItemKey(name or category.value, category): num_bytes} if num_bytes else {})


def largest(moments: Iterable[Items]) -> Items:
    """Return the moment with the most bytes."""
    return max(moments, key=Items.total)
