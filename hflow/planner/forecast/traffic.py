"""The estimate of the bytes that redistribution moves in one step.

A batch with sampled lengths goes through the code of the run itself: `GroupPlacer` chooses the worker of each
group, `shards` and `redistribute` plan the moves of each node's inputs, and `DataLocations` records the
workers that hold each sample. Only the engines are simulated.

The estimate costs a little time for every sample. On thousands of machines it would take longer than all
other planning, though all machines are alike. So on a large cluster one machine in several, with its
part of the batch, represents all (`thinned`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hflow.config.schema import WorkloadImages
from hflow.data_plane.group_placement import GroupPlacer, stream_dp_heads
from hflow.data_plane.locations import DataLocations
from hflow.data_plane.minibatches import shards
from hflow.data_plane.redistribute import Holders, Move, Shards, redistribute
from hflow.graph.ir import TRAJECTORY_FIELDS, Graph, Level
from hflow.graph.queries import topological_order
from hflow.planner.plan.forecast import EdgeTraffic, StepTraffic
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import SAVE_PREFIX, EdgeRule, Plan, ScheduledStream
from hflow.planner.plan.workload import PromptImages, Workload, image_sizes, sample_lengths
from hflow.shapes.model_shape import ModelShape
from hflow.types import Unit
from hflow.types.recorded import RecordedKind, requestable_kinds
from hflow.types.trajectory import PIXELS

MAX_LISTED_STEPS = 16
"""How many collective steps of an edge a plan lists, the largest first."""

FieldBytes = Mapping[str, Mapping[int, int]]
"""Field (`stream/field`) -> sample -> bytes."""


def estimate_traffic(plan: Plan, request: PlanRequest, workload: Workload) -> tuple[EdgeTraffic, ...]:
    """Return the bytes that the inputs of every node on the trained stream move, in execution order.

    Every node is assumed to run in the step, whatever its `every` and `after`, and no sample is refused.
    """
    part = thinned(plan, request)
    plan, request = part.plan, part.request
    stream = plan.schedule.streams[0]
    size, batch = stream.group_size, request.batch
    lengths = sample_lengths(workload, batch * size, request.seed)
    workers = generating_workers(plan, request, stream, [length - workload.prompt for length in lengths])
    locations, samples = DataLocations(), range(len(lengths))
    for sample in samples:
        locations.add_sample(sample, workers[sample], lengths[sample])
    images = ImageBytes.of(request.workload.images, workload.images, size)
    sizes = _FieldSizes(plan, workload.prompt, lengths, images)
    tokens = dict(enumerate(lengths))
    groups = {g: range(g * size, (g + 1) * size) for g in range(batch)}
    cuts = dict(plan.cuts)
    streaming = {node.name for node in plan.schedule.nodes if node.level is not Level.BATCH}
    edges = []
    for rule in _rules_of_stream(plan, stream.name):
        holders = locations.holders(rule.fields, samples)
        cut = cuts.get(rule.consumer)
        assignment = shards(rule, cut, groups, holders, seed=request.seed, step=0)
        moves = redistribute(rule, assignment, holders, plan.cluster)
        edges.append(_traffic(rule, assignment, moves.joined(), tokens, sizes.of(rule.fields), holders, part))
        locations.add_moves(moves)
        outputs = _outputs(plan.graph, rule.consumer)
        for dp_head, minibatches in zip(rule.heads, assignment, strict=True):
            locations.add_outputs(outputs, [s for minibatch in minibatches for s in minibatch], dp_head)
        if rule.consumer in streaming:  # its outputs are also moved to where the samples are
            locations.add_copies(outputs, samples, np.array(workers))
    return tuple(edges)


def generating_workers(
    plan: Plan, request: PlanRequest, stream: ScheduledStream, responses: Sequence[int]
) -> list[int]:
    """Return the worker that generates each sample of one batch, or prepares it for a written stream.

    Time is counted in tokens: every running sequence grows by one token per unit of time. The next group
    starts as soon as `max_concurrent` allows. `responses` are the tokens of each sample's response;
    `group_size` neighbours are a group. A written stream has the ranks that train on it.
    """
    placer, size = GroupPlacer(plan), stream.group_size
    num_groups = len(responses) // size
    if not stream.replicas:
        by_group = [placer.place(stream.name, group, size) for group in range(num_groups)]
        return [worker for worker in by_group for _ in range(size)]
    num_slots = request.model(plan.replica(stream.replicas[0]).model).gen.max_running
    slots: dict[int, list[int]] = defaultdict(list)
    """Worker -> heap of the times at which its used slots become free."""
    running: list[tuple[int, int, int]] = []
    """Heap of (end, worker, group) of all samples in flight."""
    workers, now = [], 0
    for group in range(num_groups):
        while len(running) + size > request.schedule.max_concurrent:
            now, _, finished = heapq.heappop(running)
            placer.finished(stream.name, finished)
        worker = placer.place(stream.name, group, size)
        for response in responses[group * size : (group + 1) * size]:
            start = now if len(slots[worker]) < num_slots else max(now, heapq.heappop(slots[worker]))
            heapq.heappush(slots[worker], start + response)
            heapq.heappush(running, (start + response, worker, group))
            workers.append(worker)
    return workers


def moved_bytes(moves: Iterable[Move], nbytes: FieldBytes) -> int:
    """Return the bytes that moves carry."""
    return sum(nbytes[field][s] for move in moves for field in move.fields for s in move.samples)


def lower_bound_bytes(
    rule: EdgeRule, tokens: Mapping[int, int], nbytes: FieldBytes, holders: Holders, capacity: int
) -> int:
    """Return the bytes that any assignment must move whose ranks take at most `capacity` tokens each.

    A byte stays in place only if its sample is assigned to a holder. So the bytes in place are at most (a)
    those of every sample at its best rank, and (b) for each rank those of the best choice of held samples
    that fits into its capacity, relaxed to a fractional knapsack (Dantzig, 1957). The bound uses the smaller.
    `nbytes` has the bytes of each field of each sample, and `holders` the workers that have the fields
    before.
    """
    total = sum(nbytes[field][sample] for field in rule.fields for sample in tokens)
    held_bytes = _held_bytes(rule, nbytes, holders)
    best: dict[int, int] = defaultdict(int)
    for by_sample in held_bytes.values():
        for sample, size in by_sample.items():
            best[sample] = max(best[sample], size)
    best_fill = sum(_knapsack(held_bytes[dp_head], tokens, capacity) for dp_head in rule.heads)
    return total - min(sum(best.values()), best_fill)


@dataclass(frozen=True)
class CollectiveStep:
    """Moves that together are one collective, for display.

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
    for same in _grouped(moves, lambda move: (move.src, move.samples, move.fields)):
        if len(same) > 1:
            steps.append(CollectiveStep("bcast", same[0].src, same))
        else:
            rest.append(same[0])
    single: list[Move] = []
    for same in _grouped(rest, lambda move: move.src):
        if len({move.dst for move in same}) > 1:
            steps.append(CollectiveStep("scatter", same[0].src, same))
        else:
            single.extend(same)
    steps += [CollectiveStep("gather", same[0].dst, same) for same in _grouped(single, lambda move: move.dst)]
    return tuple(steps)


def _grouped(moves: Iterable[Move], key: Callable[[Move], Hashable]) -> list[tuple[Move, ...]]:
    """Group moves by key, in the order of their first move."""
    groups: dict[Hashable, list[Move]] = defaultdict(list)
    for move in moves:
        groups[key(move)].append(move)
    return [tuple(group) for group in groups.values()]


def _rules_of_stream(plan: Plan, stream: str) -> list[EdgeRule]:
    """Return the rules of the nodes that read data of one root stream's samples, in execution order."""
    rules = {rule.consumer: rule for rule in plan.rules if rule.fields}
    order = [rules[name] for name in topological_order(plan.graph) if name in rules]
    return [rule for rule in order if plan.graph.root_stream(rule.stream).name == stream]


def _outputs(graph: Graph, name: str) -> list[str]:
    node = graph.node(name)
    return [f"{node.stream}/{returned.field}" for returned in node.spec.returns]


class _FieldSizes:
    """Bytes of each field of each sample."""

    def __init__(self, plan: Plan, prompt: int, lengths: Sequence[int], images: ImageBytes) -> None:
        self._graph, self._shapes = plan.graph, dict(plan.shapes)
        self._prompt, self._images = prompt, images
        self._lengths = lengths
        self._known: dict[str, Mapping[int, int]] = {}

    def of(self, fields: Iterable[str]) -> FieldBytes:
        """Return the bytes of these fields for every sample."""
        return {name: self._known.get(name) or self._measure(name) for name in fields}

    def _measure(self, name: str) -> Mapping[int, int]:
        size = field_size(self._graph, name, self._shapes, self._images)
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
    part: Thinned,
) -> EdgeTraffic:
    cluster, scale = part.plan.cluster, part.scale
    num_bytes = moved_bytes(moves, nbytes)
    loads = [[sum(tokens[s] for s in samples) for samples in minibatches] for minibatches in assignment]
    capacity = max(sum(rank) for rank in loads)
    steps = [_step_traffic(step, nbytes) for step in collective_steps(moves)]
    crossing = [m for m in moves if cluster.node_of(m.src) != cluster.node_of(m.dst)]
    return EdgeTraffic(
        consumer=rule.consumer,
        num_bytes=scale * num_bytes,
        lower_bound=scale * lower_bound_bytes(rule, tokens, nbytes, holders, capacity),
        local_bytes=scale * (_read_bytes(rule, assignment, nbytes) - num_bytes),
        imbalance=sum(map(max, zip(*loads, strict=True))) * len(loads) / sum(tokens.values()),
        steps=tuple(sorted(steps, key=lambda step: -step.num_bytes)[:MAX_LISTED_STEPS]),
        num_steps=scale * len(steps),
        num_node_bytes=scale * moved_bytes(crossing, nbytes),
        busiest_bytes=_busiest_bytes(rule, moves, nbytes, part),
        scale=scale,
    )


def _step_traffic(step: CollectiveStep, nbytes: FieldBytes) -> StepTraffic:
    return StepTraffic(
        kind=step.kind,
        root=step.root,
        sources=step.sources,
        destinations=step.destinations,
        num_samples=len(step.samples),
        fields=step.fields,
        num_bytes=moved_bytes(step.moves, nbytes),
    )


def _read_bytes(rule: EdgeRule, assignment: Shards, nbytes: FieldBytes) -> int:
    """Return the bytes that the dp-heads read; ranks that share a worker read one copy."""
    read = {
        (dp_head, sample)
        for dp_head, minibatches in zip(rule.heads, assignment, strict=True)
        for samples in minibatches
        for sample in samples
    }
    return sum(sizes[sample] for sizes in nbytes.values() for _, sample in read)


def _busiest_bytes(rule: EdgeRule, moves: Iterable[Move], nbytes: FieldBytes, part: Thinned) -> int:
    """Return the bytes that the busiest worker sends or receives, whichever is more."""
    nodes = [node for node in part.factors if not node.startswith(SAVE_PREFIX)]
    made = {field: part.factors[node] for node in nodes for field in _outputs(part.plan.graph, node)}
    factors = {field: made.get(field, part.source_factor) for field in nbytes}
    sent_bytes: dict[int, float] = defaultdict(int)
    received_bytes: dict[int, float] = defaultdict(int)
    for move in moves:
        for field in move.fields:
            size = sum([nbytes[field][sample] for sample in move.samples])
            sent_bytes[move.src] += size * factors[field]
            received_bytes[move.dst] += size * part.factors.get(rule.consumer, 1)
    return round(max((*sent_bytes.values(), *received_bytes.values()), default=0))


def _held_bytes(rule: EdgeRule, nbytes: FieldBytes, holders: Holders) -> dict[int, dict[int, int]]:
    """Return dp-head -> sample -> bytes above 0 of the sample's fields that the dp-head's worker holds."""
    held_bytes: dict[int, dict[int, int]] = {dp_head: defaultdict(int) for dp_head in rule.heads}
    for group in holders.groups:
        for sample, workers in zip(holders.samples.tolist(), group.workers.T.tolist(), strict=True):
            for dp_head in held_bytes.keys() & workers:
                held_bytes[dp_head][sample] += sum(nbytes[field][sample] for field in group.fields)
    return held_bytes


def _knapsack(value: Mapping[int, int], weight: Mapping[int, int], capacity: int) -> int:
    """Return the value of the best fractional choice within the capacity, rounded down."""
    total, room = sum(value[s] for s in value if weight[s] == 0), capacity
    for s in sorted((s for s in value if value[s] and weight[s]), key=lambda s: -value[s] / weight[s]):
        if weight[s] > room:
            return total + value[s] * room // weight[s]
        total, room = total + value[s], room - weight[s]
    return total


TEXT_BYTES = 4
"""Approximate bytes of UTF-8 per token (English text)."""
JSON_BYTES = 64
"""Approximate bytes of a JSON value without text, and of the JSON around the texts in messages."""


@dataclass(frozen=True)
class FieldSize:
    """Bytes of one sample's value: a constant, and a number of bytes per token."""

    constant: int = 0
    per_token: int = 0
    """Bytes for each token of the sample."""
    per_prompt_token: int = 0
    per_response_token: int = 0

    def of(self, prompt: int, response: int) -> int:
        """Return the bytes for a sample with these numbers of tokens."""
        per_prompt = self.per_token + self.per_prompt_token
        per_response = self.per_token + self.per_response_token
        return self.constant + per_prompt * prompt + per_response * response


_TRAJECTORY: Mapping[str, FieldSize] = {
    "input_ids": FieldSize(per_token=8),
    "loss_mask": FieldSize(per_token=1),
    "behav_logprobs": FieldSize(per_token=4),
    "versions": FieldSize(per_token=8),
    "completion": FieldSize(per_response_token=TEXT_BYTES),
    "messages": FieldSize(constant=JSON_BYTES, per_token=TEXT_BYTES),
    "stop_reason": FieldSize(constant=len("length")),
    "num_tokens": FieldSize(constant=8),
    "num_turns": FieldSize(constant=8),
    "group": FieldSize(constant=8),
}
"""Workers pack trajectories as int64, bool and float32."""

FILE_BYTES = 1.0
"""Approximate bytes of an image's file per pixel: JPEG takes about half of it, PNG twice as much."""
URL_BYTES = 4 / 3
"""Characters of base64 per byte."""

_COLUMN: Mapping[Unit, FieldSize] = {
    Unit.TOKEN: FieldSize(per_token=8),
    Unit.SEQUENCE: FieldSize(constant=8),
    Unit.GROUP: FieldSize(constant=8),
    Unit.TEXT: FieldSize(per_prompt_token=TEXT_BYTES),
    Unit.MESSAGES: FieldSize(constant=JSON_BYTES, per_prompt_token=TEXT_BYTES),
    Unit.JSON: FieldSize(constant=JSON_BYTES, per_prompt_token=TEXT_BYTES),
}
"""Columns of a dataset: their numbers may be integers, which stay 64 bits wide."""


@dataclass(frozen=True)
class ImageBytes:
    """Bytes of the images of a sample."""

    files: int = 0
    """Image files, as columns of a dataset have them."""
    urls: int = 0
    """Data URLs of the files, as messages of a model that sees have them."""
    pixels: int = 0
    """What the model takes: a sample's part, as those of a group that move together have them once."""

    @classmethod
    def of(cls, sizes: WorkloadImages, seen: PromptImages | None, group_size: int) -> ImageBytes:
        """Return the bytes for images of an assumed size.

        `seen` has the same as a model sees them; None: no model does. `group_size` counts the samples of a
        prompt.
        """
        width, height = image_sizes(sizes)[0] if seen is None else (seen.width, seen.height)
        files = round(sizes.count * width * height * FILE_BYTES)
        if seen is None:
            return cls(files)
        return cls(files, round(files * URL_BYTES), -(-seen.count * seen.load.num_bytes // group_size))

    def of_unit(self, unit: Unit) -> FieldSize:
        """Return the size of a column."""
        if unit is Unit.PIXELS:
            return FieldSize(constant=self.pixels)
        if unit in (Unit.IMAGE, Unit.IMAGES):
            return FieldSize(constant=self.files)
        return _COLUMN[unit]


NO_IMAGES = ImageBytes()

_NUMBER_BYTES: Mapping[str, int] = {"bool": 1, "int": 8, "float": 8}
"""Bytes by the type that a body returns; tensors are stored as float32."""


def field_size(
    graph: Graph, name: str, shapes: Mapping[str, ModelShape], images: ImageBytes = NO_IMAGES
) -> FieldSize:
    """Return the size of a `stream/field`, which a node returns or a trajectory or the dataset has."""
    stream_name, _, field = name.partition("/")
    for kind in requestable_kinds():
        if kind.name == field:
            return _recorded_size(kind, graph, stream_name, shapes)
    for node in graph.nodes:
        for returned in node.spec.returns:
            if node.stream == stream_name and returned.field == field:
                return _returned_size(returned.unit, returned.scalar)
    if field == PIXELS:
        return images.of_unit(Unit.PIXELS)
    if field == "messages" and field in TRAJECTORY_FIELDS:
        return replace(_TRAJECTORY[field], constant=JSON_BYTES + images.urls)
    if field in TRAJECTORY_FIELDS:
        return _TRAJECTORY[field]
    dataset = graph.stream(stream_name).dataset
    columns = next((dict(known.columns) for known in graph.datasets if known.name == dataset), {})
    return images.of_unit(columns[field])


def _recorded_size(
    kind: RecordedKind, graph: Graph, stream: str, shapes: Mapping[str, ModelShape]
) -> FieldSize:
    """Return the size of what an engine records of the samples of a stream."""
    spec = graph.node(graph.stream(stream).source).spec
    (model,) = spec.models
    form = kind.row_format(shapes[model], dict(spec.options)) if model in shapes else None
    num_bytes = 0 if form is None else form.num_bytes
    return FieldSize(per_token=num_bytes) if kind.unit is Unit.TOKEN else FieldSize(constant=num_bytes)


def _returned_size(unit: Unit, scalar: str) -> FieldSize:
    """Return the size of a body's result; each sample of a group has its own copy of a group's value."""
    if unit is Unit.TEXT:
        return FieldSize(per_response_token=TEXT_BYTES)
    if unit in (Unit.MESSAGES, Unit.JSON):
        return FieldSize(constant=JSON_BYTES)
    width = _NUMBER_BYTES.get(scalar.removeprefix("list[").removesuffix("]"), 4)
    return FieldSize(per_token=width) if unit is Unit.TOKEN else FieldSize(constant=width)


MIN_SAMPLES = 512
"""Samples of a batch, and machines, below which nothing is left out."""
MIN_MACHINES = 8


@dataclass(frozen=True)
class Thinned:
    """A plan and its request, reduced for the estimate of traffic. Use it for nothing else."""

    plan: Plan
    """Rules and generation replicas with the dp-heads on the chosen machines. Nodes with few dp-heads keep
    all of them."""
    request: PlanRequest
    """With the chosen machines' part of the batch and of the samples in flight."""
    scale: int
    """Number of machines that one represents; 1: nothing is left out."""
    factors: dict[str, float]
    """Node -> by how much to multiply the bytes of one of its dp-heads, where that is not 1."""
    source_factor: float = 1
    """The factor of the bytes of the workers that generate."""


def thinned(plan: Plan, request: PlanRequest) -> Thinned:
    """Return the plan with one machine in `scale`, which is 1 on small clusters and for small batches.

    One machine is chosen of each block of `scale` machines: of block b the one at b modulo `scale`, so that
    the chosen machines have all parts of layouts that span several machines.
    """
    cluster, stream = plan.cluster, plan.schedule.streams[0]
    scale = _scale(request.batch * stream.group_size, cluster.num_nodes)
    if scale == 1:
        return Thinned(plan, request, 1, {})

    def thin(dp_heads: Sequence[int]) -> tuple[int, ...]:
        kept = tuple(dp_head for dp_head in dp_heads if _is_chosen(cluster.node_of(dp_head), scale))
        return kept if len(kept) > 1 else tuple(dp_heads)

    rules = tuple(replace(rule, heads=thin(rule.heads)) for rule in plan.rules)
    replicas = tuple(replace(replica, heads=thin(replica.heads)) for replica in plan.replicas)
    smaller = replace(plan, rules=rules, replicas=replicas)
    pairs = zip(plan.rules, rules, strict=True)
    schedule = replace(request.schedule, max_concurrent=max(1, request.schedule.max_concurrent // scale))
    return Thinned(
        plan=smaller,
        request=replace(request, batch=max(1, request.batch // scale), schedule=schedule),
        scale=scale,
        factors={rule.consumer: scale * len(fewer.heads) / len(rule.heads) for rule, fewer in pairs},
        source_factor=scale * len(stream_dp_heads(smaller, stream)) / len(stream_dp_heads(plan, stream)),
    )


def _scale(num_samples: int, num_machines: int) -> int:
    """Return the machines that one represents: if possible a divisor, so that dp-heads keep their load."""
    most = min(num_samples // MIN_SAMPLES, num_machines // MIN_MACHINES)
    divisors = [scale for scale in range(most // 4 + 1, most + 1) if num_machines % scale == 0]
    return max(1, divisors[-1] if divisors else most)


def _is_chosen(machine: int, scale: int) -> bool:
    block, index = divmod(machine, scale)
    return index == block % scale
