"""Everything that the page of a run shows, as one value of plain texts and numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hflow.base.intervals import covered_length
from hflow.base.text import format_count, format_number, format_seconds, format_share, pluralize
from hflow.planner.plan.forecast import CycleStep, Period, Slot
from hflow.report.formatting import ends_of, format_missing
from hflow.report.html.plan.gantt import NUM_COLOURS, Bar, ChartLane, Gantt, period_gantt, stack, ticks
from hflow.report.html.plan.headline import Tile
from hflow.report.html.run.curves import MAX_STALENESS, CurveView, curve_groups
from hflow.report.tables import TableView
from hflow.runtime.records.activity import DEVICE, GENERATE, Activity, OngoingWork

if TYPE_CHECKING:
    from hflow.launch.results.runs import MeasuredSpan, MeasuredTrace, RunReport


MAX_LANES = 16
"""Lanes of the chart."""
MAX_BARS = 120
"""Bars of a lane: the longest."""
NUM_STEPS = 2
"""Steps of the chart."""
LANE_ORDER = (GENERATE, "weights", DEVICE)


def measured_gantt(spans: Sequence[MeasuredSpan]) -> Gantt | None:
    """Return the chart of two steps in the middle of the trace; None without two complete steps."""
    ends = _step_ends(spans)
    steps = sorted(ends)
    if len(steps) <= NUM_STEPS:
        return None
    first = (len(steps) - NUM_STEPS) // 2
    before, last = steps[first], steps[min(first + NUM_STEPS, len(steps) - 1)]
    start, end = ends[before], ends[last]
    if end <= start:
        return None
    title = f"from the end of step {before} to the end of step {last}"
    return _chart(spans, start, end, title, format_seconds((end - start) / max(1, last - before)))


def live_gantt(trace: MeasuredTrace, activity: Activity | None, now: float) -> Gantt | None:
    """Return the chart of the last steps until now, with what workers do now; None before the first span.

    `now` is in seconds since the epoch.
    """
    spans = trace.until_now(activity, now)
    if not spans:
        return None
    ends = sorted(_step_ends(trace.spans).values())
    start = ends[-NUM_STEPS - 1] if len(ends) > NUM_STEPS else spans[0].start
    end = max(span.end for span in spans)
    return _chart(spans, start, end, f"in the last {_elapsed(start, end)}", "") if end > start else None


def _step_ends(spans: Sequence[MeasuredSpan]) -> dict[int, float]:
    """Return step -> end of its last node on a device."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.lane == DEVICE and span.step is not None:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    return ends


def _chart(spans: Sequence[MeasuredSpan], start: float, end: float, title: str, period: str) -> Gantt:
    lanes: dict[tuple[str, str], list[MeasuredSpan]] = {}
    for span in spans:
        if span.start < end and span.end > start:
            lanes.setdefault((span.worker, span.lane), []).append(span)
    first = {lane: i for i, lane in enumerate(LANE_ORDER)}
    ordered = sorted(lanes, key=lambda key: (_worker_number(key[0]), first.get(key[1], len(first)), key[1]))
    shown = ordered[:MAX_LANES]
    num_hidden = len(ordered) - len(shown)
    charts = tuple(_lane(worker, lane, lanes[worker, lane], start, end) for worker, lane in shown)
    used = sorted({(bar.step, bar.colour) for chart in charts for bar in chart.bars if bar.step})
    return Gantt(
        period=period,
        periods=(title,),
        lanes=charts,
        ticks=tuple(ticks(end - start)),
        steps=tuple(used),
        note=f"{pluralize(num_hidden, 'more lane')} of other workers are left out." if num_hidden else "",
    )


def planned_gantt(plan: Mapping[str, Any]) -> Gantt | None:
    """Return the chart of the plan's rows; None if they have no period, or another version wrote them."""
    try:
        row = plan["forecast"]["period"]
        period = Period(
            seconds=row["seconds"],
            cycle=tuple(CycleStep(**step) for step in row["cycle"]),
            slots=tuple(Slot(**slot) for slot in row["slots"]),
            idle=tuple((lane, share) for lane, share in row["idle"]),
            num_steps=row["num_steps"],
        )
        sizes = {group["name"]: len(group["devices"]) for group in plan["groups"]}
        groups = {replica["name"]: replica["groups"] for replica in plan["replicas"]}
        chart = period_gantt(period, sizes, groups)
    except (LookupError, TypeError, ValueError):
        return None
    return chart


def _lane(worker: str, lane: str, spans: Sequence[MeasuredSpan], start: float, end: float) -> ChartLane:
    longest = sorted(spans, key=lambda span: span.start - span.end)[:MAX_BARS]
    num_rows, bars = stack([_bar(span, start, end) for span in longest])
    busy = covered_length((max(start, span.start), min(end, span.end)) for span in spans)
    return ChartLane(worker, lane, format_share(1 - busy / (end - start)), "", num_rows, bars)


def _bar(span: MeasuredSpan, start: float, end: float) -> Bar:
    left, right = max(start, span.start), min(end, span.end)
    seconds = format_seconds(span.end - span.start)
    step = "" if span.step is None else str(span.step)
    return Bar(
        node=span.name,
        ref="",
        step=step,
        colour=1 if span.step is None else span.step % NUM_COLOURS + 1,
        left=round(100 * (left - start) / (end - start), 3),
        width=round(100 * (right - left) / (end - start), 3),
        row=0,
        is_critical=False,
        is_cut_left=span.start < start,
        is_cut_right=span.end > end,
        tip=f"{span.name}{f', step {step}' if step else ''}\n{seconds}",
    )


def _worker_number(worker: str) -> int:
    number = worker.rpartition(" ")[2]
    return int(number) if number.isdigit() else -1


STEP_SECONDS, SAMPLES, STALENESS = "time/step_seconds", "time/samples_per_second", "staleness/mean"
NO_TRACE = "The run has no trace."
NO_SPANS = "Nothing is written yet of what workers did."
FEW_STEPS = "The trace has fewer than three steps, so none is drawn."
TERMS: tuple[tuple[str, str], ...] = (
    ("step", "One round: samples are generated and scored, then the models learn from them once."),
    (
        "staleness",
        "Versions of the weights between the one that wrote a token and the one that learns from it.",
    ),
    ("refused", "A node refused the sample, or failed on it: it was not trained, and is no reward of 0."),
    ("dropped", "The sample took too long: its weights were too old, or the queue was full."),
)
"""(word, explanation)."""
MAX_KEYS = 400


@dataclass(frozen=True)
class TextPart:
    """One turn of a sample."""

    role: str
    text: str
    is_trained: bool
    tokens: tuple[tuple[str, float, int], ...] = ()
    """(text, log-prob, version) of generated tokens; empty: they are not known one by one."""
    images: tuple[str, ...] = ()
    """Data URLs."""


@dataclass(frozen=True)
class SampleView:
    """One sample."""

    name: str
    """STREAM/ID."""
    stream: str
    step: str
    end: str
    why: str
    reward: str
    versions: str
    lag: str
    tokens: str
    numbers: Mapping[str, float | None]
    """What the sample can be coloured by -> its value."""
    texts: tuple[TextPart, ...]
    others: tuple[tuple[str, str], ...]
    """(name, value) of the numbers that are stored with its text."""


@dataclass(frozen=True)
class NowView:
    """What a run does at this moment."""

    line: str
    """The phase, and for how long."""
    samples: tuple[tuple[str, str, float], ...]
    """(stream, `384 of 512`, percent) of what is being generated."""
    devices: tuple[tuple[str, str, str], ...]
    """(worker, what it does, for how long)."""
    note: str
    """The devices that are left out."""


@dataclass(frozen=True)
class RunPageView:
    """The page."""

    title: str
    state: str
    is_running: bool
    now: NowView | None
    """None: the run has ended, or the page does not follow it."""
    story: tuple[str, ...]
    tiles: tuple[Tile, ...]
    groups: tuple[tuple[str, tuple[CurveView, ...]], ...]
    """(title, curves that belong together)."""
    others: tuple[CurveView, ...]
    measured: Gantt | None
    no_measured: str
    """Why there is no measured chart."""
    planned: Gantt | None
    samples: tuple[SampleView, ...]
    colours: tuple[str, ...]
    """What samples can be coloured by."""
    num_samples: str
    are_newest: bool
    """Whether the samples are those that finished last."""
    has_texts: bool
    refused: TableView | None
    faults: tuple[str, ...]
    config: tuple[tuple[str, str], ...]
    terms: tuple[tuple[str, str], ...]


def run_page_view(report: RunReport, now: float | None = None) -> RunPageView:
    """Return the content of a run's page, which follows the run if `now`, in seconds since 1970, is set."""
    record = report.record
    nodes = record.plan["graph"]["nodes"]
    train_nodes = [node["spec"]["name"] for node in nodes if node["spec"]["verb"] == "train"]
    groups, others = curve_groups(record.curves, record.results, train_nodes, report.units)
    are_newest, now = now is not None, now if record.is_running else None
    if now is None:
        measured = measured_gantt(report.trace.spans)
        no_measured = FEW_STEPS if report.trace.spans else NO_TRACE
    else:
        measured = live_gantt(report.trace, report.activity, now)
        no_measured = NO_SPANS
    samples = tuple(sample_views(report))
    keys = [key for key in COLOURED if any(sample.numbers.get(key) is not None for sample in samples)]
    total = sum(report.ledger.ends.values()) if report.ledger else 0
    return RunPageView(
        title=record.name,
        state=record.state,
        is_running=record.is_running,
        now=None if now is None else now_view(report, now),
        story=tuple(story(report)),
        tiles=tuple(_tiles(report)),
        groups=groups,
        others=others,
        measured=measured,
        no_measured="" if measured else no_measured,
        planned=planned_gantt(record.plan),
        samples=samples,
        colours=tuple(keys),
        num_samples=f"{len(samples):,} of {pluralize(total, 'sample')}",
        are_newest=are_newest,
        has_texts=bool(report.texts),
        refused=_refused(report),
        faults=tuple(faults(report)),
        config=tuple(flat_text(record.config))[:MAX_KEYS],
        terms=TERMS,
    )


def now_view(report: RunReport, now: float) -> NowView:
    """Return the view of a run at a moment, in seconds since the epoch."""
    activity, record = report.activity or Activity(), report.record
    cluster = record.plan.get("cluster", {})
    num_workers = int(cluster.get("num_nodes", 0)) * int(cluster.get("devices_per_node", 0))
    doing: dict[int, OngoingWork] = {}
    for work in sorted(activity.work, key=lambda work: work.lane != DEVICE):
        for worker in work.workers:
            doing.setdefault(worker, work)
    num_hidden = max(0, num_workers - MAX_LANES)
    num_steps = int(record.config["steps"]) - record.steps
    return NowView(
        line=" ".join(f"{line}." for line in _now_sentences(activity, num_steps, now)),
        samples=tuple(
            (stream, f"{done:,} of {wanted:,}", round(100 * done / max(1, wanted), 1))
            for stream, (done, wanted) in activity.samples.items()
        ),
        devices=tuple(
            _device_row(worker, doing.get(worker), now) for worker in range(num_workers)[:MAX_LANES]
        ),
        note=f"{pluralize(num_hidden, 'more worker')} not shown." if num_hidden else "",
    )


def _now_sentences(activity: Activity, num_steps: int, now: float) -> Iterator[str]:
    if activity.phase is not None:
        phase, start = activity.phase
        is_node = any(work.lane == DEVICE for work in activity.work)
        yield f"{phase if is_node else phase[0].upper() + phase[1:]}: {_elapsed(start, now)}"
    if activity.step_start is not None:
        yield f"The step has taken {_elapsed(activity.step_start, now)} so far"
    if activity.seconds_per_step:
        yield f"About {_elapsed(now, now + activity.seconds_left(num_steps, now))} left"


def _device_row(worker: int, work: OngoingWork | None, now: float) -> tuple[str, str, str]:
    if work is None:
        return f"worker {worker}", "idle", ""
    return f"worker {worker}", f"{work.name}, step {work.step}", _elapsed(work.start, now)


def _elapsed(start: float, now: float) -> str:
    """Format a time that passes: in whole seconds or minutes, as the page is drawn every few seconds."""
    seconds = max(0, round(now - start))
    return f"{seconds} s" if seconds < 100 else f"{seconds // 60} min {seconds % 60} s"


def story(report: RunReport) -> Iterator[str]:
    """Yield sentences on what the run reached."""
    for name in report.record.results:
        curve = report.record.curves[name]
        first, last = ends_of(curve)
        lacks = f"; {missing}" if (missing := _missing(report, name)) else ""
        if len(curve) > 1:
            yield f"{name} went from {format_number(first)} to {format_number(last)}{lacks}."
        elif lacks:
            yield f"{name} is {format_number(last)}{lacks}."
    for row in report.ledger.rewinds if report.ledger else ():
        if not row.steps_lost:
            yield (
                f"It was resumed after step {row.step}." if row.step else "It began again: nothing was saved."
            )
    if report.ledger:
        ends = ", ".join(f"{count:,} {end}" for end, count in report.ledger.ends.items())
        yield f"Samples: {ends}."
    if report.checkpoints:
        yield f"Checkpoints after {', '.join(map(str, report.checkpoints))} steps."


def _missing(report: RunReport, name: str) -> str:
    """Return a note on the last value of an evaluation's metric; empty if it lacks nothing."""
    curves, stream = report.record.curves, name.partition("/")[0]
    counts = [curves.get(f"{stream}/{kind}", ((0, 0.0),))[-1][1] for kind in ("refused", "evaluated")]
    return format_missing(int(counts[0]), int(sum(counts))) if counts[0] else ""


def faults(report: RunReport) -> Iterator[str]:
    """Yield what went wrong: steps that were done again, restarts and warnings."""
    for row in report.ledger.rewinds if report.ledger else ():
        if row.steps_lost:
            where = f"the checkpoint of step {row.step}" if row.step else "its beginning"
            yield f"The run went back to {where}; {pluralize(row.steps_lost, 'step')} done again."
    for span in report.trace.spans:
        if span.lane == "faults":
            yield f"Workers were started again in {format_seconds(span.end - span.start)} ({span.name})."
    warnings = report.activity.warnings if report.activity else ()
    for warning in (report.record.summary or {}).get("warnings", warnings):
        yield str(warning)


def flat_text(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of a configuration, without keys that are not set."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat_text(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


def _tiles(report: RunReport) -> Iterator[Tile]:
    record, curves = report.record, report.record.curves
    yield Tile("Steps", f"{record.steps:,}", f"of {record.config['steps']:,}")
    for name in [name for name in record.results if not name.endswith("/loss")][:2]:
        first, last = ends_of(curves[name])
        lacks = _missing(report, name)
        note = f"from {format_number(first)}; means of a tenth of the run"
        yield Tile(name, format_number(last), f"{note}; {lacks}" if lacks else note)
    if STEP_SECONDS in curves:
        values = [value for _, value in curves[STEP_SECONDS]]
        planned = planned_seconds(report)
        note = f"median; planned {format_seconds(planned)}" if planned else "median"
        yield Tile("A step", format_seconds(statistics.median(values)), note)
    if SAMPLES in curves:
        values = [value for _, value in curves[SAMPLES]]
        yield Tile("Throughput", f"{format_count(statistics.median(values))} samples/s", "median")
    if STALENESS in curves:
        mean = statistics.fmean(value for _, value in curves[STALENESS])
        most = max(value for _, value in curves.get(MAX_STALENESS, curves[STALENESS]))
        yield Tile("Staleness", f"{mean:.2g}", f"versions on average, {most:g} at most")


def planned_seconds(report: RunReport) -> float | None:
    """Return the period that the plan estimated."""
    try:
        return float(report.record.plan["forecast"]["period"]["seconds"])
    except (LookupError, TypeError, ValueError):
        return None


def _refused(report: RunReport) -> TableView | None:
    rows = report.ledger.refused if report.ledger else ()
    if not rows:
        return None
    return TableView(
        "Refused and dropped samples",
        ("reason", "samples", "what", "node", "an error"),
        tuple((row.reason, f"{row.count:,}", row.kind, row.node, row.message) for row in rows),
        right=(1,),
    )


COLOURED = ("reward", "advantage", "log-prob", "version", "lag")
"""What samples can be coloured by; log-prob and version also colour single tokens."""
ADVANTAGES = ("advantages", "advantage")


def sample_views(report: RunReport) -> Iterator[SampleView]:
    """Yield the samples of the page."""
    for row in report.ledger.samples if report.ledger else ():
        texts = report.texts.get((row["stream"], row["id"]), ())
        values = dict(texts[0]["values"]) if texts else {}
        advantage = next((values[name] for name in ADVANTAGES if name in values), None)
        parts = tuple(part for text in texts for part in _text_parts(text))
        logprobs = [logprob for part in parts for _, logprob, _ in part.tokens]
        oldest, newest = row["oldest"], row["newest"]
        versions = "" if oldest is None else f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        why = ", ".join(str(row[key]) for key in ("reason", "node", "message") if row[key])
        yield SampleView(
            name=f"{row['stream']}/{row['id']}",
            stream=row["stream"],
            step="" if row["step"] is None else str(row["step"]),
            end=row["end"] or ("in flight" if row["finished_at"] is None else "finished"),
            why=why if row["end"] != "trained" else "",
            reward="" if row["reward"] is None else format_number(row["reward"]),
            versions=versions,
            lag="" if row["lag"] is None else str(row["lag"]),
            tokens="" if row["tokens"] is None else f"{row['tokens']:,}",
            numbers={
                "reward": row["reward"],
                "advantage": advantage,
                "log-prob": statistics.fmean(logprobs) if logprobs else None,
                "version": row["newest"],
                "lag": row["lag"],
            },
            texts=parts,
            others=() if advantage is None else (("advantage", format_number(advantage)),),
        )


def _text_parts(row: Mapping[str, Any]) -> Iterator[TextPart]:
    for turn in row["turns"]:
        tokens = tuple((str(text), logprob, version) for text, logprob, version in turn.get("tokens", ()))
        images = tuple(url for url in map(str, turn.get("images", ())) if url.startswith("data:image/"))
        yield TextPart(str(turn["role"]), str(turn["text"]), bool(turn["trained"]), tokens, images)
