"""`ReplicaOption`: a layout and settings with which a replica can use devices, and its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.config.schema import ModelConfig
from hflow.planner.plan.rows import Replica
from hflow.shapes.layout import Layout


@dataclass(frozen=True, eq=False)
class ReplicaOption:
    """One way in which a replica can use its devices."""

    replica: Replica
    """On the first devices of the cluster, or on those that the user named."""
    config: ModelConfig
    seconds: Mapping[str, float]
    """Node or source -> seconds of one execution."""
    total: float
    """Seconds of all executions in a step."""

    @property
    def name(self) -> str:
        """The replica's name."""
        return self.replica.name

    @property
    def layout(self) -> Layout:
        """The replica's layout."""
        return self.replica.layout

    @property
    def cuts(self) -> int:
        """Parts into which the layout divides the model."""
        return self.layout.world // self.layout.data
