"""`redistribute`: which worker pulls which fields of which samples from whom.

A pure function of the plan's frozen rule and of where the data lies; the planner calls it on
sample lengths, the executor in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.planner.ir import ClusterSpec, EdgeRule

Holders = Mapping[str, Mapping[int, frozenset[int]]]
"""Field (`stream/field`) -> sample -> workers whose stores have it."""

Place = tuple[Mapping[int, frozenset[int]], list[str]]
"""Sample -> workers that have it, and the fields for which this is so."""

_Part = tuple[frozenset[int], tuple[str, ...]]
"""Workers that have some fields, sorted, of a sample."""
_NOWHERE: frozenset[int] = frozenset()

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
    parcels: dict[tuple[int, int, tuple[str, ...]], list[int]] = defaultdict(list)
    places = by_place(rule.fields, holders)
    stores = [at for at, _ in places]
    for dst, samples in _wanted(rule, assignment):
        # What lies alike is missing alike, and there are far fewer kinds than samples.
        kinds: dict[tuple[frozenset[int], ...], list[_Part]] = {}
        for sample in samples:
            kind = tuple([at.get(sample, _NOWHERE) for at in stores])
            missing = kinds.get(kind)
            if missing is None:
                missing = kinds[kind] = _missing(places, sample, dst)
            if len(missing) == 1 and len(missing[0][0]) == 1:  # as for nearly all
                ((src,), fields) = missing[0]
                sent[src] += len(fields)
                parcels[src, dst, fields].append(sample)
                continue
            for src, fields in _sources(missing, dst, sent, cluster):
                parcels[src, dst, fields].append(sample)
    return tuple(
        Move(src, dst, tuple(samples), fields) for (src, dst, fields), samples in sorted(parcels.items())
    )


def _wanted(rule: EdgeRule, assignment: Shards) -> list[tuple[int, list[int]]]:
    """Worker -> the samples that an assignment gives it, ascending: ranks may share a worker."""
    found: dict[int, set[int]] = defaultdict(set)
    for head, minibatches in zip(rule.heads, assignment, strict=True):
        found[head].update(*minibatches)
    return [(head, sorted(samples)) for head, samples in sorted(found.items())]


def _sources(
    missing: list[_Part], dst: int, sent: dict[int, int], cluster: ClusterSpec
) -> list[tuple[int, tuple[str, ...]]]:
    """Who sends which of a sample's missing fields; what they send is added up in `sent`."""
    pulled: dict[int, tuple[str, ...]] = {}
    for sources, fields in missing:
        if len(sources) == 1:
            (src,) = sources
        else:
            src = min(sources, key=lambda w: (cluster.node_of(w) != cluster.node_of(dst), sent[w], w))
        sent[src] += len(fields)
        pulled[src] = tuple(sorted((*pulled[src], *fields))) if src in pulled else fields
    return list(pulled.items())


def by_place(fields: Iterable[str], holders: Holders) -> list[Place]:
    """Fields that share one mapping, together: most lie where their samples were made."""
    places: dict[int, Place] = {}
    for field in fields:
        at = holders[field]
        places.setdefault(id(at), (at, []))[1].append(field)
    return list(places.values())


def _missing(places: Iterable[Place], sample: int, dst: int) -> list[_Part]:
    """Fields of a sample that a worker lacks, sorted, those with the same holders together."""
    by_sources: dict[frozenset[int], list[str]] = {}
    for at, fields in places:
        sources = at.get(sample, _NOWHERE)
        assert sources, f"no worker holds {', '.join(fields)} of sample {sample}"
        if dst not in sources:
            by_sources.setdefault(sources, []).extend(fields)
    return [(sources, tuple(sorted(fields))) for sources, fields in by_sources.items()]
