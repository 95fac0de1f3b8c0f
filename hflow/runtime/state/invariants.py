"""What holds after every event. Tests call `check_invariants`; a run does not."""

from __future__ import annotations

from hflow.runtime.state.device_state import DeviceTurns, EnginePhase, EngineState
from hflow.runtime.state.groups import Group
from hflow.runtime.state.rules import is_stale
from hflow.runtime.state.run_state import RunState
from hflow.runtime.state.stream_state import StreamState


def check_invariants(state: RunState) -> None:
    """Recount what the counters say, and check that nothing impossible is the case.

    Raises:
        AssertionError: when something is inconsistent; the message says what.
    """
    parts = state.parts
    for stream in parts.streams:
        _check_stream(stream, is_ending=state.is_ending)
    _check_trained_stream(state)
    _check_progress(state)
    for device in parts.devices:
        _check_device(device, state)
    for engine in parts.engines.values():
        _check_engine(engine, state)
    _check_streaming(state)
    num_in_flight = sum(stream.num_generating for stream in parts.streams)
    assert num_in_flight <= state.admission.max_samples, f"{num_in_flight} samples in flight"


def _check_stream(stream: StreamState, *, is_ending: bool) -> None:
    num_generating = len(stream.abandoned)
    num_generated = sum(len(group.members) for group in stream._accepted())
    for number, group in stream.groups.items():
        assert number == group.number < stream.next_group, f"group {number} was not opened"
        assert len(group.members) >= max(1, stream.stream.min_group), f"group {number} is too small"
        if not is_ending:
            _check_group(group, stream)
        num_running = sum(member.generating for member in group.members.values())
        num_generating += num_running
        num_generated += len(group.members) - num_running
    assert num_generating == stream.num_generating, (
        f"{stream.stream.name} counts {stream.num_generating} samples in flight, there are {num_generating}"
    )
    assert num_generated == stream.num_generated, (
        f"{stream.stream.name} counts {stream.num_generated} finished samples, there are {num_generated}"
    )


def _check_group(group: Group, stream: StreamState) -> None:
    """Check the countdowns of a group against what is done."""
    dependencies, number = stream.dependencies, group.number
    for name, needs in dependencies.member_needs.items():
        missing = sum(need not in member.done for need in needs for member in group.members.values())
        assert group.countdowns[name] >= missing, f"{name} waits for too little of group {number}"
    undone = sum(dependencies.num_member_tasks - len(member.done) for member in group.members.values())
    assert group.tasks_left > 0, f"group {number} is complete and still open"
    assert undone <= group.tasks_left <= undone + len(dependencies.group_countdowns), (
        f"group {number} counts {group.tasks_left} open tasks, its members have {undone}"
    )
    for sample, member in group.members.items():
        assert sample // dependencies.size == number, f"sample {sample} is in group {number}"
        assert not member.running & member.done, f"sample {sample} runs a node that is done"


def _check_trained_stream(state: RunState) -> None:
    schedule, progress, trained = state.parts.schedule, state.parts.progress, state.parts.trained
    num_queued = trained.num_accepted - progress.num_formed * trained.batch
    assert num_queued == len(trained.queue), f"{len(trained.queue)} groups queue, {num_queued} are counted"
    assert trained.queue.keys().isdisjoint(trained.groups), "a group is open and accepted"
    assert trained.num_admitted <= schedule.num_steps * trained.batch, "more groups than the run needs"
    assert trained.max_queue is None or len(trained.queue) <= trained.max_queue, "the queue is too long"
    lag = trained.age_limit
    if lag is None or not trained.models:
        return
    for group in (*trained.queue.values(), *trained.groups.values()):
        versions = [member.oldest for member in group.members.values()]
        is_fresh = not any(is_stale(oldest, progress.num_formed, lag) for oldest in versions)
        assert is_fresh, f"group {group.number} has a stale sample"


def _check_progress(state: RunState) -> None:
    progress = state.parts.progress
    assert progress.num_reported <= progress.num_formed + 1, "a step is reported before its batch"
    assert progress.num_formed <= progress.num_steps, "more batches than steps"
    for model, version in progress.version.items():
        assert version <= progress.num_formed, f"{model} is ahead of the batches"
        assert progress.last_changed[model] <= version, f"two nodes change {model} at once"
    running = {device.running.name for device in state.parts.devices if device.running is not None}
    assert running == progress.running.keys(), f"devices run {running}, {progress.running} is recorded"
    for name, devices in state.parts.devices_of_node.items():
        on = [device for device in devices if device.running is not None and device.running.name == name]
        assert not on or len(on) == len(devices), f"{name} runs on some of its device groups only"
        assert len({device.cycle for device in on}) < 2, f"{name} runs in two cycles at once"


def _check_device(device: DeviceTurns, state: RunState) -> None:
    if device.in_turn:
        assert device.running is None, f"{device.name} runs a node in the generation turn"
    else:
        awake = [e.name for e in device.engines if e.phase is not EnginePhase.ASLEEP]
        assert not awake, f"{device.name} is past its generation turn, but {awake} are not asleep"
    for node in device.nodes[device.position + 1 :]:
        assert state.parts.progress.last_settled[node.name] < device.cycle, (
            f"{node.name} is settled before its turn in the order of {device.name}"
        )


def _check_streaming(state: RunState) -> None:
    """Check that the queues of streaming replicas hold exactly what the streams count as running."""
    streaming = state.parts.streaming
    replicas = streaming.queues.values()
    queued = [key for replica in replicas for key in (*replica.waiting, *replica.running)]
    assert len(queued) == len(set(queued)), "something is queued twice"
    expected = {key for s in state.parts.streams for key in s.running_nodes() if key[0] in streaming.nodes}
    assert expected == set(queued), f"{sorted(expected ^ set(queued))} are expected or queued, not both"
    for replica in replicas:
        assert replica.running or not replica.waiting, f"{replica.name} is free, but nodes wait for it"


def _check_engine(engine: EngineState, state: RunState) -> None:
    progress = state.parts.progress
    assert engine.version <= engine.target, f"{engine.name} has newer weights than it was given"
    assert engine.is_separate or not engine.is_publishing, (
        f"weights are published for {engine.name}, which takes them from its devices"
    )
    if engine.is_lost:
        assert engine.phase is EnginePhase.ASLEEP, f"{engine.name} is lost, and {engine.phase}"
        assert engine.version == -1, f"{engine.name} is lost, but has weights"
    if engine.is_loading:
        for model in engine.models:
            assert progress.version[model] == engine.target, (
                f"{engine.name} loads {model} as version {engine.target}, which it is not"
            )
            assert progress.last_changed[model] < engine.target, (
                f"{engine.name} loads {model} while it changes"
            )
    for evaluation in engine.evaluations:
        if evaluation.active is not None and not state.is_ending:
            assert engine.phase is EnginePhase.AWAKE, f"{engine.name} sleeps during an evaluation"
            assert not engine.is_publishing, f"{engine.name} is given weights during an evaluation"
            assert not evaluation.models or engine.version == evaluation.active, (
                f"{engine.name} changed weights during an evaluation"
            )
