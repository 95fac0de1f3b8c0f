"""The sections on data (how batch nodes' inputs are split, and what moves), routing and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from hflow.base.text import pluralize
from hflow.planner.plan.rows import Plan, RoutingRow, Schedule, ScheduledStream
from hflow.report.text.section import GAP, Section, add_row, number, table, text

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
