"""`World` takes the place of the executor: it collects instructions and completes them in a random order.

It keeps its own account of engines, versions and samples, and asserts what every run guarantees.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledNode
from hflow.planner.plan.schedule import streaming_queues
from hflow.planner.plan.staleness import staleness_bound
from hflow.runtime import events as ev
from hflow.runtime.state.invariants import check_invariants
from hflow.runtime.state.rules import evaluation_due, node_fires
from hflow.runtime.state.run_state import RunState
from hflow.runtime.state.snapshot import RunSnapshot
from hflow.runtime.state.weight_updates import can_lose
from hflow.types.engine import SleepLevel


@dataclass
class Generating:
    """A sample that is generated, token by token."""

    stream: str
    sample: int
    ticks: int
    oldest: int = -1
    newest: int = -1
    aborted: bool = False


class EventsExhaustedError(AssertionError):
    """A run has not ended after the given number of events."""


@dataclass(frozen=True)
class Checkpoint:
    """A snapshot, the versions of tokens that were drawn then, and the world's account of the run."""

    snapshot: RunSnapshot
    journals: dict[tuple[str, int], tuple[int, int]]
    account: dict[str, Any]


ACCOUNT = (
    *("opened", "base", "oldest", "ends", "batches", "accepted", "fired", "done"),
    *("num_fired", "steps_done", "refused", "rowless", "lags"),
)
"""Attributes of a world that belong to a checkpoint."""


@lru_cache(maxsize=1 << 16)
def chance(name: str, key: int, salt: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    return Random(f"{name}/{key}/{salt}").random()


class World:
    """Performs instructions in an order that `random` chooses, until `Finish`.

    Args:
        schedule: the schedule.
        random: chooses what is completed next.
        rows: groups in each stream's dataset; a stream that is not named has an endless one.
        refusal: probability that a node refuses a sample or group.
        stop_after: events after which the user asks to stop.
        salt: seed of refusals, lengths and stalls.
        stall: probability that an instruction is completed after all others.
        checkpoints: probability that the run is asked for a checkpoint, after each event.
        losses: probability that an engine with devices of its own is lost, after each event.
        saved: the checkpoint of another world, from which this one continues.
    """

    def __init__(
        self,
        schedule: Schedule,
        random: Random,
        rows: dict[str, int],
        refusal: float = 0.0,
        stop_after: int | None = None,
        salt: int = 0,
        stall: float = 0.0,
        checkpoints: float = 0.0,
        losses: float = 0.0,
        saved: Checkpoint | None = None,
    ) -> None:
        self.schedule, self.random, self.rows = schedule, random, rows
        self.refusal, self.stop_after, self.salt = refusal, stop_after, salt
        self.stall, self.checkpoints, self.losses = stall, checkpoints, losses
        self.state = RunState(schedule, saved.snapshot if saved else None)
        self.nodes = {node.name: node for node in schedule.nodes}
        self.streams = {stream.name: stream for stream in schedule.streams}
        self.trained = schedule.streams[0]
        self.devices_of: dict[str, set[str]] = defaultdict(set)
        for device, replicas in schedule.shared:
            for replica in replicas:
                self.devices_of[replica].add(device)
        self.models_of: dict[str, set[str]] = defaultdict(set)
        for stream in schedule.streams:
            for replica in stream.replicas:
                self.models_of[replica] |= set(stream.models)
        self.writers = {
            m: [n for n in schedule.nodes if m in n.writes] for n in schedule.nodes for m in n.writes
        }
        self.bag: list[ev.Event | Generating] = []
        self.trace: list[ev.Instruction] = []
        self.engine = dict.fromkeys((*self.models_of, *self.devices_of), "asleep")
        self.version = dict.fromkeys(self.engine, -1)
        self.waking: dict[str, int] = {}
        self.level: dict[str, SleepLevel] = {}
        self.separate = dict(schedule.publishers)
        self.published: dict[str, int] = {}
        self.given = dict.fromkeys(self.separate, -1)
        self.newest_given = dict.fromkeys(self.separate, -1)
        self.opened: dict[str, list[int]] = {s: [] for s in self.streams}
        self.base: dict[str, int] = dict.fromkeys(self.streams, 0)
        self.oldest: dict[tuple[str, int], tuple[int, int]] = {}
        self.ends: Counter[tuple[str, int]] = Counter()
        self.batches: dict[str, dict[int, ev.FormBatch]] = {s: {} for s in self.streams}
        self.accepted: dict[str, set[int]] = {s: set() for s in self.streams}
        self.fired: set[tuple[str, int]] = set()
        self.done: set[tuple[str, int]] = set()
        self.running: dict[str, str] = {}
        self.in_streaming: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.queue_of = {n.name: queue for queue, nodes in streaming_queues(schedule) for n in nodes}
        self.num_fired: Counter[str] = Counter()
        self.in_flight: set[tuple[str, int]] = set()
        self.steps_done: list[int] = []
        self.refused: set[tuple[str, int]] = set()
        self.rowless: set[tuple[str, int]] = set()
        self.lags: Counter[int] = Counter()
        self.finish: ev.Finish | None = None
        self.survivors: dict[str, int] = {}
        """Replica that is lost -> version of its engines that are not."""
        self.saved: Checkpoint | None = saved
        self.journals: dict[tuple[str, int], tuple[int, int]] = {}
        if saved:
            self._continue(saved)

    def _continue(self, saved: Checkpoint) -> None:
        """Take over the account of the world that made a checkpoint."""
        for name, value in copy.deepcopy(saved.account).items():
            setattr(self, name, value)
        self.journals = dict(saved.journals)
        for name, evaluation in saved.snapshot.evaluations:
            self.base[name] = evaluation.first_group
            # One whose batch nodes had not run is evaluated again.
            self.batches[name] = {v: b for v, b in self.batches[name].items() if v in evaluation.formed}
            again = {n.name for n in self.schedule.nodes if n.level is Level.BATCH and n.stream == name}
            for account in (self.fired, self.done):
                account -= {(n, v) for n, v in account if n in again and v >= saved.snapshot.steps}
            if evaluation.active is None:
                self._forget_rowless(name, evaluation.first_group)
        for stream in saved.snapshot.streams:
            nodes = [
                n for n in self.schedule.nodes if n.stream == stream.stream and n.level is not Level.BATCH
            ]
            for group in stream.groups:
                for node in nodes:
                    keys = {m.sample: m.done for m in group.members}
                    if node.level is Level.GROUP:
                        keys = {group.number: group.done}
                    self.fired -= {(node.name, key) for key, done in keys.items() if node.name not in done}

    def _do_TakeCheckpoint(self, what: ev.TakeCheckpoint) -> None:
        snapshot = what.snapshot
        trained = {
            n.name for n in self.schedule.nodes if n.level is Level.BATCH and n.stream == self.trained.name
        }
        assert max((step for name, step in self.fired if name in trained), default=-1) < snapshot.steps
        assert snapshot.steps == len(self.batches[self.trained.name])
        assert not any(self.nodes[name].stream == self.trained.name for name in self.running.values())
        for node in self.schedule.nodes:
            if node.saves and self.finish is None and not self.state.is_ending:
                assert (node.name, snapshot.steps - 1) in self.done, "a model is not saved"
        for stream in snapshot.streams:
            for sample in (*stream.finished, *stream.unfinished):
                assert self.ends[stream.stream, sample] == 0, "a sample is saved that is not in the run"
        held = {(s.stream, sample) for s in snapshot.streams for sample in (*s.finished, *s.unfinished)}
        size = self.trained.group_size
        known = {
            (self.trained.name, s)
            for g in self.opened[self.trained.name]
            for s in range(g * size, g * size + size)
        }
        lost = {key for key in known - held - self.rowless if self.ends[key] == 0}
        assert not lost, f"{lost} are not in the checkpoint"
        journals = {
            (entry.stream, entry.sample): (entry.oldest, entry.newest)
            for entry in self.bag
            if isinstance(entry, Generating) and not entry.aborted and entry.oldest >= 0
        }
        account = copy.deepcopy({name: getattr(self, name) for name in ACCOUNT})
        self.saved = Checkpoint(snapshot, journals, account)

    def run(self, max_events: int = 20_000) -> ev.Finish:
        """Run to the end."""
        self.feed(ev.Started())
        for count in range(max_events):
            if self.finish is not None:
                return self.finish
            if count == self.stop_after:
                self.feed(ev.StopRequested())
                continue
            if self.checkpoints and self.random.random() < self.checkpoints:
                self.feed(ev.CheckpointDue())
                if self.finish is not None:
                    continue
            if self.losses and self.random.random() < self.losses:
                self.lose_engine()
                if self.finish is not None:
                    continue
            ready = [i for i, entry in enumerate(self.bag) if self.can_move(entry)]
            assert ready, f"deadlock: {self.bag}, {self.engine}"
            going = [i for i in ready if not self._is_stalled(self.bag[i])]
            self.move(self.random.choice(going or ready))
        raise EventsExhaustedError

    def feed(self, event: ev.Event) -> None:
        for instruction in self.state.handle(event):
            assert self.finish is None, f"{instruction} after the end"
            self.trace.append(instruction)
            self.on_instruction(instruction)
            getattr(self, f"_do_{type(instruction).__name__}")(instruction)
        if self.finish is None:
            check_invariants(self.state)
        flying = len(self.in_flight)
        assert flying <= self.state.admission.max_samples
        assert flying <= max(
            self.schedule.settings.max_concurrent, sum(s.group_size for s in self.schedule.streams)
        )

    def on_instruction(self, instruction: ev.Instruction) -> None:
        """Called before an instruction is performed."""

    def lose_engine(self) -> None:
        """Lose an engine that may be lost: its samples begin again, or continue from their journals.

        If it is one of several of its replica, the others generate on, but take no new weights.
        """
        engines = self.state.parts.engines
        names = [name for name, engine in engines.items() if can_lose(engine, self.state.parts)]
        if not names:
            return
        name = self.random.choice(names)
        answers = ev.Awake | ev.Asleep | ev.Published
        self.bag = [e for e in self.bag if not (isinstance(e, answers) and e.replica == name)]
        self.published.pop(name, None)
        if name in self.given:
            self.given[name] = -1
        if self.engine[name] in ("awake", "sleeping") and self.random.random() < 0.5:
            self.survivors[name] = self.version[name]
        self.engine[name], self.version[name] = "lost", -1
        self.waking.pop(name, None)
        for entry in self.bag:
            if not isinstance(entry, Generating) or self._is_on_survivor(entry, name):
                continue
            if name in self.streams[entry.stream].replicas:
                entry.ticks = max(entry.ticks, 1)
                if not self.schedule.settings.interrupt or self.random.random() < 0.5:
                    entry.oldest = entry.newest = -1
        self.bag.append(ev.EngineBack(name))
        self.feed(ev.EngineLost(name))

    # ---------------------------------------------------------------- completions
    def can_move(self, entry: ev.Event | Generating) -> bool:
        if isinstance(entry, ev.EngineBack) and not self.schedule.settings.interrupt:
            return not any(
                isinstance(other, Generating) and not other.aborted and self._is_on_survivor(other, replica)
                for other in self.bag
                for replica in self.streams[getattr(other, "stream", self.trained.name)].replicas
                if replica == entry.replica
            )
        if not isinstance(entry, Generating) or entry.aborted:
            return True
        replicas = self.streams[entry.stream].replicas
        return all(
            self.engine[replica] in ("awake", "sleeping") or self._is_on_survivor(entry, replica)
            for replica in replicas
        )

    def _is_on_survivor(self, entry: Generating, replica: str) -> bool:
        """Return whether a sample of a lost replica is on one of its engines that still generates."""
        return replica in self.survivors and entry.sample % 2 == 1

    def _is_stalled(self, entry: ev.Event | Generating) -> bool:
        if not self.stall:
            return False
        if isinstance(entry, Generating):
            return chance(f"stall {entry.stream}", entry.sample, self.salt) < self.stall
        return chance(f"stall {entry}", 0, self.salt) < self.stall

    def move(self, index: int) -> None:
        entry = self.bag[index]
        if isinstance(entry, Generating):
            self._tick(entry)
            if entry.ticks > 0:
                return
        self.bag[index] = self.bag[-1]
        self.bag.pop()
        match entry:
            case Generating():
                self._finish_sample(entry)
            case ev.Awake(replica, version):
                self.engine[replica], self.version[replica] = "awake", version
                self.waking.pop(replica, None)
                self.feed(entry)
            case ev.Published(replica, version):
                self.published[replica] = version
                self.feed(entry)
            case ev.Asleep(replica):
                self.engine[replica] = "asleep"
                self.feed(entry)
            case ev.EngineBack(replica):
                self.survivors.pop(replica, None)
                self.engine[replica] = "asleep"
                self.feed(entry)
            case ev.Exhausted(stream, group):
                size = self.streams[stream].group_size
                gone = {(stream, s) for s in range(group * size, (group + 1) * size)}
                self.in_flight -= gone
                self.rowless |= gone
                self.feed(entry)
            case ev.NodeDone(node, key) if self.nodes[node].level is Level.BATCH:
                self.done.add((node, key))
                for group in self.nodes[node].groups or (node,):
                    assert self.running.pop(group) == node
                self.feed(entry)
            case ev.NodeDone(node, key) | ev.NodeFailed(node, key) if node in self.nodes:
                for group in self.nodes[node].groups:
                    self.in_streaming[group].discard((node, key))
                self.feed(entry)
            case _:
                self.feed(entry)

    def _tick(self, entry: Generating) -> None:
        entry.ticks -= 1
        if entry.aborted:
            entry.ticks = 0
            return
        replicas = self.streams[entry.stream].replicas
        if replicas:
            version = min(self.survivors.get(replica, self.version[replica]) for replica in replicas)
            entry.oldest = version if entry.oldest < 0 else min(entry.oldest, version)
            entry.newest = max(entry.newest, version)

    def _finish_sample(self, entry: Generating) -> None:
        self.in_flight.remove((entry.stream, entry.sample))
        source = self.streams[entry.stream].source
        if entry.aborted or chance(source, entry.sample, self.salt) < self.refusal / 2:
            self.feed(ev.NodeFailed(source, entry.sample, ev.Refusal.FAILED))
        else:
            self.oldest[entry.stream, entry.sample] = (entry.oldest, entry.newest)
            self.feed(ev.SampleDone(entry.stream, entry.sample, entry.oldest))

    def _complete(self, node: str, key: int) -> None:
        unlucky = chance(node, key, self.salt) < self.refusal
        if unlucky and not self.nodes[node].keep:
            self.bag.append(ev.NodeFailed(node, key, ev.Refusal.TIMEOUT))
        else:
            self.bag.append(ev.NodeDone(node, key, keep=not unlucky))

    # ---------------------------------------------------------------- instructions
    def _do_OpenGroup(self, what: ev.OpenGroup) -> None:
        assert not self.state.is_ending
        stream = self.streams[what.stream]
        size = stream.group_size
        if what.is_continued:
            self._continue_group(what)
            return
        assert what.group == len(self.opened[what.stream]), "ids are consecutive"
        assert what.samples == tuple(range(what.group * size, (what.group + 1) * size))
        assert all(self.engine[replica] == "awake" for replica in stream.replicas)
        self.opened[what.stream].append(what.group)
        if stream is self.trained:
            self._check_capacity()
        self.in_flight |= {(what.stream, sample) for sample in what.samples}
        row = what.group - self.base[what.stream]
        if row >= self.rows.get(what.stream, 10**9):
            self.bag.append(ev.Exhausted(what.stream, what.group))
            return
        for sample in what.samples:
            ticks = 1 + int(chance("ticks", sample, self.salt) * 3)
            self.bag.append(Generating(what.stream, sample, ticks))

    def _continue_group(self, what: ev.OpenGroup) -> None:
        """Generate on with the tokens of a checkpoint; some of them are lost."""
        assert what.group in self.opened[what.stream]
        self.in_flight |= {(what.stream, sample) for sample in what.samples}
        if what.group - self.base[what.stream] >= self.rows.get(what.stream, 10**9):
            self.bag.append(ev.Exhausted(what.stream, what.group))
            return
        for sample in what.samples:
            assert self.ends[what.stream, sample] == 0
            oldest, newest = self.journals.get((what.stream, sample), (-1, -1))
            if not self.schedule.settings.interrupt or chance("lost", sample, self.salt) < 0.3:
                oldest = newest = -1
            self.bag.append(Generating(what.stream, sample, 1 + sample % 2, oldest, newest))

    def _check_capacity(self) -> None:
        """Check the admission limit, from the groups that were opened and refused."""
        if not self.changes(self.trained.models) or not self.trained.replicas:
            return
        size, rules = self.trained.group_size, self.schedule
        members = Counter(s // size for name, s in self.refused if name == self.trained.name)
        lost = sum(count == size for count in members.values())
        syncs = min(self.version[replica] for replica in self.trained.replicas) // rules.settings.sync_every
        limit = int(
            (rules.settings.max_staleness + syncs + 1) * rules.settings.sync_every * (self.trained.batch or 1)
        )
        assert len(self.opened[self.trained.name]) - lost <= limit

    def _do_RunSample(self, what: ev.RunSample) -> None:
        self._fire(what.node, what.sample)
        self._complete(what.node, what.sample)

    def _do_RunGroup(self, what: ev.RunGroup) -> None:
        assert list(what.samples) == sorted(what.samples)
        assert all(self.ends[self.nodes[what.node].stream, sample] == 0 for sample in what.samples)
        self._fire(what.node, what.group)
        self._complete(what.node, what.group)

    def _do_RunStreamingInference(self, what: ev.RunStreamingInference) -> None:
        node = self.nodes[what.node]
        assert node.groups
        for group in node.groups:
            assert not self.in_streaming[group], f"{group} is on {self.in_streaming[group]}"
            self.in_streaming[group] = {(what.node, key) for key in what.keys}
        queue = self.queue_of[what.node]
        assert what.number == self.num_fired[queue]
        self.num_fired[queue] += 1
        size = self.streams[node.stream].group_size
        named = [s if node.level is Level.SAMPLE else s // size for s in what.samples]
        assert tuple(dict.fromkeys(named)) == what.keys
        for sample in what.samples:
            assert self.ends[node.stream, sample] == 0, "a model works on what was refused"
        for key in what.keys:
            self._fire(what.node, key)
            self._complete(what.node, key)

    def _fire(self, node: str, key: int) -> None:
        assert not self.state.is_ending
        assert (node, key) not in self.fired, f"{node} fires twice for {key}"
        self.fired.add((node, key))

    def _do_Refuse(self, what: ev.Refuse) -> None:
        assert what.samples
        for sample in what.samples:
            assert sample // self.streams[what.stream].group_size == what.group
            self.ends[what.stream, sample] += 1
            self.refused.add((what.stream, sample))
        for entry in self.bag:
            if isinstance(entry, Generating) and entry.stream == what.stream and entry.sample in what.samples:
                entry.aborted = True

    def _do_Accept(self, what: ev.Accept) -> None:
        assert not self.state.is_ending
        assert all(self.ends[what.stream, sample] == 0 for sample in what.samples)
        self.accepted[what.stream] |= set(what.samples)

    def _do_FormBatch(self, what: ev.FormBatch) -> None:
        assert not self.state.is_ending
        stream = self.streams[what.stream]
        assert list(what.samples) == sorted(set(what.samples))
        assert list(what.groups) == sorted(set(what.groups))
        members = Counter(sample // stream.group_size for sample in what.samples)
        assert set(members) == set(what.groups)
        assert all(num >= stream.min_group for num in members.values())
        assert self.accepted[what.stream].issuperset(what.samples)
        for sample in what.samples:
            self.ends[what.stream, sample] += 1
        batches = self.batches[what.stream]
        assert what.step not in batches
        if stream is self.trained:
            assert what.step == len(batches) < self.schedule.num_steps
            assert len(what.groups) == stream.batch
            self._check_lags(what)
        else:
            end = self.base[what.stream] + self.rows.get(what.stream, 10**9)
            self._forget_rowless(what.stream, end)
            self.base[what.stream] = len(self.opened[what.stream])
            num_steps = self.state.parts.progress.num_steps
            assert evaluation_due(stream, what.step, num_steps)
            if self.changes(stream.models):
                assert all(self.oldest[what.stream, s] == (what.step, what.step) for s in what.samples)
        batches[what.step] = what

    def _forget_rowless(self, stream: str, end: int) -> None:
        """Forget groups beyond the end of a dataset, whose ids are used again."""
        size = self.streams[stream].group_size
        groups = self.opened[stream][end:]
        self.rowless -= {(stream, s) for g in groups for s in range(g * size, (g + 1) * size)}
        del self.opened[stream][end:]

    def _check_lags(self, what: ev.FormBatch) -> None:
        if not self.changes(self.trained.models) or not self.trained.replicas:
            return
        lag = staleness_bound(self.schedule)
        for sample in what.samples:
            oldest, newest = self.oldest[what.stream, sample]
            assert lag is None or what.step - lag <= oldest
            assert oldest <= newest <= what.step
            if not self.schedule.settings.interrupt:
                assert oldest == newest or len(self.trained.replicas) > 1
            self.lags[what.step - oldest] += 1
            if lag == 0:
                assert oldest == newest == what.step

    def changes(self, models: tuple[str, ...]) -> bool:
        return any(model in self.writers for model in models)

    def _is_at(self, model: str, step: int) -> bool:
        """Whether exactly the writes of the steps before `step` were made."""
        for node in self.writers[model]:
            made = {key for name, key in self.done if name == node.name}
            due = {k for k in range(step) if node_fires(node, k, self.schedule.num_steps)}
            if made != due:
                return False
        return True

    def _do_RunBatch(self, what: ev.RunBatch) -> None:
        node = self.nodes[what.node]
        groups = node.groups or (node.name,)
        self._fire(what.node, what.step)
        for group in groups:
            assert group not in self.running, f"{group} is on {self.running.get(group)}"
        assert what.step in self.batches[node.stream]
        for replica, devices in self.devices_of.items():
            assert devices.isdisjoint(groups) or self.engine[replica] == "asleep"
        for need in node.needs:
            if need in self.nodes and self.nodes[need].level is Level.BATCH:
                assert (need, what.step) in self.done or not self._fires(need, what.step)
        for model in {*node.reads, *node.writes}:
            if model in self.writers:
                assert self._is_at(model, what.step)
        for replica, version in self.waking.items():
            if replica in self.separate:
                continue
            assert version == self.version[replica] or self.models_of[replica].isdisjoint(node.writes)
        self._check_lead(node, what.step)
        self.running |= dict.fromkeys(groups, node.name)
        self.bag.append(ev.NodeDone(what.node, what.step))

    def _check_lead(self, node: ScheduledNode, step: int) -> None:
        """Check that no node changes weights that an engine of the trained stream must get first."""
        every, progress = self.schedule.settings.sync_every, self.state.parts.progress
        if len(self.streams) > 1 or progress.num_formed == progress.num_steps:
            return
        for replica in self.separate:
            if not self.models_of[replica].isdisjoint(node.writes):
                assert step // every <= self.newest_given[replica] // every

    def _fires(self, name: str, step: int) -> bool:
        node = self.nodes[name]
        if node.stream == self.trained.name:
            return node_fires(node, step, self.state.parts.progress.num_steps)
        return step in self.batches[node.stream]

    def _do_Wake(self, what: ev.Wake) -> None:
        assert self.engine[what.replica] == "asleep"
        assert self.running.keys().isdisjoint(self.devices_of.get(what.replica, ()))
        if self.level.get(what.replica) is SleepLevel.DROP_WEIGHTS:
            assert what.version > self.version[what.replica], "weights that were dropped do not come back"
        if what.replica in self.separate:
            assert self.published.pop(what.replica) == what.version, "what was published is loaded, once"
        elif what.version != self.version[what.replica]:
            self._check_taken(what)
        self.engine[what.replica] = "waking"
        self.waking[what.replica] = what.version
        self.bag.append(ev.Awake(what.replica, what.version))

    def _do_Publish(self, what: ev.Publish) -> None:
        assert what.replica in self.separate
        assert self.engine[what.replica] in ("awake", "asleep", "lost"), (
            "the engine has loaded what was published before"
        )
        assert what.replica not in self.published
        assert self.given[what.replica] == self.version[what.replica], (
            "at most one published version is pending"
        )
        self._check_taken(what)
        self.given[what.replica] = self.newest_given[what.replica] = what.version
        self.bag.append(ev.Published(what.replica, what.version))

    def _check_taken(self, what: ev.Publish | ev.Wake) -> None:
        """Check that the weights of this version exist, and that no node changes them."""
        assert what.version > self.version[what.replica]
        changing = {m for name in self.running.values() for m in self.nodes[name].writes}
        for model in self.models_of[what.replica] & self.writers.keys():
            assert self._is_at(model, what.version)
            assert model not in changing

    def _do_Sleep(self, what: ev.Sleep) -> None:
        assert self.engine[what.replica] == "awake"
        for stream in self.schedule.streams[1:]:
            if what.replica in stream.replicas and not self.state.is_ending:
                assert not any(name == stream.name for name, _ in self.in_flight)
        is_stopping = self.state.parts.progress.is_stopping
        if not (self.schedule.settings.interrupt or is_stopping) and what.replica in self.trained.replicas:
            assert not any(name == self.trained.name for name, _ in self.in_flight)
        assert (what.level is SleepLevel.PAUSE) == (what.replica not in self.devices_of)
        self.level[what.replica] = what.level
        self.engine[what.replica] = "sleeping"
        self.bag.append(ev.Asleep(what.replica))

    def _do_StepDone(self, what: ev.StepDone) -> None:
        assert what.step == len(self.steps_done)
        for node in self.schedule.nodes:
            late = node.at_end and self.state.parts.progress.num_steps < self.schedule.num_steps
            if node.level is Level.BATCH and self._fires(node.name, what.step) and not late:
                assert (node.name, what.step) in self.done
        self.steps_done.append(what.step)

    def _do_Finish(self, what: ev.Finish) -> None:
        self.finish = what

    # ---------------------------------------------------------------- at the end
    def ends_of(self, kind: type[ev.Instruction]) -> int:
        """Return the number of instructions of a kind."""
        return sum(isinstance(instruction, kind) for instruction in self.trace)

    def check_end(self) -> None:
        """Check that each sample ended at most once, and that a full run fired every node that is due."""
        assert self.finish is not None
        assert not self.finish.error
        assert max(self.ends.values(), default=0) <= 1
        assert not self.running
        for stream, counts in self.opened.items():
            size = self.streams[stream].group_size
            known = {(stream, s) for group in counts for s in range(group * size, (group + 1) * size)}
            assert {key for key in self.ends if key[0] == stream} <= known
            if self.finish.reason == "done":  # nothing was made for nothing
                assert {key for key in self.ends if key[0] == stream} == known - self._rowless(stream)
        if self.finish.reason == "stopped":
            return
        num_steps = len(self.batches[self.trained.name])
        side = {
            n.name for n in self.schedule.nodes if n.level is Level.BATCH and n.stream != self.trained.name
        }
        assert self.steps_done == list(range(num_steps + bool(side)))
        assert num_steps == self.schedule.num_steps or self.finish.reason == "dataset exhausted"
        for stream in self.schedule.streams[1:]:
            assert num_steps in self.batches[stream.name], "no evaluation at the end"
        self._check_fired(num_steps)

    def _rowless(self, stream: str) -> set[tuple[str, int]]:
        """Return the samples of groups for which the dataset had no row."""
        return {key for key in self.rowless if key[0] == stream}

    def _check_fired(self, num_steps: int) -> None:
        for node in self.schedule.nodes:
            if node.level is not Level.BATCH:
                continue
            steps = {step for name, step in self.fired if name == node.name}
            if node.stream != self.trained.name:
                assert steps == set(self.batches[node.stream]), f"{node.name} fired at {steps}"
            else:
                due = {k for k in range(num_steps) if node_fires(node, k, num_steps)}
                assert steps == due or (node.saves and steps > due), f"{node.name} fired at {steps}"
