"""The sections on data (how batch nodes' inputs are split, and what moves), routing and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from hflow.base.text import format_bytes, format_ranges_briefly, pluralize
from hflow.planner.plan.forecast import EdgeTraffic, StepTraffic
from hflow.planner.plan.rows import BatchCut, EdgeRule, Plan, RoutingRow, Schedule, ScheduledStream
from hflow.report.text.section import GAP, Section, add_row, dim, lines, number, table, text

FIRST_KEYS = (2, 1)
"""Numbers of keys to try before the dots."""
ROUTING_NOTE = (
    "How a part is found. A key is (replica, d, t, p), or __data0__ for data rank 0 of the node that opens "
    "the stream, or a worker's number; there is one worker to a device."
)


def routing_section(plan: Plan, width: int) -> Section:
    """Return a row for each replica, the source of the samples, and the worker indices."""
    shown, parts = table(text("of"), number("keys"), text("key → worker")), list(_parts(plan))
    room = width - max(len(name) for name, _ in parts) - len("1,024") - 2 * GAP
    for name, rows in parts:
        add_row(shown, name, f"{len(rows):,}", _keys(rows, room))
    return Section("Routing", ROUTING_NOTE, (shown,))


def _parts(plan: Plan) -> Iterator[tuple[str, Sequence[RoutingRow]]]:
    start = 0
    for replica in plan.replicas:
        yield replica.name, plan.routing[start : start + replica.layout.world]
        start += replica.layout.world
    rest = plan.routing[start:]
    num_data = sum(row.key.startswith("__data") for row in rest)
    yield plan.schedule.streams[0].source, rest[:num_data]
    yield "workers", rest[num_data:]


def _keys(rows: Sequence[RoutingRow], room: int) -> str:
    """Return all keys if there are few; else the first ones and the last, in one line if possible."""
    pairs = [f"{row.key} → {row.worker}" for row in rows]
    if len(pairs) <= FIRST_KEYS[0] + 1:
        return ", ".join(pairs)
    folded = [", ".join((*pairs[:first], "…", pairs[-1])) for first in FIRST_KEYS]
    return next((words for words in folded if len(words) <= room), folded[-1])


NUM_STEPS_SHOWN = 2
"""Largest number of steps that are all named; of more, only the largest step is."""
MOST_FIELDS = 8
NOTE = (
    "What moves between workers before a node runs, on a batch with the lengths assumed below. ≥: the fewest "
    "bytes that any split as even could move; across: between machines; in place: read where it is stored; "
    "load: the heaviest rank's tokens over the mean."
)
SCALED_NOTE = " Estimated on one machine in {scale}, with its part of the batch."
NOTE_WITHOUT_BYTES = "What a node reads, and how it is split over data ranks. Bytes are not estimated."


def data_section(plan: Plan, width: int) -> Section:
    """Return a row for each node that reads fields."""
    rules = [rule for rule in plan.rules if rule.fields]
    if not rules:
        return Section("Data", absent="no node reads a field of another")
    traffic = {row.consumer: row for row in plan.forecast.traffic}
    is_spread = plan.cluster.num_nodes > 1
    columns = [text("node"), text("reads, split, moves")]
    if traffic:
        across = (number("across"),) if is_spread else ()
        columns += [number("moves"), *across, number("in place"), number("load")]
    shown, cuts = table(*columns), dict(plan.cuts)
    for rule in rules:
        moved = traffic.get(rule.consumer)
        reads = lines(_reads(rule, cuts.get(rule.consumer), moved))
        add_row(shown, Text(rule.consumer, "bold"), reads, *(_bytes(moved, is_spread) if moved else ()))
    scale = max((row.scale for row in traffic.values()), default=1)
    note = NOTE + (SCALED_NOTE.format(scale=scale) if scale > 1 else "")
    return Section("Data", note if traffic else NOTE_WITHOUT_BYTES, (shown,))


def _bytes(moved: EdgeTraffic, is_spread: bool) -> Iterator[Text]:
    yield lines((format_bytes(moved.num_bytes), dim(f"≥ {format_bytes(moved.lower_bound)}")))
    if is_spread:
        yield Text(format_bytes(moved.num_node_bytes))
    yield Text(format_bytes(moved.local_bytes))
    yield Text(f"{moved.imbalance:.2f}")


def _reads(rule: EdgeRule, cut: BatchCut | None, moved: EdgeTraffic | None) -> Iterator[Text]:
    yield Text(_fields(rule))
    yield dim(_split(rule, cut))
    if moved is not None:
        yield dim(_steps(moved))


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


SAMPLES_NOTE = (
    "A stream is a flow of samples: a prompt with several answers is a group. Staleness is the number of "
    "updates between the weights that generated a token and those that it trains."
)


def samples_section(plan: Plan, width: int) -> Section:
    """Return a row for each stream, then the staleness bound in words."""
    words = f"{staleness_sentence(plan)} {_stop(plan.schedule.settings.max_refused_per_step)}"
    return Section(
        "Samples", SAMPLES_NOTE, (_streams(plan), Text(), *map(Text, _encoded_again(plan)), Text(words))
    )


def _encoded_again(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each stream that another model's tokenizer makes from the text of a stream."""
    for stream in plan.graph.streams:
        models = plan.graph.node(stream.source).spec.models
        if stream.parent is not None and models:
            yield (
                f"{stream.name} is the text of {stream.parent}, encoded again with the tokenizer of "
                f"{models[0]} (and its chat template, if it has one)."
            )


def _stop(most: int) -> str:
    return f"The run stops when more than {pluralize(most, 'group')} are refused before a batch is full."


def _streams(plan: Plan) -> Table:
    shown = table(text("stream"), number("groups"), number("samples a group"), text("made by"), text("when"))
    for stream in plan.schedule.streams:
        groups = f"{stream.batch:,}" if stream.batch is not None else "all rows"
        min_group = f" (at least {stream.min_group})" if stream.min_group > 1 else ""
        size = f"{stream.group_size}{min_group}"
        made = ", ".join(stream.replicas) or stream.source
        add_row(shown, Text(stream.name, "bold"), groups, size, made, _when(stream, plan.schedule.num_steps))
    return shown


def _when(stream: ScheduledStream, num_steps: int) -> str:
    if stream.batch is not None:
        return "every step"
    if not num_steps:
        return "once"
    after = f", from version {stream.after} on" if stream.after else ""
    return f"every {pluralize(stream.every, 'step')}{after}, and at the end"


def staleness_sentence(plan: Plan) -> str:
    """Explain what the bound means for the tokens that are trained."""
    bound, schedule = plan.staleness_bound, plan.schedule
    if bound is None:
        return "Staleness is unbounded: no rule drops a sample whose tokens are old."
    if not schedule.streams[0].models:
        return "Staleness is 0: no model makes the samples that are trained."
    if bound == 0:
        return (
            "Staleness is 0: every token is made by the weights from which its training step starts. "
            "schedule.max_staleness=1 would let generation and training overlap on devices of their own."
        )
    drops = "; samples that would become older are dropped and counted" if schedule.settings.age_rule else ""
    return (
        f"Staleness is at most {bound}: a token may be made by weights {pluralize(bound, 'update')} older "
        f"than those from which its training step starts, as {_why(schedule, bound)}{drops}."
    )


def _why(schedule: Schedule, bound: int) -> str:
    """Explain what the bound follows from."""
    eta, sync = schedule.settings.max_staleness, schedule.settings.sync_every
    if bound != schedule.settings.certified_lag:
        return f"drop_older_than is {bound}"
    rounded = ", rounded up," if schedule.settings.splits_batch else ""
    return f"(max_staleness {eta} + 1) x sync_every {sync}{rounded} - 1 = {bound}"
