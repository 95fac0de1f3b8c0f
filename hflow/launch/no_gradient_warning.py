"""`NoGradientWarning`: warns when a model has had no gradient for several steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.backends.interface import GRAD_NORM, LOSS, NUM_TRAINED_TOKENS, SKIPPED_UPDATES
from hflow.graph.ir import Graph
from hflow.planner.reported_field import reported_field

NUM_STEPS = 5
"""Steps in a row without a gradient after which a run warns."""
MAX_NORM = 1e-6
"""Largest gradient norm, and loss, that rounding alone leaves of 0."""
MANY_CUT = 0.5
"""Share of samples that ended at a limit of tokens from which this is named as a cause."""


class NoGradientWarning:
    """Warns once of each train node without gradient and loss, or an update, in `NUM_STEPS` steps in a row.

    No recipe means this to happen: equal rewards, or a batch without learned tokens, leave the weights as
    they are for as long as they last.

    Args:
        graph: the graph of the run.
        run: what `hflow samples` is called with to read this run's samples.
    """

    def __init__(self, graph: Graph, run: str) -> None:
        self._graph = graph
        self._nodes = [node.name for node in graph.nodes if node.spec.verb == "train"]
        self._run = run
        self._rows: dict[str, list[Mapping[str, float]]] = {}
        """Train node -> the metrics of the last steps, in all of which it had no gradient."""
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that a step's metrics deserve.

        Args:
            step: number of the step, from 1.
            values: the step's metrics.
        """
        for node in self._nodes:
            if NUM_TRAINED_TOKENS.member(node) not in values or node in self._warned:
                continue
            # A step without an update has neither.
            norm, loss = (values.get(metric.member(node), 0.0) for metric in (GRAD_NORM, LOSS))
            rows = self._rows.setdefault(node, [])
            if norm > MAX_NORM or not abs(loss) <= MAX_NORM:
                rows.clear()
                continue
            rows.append(values)
            if len(rows) == NUM_STEPS:
                self._warned.add(node)
                model = self._graph.node(node).spec.models[0]
                yield (
                    f"warning: {node} had no gradient in steps {step - NUM_STEPS + 1} to {step}, so {model} "
                    f"learns nothing. {self._advice(node, rows)}"
                )

    def _advice(self, node: str, rows: list[Mapping[str, float]]) -> str:
        """Return the likely causes, and where to look."""
        if all(row.get(NUM_TRAINED_TOKENS.member(node)) == 0 for row in rows):
            return f"No token of its batches is learned: {NUM_TRAINED_TOKENS.member(node)} is 0."
        if any(SKIPPED_UPDATES.member(node) in row for row in rows):
            skipped = SKIPPED_UPDATES.member(node)
            return (
                f"Updates whose gradient was not finite were skipped: see {skipped}. Lower the learning "
                "rate, or check the loss."
            )
        root = self._graph.root_stream(self._graph.node(node).stream)
        constant = [
            f"{name} was {rows[0][name]:g} in all of them"
            for name in self._scores(root.name)
            if name in rows[0] and all(row.get(name) == rows[0][name] for row in rows)
        ]
        causes = (
            "Likely causes: all samples of a prompt get the same reward, as when a reward never recognises "
            "an answer, or the task is too hard or too easy"
        )
        cut = max((row.get(f"{root.name}/truncated", 0.0) for row in rows), default=0.0)
        if cut >= MANY_CUT:
            causes += f"; or answers are cut ({root.name}/truncated is {cut:.2g})"
        found = f"{', '.join(constant)}. " if constant else ""
        return f"{found}{causes}. Read prompts, answers and rewards: hflow samples {self._run} --text"

    def _scores(self, root: str) -> list[str]:
        """Return the metrics of the numbers that samples of a root stream are scored with."""
        graph = self._graph
        fields = [
            (node.stream, reported_field(graph, node.name))
            for node in graph.nodes
            if node.spec.verb != "train" and graph.root_stream(node.stream).name == root
        ]
        return list(dict.fromkeys(f"{stream}/{field}" for stream, field in fields if field))
