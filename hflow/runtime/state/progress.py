"""How far the run is: batches formed, nodes settled, versions of the models."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.graph.ir import Level
from hflow.planner.ir import Schedule, ScheduledNode


class Progress:
    """Steps and versions.

    Attributes:
        num_steps: steps that there will be; fewer than planned once the dataset is exhausted.
        formed: batches of the trained stream formed so far.
        reported: leading steps at which every batch node is settled (`StepDone`); with side streams
            that have batch nodes, the final cycle counts as one.
        settled: batch node -> the last step for which it is done or was passed over.
        fired: batch node -> the last step at which it fired.
        running: batch node at work -> its step.
        version: model -> leading steps at which its writers are settled. Only models that have writers.
        touched: model -> the last step at which a writer started to change it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_steps = schedule.num_steps
        self.formed = 0
        self.reported = 0
        nodes = [node for node in schedule.nodes if node.level is Level.BATCH]
        self.settled = {node.name: -1 for node in nodes}
        self.fired = dict.fromkeys(self.settled, -1)
        self.running: dict[str, int] = {}
        self._writers: dict[str, list[str]] = {}
        for node in nodes:
            for model in node.writes:
                self._writers.setdefault(model, []).append(node.name)
        self.version = dict.fromkeys(self._writers, 0)
        self.touched = dict.fromkeys(self._writers, -1)

    def form_batch(self) -> None:
        """A batch was formed."""
        self.formed += 1

    def start(self, node: ScheduledNode, step: int) -> None:
        """A batch node fires."""
        assert self.fired[node.name] < step, f"{node.name} fires twice at step {step}"
        self.running[node.name] = self.fired[node.name] = step
        for model in node.writes:
            self.touched[model] = step

    def finish(self, name: str, step: int, cycle: int) -> None:
        """A batch node is done for a step, which is that of its cycle unless it was late."""
        assert self.running.get(name) == step, f"{name} does not run step {step}"
        del self.running[name]
        self.settled[name] = cycle
        self._advance_versions()

    def pass_over(self, name: str, step: int) -> None:
        """A batch node does not fire at a step."""
        self.settled[name] = step
        self._advance_versions()

    def steps_settled(self, names: Iterable[str]) -> int:
        """Formed steps at which all of these nodes are done or passed over."""
        return min((self.settled[name] + 1 for name in names), default=self.formed)

    def trained_models(self, models: Iterable[str]) -> tuple[str, ...]:
        """Those of `models` that some node writes; the others never change."""
        return tuple(model for model in models if model in self.version)

    def is_untouched(self, models: Iterable[str], step: int) -> bool:
        """Whether these models can still be had as they are at the start of `step`."""
        return all(self.version[model] <= step and self.touched[model] < step for model in models)

    def common_version(self, models: Iterable[str]) -> int | None:
        """The version at which all models stand with no writer at work; None when there is none."""
        versions = {self.version[model] for model in models}
        if len(versions) > 1:
            return None
        version = versions.pop() if versions else 0
        return version if self.is_untouched(models, version) else None

    def least_version(self, models: Iterable[str]) -> int:
        """The least version among models; 0 where none of them changes."""
        return min((self.version[model] for model in models), default=0)

    def _advance_versions(self) -> None:
        for model, writers in self._writers.items():
            self.version[model] = min(self.formed, self.steps_settled(writers))
