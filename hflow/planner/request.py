"""`PlanRequest`: what `compile_plan` is asked for besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.config.schema import ModelConfig, ScheduleConfig, WorkloadConfig
from hflow.planner.hardware import Hardware
from hflow.planner.ir import ClusterSpec
from hflow.planner.model_shape import ModelShape


@dataclass(frozen=True)
class PlanRequest:
    """A cluster, a place for every model, and the numbers of a run.

    By default every model runs on all devices, which take turns.
    """

    cluster: ClusterSpec
    batch: int
    """Groups (prompts) a step."""
    num_steps: int
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Model name -> its configuration with its `dtype` decided. A model that is left out has the defaults.
    A layout that is None becomes `d{devices of its group}`; where that does not fit in memory, the layout
    with the fewest tensor ranks and stages that fits. A group that is None becomes the group of the first
    trained model, or `all`."""
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Model name -> its sizes. For models without, the plan has no memory, time or weight slices."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Device group -> its devices. Empty: the groups that models name share the cluster out, each
    as large as its largest layout; those without a layout share what is left."""
    placement: str | None = None
    """Devices and layouts of replicas in short, as `allocation.allocate` reads them; not together with
    groups and layouts above."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end only."""
    seed: int = 0
    hardware: Hardware | None = None
    """Devices and links; None: no forecast."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat bound values (models, optimizers, data) that enter the plan and its digest."""
    warnings: tuple[str, ...] = ()
    """What is allowed in the configuration, but probably not meant."""

    def model(self, name: str) -> ModelConfig:
        """Return the configuration of a model; the defaults for one that is left out."""
        return self.models.get(name, ModelConfig())
