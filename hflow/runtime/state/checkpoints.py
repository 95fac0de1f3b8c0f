"""When a run can be saved, and its snapshot.

A checkpoint after step s contains the models as they are after s, and the `RunSnapshot` of that moment. Both
must be of the same moment, although device groups reach it at different times. So from the time when the
batch of s is formed until the snapshot is taken, no batch of a later step is formed and no evaluation of a
later version begins. Generation continues.

Saving is done by batch nodes (`ScheduledNode.saves`), which fire at steps that the schedule names, and at
those that are requested while it runs (`RunProgress.requested_saves`).
"""

from __future__ import annotations

from hflow.planner.plan.rows import ScheduledNode
from hflow.runtime.events import TakeCheckpoint
from hflow.runtime.state.rules import node_fires
from hflow.runtime.state.snapshot import RunSnapshot
from hflow.runtime.state.state_parts import StateParts
from hflow.runtime.state.weight_updates import can_begin


def saves_at(node: ScheduledNode, step: int, parts: StateParts) -> bool:
    """Return whether a node that saves a model fires at a step, not counting late ones."""
    progress = parts.progress
    return node_fires(node, step, progress.num_steps) or step in progress.requested_saves


def request_checkpoint(parts: StateParts) -> None:
    """Save at the next step that no device group has passed, if there is one.

    Where engines get new weights every few steps, this is the last step before they do. So a run that
    continues there gives them the weights that they would have got.
    """
    progress = parts.progress
    sync_every = parts.schedule.settings.sync_every
    step = (progress.num_formed // sync_every + 1) * sync_every - 1
    if pending_checkpoint(parts) is None and step < progress.num_steps:
        progress.requested_saves.add(step)


def pending_checkpoint(parts: StateParts) -> int | None:
    """Return the step after which a snapshot is to be taken, once its batch is formed; else None."""
    progress = parts.progress
    steps = range(progress.num_checked, progress.num_formed)
    return next((step for step in steps if any(saves_at(n, step, parts) for n in parts.save_nodes)), None)


def take_checkpoint(parts: StateParts) -> None:
    """Emit `TakeCheckpoint` if one is pending, its step is complete, and no evaluation is under way."""
    progress = parts.progress
    step = pending_checkpoint(parts)
    if step is None:
        progress.num_checked = progress.num_formed
    elif step < progress.num_reported and not _is_evaluating(parts):
        progress.num_checked = step + 1
        progress.requested_saves.discard(step)
        take_last_checkpoint(parts)


def take_last_checkpoint(parts: StateParts) -> None:
    """Emit `TakeCheckpoint` if steps were completed since the last one. Every formed batch is complete."""
    progress = parts.progress
    if parts.save_nodes and progress.num_formed > progress.last_checkpoint:
        progress.last_checkpoint = progress.num_formed
        parts.emit(TakeCheckpoint(make_snapshot(parts)))


def make_snapshot(parts: StateParts) -> RunSnapshot:
    """Return the snapshot of a run in which every formed batch is complete."""
    progress = parts.progress
    assert progress.num_reported >= progress.num_formed, "a batch is not complete"
    return RunSnapshot(
        steps=progress.num_formed,
        num_refused=parts.trained.num_refused,
        streams=tuple(stream.snapshot() for stream in parts.streams),
        evaluations=tuple((name, e.evaluation_snapshot()) for name, e in parts.evaluations.items()),
        # A node of an evaluation may have fired for the next step: with the evaluation, it runs again.
        last_fired=tuple((n, min(step, progress.num_formed - 1)) for n, step in progress.last_fired.items()),
        streaming_runs=parts.streaming.num_runs(),
    )


def restore(snapshot: RunSnapshot, parts: StateParts) -> None:
    """Bring the parts of a run that has not started to the moment of a snapshot.

    Groups of the trained stream are opened again now, and those of an evaluation when it begins: what was
    generated continues, and nodes that were running run again.
    """
    progress = parts.progress
    progress.restore(snapshot.steps, snapshot.last_fired)
    for device in parts.devices:
        device.cycle = snapshot.steps
    parts.streaming.restore(snapshot.streaming_runs)
    trained, *side_streams = snapshot.streams
    parts.trained.restore(trained, snapshot.steps, snapshot.num_refused)
    evaluations = dict(snapshot.evaluations)
    for stream in side_streams:
        parts.evaluations[stream.stream].restore(stream, evaluations[stream.stream])


def _is_evaluating(parts: StateParts) -> bool:
    """Return whether an evaluation is active, or about to begin on engines that have its version."""
    if any(evaluation.occupies_engines for evaluation in parts.evaluations.values()):
        return True
    return any(
        engine.target < parts.progress.num_formed
        and any(can_begin(evaluation, engine.target, parts) for evaluation in engine.evaluations)
        for engine in parts.engines.values()
    )
