"""Which weights engines get, and when.

Invariant: weights are taken from the devices that train them only while no node changes them, so an engine
holds exactly the version that it is labelled with. An engine keeps its weights while evaluation samples run
on it. Training does not wait for that; the engine catches up afterwards.

An engine that shares devices with batch nodes takes the weights from the devices that train them when it
wakes. It has its turn when all device groups that it shares are at the turn of the same step:

1. `Sleep`: no more groups are opened, and samples are interrupted and kept; `Asleep` confirms.
2. `Wake`: the weights move; `Awake` confirms. Interrupted samples continue, and groups are opened again.

Nodes that change the weights wait until the engine has them.

For an engine with its own devices the weights move in two parts. `Publish` copies them, as soon as the
version exists. The devices that hold the weights make the copy before anything they are asked to do later,
so nodes that change the weights need not wait for it. The engine generates meanwhile. After `Published` it
sleeps, loads the copy and wakes as above, while training continues. At most one published version is
pending per engine: the next version is published, and the nodes that change it start, when the pending one
is loaded. So training is never further ahead of an engine than the version that the engine loads next.

If samples are not to be interrupted, `Sleep` is issued when the last sample has finished.

An engine on its own devices may be lost (`lose_engine`) and come back without weights. It counts as asleep
meanwhile. What was published for it may be changes to what it had, or wait for a process that has ended. So
the newest version is published again, as before its first `Wake`. Training waits for it no more than for a
slow engine.

`Sleep` says what the engine keeps (`SleepLevel`). An engine on its own devices only pauses. One that shares
devices drops its weights if it loads new ones when it wakes, or if the run ends. It keeps a copy in host
memory if it wakes with the same version: between two syncs (`sync_every`), or where nothing changes its
models.
"""

from __future__ import annotations

from collections.abc import Sequence

from hflow.runtime.events import Publish, Sleep, Wake
from hflow.runtime.state.device_state import DeviceTurns, EnginePhase, EngineState
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.rules import next_evaluation
from hflow.runtime.state.state_parts import StateParts
from hflow.types.engine import SleepLevel


def needs_turn(device: DeviceTurns, parts: StateParts) -> bool:
    """Return whether the engines of a device group are still needed in the step of its pointer.

    The trained stream needs them until the step's batch is formed, a side stream until the evaluation of
    the step's version is complete. Once the result is False, it remains so for the step.
    """
    step, progress = device.cycle, parts.progress
    if step > progress.num_formed or not device.engines:
        return False
    has_no_batch = step == progress.num_formed < progress.num_steps
    return any(
        (engine.serves_trained_stream and has_no_batch) or engine.is_evaluating or _is_expected(engine, step)
        for engine in device.engines
    )


def can_begin(evaluation: Evaluation, version: int, parts: StateParts) -> bool:
    """Return whether an evaluation of this version has its turns. Its engines may still lack the weights."""
    return evaluation.is_expected(version) and all(
        device.in_turn and device.cycle == version <= parts.progress.num_formed
        for device in parts.shared_devices[evaluation.stream.name]
    )


def publish_weights(parts: StateParts) -> bool:
    """Publish all weights that separate engines need and that exist. Returns whether there were any."""
    versions = {
        name: _version_to_publish(engine, parts)
        for name, engine in parts.engines.items()
        if engine.is_separate
    }
    to_publish = {name: version for name, version in versions.items() if version is not None}
    for name, version in to_publish.items():
        engine = parts.engines[name]
        engine.weights.target, engine.is_publishing = version, True
        parts.emit(Publish(name, version))
    return bool(to_publish)


def update_engines(parts: StateParts) -> None:
    """Put engines to sleep and wake them, by their turns and by the versions they need."""
    for engine in parts.engines.values():
        if engine.phase in (EnginePhase.AWAKE, EnginePhase.DRAINING):
            _sleep_if_needed(engine, parts)
        elif engine.phase is EnginePhase.ASLEEP and _should_be_awake(engine, parts):
            _wake_if_possible(engine, parts)


def pause_engines(parts: StateParts) -> None:
    """Put all engines to sleep that are awake, because the run ends. They keep their samples.

    No engine wakes again, so those that share devices drop their weights.
    """
    for engine in parts.engines.values():
        if engine.phase in (EnginePhase.AWAKE, EnginePhase.DRAINING):
            engine.phase = EnginePhase.FALLING_ASLEEP
            engine.has_dropped_weights = engine.name in parts.devices_of_engine
            level = SleepLevel.DROP_WEIGHTS if engine.has_dropped_weights else SleepLevel.PAUSE
            parts.emit(Sleep(engine.name, level))


def can_lose(engine: EngineState, parts: StateParts) -> bool:
    """Return whether the run can continue while an engine is started again.

    It cannot during an evaluation, whose version may not exist any more. Nor where an engine shares its
    devices with batch nodes, or its samples with another engine: that one could have to wait, awake, for
    samples that wait for weights that do not exist before it sleeps.
    """
    has_own_samples = all(engines == (engine,) for engines in parts.engines_of.values() if engine in engines)
    is_apart = engine.name not in parts.devices_of_engine
    return is_apart and has_own_samples and not engine.is_evaluating and not engine.is_lost


def lose_engine(engine: EngineState, parts: StateParts) -> None:
    """Note that the worker of an engine has failed. Nothing that was asked of the engine is confirmed."""
    assert can_lose(engine, parts), f"the run cannot continue without {engine.name}"
    engine.weights.reset()
    engine.phase, engine.is_publishing, engine.is_lost = EnginePhase.ASLEEP, False, True


def blocks_writer(engine: EngineState, step: int, parts: StateParts) -> bool:
    """Return whether an engine must get the weights of the start of `step` before they change."""
    if engine.is_loading:
        return True
    return (
        parts.progress.is_unchanged(engine.models, step)
        and not engine.is_evaluating
        and _should_be_awake(engine, parts)
        and _needs_version(engine, step, parts)
    )


def _is_expected(engine: EngineState, version: int) -> bool:
    """Return whether an evaluation of this version is expected on an engine."""
    return any(evaluation.is_expected(version) for evaluation in engine.evaluations)


def _should_be_awake(engine: EngineState, parts: StateParts) -> bool:
    """Return whether an engine should be awake: a separate one always, another one in its turn.

    It has its turn on all of its device groups at once. Where one of them need not wait for its engines any
    more, none of them waits for this one: `needs_turn` holds for all groups of an engine that is needed.
    """
    devices = parts.devices_of_engine.get(engine.name, ())
    return all(
        device.in_turn and device.cycle == devices[0].cycle and needs_turn(device, parts)
        for device in devices
    )


def _needs_version(engine: EngineState, version: int, parts: StateParts) -> bool:
    """Return whether an engine needs the weights of `version` in place of those that it was given last."""
    if engine.target < 0 or engine.has_dropped_weights:
        return True
    sync_every, progress = parts.schedule.settings.sync_every, parts.progress
    generates_batches = engine.serves_trained_stream and progress.num_formed < progress.num_steps
    if generates_batches and version // sync_every > engine.target // sync_every:
        return True
    return version != engine.target and any(can_begin(e, version, parts) for e in engine.evaluations)


def _version_to_publish(engine: EngineState, parts: StateParts) -> int | None:
    """Return the version to publish for an engine now; None if there is none.

    There is none before the engine has loaded the last one, nor while that one is being evaluated, or can
    still be evaluated, on it.
    """
    is_evaluated = engine.is_evaluating or any(
        can_begin(evaluation, engine.target, parts) for evaluation in engine.evaluations
    )
    if engine.has_pending_weights or is_evaluated:
        return None
    version = parts.progress.common_version(engine.models)
    return version if version is not None and _needs_version(engine, version, parts) else None


def _must_sleep(engine: EngineState, parts: StateParts) -> bool:
    """Return whether an engine's turn is over, or new weights are ready for it."""
    if engine.is_separate:
        return engine.has_pending_weights and not engine.is_publishing
    if not _should_be_awake(engine, parts):
        return True
    if engine.is_evaluating:
        return False
    version = parts.progress.common_version(engine.models)
    return version is not None and _needs_version(engine, version, parts)


def _sleep_if_needed(engine: EngineState, parts: StateParts) -> None:
    """Put an engine to sleep if it must, at once or when its samples are finished."""
    if not _must_sleep(engine, parts):
        engine.phase = EnginePhase.AWAKE
    elif parts.schedule.settings.interrupt or _is_idle(engine, parts):
        engine.phase = EnginePhase.FALLING_ASLEEP
        level = _sleep_level(engine, parts)
        engine.has_dropped_weights = level is SleepLevel.DROP_WEIGHTS
        parts.emit(Sleep(engine.name, level))
    else:
        engine.phase = EnginePhase.DRAINING


def _sleep_level(engine: EngineState, parts: StateParts) -> SleepLevel:
    """Return the level at which an engine sleeps."""
    devices = parts.devices_of_engine.get(engine.name)
    if devices is None:
        return SleepLevel.PAUSE
    if engine.models and _wakes_with_new_weights(engine, devices, parts):
        return SleepLevel.DROP_WEIGHTS
    return SleepLevel.KEEP_WEIGHTS


def _wakes_with_new_weights(engine: EngineState, devices: Sequence[DeviceTurns], parts: StateParts) -> bool:
    """Return whether an engine that sleeps now loads new weights when it wakes.

    If it sleeps in its turn, new weights are ready for it. Otherwise it wakes at a later step (unless the
    dataset ends, which makes this the final cycle): for its next evaluation, or to generate the first batch
    that is not formed. Its models have changed by then if the nodes that change them run on any of its device
    groups, all of which are at the same step. The result is False where that depends on timing: the engine
    then wakes with either version.
    """
    if all(needs_turn(device, parts) for device in devices):
        return True
    progress, cycle = parts.progress, devices[0].cycle
    local = {node.name for device in devices for node in device.nodes}
    if not progress.is_certain(cycle) or not progress.writers(engine.models) <= local:
        return False
    next_batch = max(cycle + 1, progress.num_formed)
    if next_batch >= progress.num_steps:
        return True  # only evaluations of new versions are left
    if engine.serves_trained_stream:
        sync_every = parts.schedule.settings.sync_every
        is_synced = next_batch // sync_every > engine.target // sync_every
        return is_synced or _evaluates_by(next_batch, engine, cycle, local, parts)
    return not any(other.serves_trained_stream for device in devices for other in device.engines)


def _evaluates_by(version: int, engine: EngineState, cycle: int, local: set[str], parts: StateParts) -> bool:
    """Return whether an engine evaluates a later version than its own, up to this one."""
    progress = parts.progress
    due = [
        next_evaluation(evaluation.stream, cycle, progress.num_steps)
        for evaluation in engine.evaluations
        if progress.writers(evaluation.models) <= local
    ]
    return any(next_version is not None and next_version <= version for next_version in due)


def _is_idle(engine: EngineState, parts: StateParts) -> bool:
    """Return whether no sample of an engine's streams is in flight."""
    return not any(
        stream.num_generating and engine in parts.engines_of[stream.stream.name] for stream in parts.streams
    )


def _wake_if_possible(engine: EngineState, parts: StateParts) -> None:
    """Wake an engine, with new weights if it needs them. If these do not exist yet, it sleeps on."""
    if engine.is_lost:
        return
    if engine.is_separate:
        if engine.is_publishing or not engine.has_pending_weights:
            return
    elif _needs_version(engine, parts.progress.min_version(engine.models), parts):
        version = parts.progress.common_version(engine.models)
        if version is None:
            return
        engine.weights.target = version
    engine.phase, engine.has_dropped_weights = EnginePhase.WAKING, False
    parts.emit(Wake(engine.name, engine.target))
