"""What one step's redistribution moves, by the functions that the run itself calls.

A batch of sampled lengths goes through `shards` and `redistribute` node by node; who holds what is
kept as the run keeps it. Bytes are those of the fields' values, as the run counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hflow.graph.ir import Graph
from hflow.planner.data.dispatch_model import root_name, sample_homes
from hflow.planner.data.field_sizes import field_size
from hflow.planner.data.minibatches import shards
from hflow.planner.data.redistribute import Holders, Move, Shards, redistribute
from hflow.planner.forecast import EdgeTraffic, StepTraffic
from hflow.planner.ir import ClusterSpec, EdgeRule, Level, Plan
from hflow.planner.node_order import topological_order
from hflow.planner.request import PlanRequest
from hflow.planner.workload import Workload, sample_lengths

# -------------------- Bytes of a redistribution beside their lower bound, and its moves as collective
# steps.


FieldBytes = Mapping[str, Mapping[int, int]]
"""Field (`stream/field`) -> sample -> bytes."""


def moved_bytes(moves: Iterable[Move], nbytes: FieldBytes) -> int:
    """Bytes that moves carry."""
    return sum(nbytes[field][s] for move in moves for field in move.fields for s in move.samples)


def lower_bound_bytes(
    rule: EdgeRule, tokens: Mapping[int, int], nbytes: FieldBytes, holders: Holders, capacity: int
) -> int:
    """Bytes that any assignment must move whose ranks take at most `capacity` tokens each.

    A byte stays only where its sample is assigned to a holder. So what stays is at most (a) every
    sample at its best rank, and (b) for each rank the best choice of held samples that fits into
    its capacity, relaxed to a fractional knapsack (Dantzig, 1957). The bound takes the smaller.

    Args:
        rule: fields and heads of the consumer.
        tokens: tokens of each sample to assign.
        nbytes: bytes of each field of each sample.
        holders: where the fields lie before.
        capacity: tokens of the heaviest rank, 0 or more.
    """
    total = sum(nbytes[field][sample] for field in rule.fields for sample in tokens)
    held = _held(rule, tokens, nbytes, holders)
    best: dict[int, int] = defaultdict(int)
    for of_worker in held.values():
        for sample, size in of_worker.items():
            best[sample] = max(best[sample], size)
    best_fill = sum(_knapsack(held[head], tokens, capacity) for head in rule.heads)
    return total - min(sum(best.values()), best_fill)


def _held(
    rule: EdgeRule, samples: Iterable[int], nbytes: FieldBytes, holders: Holders
) -> dict[int, dict[int, int]]:
    """Head -> sample -> bytes of its fields that the head's worker holds, where there are any."""
    held: dict[int, dict[int, int]] = {head: defaultdict(int) for head in rule.heads}
    places = [(nbytes[field], holders[field]) for field in rule.fields]
    for sample in samples:
        for sizes, at in places:
            for worker in at.get(sample, ()):
                if worker in held:
                    held[worker][sample] += sizes[sample]
    return held


def _knapsack(value: Mapping[int, int], weight: Mapping[int, int], capacity: int) -> int:
    """The value of the best fractional choice within the capacity, rounded down."""
    free = sum(value[s] for s in value if weight[s] == 0)
    worth = sorted((s for s in value if value[s] and weight[s]), key=lambda s: -value[s] / weight[s])
    kept, room = free, capacity
    for s in worth:
        if weight[s] > room:
            return kept + value[s] * room // weight[s]
        kept, room = kept + value[s], room - weight[s]
    return kept


@dataclass(frozen=True)
class CollectiveStep:
    """Moves that together are one collective, for people to read.

    `bcast`: one source sends the same to several; `scatter`: one source sends different samples
    to several; `gather`: one destination receives from all its sources.
    """

    kind: Literal["bcast", "scatter", "gather"]
    root: int
    moves: tuple[Move, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Workers that send."""
        return tuple(sorted({move.src for move in self.moves}))

    @property
    def destinations(self) -> tuple[int, ...]:
        """Workers that receive."""
        return tuple(sorted({move.dst for move in self.moves}))

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples that move."""
        return tuple(sorted({sample for move in self.moves for sample in move.samples}))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that move."""
        return tuple(sorted({field for move in self.moves for field in move.fields}))


def collective_steps(moves: Sequence[Move]) -> tuple[CollectiveStep, ...]:
    """Classify moves as broadcasts, scatters and gathers; every move is in exactly one step."""
    steps, rest = [], []
    for same in _by(moves, lambda move: (move.src, move.samples, move.fields)):
        if len(same) > 1:
            steps.append(CollectiveStep("bcast", same[0].src, same))
        else:
            rest.append(same[0])
    single: list[Move] = []
    for same in _by(rest, lambda move: move.src):
        if len({move.dst for move in same}) > 1:
            steps.append(CollectiveStep("scatter", same[0].src, same))
        else:
            single.extend(same)
    steps += [CollectiveStep("gather", same[0].dst, same) for same in _by(single, lambda move: move.dst)]
    return tuple(steps)


def _by(moves: Iterable[Move], key: Callable[[Move], Hashable]) -> list[tuple[Move, ...]]:
    """Moves with the same key together, in the order of their first."""
    together: dict[Hashable, list[Move]] = defaultdict(list)
    for move in moves:
        together[key(move)].append(move)
    return [tuple(same) for same in together.values()]


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
