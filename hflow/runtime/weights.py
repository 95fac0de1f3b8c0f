"""Which weights engines get, and when.

An engine takes weights while no node changes them, and the writers of a step wait until the
engines that want that step's weights have them (not until anything was generated with them). So
the version on an engine's label is exactly what it holds. While evaluation samples run on an
engine it keeps its weights; trainers do not wait for that, and the engine catches up afterwards.

A transfer takes four messages, in this order: `Sleep` (no group is opened any more; samples are
interrupted and kept), `Asleep`, `Wake` (the bytes move), `Awake` (the version is set; what was
interrupted goes on, and groups are opened again). Where samples are not to be interrupted, `Sleep`
comes once the last one has finished, and the next writer waits for that too.
"""

from __future__ import annotations

from hflow.runtime.devices import DeviceOrder, Engine, EngineState
from hflow.runtime.evaluation import Evaluation
from hflow.runtime.events import Sleep, Wake
from hflow.runtime.run_data import RunData


def turn_is_needed(device: DeviceOrder, data: RunData) -> bool:
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


def can_begin(evaluation: Evaluation, version: int, data: RunData) -> bool:
    """Whether an evaluation of this version has the turns that it needs; engines may yet lack weights."""
    return evaluation.is_expected(version) and all(
        device.in_turn and device.cycle == version <= data.progress.formed
        for device in data.shared_by[evaluation.stream.name]
    )


def update_engines(data: RunData) -> None:
    """Put engines to sleep and wake them, as turns and versions ask."""
    for engine in data.engines.values():
        if engine.state in (EngineState.AWAKE, EngineState.DRAINING):
            _stop(engine, data)
        elif engine.state is EngineState.ASLEEP and _is_wanted(engine, data):
            _wake(engine, data)


def blocks_writer(engine: Engine, step: int, data: RunData) -> bool:
    """Whether the weights of the start of `step` must reach an engine before they change."""
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


def _is_wanted(engine: Engine, data: RunData) -> bool:
    """Whether an engine should be awake: always, or in the turn of the group that it shares."""
    device = data.device_of.get(engine.name)
    return device is None or (device.in_turn and turn_is_needed(device, data))


def _lacks(engine: Engine, version: int, data: RunData) -> bool:
    """Whether an engine should get the weights of `version` in place of those that it has."""
    if engine.version < 0:
        return True
    every = data.schedule.sync_every
    rolls_on = engine.serves_rollout and data.progress.formed < data.progress.num_steps
    if rolls_on and version // every > engine.version // every:
        return True
    return version != engine.version and any(can_begin(e, version, data) for e in engine.evaluations)


def _must_sleep(engine: Engine, data: RunData) -> bool:
    """Whether an engine's turn is over, or new weights are ready for it."""
    if not _is_wanted(engine, data):
        return True
    if engine.is_held:
        return False
    version = data.progress.common_version(engine.models)
    return version is not None and _lacks(engine, version, data)


def _stop(engine: Engine, data: RunData) -> None:
    """Put an engine to sleep that must, at once or when its samples are finished."""
    if not _must_sleep(engine, data):
        engine.state = EngineState.AWAKE
    elif data.schedule.interrupt or _is_idle(engine, data):
        engine.state = EngineState.SLEEPING
        data.emit(Sleep(engine.name))
    else:
        engine.state = EngineState.DRAINING


def _is_idle(engine: Engine, data: RunData) -> bool:
    """Whether no sample of any of its streams is in flight."""
    return not any(
        stream.num_generating and engine in data.engines_of[stream.stream.name] for stream in data.streams
    )


def _wake(engine: Engine, data: RunData) -> None:
    """Wake an engine with new weights where it lacks them (once they are whole), else as it is."""
    version = data.progress.common_version(engine.models)
    if _lacks(engine, data.progress.least_version(engine.models), data):
        if version is None:
            return
        engine.target = version
    else:
        engine.target = engine.version
    engine.state = EngineState.WAKING
    data.emit(Wake(engine.name, engine.target))
