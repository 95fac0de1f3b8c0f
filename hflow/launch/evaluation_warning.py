"""`EvaluationWarning`: warns when the means of an evaluation lack samples, and says why they were refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.graph.ir import Graph
from hflow.report.formatting import missing_text
from hflow.runtime.execution.step_metrics import EVALUATION_REFUSED, NUM_EVALUATED


class EvaluationWarning:
    """Warns of each side stream's first evaluation without all samples, and when their number has doubled.

    Args:
        graph: the graph of the run.

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
        """Yield the warnings that an evaluation's metrics deserve.

        Args:
            step: completed steps of the weights that were evaluated.
            values: the evaluation's metrics.
        """
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
                yield f"warning: {stream} after step {step}: {missing_text(*self.missing[stream])}{reason}"
