"""How far a run is: batches formed, nodes settled, versions of the models.

Invariant: a model's version is the number of leading steps at which all nodes that write it are settled,
and never exceeds the number of formed batches. A node is settled at a step when it is done or was skipped.
"""

from __future__ import annotations

from collections.abc import Iterable

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledNode


class RunProgress:
    """Steps and versions.

    Attributes:
        num_steps: steps of the run; fewer than planned once the dataset is exhausted.
        num_formed: batches of the trained stream formed so far.
        num_reported: leading steps at which every batch node is settled (`StepDone` was issued). If side
            streams have batch nodes, the final cycle counts as a step.
        last_settled: batch node -> the last step at which it is settled.
        last_fired: batch node -> the last step at which it fired.
        running: running batch node -> its step.
        version: model -> its version. Only models that some node writes.
        last_changed: model -> the last step at which a node started to change it.
        is_stopping: whether the run is to end: the user asked for it, or there is a problem.
        problem: why it ends with an error; None: it does not.
        requested_saves: steps after which the run is saved because it was asked for (`CheckpointDue`).
        last_checkpoint: completed steps of the last snapshot.
        num_checked: leading steps after which no checkpoint is to be taken any more.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_steps = schedule.num_steps
        self.num_formed = 0
        self.num_reported = 0
        nodes = [node for node in schedule.nodes if node.level is Level.BATCH]
        self.last_settled = {node.name: -1 for node in nodes}
        self.last_fired = dict.fromkeys(self.last_settled, -1)
        self.running: dict[str, int] = {}
        self._writers: dict[str, list[str]] = {}
        for node in nodes:
            for model in node.writes:
                self._writers.setdefault(model, []).append(node.name)
        self.version = dict.fromkeys(self._writers, 0)
        self.last_changed = dict.fromkeys(self._writers, -1)
        self.is_stopping = False
        self.problem: str | None = None
        self.requested_saves: set[int] = set()
        self.num_checked = 0
        self.last_checkpoint = 0

    def restore(self, steps: int, last_fired: Iterable[tuple[str, int]]) -> None:
        """Continue after some completed steps, given the last step at which each batch node fired."""
        self.num_formed = self.num_reported = steps
        self.num_checked = self.last_checkpoint = steps
        self.last_settled = dict.fromkeys(self.last_settled, steps - 1)
        self.last_fired |= {name: step for name, step in last_fired if name in self.last_fired}
        self.version = dict.fromkeys(self.version, steps)
        self.last_changed = dict.fromkeys(self.last_changed, steps - 1)

    def form_batch(self) -> None:
        """Count a batch that was formed."""
        self.num_formed += 1

    def start(self, node: ScheduledNode, step: int) -> None:
        """Record that a batch node fires."""
        assert self.last_fired[node.name] < step, f"{node.name} fires twice at step {step}"
        self.running[node.name] = self.last_fired[node.name] = step
        for model in node.writes:
            self.last_changed[model] = step

    def finish(self, name: str, step: int, cycle: int) -> None:
        """Record that a batch node is done for a step. Its cycle is the step, unless the node was late."""
        assert self.running.get(name) == step, f"{name} does not run step {step}"
        del self.running[name]
        self.last_settled[name] = cycle
        self._update_versions()

    def skip(self, name: str, step: int) -> None:
        """Record that a batch node does not fire at a step."""
        self.last_settled[name] = step
        self._update_versions()

    def num_settled(self, names: Iterable[str]) -> int:
        """Return the number of formed steps at which all of these nodes are settled."""
        return min((self.last_settled[name] + 1 for name in names), default=self.num_formed)

    def trained_models(self, models: Iterable[str]) -> tuple[str, ...]:
        """Return those of `models` that some node writes. The others never change."""
        return tuple(model for model in models if model in self.version)

    def is_certain(self, step: int) -> bool:
        """Return whether it is certain that a step happens, or that it is the final cycle.

        Before that, the dataset may end and make this the final cycle, in which every side stream is due.
        """
        return step < self.num_formed or step == self.num_steps

    def writers(self, models: Iterable[str]) -> set[str]:
        """Return the batch nodes that change these models."""
        return {writer for model in models for writer in self._writers.get(model, ())}

    def is_unchanged(self, models: Iterable[str], step: int) -> bool:
        """Return whether these models are, or will be, as they are at the start of `step`."""
        return all(self.version[model] <= step and self.last_changed[model] < step for model in models)

    def common_version(self, models: Iterable[str]) -> int | None:
        """Return the version of all models if it is one and no node changes them now; else None."""
        versions = {self.version[model] for model in models}
        if len(versions) > 1:
            return None
        version = versions.pop() if versions else 0
        return version if self.is_unchanged(models, version) else None

    def min_version(self, models: Iterable[str]) -> int:
        """Return the lowest version among models; 0 if none of them changes."""
        return min((self.version[model] for model in models), default=0)

    def _update_versions(self) -> None:
        for model, writers in self._writers.items():
            self.version[model] = min(self.num_formed, self.num_settled(writers))
