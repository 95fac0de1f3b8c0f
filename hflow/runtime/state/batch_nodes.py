"""When batch nodes fire: the pointers of device groups, and what a node waits for."""

from __future__ import annotations

from hflow.planner.ir import ScheduledNode
from hflow.runtime.events import RunBatch, StepDone
from hflow.runtime.state.device_state import DeviceOrder, EngineState
from hflow.runtime.state.firing_rules import node_fires, on_beat
from hflow.runtime.state.state_parts import StateParts
from hflow.runtime.state.weight_updates import blocks_writer, publish_weights, turn_is_needed


def fires(node: ScheduledNode, step: int, data: StateParts) -> bool:
    """Whether a batch node fires at a step, as far as that is known now."""
    num_steps = data.progress.num_steps
    evaluation = data.evaluations.get(node.stream)
    if evaluation is None:
        return node_fires(node, step, num_steps) or _is_late(node, step, data)
    return evaluation.happens_at(step) and (step == num_steps or on_beat(step, node.every, node.after))


def _is_late(node: ScheduledNode, step: int, data: StateParts) -> bool:
    """Whether a node that fires at the last step is owed one, as that step was not known to be the last.

    So is the case where the dataset ends early. It fires in the final cycle, when the weights are
    still those that the last step left; nodes that want an exact version cannot be late.
    """
    progress = data.progress
    plain = node.at_end and not node.reads and not node.writes
    return plain and step == progress.num_steps and progress.fired[node.name] < step - 1


def fire_batch_nodes(data: StateParts) -> None:
    """Move every group's pointer as far as it goes and fire what is ready there.

    What devices are asked to do they do in that order, so weights are published first.
    """
    went_on = True
    while went_on:
        settle_batch_nodes(data)
        published = publish_weights(data)
        went_on = published or sum(_fire(device, data) for device in data.devices) > 0


def settle_batch_nodes(data: StateParts) -> None:
    """Pass over what does not happen and report the steps that are complete; fire nothing."""
    for device in data.devices:
        _move(device, data)
    progress = data.progress
    final = progress.formed == progress.num_steps and data.has_side_nodes
    steps = min(progress.formed + final, progress.steps_settled(progress.settled))
    while progress.reported < steps:
        data.emit(StepDone(progress.reported))
        progress.reported += 1


def finish_node(name: str, step: int, data: StateParts) -> None:
    """A batch node reports that it is done for a step."""
    device = next((d for d in data.devices if d.running is not None and d.running.name == name), None)
    assert device is not None, f"{name} does not run"
    data.progress.finish(name, step, device.cycle)
    device.running = None
    device.step_forward()


def _move(device: DeviceOrder, data: StateParts) -> None:
    """Pass over what does not happen at this step, up to a node that fires or a turn that is needed."""
    progress = data.progress
    while device.running is None and device.cycle <= progress.formed:
        if device.in_turn:
            if not _turn_is_over(device, data):
                return
            device.step_forward()
        elif (node := device.next_node) is None:
            device.next_cycle()
        else:
            if fires(node, device.cycle, data) or not _is_passable(node, device.cycle, data):
                return
            progress.pass_over(node.name, device.cycle)
            device.step_forward()


def _turn_is_over(device: DeviceOrder, data: StateParts) -> bool:
    """Whether the group's engines sleep and nothing can ask for them at this step any more."""
    asleep = all(engine.state is EngineState.ASLEEP for engine in device.engines)
    known = not device.engines or _is_known(device.cycle, data)
    return asleep and known and not turn_is_needed(device, data)


def _is_known(step: int, data: StateParts) -> bool:
    """Whether it is certain that a step happens, or that it is the final cycle.

    Until then the dataset may end and make it the final one, in which every side stream is due.
    """
    return step < data.progress.formed or step == data.progress.num_steps


def _is_passable(node: ScheduledNode, step: int, data: StateParts) -> bool:
    """Whether a node that does not fire at a step may be passed over.

    A writer only when it could have fired: that is when its models' version advances, and readers
    of the step and engines that want its weights are served before.
    """
    final = step == data.progress.num_steps
    return _is_known(step, data) and (final or not node.writes or _is_ready(node, step, data))


def _fire(device: DeviceOrder, data: StateParts) -> bool:
    node, step = device.next_node, device.cycle
    if node is None or not fires(node, step, data) or not _is_ready(node, step, data):
        return False
    told = _told_step(node, step, data)
    device.running = node
    data.progress.start(node, told)
    data.emit(RunBatch(node.name, told))
    return True


def _is_ready(node: ScheduledNode, step: int, data: StateParts) -> bool:
    """Whether a node that fires at a step has all that it waits for, its group apart."""
    return (
        _is_formed(node.stream, step, data)
        and all(_is_past(n, _told_step(node, step, data), data) for n in data.batch_needs[node.name])
        and _has_versions(node, step, data)
        and not any(blocks_writer(engine, step, data) for m in node.writes for engine in data.readers_of(m))
    )


def _told_step(node: ScheduledNode, cycle: int, data: StateParts) -> int:
    """The step that a node works on: that of its cycle, unless it is late."""
    late = node.stream == data.rollout.stream.name and cycle == data.progress.num_steps
    return cycle - late


def _is_formed(stream: str, step: int, data: StateParts) -> bool:
    evaluation = data.evaluations.get(stream)
    if evaluation is not None:
        return step in evaluation.formed
    return step < data.progress.formed or step == data.progress.num_steps


def _is_past(node: ScheduledNode, step: int, data: StateParts) -> bool:
    return data.progress.settled[node.name] >= step or not fires(node, step, data)


def _has_versions(node: ScheduledNode, step: int, data: StateParts) -> bool:
    """Whether the models of a node are at this step's start exactly (lag 1)."""
    models = data.progress.trained_models((*node.reads, *node.writes))
    for model in models:
        version = data.progress.version[model]
        assert version <= step, (
            f"{node.name} at step {step} missed {model}: it is at version {version}, no edge held its writer"
        )
    return all(data.progress.version[model] == step for model in models)
