"""What a run warns of after a step, from the step's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hflow.graph.ir import Graph
from hflow.graph.queries import missing_correction, reported_field
from hflow.report.formatting import format_missing
from hflow.runtime.records.step_metrics import EVALUATION_REFUSED, NUM_EVALUATED
from hflow.training.interface import ENGINE_KL, GRAD_NORM, LOSS, NUM_TRAINED_TOKENS, SKIPPED_UPDATES


class EngineGapWarning:
    """Warns of each train node's first KL above the limit, and again whenever the KL has doubled.

    `low_precisions` is model -> the setting that ends a low precision, of its engines or its own.
    """

    def __init__(self, graph: Graph, max_kl: float | None, low_precisions: Mapping[str, str]) -> None:
        self._graph = graph
        self._low_precisions = low_precisions
        self._max_kl = max_kl
        self._warned: dict[str, float] = {}

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that a step's metrics deserve."""
        if self._max_kl is None:
            return
        for name, value in values.items():
            if not (node := ENGINE_KL.key_of(name)):
                continue
            kl = math.inf if math.isnan(value) else value
            limit = 2 * self._warned[node] if node in self._warned else self._max_kl
            if kl > limit:
                self._warned[node] = kl
                yield (
                    f"warning: {name} is {value:.3g} in step {step}, above "
                    f"report.max_engine_kl={self._max_kl:g}: with the same weights, the engine draws from "
                    f"another distribution than the trainer computes. {self._advice(node)}"
                )

    def _advice(self, node: str) -> str:
        """Return the likely causes, and how to correct the loss."""
        spec = self._graph.node(node).spec
        key = f"models.{spec.models[0]}"
        tries = self._low_precisions.get(spec.models[0], "dtype=fp32")
        causes = f"Likely causes are a low precision (try {key}.{tries}) and a model or kernel that the "
        causes += "engine implements differently."
        missing = missing_correction(self._graph.node(node))
        if missing is not None:
            return f"{causes} {missing}"
        limit = spec.knob_values["behav_weight_cap"]
        cap = "null" if limit is None else limit
        return f"{causes} The loss is corrected up to nodes.{node}.behav_weight_cap={cap}."


class EvaluationWarning:
    """Warns of each side stream's first evaluation without all samples, and when their number has doubled.

    Attributes:
        missing: side stream -> (refused samples, all samples) of its last evaluation, if it refused any.
    """

    def __init__(self, graph: Graph) -> None:
        self._streams = {node.name: graph.root_stream(node.stream).name for node in graph.nodes}
        self._messages: dict[str, str] = {}
        self._warned: dict[str, float] = {}
        self.missing: dict[str, tuple[int, int]] = {}

    def add_refusal(self, node: str, message: str) -> None:
        """Keep why a node refused a sample; the first reason of each stream is reported."""
        if message:
            self._messages.setdefault(self._streams[node], message)

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that the metrics of an evaluation after `step` completed steps deserve."""
        for name, num_refused in values.items():
            if not (stream := EVALUATION_REFUSED.key_of(name)):
                continue
            self.missing.pop(stream, None)
            if not num_refused:
                continue
            num_all = num_refused + values[NUM_EVALUATED.member(stream)]
            self.missing[stream] = int(num_refused), int(num_all)
            if num_refused >= 2 * self._warned.get(stream, 0):
                self._warned[stream] = num_refused
                reason = f": {self._messages[stream]}" if stream in self._messages else ""
                yield f"warning: {stream} after step {step}: {format_missing(*self.missing[stream])}{reason}"


NUM_IDLE_STEPS = 5
"""Steps in a row without a gradient after which a run warns."""
NO_GRADIENT_NORM = 1e-6
"""Largest gradient norm, and loss, that rounding alone leaves of 0."""
MANY_CUT = 0.5
"""Share of samples that ended at a limit of tokens from which this is named as a cause."""


class TruncationWarning:
    """Warns once of each stream most of whose samples ended at a limit of tokens."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that a step's metrics deserve."""
        for name, share in values.items():
            stream, _, kind = name.partition("/")
            if kind == "truncated" and share > MANY_CUT and stream not in self._warned:
                self._warned.add(stream)
                yield (
                    f"warning: {share:.0%} of the samples of {stream} in step {step} ended at a limit of "
                    f"tokens, and not by a stop token ({name}). Raise nodes.{stream}.max_tokens, or ask for "
                    "shorter answers."
                )


class NoGradientWarning:
    """Warns once of each train node without gradient and loss, or an update, in `NUM_IDLE_STEPS` steps.

    No recipe means this to happen: equal rewards, or a batch without learned tokens, leave the weights as
    they are for as long as they last.

    `run` is what `hflow samples` is called with to read this run's samples.
    """

    def __init__(self, graph: Graph, run: str) -> None:
        self._graph = graph
        self._nodes = [node.name for node in graph.nodes if node.spec.verb == "train"]
        self._run = run
        self._rows: dict[str, list[Mapping[str, float]]] = {}
        """Train node -> the metrics of the last steps, in all of which it had no gradient."""
        self._warned: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that a step's metrics deserve."""
        for node in self._nodes:
            if NUM_TRAINED_TOKENS.member(node) not in values or node in self._warned:
                continue
            # A step without an update has neither.
            norm, loss = (values.get(metric.member(node), 0.0) for metric in (GRAD_NORM, LOSS))
            rows = self._rows.setdefault(node, [])
            if norm > NO_GRADIENT_NORM or not abs(loss) <= NO_GRADIENT_NORM:
                rows.clear()
                continue
            rows.append(values)
            if len(rows) == NUM_IDLE_STEPS:
                self._warned.add(node)
                model, first = self._graph.node(node).spec.models[0], step - NUM_IDLE_STEPS + 1
                yield (
                    f"warning: {node} had no gradient in steps {first} to {step}, so {model} "
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
