"""The section on samples: where they come from, and how old they may be."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hflow.planner.plan.rows import Plan, Schedule, ScheduledStream
from hflow.planner.plan.staleness import certified_lag, splits_batch
from hflow.report.formatting import plural
from hflow.report.plan_text.section import Section, add_row, number, table, text

NOTE = (
    "A stream is a flow of samples: a prompt with several answers is a group. Staleness is the number of "
    "updates between the weights that generated a token and those that it trains."
)


def samples_section(plan: Plan, width: int) -> Section:
    """Return a row for each stream, then the staleness bound in words."""
    words = f"{staleness_sentence(plan)} {_stop(plan.schedule.settings.max_refused_per_step)}"
    return Section("Samples", NOTE, (_streams(plan), Text(), *map(Text, _encoded_again(plan)), Text(words)))


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
    return f"The run stops when more than {plural(most, 'group')} are refused before a batch is full."


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
    return f"every {plural(stream.every, 'step')}{after}, and at the end"


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
        f"Staleness is at most {bound}: a token may be made by weights {plural(bound, 'update')} older than "
        f"those from which its training step starts, as {_why(schedule, bound)}{drops}."
    )


def _why(schedule: Schedule, bound: int) -> str:
    """Explain what the bound follows from."""
    eta, sync = schedule.settings.max_staleness, schedule.settings.sync_every
    if bound != certified_lag(eta, sync):
        return f"drop_older_than is {bound}"
    rounded = ", rounded up," if splits_batch(schedule) else ""
    return f"(max_staleness {eta} + 1) x sync_every {sync}{rounded} - 1 = {bound}"
