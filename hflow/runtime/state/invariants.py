"""What holds after every event. Tests call `check_invariants`; a run does not."""

from __future__ import annotations

from hflow.planner.staleness import age_limit
from hflow.runtime.state.device_state import DeviceOrder, Engine, EngineState
from hflow.runtime.state.groups import Group
from hflow.runtime.state.run_state import RunState
from hflow.runtime.state.staleness import is_stale
from hflow.runtime.state.stream_state import StreamState


def check_invariants(state: RunState) -> None:
    """Recount from the parts what the counters say, and check what must never be.

    Raises:
        AssertionError: something is inconsistent; the text names it.
    """
    data = state.parts
    for stream in data.streams:
        _check_stream(stream)
    _check_rollout(state)
    _check_progress(state)
    for device in data.devices:
        _check_device(device, state)
    for engine in data.engines.values():
        _check_engine(engine, state)
    _check_stations(state)
    flying = sum(stream.num_generating for stream in data.streams)
    assert flying <= state.admission.max_samples, f"{flying} samples in flight"


def _check_stream(stream: StreamState) -> None:
    generating = len(stream.abandoned)
    for number, group in stream.groups.items():
        assert number == group.number < stream.next_group, f"group {number} was not opened"
        assert len(group.members) >= max(1, stream.stream.min_group), f"group {number} is too small"
        _check_group(group, stream)
        generating += sum(member.generating for member in group.members.values())
    assert generating == stream.num_generating, (
        f"{stream.stream.name} counts {stream.num_generating} samples in flight, there are {generating}"
    )


def _check_group(group: Group, stream: StreamState) -> None:
    """The countdowns of a group against what is done."""
    graph = stream.graph
    for name, needs in graph.member_needs.items():
        missing = sum(need not in m.done for need in needs for m in group.members.values())
        assert group.waits[name] >= missing, f"group {group.number} forgot what {name} waits for"
    undone = sum(graph.num_member_tasks - len(member.done) for member in group.members.values())
    assert group.tasks_left > 0, f"group {group.number} is complete and still open"
    assert undone <= group.tasks_left <= undone + len(graph.group_waits), f"group {group.number} miscounts"
    for sample, member in group.members.items():
        assert sample // graph.size == group.number, f"sample {sample} is in group {group.number}"
        assert not member.running & member.done, f"sample {sample} runs a node that is done"


def _check_rollout(state: RunState) -> None:
    schedule, progress, rollout = state.parts.schedule, state.parts.progress, state.parts.rollout
    unbound = rollout.num_accepted - progress.formed * rollout.batch
    assert unbound == len(rollout.queue), f"{len(rollout.queue)} groups queue, {unbound} are counted"
    assert rollout.queue.keys().isdisjoint(rollout.groups), "a group is open and accepted"
    assert rollout.num_admitted <= schedule.num_steps * rollout.batch, "more groups than the run needs"
    assert rollout.bound is None or len(rollout.queue) <= rollout.bound, "more groups queue than may"
    lag = age_limit(schedule)
    if lag is None or not rollout.models:
        return
    for group in (*rollout.queue.values(), *rollout.groups.values()):
        ages = [member.oldest for member in group.members.values()]
        assert not any(is_stale(oldest, progress.formed, lag) for oldest in ages), "a stale sample is kept"


def _check_progress(state: RunState) -> None:
    progress = state.parts.progress
    assert progress.reported <= progress.formed + 1, "a step is reported before its batch"
    assert progress.formed <= progress.num_steps, "more batches than steps"
    for model, version in progress.version.items():
        assert version <= progress.formed, f"{model} is ahead of the batches"
        assert progress.touched[model] <= version, f"{model} is written twice at once"
    at_work = {d.running.name for d in state.parts.devices if d.running is not None}
    assert at_work == progress.running.keys(), f"groups run {at_work}, {progress.running} is recorded"


def _check_device(device: DeviceOrder, state: RunState) -> None:
    if device.in_turn:
        assert device.running is None, f"{device.name} runs a node in the generation turn"
    else:
        up = [e.name for e in device.engines if e.state is not EngineState.ASLEEP]
        assert not up, f"{device.name} is past its turn with {up} up"
    for node in device.nodes[device.position + 1 :]:
        assert state.parts.progress.settled[node.name] < device.cycle, f"{node.name} overtook its order"


def _check_stations(state: RunState) -> None:
    """What waits or runs at a station is what its streams wait for."""
    stations = state.parts.stations
    here = [key for station in stations.all.values() for key in (*station.waiting, *station.running)]
    assert len(here) == len(set(here)), "something is at a station twice"
    awaited = {key for s in state.parts.streams for key in s.awaited() if key[0] in stations.nodes}
    assert awaited == set(here), f"{sorted(awaited ^ set(here))} are awaited or at a station, not both"
    for station in stations.all.values():
        assert station.running or not station.waiting, f"station {station.name} does nothing"


def _check_engine(engine: Engine, state: RunState) -> None:
    assert engine.version <= engine.target, f"{engine.name} has newer weights than it was given"
    assert engine.is_separate or not engine.is_publishing, f"{engine.name} takes its weights itself"
    if engine.is_loading:
        for model in engine.models:
            assert state.parts.progress.version[model] == engine.target, (
                f"{engine.name} is given {model} as version {engine.target}, which it is not"
            )
            assert state.parts.progress.touched[model] < engine.target, (
                f"{engine.name} is given {model} while it changes"
            )
    for evaluation in engine.evaluations:
        if evaluation.active is not None:
            assert engine.state is EngineState.AWAKE, f"{engine.name} sleeps during an evaluation"
            assert not engine.is_publishing, f"{engine.name} is given weights during an evaluation"
            assert not evaluation.models or engine.version == evaluation.active, (
                f"{engine.name} changed weights during an evaluation"
            )
