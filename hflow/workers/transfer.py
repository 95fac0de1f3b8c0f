"""What travels between stores: one packed batch a stream, with bare field names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hflow.data.batch import Batch
from hflow.workers.base import Move
from hflow.workers.store import Store

Parcel = Mapping[str, Batch]
"""stream -> the moved fields of its samples."""


def pack(store: Store, samples: Sequence[int], fields: Iterable[str]) -> dict[str, Batch]:
    """Pack `stream/field` names of samples, stream by stream."""
    by_stream: dict[str, list[str]] = {}
    for name in fields:
        by_stream.setdefault(name.partition("/")[0], []).append(name)
    return {stream: store.gather(stream, names, samples) for stream, names in by_stream.items()}


def unpack(store: Store, parcel: Parcel) -> int:
    """Put a parcel's fields into a store; returns its bytes."""
    for stream, batch in parcel.items():
        store.put(stream, batch)
    return sum(batch.nbytes for batch in parcel.values())


Wanted = list[tuple[tuple[int, ...], tuple[str, ...]]]
"""(samples, fields) of each parcel."""


def by_ends(moves: Iterable[Move]) -> dict[int, dict[int, Wanted]]:
    """Destination -> source -> what it pulls from there: one message to each of them."""
    pairs: dict[int, dict[int, Wanted]] = {}
    for move in moves:
        pairs.setdefault(move.dst, {}).setdefault(move.src, []).append((move.samples, move.fields))
    return pairs
