"""What one step's redistribution moves, by the functions that the run itself calls.

A batch of sampled lengths goes through `shards` and `redistribute` node by node; who holds what is
kept as the run keeps it. Bytes are those of the fields' values, as the run counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hflow.graph.ir import Graph
from hflow.plan.cut import shards
from hflow.plan.field_sizes import field_size
from hflow.plan.forecast import EdgeTraffic, StepTraffic
from hflow.plan.homes import root_name, sample_homes
from hflow.plan.ir import ClusterSpec, EdgeRule, Level, Plan
from hflow.plan.order import topological_order
from hflow.plan.redistribute import Holders, Move, Shards, redistribute
from hflow.plan.request import PlanRequest
from hflow.plan.traffic import CollectiveStep, FieldBytes, collective_steps, lower_bound_bytes, moved_bytes
from hflow.plan.workload import Workload, sample_lengths

NUM_STEPS = 16
"""Collective steps of an edge that are kept, the largest."""


def preview_traffic(plan: Plan, request: PlanRequest, workload: Workload) -> tuple[EdgeTraffic, ...]:
    """The bytes that the inputs of every node with a rule on the trained stream move, in the order of firing.

    Every node fires, whatever its `every` and `after`, and no sample is refused.

    Args:
        plan: its rules, cuts and placements.
        request: the run's seed, and bounds of the engines.
        workload: lengths of the trained stream's samples.
    """
    stream = plan.schedule.streams[0]
    size, batch = stream.group_size, request.batch
    lengths = sample_lengths(workload, batch * size, request.seed)
    homes = sample_homes(plan, request, stream, [length - workload.prompt for length in lengths])
    held = _Held(homes)
    sizes = _Sizes(plan.graph, workload.prompt, lengths)
    tokens = dict(enumerate(lengths))
    groups = {g: range(g * size, (g + 1) * size) for g in range(batch)}
    cuts = dict(plan.cuts)
    arriving = {node.name for node in plan.schedule.nodes if node.level is not Level.BATCH}
    edges = []
    for rule in _rules(plan, stream.name):
        holders = held.of(rule.fields)
        cut = cuts.get(rule.consumer)
        assignment = shards(rule, cut, groups, tokens, holders, seed=request.seed, step=0)
        moves = redistribute(rule, assignment, holders, plan.cluster)
        edges.append(_traffic(rule, assignment, moves, tokens, sizes.of(rule.fields), holders, plan.cluster))
        held.moved(moves)
        held.made(_outputs(plan.graph, rule.consumer), rule.heads, assignment)
        if rule.consumer in arriving:
            held.came_home(_outputs(plan.graph, rule.consumer))
    return tuple(edges)


def _rules(plan: Plan, stream: str) -> list[EdgeRule]:
    """Rules of the nodes that read data of one stream's samples, in the order of firing."""
    rules = {rule.consumer: rule for rule in plan.rules if rule.fields}
    order = [rules[name] for name in topological_order(plan.graph) if name in rules]
    return [rule for rule in order if root_name(plan.graph, rule.stream) == stream]


def _outputs(graph: Graph, name: str) -> list[str]:
    node = graph.node(name)
    return [f"{node.stream}/{returned.field}" for returned in node.spec.returns]


class _Held:
    """Who holds which fields of a batch. What the source and its samples' bodies made is at home."""

    def __init__(self, homes: Sequence[int]) -> None:
        alone = {worker: frozenset((worker,)) for worker in set(homes)}
        self._home = {sample: alone[worker] for sample, worker in enumerate(homes)}
        self._at: dict[str, dict[int, frozenset[int]]] = {}

    def of(self, fields: Iterable[str]) -> Holders:
        """Field -> sample -> workers."""
        return {name: self._at.get(name, self._home) for name in fields}

    def moved(self, moves: Iterable[Move]) -> None:
        """Workers pulled fields; the sources keep their copies."""
        joined: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        for move in moves:
            for name in move.fields:
                if name not in self._at:
                    self._at[name] = dict(self._home)
                at = self._at[name]
                for sample in move.samples:
                    key = at[sample], move.dst
                    if key not in joined:
                        joined[key] = at[sample] | {move.dst}
                    at[sample] = joined[key]

    def made(self, fields: Iterable[str], heads: Sequence[int], assignment: Shards) -> None:
        """A batch node left fields of its ranks' samples on their heads."""
        made: dict[int, frozenset[int]] = {}
        for head, minibatches in zip(heads, assignment, strict=True):
            alone = frozenset((head,))
            made.update((sample, alone) for samples in minibatches for sample in samples)
        self._at.update((name, dict(made)) for name in fields)

    def came_home(self, fields: Iterable[str]) -> None:
        """Fields were brought to where their samples are, too."""
        for name in fields:
            self._at[name] = {sample: at | self._home[sample] for sample, at in self._at[name].items()}


class _Sizes:
    """Bytes of each field of each sample."""

    def __init__(self, graph: Graph, prompt: int, lengths: Sequence[int]) -> None:
        self._graph = graph
        self._prompt = prompt
        self._lengths = lengths
        self._known: dict[str, Mapping[int, int]] = {}

    def of(self, fields: Iterable[str]) -> FieldBytes:
        """Field -> sample -> bytes."""
        return {name: self._known.get(name) or self._measure(name) for name in fields}

    def _measure(self, name: str) -> Mapping[int, int]:
        size = field_size(self._graph, name)
        lengths = enumerate(self._lengths)
        self._known[name] = {s: size.of(self._prompt, length - self._prompt) for s, length in lengths}
        return self._known[name]


def _traffic(
    rule: EdgeRule,
    assignment: Shards,
    moves: Sequence[Move],
    tokens: Mapping[int, int],
    nbytes: FieldBytes,
    holders: Holders,
    cluster: ClusterSpec,
) -> EdgeTraffic:
    moved = moved_bytes(moves, nbytes)
    loads = [[sum(tokens[s] for s in samples) for samples in minibatches] for minibatches in assignment]
    heaviest = max(sum(rank) for rank in loads)
    steps = [_step(step, nbytes) for step in collective_steps(moves)]
    crossing = [m for m in moves if cluster.node_of(m.src) != cluster.node_of(m.dst)]
    return EdgeTraffic(
        consumer=rule.consumer,
        num_bytes=moved,
        lower_bound=lower_bound_bytes(rule, tokens, nbytes, holders, heaviest),
        local_bytes=_read_bytes(rule, assignment, nbytes) - moved,
        imbalance=sum(map(max, zip(*loads, strict=True))) * len(loads) / sum(tokens.values()),
        steps=tuple(sorted(steps, key=lambda step: -step.num_bytes)[:NUM_STEPS]),
        num_steps=len(steps),
        num_node_bytes=moved_bytes(crossing, nbytes),
        busiest_bytes=_busiest(moves, nbytes),
    )


def _read_bytes(rule: EdgeRule, assignment: Shards, nbytes: FieldBytes) -> int:
    """Bytes that the heads read; ranks that share a worker read one copy."""
    read = {
        (head, sample)
        for head, minibatches in zip(rule.heads, assignment, strict=True)
        for samples in minibatches
        for sample in samples
    }
    return sum(sizes[sample] for sizes in nbytes.values() for _, sample in read)


def _step(step: CollectiveStep, nbytes: FieldBytes) -> StepTraffic:
    return StepTraffic(
        kind=step.kind,
        root=step.root,
        sources=step.sources,
        destinations=step.destinations,
        num_samples=len(step.samples),
        fields=step.fields,
        num_bytes=moved_bytes(step.moves, nbytes),
    )


def _busiest(moves: Iterable[Move], nbytes: FieldBytes) -> int:
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for move in moves:
        size = moved_bytes([move], nbytes)
        sent[move.src] += size
        received[move.dst] += size
    return max((*sent.values(), *received.values()), default=0)
