"""Samples on their way between the stores of workers: one packed batch per stream, with bare field names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hflow.data.batch import Batch
from hflow.planner.data.redistribute import Move
from hflow.workers.storage.sample_store import SampleStore

PackedSamples = Mapping[str, Batch]
"""Stream -> the moved fields of its samples."""
SampleRequest = tuple[tuple[int, ...], tuple[str, ...]]
"""Samples, and the `stream/field` names that are wanted of them."""


def pack(store: SampleStore, samples: Sequence[int], fields: Iterable[str]) -> PackedSamples:
    """Pack `stream/field` names of samples, stream by stream."""
    by_stream: dict[str, list[str]] = {}
    for name in fields:
        by_stream.setdefault(name.partition("/")[0], []).append(name)
    return {stream: store.gather(stream, names, samples) for stream, names in by_stream.items()}


def unpack(store: SampleStore, packed: PackedSamples) -> int:
    """Put packed samples into a store and return their bytes."""
    for stream, batch in packed.items():
        store.put(stream, batch)
    return sum(batch.nbytes for batch in packed.values())


def pulls_of(moves: Iterable[Move]) -> dict[int, dict[int, list[SampleRequest]]]:
    """Return destination -> source -> requests, so that each pair of workers exchanges one message."""
    pulls: dict[int, dict[int, list[SampleRequest]]] = {}
    for move in moves:
        requests = pulls.setdefault(move.dst, {}).setdefault(move.src, [])
        requests.append((move.samples, move.fields))
    return pulls
