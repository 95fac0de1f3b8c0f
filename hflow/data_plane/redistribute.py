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
    num_workers, per_machine = cluster.num_devices, cluster.devices_per_node
    order = list(range(num_workers))
    """Worker -> what it sends times `num_workers`, plus its number. The least is the one to pull from."""
    samples_of: dict[tuple[int, int, tuple[str, ...]], list[int]] = defaultdict(list)
    field_groups = group_by_holders(rule.fields, holders)
    numbered = [(number, workers) for number, (workers, _) in enumerate(field_groups)]
    fields_of = _JoinedFields(fields for _, fields in field_groups)
    for dst, samples in _samples_by_head(rule, assignment):
        first = dst - dst % per_machine
        on_machine = frozenset(range(first, first + per_machine))
        for sample in samples:
            missing: dict[frozenset[int], tuple[int, ...]] = {}
            """Workers that have some of the field groups that `dst` lacks -> numbers of these groups."""
            for number, workers in numbered:
                sources = workers.get(sample, _NO_WORKERS)
                if dst not in sources:
                    missing[sources] = (*missing.get(sources, ()), number)
            pulled: dict[int, tuple[int, ...]] = {}
            for sources, numbers in missing.items():
                assert sources, f"no worker holds {', '.join(fields_of[numbers])} of sample {sample}"
                if len(sources) == 1:
                    (src,) = sources
                else:
                    src = min(sources & on_machine or sources, key=order.__getitem__)
                order[src] += num_workers * len(fields_of[numbers])
                pulled[src] = (*pulled.get(src, ()), *numbers)
            for src, numbers in pulled.items():
                samples_of[src, dst, fields_of[numbers]].append(sample)
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


class _JoinedFields(dict[tuple[int, ...], tuple[str, ...]]):
    """Numbers of field groups -> all their fields, sorted."""

    def __init__(self, groups: Iterable[list[str]]) -> None:
        super().__init__()
        self._groups = tuple(groups)

    def __missing__(self, numbers: tuple[int, ...]) -> tuple[str, ...]:
        fields = tuple(sorted(field for number in numbers for field in self._groups[number]))
        self[numbers] = fields
        return fields
