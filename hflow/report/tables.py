"""The tables of a plan that its reports share: each is decided once, and drawn as text and on the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hflow.base.text import format_bytes, format_ranges_briefly, format_seconds, format_setting, pluralize
from hflow.planner.plan.forecast import Candidate, EdgeTraffic, NodeTime, StepTraffic
from hflow.planner.plan.rows import BatchCut, EdgeRule, Plan, Replica, ScheduledNode, WeightRoute
from hflow.report.formatting import format_cadence, format_rank_order, format_replica_size

Tone = Literal["plain", "strong", "quiet"]
Phrase = tuple[str, Tone]
"""Words with their tone; a line of a cell ends with a line feed."""
TableCell = str | tuple[Phrase, ...]


@dataclass(frozen=True)
class TableView:
    """A table; columns in `right` hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    right: tuple[int, ...] = ()
    note: str = ""
    """What its words mean."""
    after: tuple[str, ...] = ()
    """Lines that follow the rows."""
    absent: str = ""
    """Why there are no rows."""


def strong(words: str) -> TableCell:
    """Return a cell of words that stand out."""
    return ((words, "strong"),)


def in_lines(first: Phrase, *others: Phrase) -> TableCell:
    """Return a cell with one line for each phrase."""
    return (first, *((f"\n{words}", tone) for words, tone in others))


PLACEMENTS_NOTE = (
    "The best plan of each way in which replicas may share devices; the first one is this plan. What the "
    "configuration sets was not changed. To move inputs, the others are taken to need what this plan does."
)


def placements_table(plan: Plan) -> TableView:
    """Return a row for each candidate of the search for a placement, the chosen one first."""
    rows = ((format_seconds(row.seconds), _candidate(row)) for row in plan.forecast.candidates)
    return TableView(
        "Placements", ("step", "placement, and why not"), tuple(rows), right=(0,), note=PLACEMENTS_NOTE
    )


def _candidate(candidate: Candidate) -> TableCell:
    settings = " ".join(format_setting(key, value) for key, value in candidate.settings)
    changed: list[Phrase] = [(settings, "quiet")] if settings else []
    return in_lines((candidate.why, "strong"), (candidate.placement, "plain"), *changed)


REPLICAS_NOTE = (
    "A replica is one copy of a model. Its layout cuts it: d ways over data, t ways inside tensors, p ways "
    "into pipeline stages. A dp-head takes in the samples of its data rank and gives out the results."
)
OTHER_AXES_NOTE = (
    "c ranks divide the tokens of each sequence, and e of the data and c ranks the experts of each layer."
)
REPLICATE_NOTE = "With r, FSDP shards weights over d / r neighbours, and r sets of them hold the same (HSDP)."
BF16_NOTE = "bf16 is the precision of forward and backward passes; an optimizer changes weights in fp32."
REPLICA_COLUMNS = ("replica", "parameters", "backend", "layout", "group", "devices", "dp-heads")


def replicas_table(plan: Plan) -> TableView:
    """Return a row for each replica, and the reasons of the layouts that the planner chose."""
    layouts = [replica.layout for replica in plan.replicas]
    others = max(layout.context for layout in layouts) > 1 or max(layout.expert for layout in layouts) > 1
    replicates = max(layout.replicate for layout in layouts) > 1
    is_bf16 = any(replica.dtype == "bf16" and replica.role == "train" for replica in plan.replicas)
    return TableView(
        "Replicas",
        REPLICA_COLUMNS,
        tuple((strong(replica.name), *replica_cells(plan, replica)) for replica in plan.replicas),
        note=" ".join(
            (
                REPLICAS_NOTE,
                *[OTHER_AXES_NOTE] * others,
                *[REPLICATE_NOTE] * replicates,
                *[BF16_NOTE] * is_bf16,
            )
        ),
        after=tuple(f"{name} is {plan.replica(name).layout}: {why}." for name, why in plan.forecast.layouts),
    )


def replica_cells(plan: Plan, replica: Replica) -> tuple[str, ...]:
    """Return the cells of a replica, below `REPLICA_COLUMNS` after its name."""
    return (
        format_replica_size(replica, dict(plan.shapes).get(replica.model)),
        replica.backend,
        str(replica.layout),
        ", ".join(replica.groups),
        format_ranges_briefly(replica.workers),
        format_ranges_briefly(replica.heads),
    )


NUM_STEPS_SHOWN = 2
"""Largest number of steps that are all named; of more, only the largest step is."""
MOST_FIELDS = 8
DATA_NOTE = (
    "What moves between workers before a node runs, on a batch with the lengths assumed {where}. ≥: the "
    "fewest bytes that any split as even could move; across: between machines; in place: read where it is "
    "stored; load: the heaviest rank's tokens over the mean."
)
SCALED_NOTE = " Estimated on one machine in {scale}, with its part of the batch."
NOTE_WITHOUT_BYTES = "What a node reads, and how it is split over data ranks. Bytes are not estimated."


def data_table(plan: Plan, assumptions: Literal["above", "below"]) -> TableView:
    """Return a row for each node that reads fields: how its inputs are split, and what moves.

    `assumptions` is where the report says which lengths the estimates assume.
    """
    rules = [rule for rule in plan.rules if rule.fields]
    if not rules:
        return TableView("Data", (), (), absent="no node reads a field of another")
    traffic, cuts = {row.consumer: row for row in plan.forecast.traffic}, dict(plan.cuts)
    is_spread = plan.cluster.num_nodes > 1
    sizes = ("moves", *(("across",) if is_spread else ()), "in place", "load") if traffic else ()
    rows = []
    for rule in rules:
        moved = traffic.get(rule.consumer)
        cells = _bytes(moved, is_spread) if moved else ("",) * len(sizes)
        rows.append((strong(rule.consumer), _reads(rule, cuts.get(rule.consumer), moved), *cells))
    scale = max((row.scale for row in traffic.values()), default=1)
    note = DATA_NOTE.format(where=assumptions) + (SCALED_NOTE.format(scale=scale) if scale > 1 else "")
    return TableView(
        "Data",
        ("node", "reads, split, moves", *sizes),
        tuple(rows),
        right=tuple(range(2, 2 + len(sizes))),
        note=note if traffic else NOTE_WITHOUT_BYTES,
    )


def _bytes(moved: EdgeTraffic, is_spread: bool) -> Iterator[TableCell]:
    least = f"≥ {format_bytes(moved.lower_bound)}"
    yield in_lines((format_bytes(moved.num_bytes), "plain"), (least, "quiet"))
    if is_spread:
        yield format_bytes(moved.num_node_bytes)
    yield format_bytes(moved.local_bytes)
    yield f"{moved.imbalance:.2f}"


def _reads(rule: EdgeRule, cut: BatchCut | None, moved: EdgeTraffic | None) -> TableCell:
    steps: list[Phrase] = [] if moved is None else [(_steps(moved), "quiet")]
    return in_lines((_fields(rule), "plain"), (_split(rule, cut), "quiet"), *steps)


def _fields(rule: EdgeRule) -> str:
    """Return the fields, those of the node's own stream by their short names."""
    names = [field.removeprefix(f"{rule.stream}/") for field in rule.fields]
    more = len(names) - MOST_FIELDS
    return ", ".join(names[:MOST_FIELDS]) + (f", {more} more" if more > 0 else "")


def _split(rule: EdgeRule, cut: BatchCut | None) -> str:
    heads = format_ranges_briefly(rule.heads)
    if rule.policy == "single":
        return f"all to worker {heads}"
    unit = "whole groups" if rule.by_group else "samples"
    words = f"{unit}, evenly by tokens, to {heads}"
    if cut is not None and (cut.minibatches, cut.epochs) != (1, 1):
        times = f", {pluralize(cut.epochs, 'time')}" if cut.epochs > 1 else ""
        words += f"; {cut.minibatches} minibatch{'es' if cut.minibatches > 1 else ''}{times}"
    return words


def _steps(moved: EdgeTraffic) -> str:
    """Return the steps that move most; the others are counted."""
    if not moved.num_steps:
        return "nothing moves"
    if moved.num_steps > NUM_STEPS_SHOWN:
        return f"{moved.num_steps:,} steps, as {_step(moved.steps[0])}"
    return "; ".join(map(_step, moved.steps))


def _step(step: StepTraffic) -> str:
    ends = f"{format_ranges_briefly(step.sources)} → {format_ranges_briefly(step.destinations)}"
    return f"{step.kind} {ends}: {format_bytes(step.num_bytes)}"


WEIGHTS_NOTE = (
    "How new weights reach another copy of the model. shared: both use the same memory; gather: assembled "
    "bucket by bucket on the same devices; pull: copied out slice by slice, then fetched by other devices or "
    "processes, by a transport (models.NAME.gen.transport). The bytes moved are the fewest possible: what a "
    "device already holds stays in place. gather moves whole tensors, so more to engines that are cut."
)
ROUTE_SIZE_COLUMNS = ("rows", "moved", "between machines", "in place")


def weights_table(plan: Plan) -> TableView:
    """Return a row for each weight route: how new weights reach another copy of a model, and the bytes."""
    if not plan.weights:
        return TableView("Weights", (), (), absent="no model that changes has a second copy")
    sizes = ROUTE_SIZE_COLUMNS if any(map(is_sized, plan.weights)) else ()
    return TableView(
        "Weights",
        ("from → to", "how", *sizes),
        tuple(
            (_ends(plan, route), _way(route), *(route_sizes(route) if sizes else ()))
            for route in plan.weights
        ),
        right=tuple(range(2, 2 + len(sizes))),
        note=WEIGHTS_NOTE,
    )


def is_sized(route: WeightRoute) -> bool:
    """Return whether the bytes of a route are known."""
    return bool(route.rows or route.moved_bytes or route.held_bytes)


def route_sizes(route: WeightRoute) -> tuple[str, ...]:
    """Return the sizes of a route, below `ROUTE_SIZE_COLUMNS`; question marks if they are not known."""
    if not is_sized(route):
        return "?", "?", "?", "?"
    sizes = (route.moved_bytes, route.node_bytes, route.held_bytes)
    return f"{len(route.rows):,}", *map(format_bytes, sizes)


def _ends(plan: Plan, route: WeightRoute) -> TableCell:
    src, dst = plan.replica(route.src), plan.replica(route.dst)
    return (
        (src.name, "strong"),
        (f"{_place(src)}\n→ ", "plain"),
        (dst.name, "strong"),
        (_place(dst), "plain"),
    )


def _place(replica: Replica) -> str:
    return f" {replica.layout} on {format_ranges_briefly(replica.workers)}"


def _way(route: WeightRoute) -> TableCell:
    return in_lines((route.how, "plain"), *((words, "quiet") for words in route_notes(route)))


def route_notes(route: WeightRoute) -> Iterator[str]:
    """Yield what is particular to a route: its transport, and what it need not move."""
    if route.transport:
        yield f"by {route.transport}: {route.why}"
    if route.hands_over:
        yield f"handed to the engines' processes by {route.near}"
    elif route.near:
        yield f"what a device holds by {route.near}"
    if route.delta:
        yield "only changes"
    if route.saved_bytes:
        yield format_rank_order(route.moved_bytes, route.saved_bytes)


LEAST_PART = 0.005
"""Parts with a smaller share of a node's seconds are not named."""
NEW_WEIGHTS = "new weights"
"""What an engine's row shows: loading the weights that were trained."""
TIMES_NOTE = (
    "Seconds of one execution (of a stream's source: of a whole batch), their parts, and what limits "
    "most of these seconds."
)


def times_table(plan: Plan, most: int | None = None) -> TableView:
    """Return a row for each node in the order of execution; of more than `most`, the slowest."""
    times = plan.forecast.times
    if not times:
        return TableView("Time", (), (), absent="the seconds of no node are known")
    executions = _executions(plan)
    rank = {name: i for i, name in enumerate(executions)}
    slowest = sorted(times, key=lambda row: -row.seconds)[:most]
    rows = [
        (
            strong(row.node),
            executions.get(row.node, NEW_WEIGHTS),
            format_seconds(row.seconds),
            _parts(row),
            row.limit if row.seconds else "",
        )
        for row in sorted(slowest, key=lambda row: rank.get(row.node, len(rank)))
    ]
    more = len(times) - len(slowest)
    return TableView(
        "Time",
        ("node", "per", "seconds", "of which", "limited by"),
        tuple(rows),
        right=(2,),
        note=TIMES_NOTE,
        after=(f"and {pluralize(more, 'faster node')}",) if more else (),
    )


def _executions(plan: Plan) -> dict[str, str]:
    """Return the unit of each node's execution, such as a batch, in the order of the schedule."""
    batches = {s.source: "batch" if s.batch else "evaluation" for s in plan.schedule.streams}
    return batches | {node.name: _per(node, plan.schedule.num_steps) for node in plan.schedule.nodes}


def _per(node: ScheduledNode, num_steps: int) -> str:
    if node.at_end and node.every >= num_steps:
        return f"{node.level}, at the end"
    return f"{node.level}{format_cadence(node.every, node.after)}"


def _parts(row: NodeTime) -> str:
    named = [(name, spent) for name, spent in row.parts if spent >= LEAST_PART * row.seconds and spent > 0]
    if len(named) == 1:
        return named[0][0]
    return ", ".join(f"{name} {format_seconds(spent)}" for name, spent in named)
