"""Schedules of well-known recipes, and `Script`, which runs them in order and records a short trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledNode, ScheduledStream
from hflow.runtime import events as ev
from hflow.runtime.state.invariants import check_invariants
from hflow.runtime.state.run_state import RunState

ENGINE = "actor@gen"


def sample(name: str, *needs: str, keep: bool = False, stream: str = "gen") -> ScheduledNode:
    return ScheduledNode(name, Level.SAMPLE, stream, needs, keep=keep)


def group(name: str, *needs: str, keep: bool = False, stream: str = "gen") -> ScheduledNode:
    return ScheduledNode(name, Level.GROUP, stream, needs, keep=keep)


def arriving(name: str, on: str, *needs: str, level: Level = Level.GROUP) -> ScheduledNode:
    """A model that runs as samples or groups arrive on devices, as in `batch`."""
    return ScheduledNode(name, level, "gen", needs, split(on))


def batch(name: str, on: str | None, *needs: str, stream: str = "gen", **more: Any) -> ScheduledNode:
    """A batch node on a device group, or on several, as in `a+b`."""
    return ScheduledNode(name, Level.BATCH, stream, needs, split(on), **more)


def split(groups: str | None) -> tuple[str, ...]:
    return tuple(groups.split("+")) if groups else ()


def generated(size: int = 2, num_groups: int = 2, min_group: int = 1) -> ScheduledStream:
    return ScheduledStream("gen", "gen", size, num_groups, (ENGINE,), ("actor",), min_group)


def encoded(num_groups: int = 2) -> ScheduledStream:
    return ScheduledStream("gen", "gen", 1, num_groups, (), ())


def schedule(
    streams: list[ScheduledStream], nodes: list[ScheduledNode], *, shared: str = "", **more: int
) -> Schedule:
    """Return a schedule whose node orders are those of `nodes`; the engines share the groups `shared`."""
    orders = orders_of([node for node in nodes if node.level is Level.BATCH])
    engines = tuple(dict.fromkeys(r for stream in streams for r in stream.replicas))
    separate = publishers(() if shared else engines, nodes)
    rows = tuple(streams), tuple(nodes), orders, tuple((name, engines) for name in split(shared))
    plain = Schedule(*rows, num_steps=2, publishers=separate, settings=ScheduleConfig(max_concurrent=64))
    return changed(plain, **more)


def orders_of(nodes: list[ScheduledNode]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the batch nodes of each group, in their order in the list."""
    groups = dict.fromkeys(name for node in nodes for name in node.groups)
    return tuple((name, tuple(node.name for node in nodes if name in node.groups)) for name in groups)


def changed(schedule: Schedule, **changes: Any) -> Schedule:
    """Return a schedule with other values of its fields or of its settings."""
    names = {field.name for field in fields(ScheduleConfig)}
    settings = replace(schedule.settings, **{name: changes[name] for name in names & changes.keys()})
    return replace(schedule, settings=settings, **{k: v for k, v in changes.items() if k not in names})


def publishers(
    engines: Iterable[str], nodes: Iterable[ScheduledNode]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return separate engines `MODEL@...` with the groups of the node that writes their model, if any."""
    trainers = {model: node.groups or (node.name,) for node in nodes for model in node.writes}
    models = {engine: engine.partition("@")[0] for engine in engines}
    return tuple((engine, trainers[model]) for engine, model in models.items() if model in trainers)


def grpo(*, shared: bool, **more: int) -> Schedule:
    nodes = [
        sample("score", "gen"),
        group("advantage", "score"),
        batch("ref", "train", reads=("ref",)),
        batch("actor_train", "train", "ref", writes=("actor",)),
    ]
    return schedule([generated()], nodes, shared="train" if shared else "", **more)


def spell(what: ev.Instruction) -> str:
    """Return an instruction in a few words."""
    match what:
        case ev.OpenGroup(stream, number):
            return f"open {stream} {number}"
        case ev.RunSample(node, key) | ev.RunGroup(node, key) | ev.RunBatch(node, key):
            return f"{node} {key}"
        case ev.RunStreamingInference(node, _, keys):
            return f"{node} on {' '.join(map(str, keys))}"
        case ev.Refuse(_, _, samples, node, reason):
            return f"refuse {' '.join(map(str, samples))} {node} {reason}"
        case ev.FormBatch(stream, step, _, groups):
            return f"form {stream} {step}: {' '.join(map(str, groups))}"
        case ev.Publish(replica, version):
            return f"publish {replica} {version}"
        case ev.Wake(replica, version):
            return f"wake {replica} {version}"
        case ev.Sleep(replica, _):
            return f"sleep {replica}"
        case ev.StepDone(step):
            return f"step {step}"
        case ev.TakeCheckpoint(snapshot):
            return f"checkpoint {snapshot.steps}"
        case ev.Finish(reason):
            return reason
    raise AssertionError(what)


class Script:
    """Completes instructions in order, except those that `hold` names, which wait for `release`."""

    def __init__(self, schedule: Schedule, rows: dict[str, int] | None = None, hold: set[str] | None = None):
        self.state = RunState(schedule)
        self.streams = {stream.name: stream for stream in schedule.streams}
        self.rows = rows or {}
        self.hold = hold or set()
        self.held: dict[str, ev.Event] = {}
        self.version = 0
        self.first = dict.fromkeys(self.streams, 0)
        self.next = dict.fromkeys(self.streams, 0)
        self.todo: deque[ev.Event] = deque()
        self.trace: list[str] = []
        self.sleep_levels: list[str] = []
        self.oldest: dict[int, int] = {}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.accepted: dict[str, tuple[int, ...]] = dict.fromkeys(self.streams, ())

    def run(self) -> list[str]:
        """Run to the end and return the trace."""
        self.send(ev.Started())
        return self.trace

    def send(self, event: ev.Event) -> list[str]:
        """Send an event and everything that follows from it; return the new part of the trace."""
        start = len(self.trace)
        self.todo.append(event)
        while self.todo:
            for instruction in self.state.handle(self.todo.popleft()):
                if isinstance(instruction, ev.Accept):
                    self.accepted[instruction.stream] += instruction.samples
                    continue
                self.trace.append(spell(instruction))
                if isinstance(instruction, ev.Sleep):
                    self.sleep_levels.append(instruction.level.name)
                for answer in self._answers(instruction):
                    self._queue(spell(instruction), answer)
            if self.state.finished is None:
                check_invariants(self.state)
        return self.trace[start:]

    def release(self, what: str) -> list[str]:
        """Complete an instruction that was held."""
        return self.send(self.held.pop(what))

    def _queue(self, name: str, event: ev.Event) -> None:
        if isinstance(event, ev.SampleDone):
            name = f"{event.stream}#{event.sample}"
        if name in self.hold or name.split()[0] in self.hold:
            self.held[name] = event
        else:
            self.todo.append(event)

    def _answers(self, what: ev.Instruction) -> list[ev.Event]:
        match what:
            case ev.OpenGroup(stream, number, samples):
                self.next[stream] = number + 1
                if number - self.first[stream] >= self.rows.get(stream, 10**6):
                    return [ev.Exhausted(stream, number)]
                oldest = self.version if self.streams[stream].replicas else -1
                if self.streams[stream].batch is not None:
                    self.oldest |= dict.fromkeys(samples, oldest)
                return [ev.SampleDone(stream, key, oldest) for key in samples]
            case ev.FormBatch(stream, step, samples):
                if self.streams[stream].batch is None:
                    self.first[stream] = self.next[stream]
                else:
                    self.batches[step] = samples
                return []
            case ev.RunSample(node, key) | ev.RunGroup(node, key) | ev.RunBatch(node, key):
                return [ev.NodeDone(node, key)]
            case ev.RunStreamingInference(node, _, keys):
                return [ev.NodeDone(node, key) for key in keys]
            case ev.Publish(replica, version):
                return [ev.Published(replica, version)]
            case ev.Wake(replica, version):
                self.version = version
                return [ev.Awake(replica, version)]
            case ev.Sleep(replica, _):
                return [ev.Asleep(replica)]
        return []
