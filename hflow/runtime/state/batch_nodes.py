"""When batch nodes fire.

Every device group has a pointer into the fixed order of its batch nodes (`DeviceTurns`). A node fires when
the pointers of all its groups are at it and all that it waits for is done: the batch, the nodes before it,
the versions of its models, and engines that need the weights before it changes them. It occupies all its
groups until it is done. Groups do not wait for each other in a circle, because their orders are parts of one.

Invariant: a device group runs one batch node at a time, in its order, and each node at most once per step.
"""

from __future__ import annotations

from hflow.planner.plan.rows import ScheduledNode
from hflow.runtime.events import RunBatch, StepDone
from hflow.runtime.state.checkpoints import saves_at, take_checkpoint
from hflow.runtime.state.device_state import DeviceTurns, EnginePhase
from hflow.runtime.state.rules import is_due, node_fires
from hflow.runtime.state.state_parts import StateParts
from hflow.runtime.state.weight_updates import blocks_writer, needs_turn, publish_weights


def fires(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether a batch node fires at a step, as far as that is known now."""
    num_steps = parts.progress.num_steps
    evaluation = parts.evaluations.get(node.stream)
    if node.saves:
        return saves_at(node, step, parts) or _is_late(node, step, parts)
    if evaluation is None:
        return node_fires(node, step, num_steps)
    return evaluation.happens_at(step) and (step == num_steps or is_due(step, node.every, node.after))


def fire_batch_nodes(parts: StateParts) -> None:
    """Move every pointer as far as possible and fire the nodes that are ready.

    Devices do what they are asked in this order, so weights are published before nodes change them.
    """
    has_changed = True
    while has_changed:
        advance_pointers(parts)
        published = publish_weights(parts)
        has_changed = published or sum(_fire_next(device, parts) for device in parts.devices) > 0


def advance_pointers(parts: StateParts) -> None:
    """Skip nodes that do not fire and report the steps that are complete; fire nothing."""
    while sum(_advance(device, parts) for device in parts.devices) > 0:
        pass  # a group may wait for another one, which came after it
    progress = parts.progress
    includes_final_cycle = progress.num_formed == progress.num_steps and parts.has_side_nodes
    num_complete = min(
        progress.num_formed + includes_final_cycle, progress.num_settled(progress.last_settled)
    )
    while progress.num_reported < num_complete:
        parts.emit(StepDone(progress.num_reported))
        progress.num_reported += 1
    take_checkpoint(parts)


def finish_batch_node(name: str, step: int, parts: StateParts) -> None:
    """Record that a batch node is done for a step."""
    devices = parts.devices_of_node[name]
    for device in devices:
        assert device.running is not None, f"{name} does not run"
        assert device.running.name == name, f"{device.running.name} runs on {device.name}, not {name}"
        device.running = None
    parts.progress.finish(name, step, devices[0].cycle)
    for device in devices:
        device.step_forward()


def _advance(device: DeviceTurns, parts: StateParts) -> bool:
    """Move a pointer to the next node that fires, or to a generation turn that is needed.

    A node that does not fire is skipped in all its groups at once. Returns whether the pointer moved.
    """
    progress, has_moved = parts.progress, False
    while device.running is None and device.cycle <= progress.num_formed:
        if device.in_turn:
            if not _turn_is_over(device, parts):
                break
            device.step_forward()
        elif (node := device.next_node) is None:
            device.next_cycle()
        else:
            cycle = device.cycle
            if fires(node, cycle, parts) or not _is_next(node, parts) or not _can_skip(node, cycle, parts):
                break
            progress.skip(node.name, cycle)
            for other in parts.devices_of_node[node.name]:
                other.step_forward()
        has_moved = True
    return has_moved


def _is_next(node: ScheduledNode, parts: StateParts) -> bool:
    """Return whether all device groups of a node are free and have reached it."""
    return all(device.next_node is node for device in parts.devices_of_node[node.name])


def _turn_is_over(device: DeviceTurns, parts: StateParts) -> bool:
    """Return whether the group's engines are asleep and cannot be needed at this step any more."""
    asleep = all(engine.phase is EnginePhase.ASLEEP for engine in device.engines)
    is_certain = not device.engines or parts.progress.is_certain(device.cycle)
    return asleep and is_certain and not needs_turn(device, parts)


def _can_skip(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether a node that does not fire at a step may be skipped.

    A node that writes a model is skipped only when it could have fired, because its model's version then
    advances. So nodes and engines that need the version of the step are served before.
    """
    is_final = step == parts.progress.num_steps
    return parts.progress.is_certain(step) and (is_final or not node.writes or _is_ready(node, step, parts))


def _fire_next(device: DeviceTurns, parts: StateParts) -> bool:
    """Fire the node at a pointer if all its device groups have reached it and it is ready.

    Returns whether it was.
    """
    node, cycle = device.next_node, device.cycle
    if node is None or not _is_next(node, parts):
        return False
    if not fires(node, cycle, parts) or not _is_ready(node, cycle, parts):
        return False
    step = _step_of(node, cycle, parts)
    for occupied in parts.devices_of_node[node.name]:
        occupied.running = node
    parts.progress.start(node, step)
    parts.emit(RunBatch(node.name, step))
    return True


def _is_ready(node: ScheduledNode, cycle: int, parts: StateParts) -> bool:
    """Return whether everything that a node waits for is done, except nodes of its own device groups."""
    step = _step_of(node, cycle, parts)
    return (
        _is_formed(node.stream, cycle, parts)
        and all(_has_passed(need, step, parts) for need in parts.batch_needs[node.name])
        and _has_versions(node, cycle, parts)
        and not any(
            blocks_writer(engine, cycle, parts)
            for model in node.writes
            for engine in parts.engines_with(model)
        )
    )


def _is_late(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether a node that fires at the last step must fire in the final cycle instead.

    That is so if the dataset ended early, so that the last step was not known to be the last. The weights
    are still those after the last step. Nodes that need an exact version are never late.
    """
    progress = parts.progress
    needs_no_version = node.at_end and not node.reads and not node.writes
    return needs_no_version and step == progress.num_steps and progress.last_fired[node.name] < step - 1


def _step_of(node: ScheduledNode, cycle: int, parts: StateParts) -> int:
    """Return the step that a node works on in a cycle: the same number, unless the node is late."""
    is_late = node.stream == parts.trained.stream.name and cycle == parts.progress.num_steps
    return cycle - is_late


def _is_formed(stream: str, step: int, parts: StateParts) -> bool:
    """Return whether a stream's batch of a step, or its evaluation of a version, is formed."""
    evaluation = parts.evaluations.get(stream)
    if evaluation is not None:
        return step in evaluation.formed
    return step < parts.progress.num_formed or step == parts.progress.num_steps


def _has_passed(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether a node is settled at a step, or does not fire at it."""
    return parts.progress.last_settled[node.name] >= step or not fires(node, step, parts)


def _has_versions(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether the models of a node are exactly as they are at the step's start."""
    progress = parts.progress
    models = progress.trained_models((*node.reads, *node.writes))
    for model in models:
        version = progress.version[model]
        assert version <= step, (
            f"{node.name} at step {step} needs {model} at that version, but it is at version {version}: "
            "an order edge before a node that writes it is missing"
        )
    return all(progress.version[model] == step for model in models)
