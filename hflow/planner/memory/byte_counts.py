"""`Items`: named bytes that add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Items = Counter[str]
"""Name -> bytes. The sum of two adds items of one name and drops those that are 0."""


def largest(moments: Iterable[Items]) -> Items:
    """The moment with the most bytes."""
    return max(moments, key=Items.total)
