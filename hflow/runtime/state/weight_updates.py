"""Which weights engines get, and when.

Weights leave those who train them while no node changes them, so that the version on an engine's label
is exactly what it holds. While evaluation samples run on an engine it keeps its weights; trainers do not
wait for that, and the engine catches up afterwards.

An engine that takes turns with batch nodes, or uses their storage, takes weights from them as it wakes:
`Sleep` (no group is opened any more; samples are interrupted and kept), `Asleep`, `Wake` (the bytes
move), `Awake` (the version is set; what was interrupted goes on, and groups are opened again). The next
writers wait until it has them.

For an engine apart the bytes move in two parts. `Publish` makes a copy, and is ordered in the moment in
which the version is there, before anything else is ordered on the devices that hold it; as these do what
they are asked in order, the next writers need not wait for more than the order. The engine generates
meanwhile. `Published` lets it sleep, load and wake as above, beside whatever trains. One version lies
ready for an engine at most: the next is published, and the writers after it go on, when it is loaded. So
nobody trains further ahead of what an engine generates with than the version that it is about to load.

Where samples are not to be interrupted, `Sleep` comes once the last one has finished.
"""

from __future__ import annotations

from hflow.runtime.events import Publish, Sleep, Wake
from hflow.runtime.state.device_state import DeviceOrder, Engine, EngineState
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.state_parts import StateParts


def turn_is_needed(device: DeviceOrder, data: StateParts) -> bool:
    """Whether the pointer's step still needs the engines of a group.

    For the trained stream until its batch is formed, for a side stream until the evaluation of
    the step's version is complete. Once False it stays so for the step.
    """
    step = device.cycle
    if step > data.progress.formed or not device.engines:
        return False
    unformed = step == data.progress.formed < data.progress.num_steps
    return any(
        (engine.serves_rollout and unformed) or engine.is_held or _is_awaited(engine, step)
        for engine in device.engines
    )


def can_begin(evaluation: Evaluation, version: int, data: StateParts) -> bool:
    """Whether an evaluation of this version has the turns that it needs; engines may yet lack weights."""
    return evaluation.is_expected(version) and all(
        device.in_turn and device.cycle == version <= data.progress.formed
        for device in data.shared_by[evaluation.stream.name]
    )


def publish_weights(data: StateParts) -> bool:
    """Publish the weights that engines apart lack, as soon as they are there; returns whether any were."""
    versions = {name: _due(engine, data) for name, engine in data.engines.items() if engine.is_separate}
    due = {name: version for name, version in versions.items() if version is not None}
    for name, version in due.items():
        engine = data.engines[name]
        engine.copy.target, engine.is_publishing = version, True
        data.emit(Publish(name, version))
    return bool(due)


def update_engines(data: StateParts) -> None:
    """Put engines to sleep and wake them, as turns and versions ask."""
    for engine in data.engines.values():
        if engine.state in (EngineState.AWAKE, EngineState.DRAINING):
            _stop(engine, data)
        elif engine.state is EngineState.ASLEEP and _is_wanted(engine, data):
            _wake(engine, data)


def blocks_writer(engine: Engine, step: int, data: StateParts) -> bool:
    """Whether the weights of the start of `step` must be taken for an engine before they change."""
    if engine.is_loading:
        return True
    return (
        data.progress.is_untouched(engine.models, step)
        and not engine.is_held
        and _is_wanted(engine, data)
        and _lacks(engine, step, data)
    )


def _is_awaited(engine: Engine, version: int) -> bool:
    return any(evaluation.is_expected(version) for evaluation in engine.evaluations)


def _is_wanted(engine: Engine, data: StateParts) -> bool:
    """Whether an engine should be awake: always, or in the turn of the group that it shares."""
    device = data.device_of.get(engine.name)
    return device is None or (device.in_turn and turn_is_needed(device, data))


def _lacks(engine: Engine, version: int, data: StateParts) -> bool:
    """Whether an engine should get the weights of `version` in place of those that it was given last."""
    if engine.target < 0:
        return True
    every = data.schedule.settings.sync_every
    rolls_on = engine.serves_rollout and data.progress.formed < data.progress.num_steps
    if rolls_on and version // every > engine.target // every:
        return True
    return version != engine.target and any(can_begin(e, version, data) for e in engine.evaluations)


def _due(engine: Engine, data: StateParts) -> int | None:
    """The version to publish for an engine now, if any.

    None before it has loaded the last one, nor while that one is, or can yet be, evaluated on it.
    """
    is_evaluated = engine.is_held or any(can_begin(e, engine.target, data) for e in engine.evaluations)
    if engine.is_behind or is_evaluated:
        return None
    version = data.progress.common_version(engine.models)
    return version if version is not None and _lacks(engine, version, data) else None


def _must_sleep(engine: Engine, data: StateParts) -> bool:
    """Whether an engine's turn is over, or new weights are ready for it."""
    if engine.is_separate:
        return engine.is_behind and not engine.is_publishing
    if not _is_wanted(engine, data):
        return True
    if engine.is_held:
        return False
    version = data.progress.common_version(engine.models)
    return version is not None and _lacks(engine, version, data)


def _stop(engine: Engine, data: StateParts) -> None:
    """Put an engine to sleep that must, at once or when its samples are finished."""
    if not _must_sleep(engine, data):
        engine.state = EngineState.AWAKE
    elif data.schedule.settings.interrupt or _is_idle(engine, data):
        engine.state = EngineState.SLEEPING
        data.emit(Sleep(engine.name))
    else:
        engine.state = EngineState.DRAINING


def _is_idle(engine: Engine, data: StateParts) -> bool:
    """Whether no sample of any of its streams is in flight."""
    return not any(
        stream.num_generating and engine in data.engines_of[stream.stream.name] for stream in data.streams
    )


def _wake(engine: Engine, data: StateParts) -> None:
    """Wake an engine with new weights where it lacks them (once they are whole), else as it is."""
    if engine.is_separate:
        if engine.is_publishing or not engine.is_behind:
            return
    elif _lacks(engine, data.progress.least_version(engine.models), data):
        version = data.progress.common_version(engine.models)
        if version is None:
            return
        engine.copy.target = version
    engine.state = EngineState.WAKING
    data.emit(Wake(engine.name, engine.target))
