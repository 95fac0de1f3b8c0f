"""`hflow run --resume`: finds where a run continues, and checks that it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.base.errors import ConfigError, PlanError, RunError
from hflow.base.files import resolved
from hflow.base.secrets import mask_secrets
from hflow.config import RunConfig, flatten
from hflow.dsl import Recipe
from hflow.graph.queries import saved_models
from hflow.launch.checkpoints.fingerprints import RunInputs, read_inputs
from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.launch.planning.plan_file import read_plan_file, recipe_file
from hflow.launch.running.inputs import changed_inputs
from hflow.launch.targets import resolve
from hflow.models.settings import SHARDS
from hflow.planner.diff import Effect, PlanDiff, diff_plans
from hflow.planner.diff.values import format_plain
from hflow.planner.plan.serialise import to_json
from hflow.runtime.ledger import rewind
from hflow.runtime.ledger.query import select
from hflow.runtime.records.sample_text_files import SampleKey, drop_samples_after, keep_samples
from hflow.runtime.saving.checkpoint import Checkpoints, verify_checkpoint
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.saving.saved_run import ResumePoint, read_saved_run
from hflow.workers.interface import WorkerSetup

SHOWN_BY_PLAN = ("steps", "cluster")
"""Keys of the configuration that a plan has under other names."""


@dataclass(frozen=True)
class ResumedRun:
    """A run that continues in its own directory."""

    compiled: Compiled
    directory: RunDirectory
    point: ResumePoint | None
    """None: the run was never saved, and begins again."""
    diff: PlanDiff
    """What differs from the plan that ran before."""
    earlier: RunConfig
    """The configuration that ran before."""

    def check_inputs(self, inputs: Callable[[RunInputs | None], RunInputs]) -> tuple[RunInputs, list[str]]:
        """Return the present inputs, found with those of before, and warnings of what is not as it was.

        Raises:
            ConfigError: if the checkpoint means something else with what has changed; names it.
        """
        known = read_inputs(self.directory.inputs)
        present, warnings = inputs(known), list(self._kept_states())
        if self.point is None:  # it begins again
            return present, []
        if known is None:
            warnings.append(
                f"warning: {self.directory.inputs.name} is missing, so nothing tells whether the data and "
                "models are those that the run began with"
            )
            return present, warnings
        for changed in changed_inputs(known, present, self.earlier, self.compiled):
            if changed.is_refused:
                raise ConfigError(
                    f"the run in {self.directory.path} cannot resume: {changed.key} is not what it read: "
                    f"{changed.change}. {changed.fix}."
                )
            warnings.append(
                f"warning: {changed.key} is not what the run read before: {changed.change}; results may "
                "differ from here on"
            )
        return present, warnings

    def _kept_states(self) -> Iterator[str]:
        """Yield a warning for each node that has other knobs now, but continues with its state of before."""
        states = self.point.saved.node_states if self.point else {}
        for node, state in states.items():
            changed = [c for c in self.diff.changes if c.topic == "node" and c.subject.startswith(f"{node}.")]
            if changed:
                yield (
                    f"warning: {changed[0]}, but {node} continues with its state, {state}; a knob "
                    "that only sets how a run begins has no effect"
                )

    def change_notes(self) -> Iterator[str]:
        """Yield a line with all changes that results depend on, and one with all others."""
        new = [str(change) for change in self.diff.decided_by_user(Effect.NEW)]
        if new:
            yield f"results differ from here on, by {'; '.join(new)}"
        if others := _without_effect(self.diff, self.earlier, self.compiled.config):
            yield mask_secrets(f"changed, with the same results: {'; '.join(others)}")

    @property
    def steps(self) -> int:
        """Completed steps of the checkpoint."""
        return self.point.steps if self.point else 0


def find_resumed(run: str, overrides: Sequence[str] = (), recipe: Recipe | None = None) -> ResumedRun:
    """Find a run and the checkpoint from which it continues, and compile its recipe (None: that of its plan).

    Raises:
        ConfigError: if there is no such run, or all its steps are done.
        PlanError: if the recipe or the configuration differs in what cannot change.
        RunError: if the checkpoint is damaged; names the file.
    """
    found = resolve(run)
    directory = RunDirectory(resolved(found.require_run(or_checkpoint=True).path))
    checkpoint = found.checkpoint if found.kind == "checkpoint" else None
    file = read_plan_file(directory.plan)
    config, earlier = file.configuration(overrides), file.configuration()
    for key in ("name", "out"):
        if getattr(config, key) != getattr(earlier, key):
            raise ConfigError(
                f"{key}={getattr(config, key)} has no effect, as a run continues in its own directory, "
                f"{directory.path}; remove it"
            )
    compiled = compile_recipe(
        recipe_file(file) if recipe is None else recipe,
        config=config,
        engines=file.engines,
        candidates=file.candidates,
        backend=file.backend,
    )
    diff = diff_plans(file.rows, to_json(compiled.plan))
    if refused := diff.decided_by_user(Effect.REFUSE):
        others = [str(c) for effect in (Effect.RESHARD, Effect.NEW) for c in diff.decided_by_user(effect)]
        others += _without_effect(diff, earlier, config)
        also = f". Other changes, which are allowed: {'; '.join(others)}" if others else ""
        raise PlanError(
            f"the run in {directory.path} cannot resume: {'; '.join(map(str, refused))}{mask_secrets(also)}"
        )
    checkpoints = Checkpoints(directory.checkpoints)
    checkpoints.link_latest()
    point = _read(checkpoint) if checkpoint else newest_point(checkpoints)
    if point is not None and point.steps >= compiled.config.steps:
        if compiled.config.steps < earlier.steps:
            raise ConfigError(
                f"the run in {directory.path} continues after step {point.steps}, so "
                f"steps={compiled.config.steps} leaves none; set more, "
                f"such as steps={max(earlier.steps, point.steps + 1)}"
            )
        raise ConfigError(
            f"the run in {directory.path} has completed its {point.steps} steps; to continue it, set more, "
            f"such as steps={2 * point.steps}"
        )
    return ResumedRun(compiled, directory, point, diff, earlier)


def _without_effect(diff: PlanDiff, earlier: RunConfig, config: RunConfig) -> list[str]:
    """Return changes that results do not depend on: of the plan, and of settings that no plan has."""
    before, after = dict(flatten(earlier)), dict(flatten(config))
    in_plan = {change.subject for change in diff.changes}
    others = [
        f"setting {key}: {format_plain(before.get(key))} -> {format_plain(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
        and key not in SHOWN_BY_PLAN
        and in_plan.isdisjoint((key, key.partition(".")[2]))
    ]
    return [*map(str, diff.decided_by_user(Effect.SAME)), *others]


def newest_point(checkpoints: Checkpoints) -> ResumePoint | None:
    """Return the newest checkpoint of a run; None if it was never saved.

    Raises:
        RunError: if it is damaged; names the file.
    """
    return None if checkpoints.last is None else _read(checkpoints.path(checkpoints.last))


def rewind_run(directory: RunDirectory, point: ResumePoint | None) -> None:
    """Take the ledger and the texts of a run back to a checkpoint; None: to their beginning.

    Raises:
        RunError: if the ledger is damaged.
    """
    drop_samples_after(directory.samples, point.steps if point else 0)
    if directory.ledger.is_file():
        rewind(directory.ledger, point.steps if point else 0, point.saved.ledger_position if point else 0)

        def known_among(samples: Set[SampleKey]) -> set[SampleKey]:
            rows = select(directory.ledger, among=samples).to_json()
            return {(row["stream"], row["id"]) for row in rows}

        keep_samples(directory.samples, known_among)


def resumed_setup(setup: WorkerSetup, compiled: Compiled, point: ResumePoint) -> WorkerSetup:
    """Return the setup of workers that continue from a checkpoint.

    Trained models load what was saved of them; all others are what they were, so that a reference model which
    starts from the actor's first weights does so again.

    Raises:
        RunError: if the optimizer's state was not saved.
    """
    models = dict(setup.models)
    for name in saved_models(compiled.graph):
        path = point.path / name
        if models[name].trainable and not (path / SHARDS).is_dir():
            raise RunError(
                f"{path} has no optimizer state ({SHARDS}/), so the run cannot continue; begin another with "
                f"models.{name}.path={path}, and set models.{name}.save_optimizer=true"
            )
        saved = str(resolved(path))
        if models[name].lora is not None:  # the checkpoint has adapters, and their weights are elsewhere
            models[name] = replace(models[name], saved=saved, resume=True)
        else:
            models[name] = replace(models[name], path=saved, architecture=None, resume=models[name].trainable)
        extra = point.saved.extra_updates(compiled.plan).get(name, 0)
        models[name] = replace(models[name], num_updates=models[name].num_updates + extra)
    return replace(setup, models=models, node_states=point.saved.node_states)


def _read(path: Path) -> ResumePoint:
    verify_checkpoint(path)
    return ResumePoint(path, read_saved_run(path))
