"""`redistribute`: which worker pulls which fields of which samples from which other worker.

It is a pure function of the plan's rule and of where the data is. The planner calls it with sampled lengths,
the executor in every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import EdgeRule

Holders = Mapping[str, Mapping[int, frozenset[int]]]
"""Field (`stream/field`) -> sample -> workers whose stores have it."""

FieldsByHolders = tuple[Mapping[int, frozenset[int]], list[str]]
"""A mapping of samples to the workers that have them, and the fields for which it holds."""

Shards = tuple[tuple[tuple[int, ...], ...], ...]
"""dp index -> minibatches -> sample ids, ascending. A node that does not train has one minibatch."""

_MissingFields = tuple[frozenset[int], tuple[str, ...]]
"""Workers that have some fields of a sample, and these fields, sorted."""

_NO_WORKERS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Move:
    """Fields of samples that one worker pulls from another worker's store."""

    src: int
    dst: int
    samples: tuple[int, ...]
    fields: tuple[str, ...]
    """`stream/field` names."""


def redistribute(
    rule: EdgeRule, assignment: Shards, holders: Holders, cluster: ClusterSpec
) -> tuple[Move, ...]:
    """Plan the moves after which every dp-head holds what its rank reads.

    Data that a dp-head already holds does not move, and nothing moves twice. The source of a move is a
    holder on the dp-head's machine if there is one, and among these the one that sends least so far. Fields
    with the same source, destination and samples share one move.

    Args:
        rule: fields and dp-heads of the consumer.
        assignment: the samples of each dp rank.
        holders: the workers that have the fields now; every sample of the assignment has a holder.
        cluster: says which workers share a machine.
    """
    num_sent: dict[int, int] = defaultdict(int)
    samples_of: dict[tuple[int, int, tuple[str, ...]], list[int]] = defaultdict(list)
    field_groups = group_by_holders(rule.fields, holders)
    holders_of = [workers for workers, _ in field_groups]
    for dst, samples in _samples_by_head(rule, assignment):
        # Samples with equal holders miss the same fields, and there are far fewer kinds than samples.
        missing_by_kind: dict[tuple[frozenset[int], ...], list[_MissingFields]] = {}
        for sample in samples:
            kind = tuple([workers.get(sample, _NO_WORKERS) for workers in holders_of])
            missing = missing_by_kind.get(kind)
            if missing is None:
                missing = missing_by_kind[kind] = _missing_fields(field_groups, sample, dst)
            if len(missing) == 1 and len(missing[0][0]) == 1:  # the fast path of nearly all samples
                ((src,), fields) = missing[0]
                num_sent[src] += len(fields)
                samples_of[src, dst, fields].append(sample)
                continue
            for src, fields in _choose_sources(missing, dst, num_sent, cluster):
                samples_of[src, dst, fields].append(sample)
    return tuple(
        Move(src, dst, tuple(samples), fields) for (src, dst, fields), samples in sorted(samples_of.items())
    )


def group_by_holders(fields: Iterable[str], holders: Holders) -> list[FieldsByHolders]:
    """Group fields that share one mapping of holders: most fields are where their samples were made."""
    groups: dict[int, FieldsByHolders] = {}
    for field in fields:
        workers = holders[field]
        groups.setdefault(id(workers), (workers, []))[1].append(field)
    return list(groups.values())


def _samples_by_head(rule: EdgeRule, assignment: Shards) -> list[tuple[int, list[int]]]:
    """Return each dp-head with the samples assigned to it, ascending. Several ranks may share a dp-head."""
    samples_of: dict[int, set[int]] = defaultdict(set)
    for dp_head, minibatches in zip(rule.heads, assignment, strict=True):
        samples_of[dp_head].update(*minibatches)
    return [(dp_head, sorted(samples)) for dp_head, samples in sorted(samples_of.items())]


def _choose_sources(
    missing: list[_MissingFields], dst: int, num_sent: dict[int, int], cluster: ClusterSpec
) -> list[tuple[int, tuple[str, ...]]]:
    """Return the sender of each of a sample's missing fields, and add these to `num_sent`."""
    pulled: dict[int, tuple[str, ...]] = {}
    for sources, fields in missing:
        if len(sources) == 1:
            (src,) = sources
        else:
            src = min(sources, key=lambda w: (cluster.node_of(w) != cluster.node_of(dst), num_sent[w], w))
        num_sent[src] += len(fields)
        pulled[src] = tuple(sorted((*pulled[src], *fields))) if src in pulled else fields
    return list(pulled.items())


def _missing_fields(groups: Iterable[FieldsByHolders], sample: int, dst: int) -> list[_MissingFields]:
    """Return the fields of a sample that a worker lacks, grouped by the workers that have them."""
    by_sources: dict[frozenset[int], list[str]] = {}
    for workers, fields in groups:
        sources = workers.get(sample, _NO_WORKERS)
        assert sources, f"no worker holds {', '.join(fields)} of sample {sample}"
        if dst not in sources:
            by_sources.setdefault(sources, []).extend(fields)
    return [(sources, tuple(sorted(fields))) for sources, fields in by_sources.items()]
