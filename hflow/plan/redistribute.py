"""`redistribute`: which worker pulls which fields of which samples from whom.

A pure function of the plan's frozen rule and of where the data lies; the planner calls it on
sample lengths, the executor in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.plan.ir import ClusterSpec, EdgeRule

Holders = Mapping[str, Mapping[int, frozenset[int]]]
"""Field (`stream/field`) -> sample -> workers whose stores have it."""

Place = tuple[Mapping[int, frozenset[int]], list[str]]
"""Sample -> workers that have it, and the fields for which this is so."""

Shards = tuple[tuple[tuple[int, ...], ...], ...]
"""dp index -> minibatches -> sample ids, ascending. A node that does not train has one minibatch."""


@dataclass(frozen=True)
class Move:
    """Fields of samples that one worker pulls from another's store."""

    src: int
    dst: int
    samples: tuple[int, ...]
    fields: tuple[str, ...]
    """`stream/field` names."""


def redistribute(
    rule: EdgeRule, assignment: Shards, holders: Holders, cluster: ClusterSpec
) -> tuple[Move, ...]:
    """Plan the moves after which every dp-head holds what its rank reads.

    What a head holds already does not move, and nothing moves twice. A source is a holder on the
    head's machine first, the one that sends least next. Fields with the same ends and samples
    share one move.

    Args:
        rule: fields and heads of the consumer.
        assignment: the samples of each dp rank.
        holders: where the fields lie now; every sample of the assignment has a holder.
        cluster: says which workers share a machine.
    """
    sent: dict[int, int] = defaultdict(int)
    parcels: dict[tuple[int, int], dict[int, list[str]]] = {}
    places = by_place(rule.fields, holders)
    for dst, sample in _wanted(rule, assignment):
        for sources, fields in _missing(places, sample, dst):
            src = min(sources, key=lambda w: (cluster.node_of(w) != cluster.node_of(dst), sent[w], w))
            sent[src] += len(fields)
            parcels.setdefault((src, dst), {}).setdefault(sample, []).extend(fields)
    return tuple(move for ends, parcel in sorted(parcels.items()) for move in _merge(*ends, parcel))


def _wanted(rule: EdgeRule, assignment: Shards) -> list[tuple[int, int]]:
    """The (worker, sample) pairs of an assignment, once each: ranks may share a worker."""
    pairs = zip(rule.heads, assignment, strict=True)
    return sorted({(head, s) for head, minibatches in pairs for samples in minibatches for s in samples})


def by_place(fields: Iterable[str], holders: Holders) -> list[Place]:
    """Fields that share one mapping, together: most lie where their samples were made."""
    places: dict[int, Place] = {}
    for field in fields:
        at = holders[field]
        places.setdefault(id(at), (at, []))[1].append(field)
    return list(places.values())


def _missing(places: Iterable[Place], sample: int, dst: int) -> list[tuple[frozenset[int], list[str]]]:
    """Fields of a sample that a worker lacks, those with the same holders together."""
    by_sources: dict[frozenset[int], list[str]] = {}
    for at, fields in places:
        sources = at.get(sample, frozenset())
        assert sources, f"no worker holds {', '.join(fields)} of sample {sample}"
        if dst not in sources:
            by_sources.setdefault(sources, []).extend(fields)
    return list(by_sources.items())


def _merge(src: int, dst: int, parcel: Mapping[int, list[str]]) -> list[Move]:
    """One move for all samples that travel with the same fields."""
    by_fields: dict[tuple[str, ...], list[int]] = {}
    for sample, fields in sorted(parcel.items()):
        by_fields.setdefault(tuple(sorted(fields)), []).append(sample)
    return [Move(src, dst, tuple(samples), fields) for fields, samples in sorted(by_fields.items())]
