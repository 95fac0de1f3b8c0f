"""`EngineGapWarning`: warns when an engine's log-probs are far from those of the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hflow.backends.interface import ENGINE_KL
from hflow.graph.ir import Graph


class EngineGapWarning:
    """Warns of each train node's first KL above the limit, and again whenever the KL has doubled.

    Args:
        graph: the graph of the run.
        max_kl: `report.max_engine_kl`; None: never warn.
    """

    def __init__(self, graph: Graph, max_kl: float | None) -> None:
        self._graph = graph
        self._max_kl = max_kl
        self._warned: dict[str, float] = {}

    def check(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the warnings that a step's metrics deserve.

        Args:
            step: number of the step, from 1.
            values: the step's metrics.
        """
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
        causes = f"Likely causes are a low precision (try models.{spec.models[0]}.dtype=fp32) and a "
        causes += "model or kernel that the engine implements differently."
        knobs = spec.knob_values
        key = f"nodes.{node}"
        if "behav_weight_cap" not in knobs:
            return f"{causes} {node} does not correct its loss for it; nodes.actor_train and gspo_train do."
        if spec.option("prox") not in ("recompute", "metrics"):
            return f"{causes} {key}.prox=recompute {key}.over_cap=truncate corrects the loss."
        cap = "null" if knobs["behav_weight_cap"] is None else knobs["behav_weight_cap"]
        return f"{causes} The loss is corrected up to {key}.behav_weight_cap={cap}."
