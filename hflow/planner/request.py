"""`PlanRequest`: the input of `compile_plan` besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.config.schema import ModelConfig, ScheduleConfig, WorkloadConfig
from hflow.planner.hardware import Device, Hardware
from hflow.planner.ir import ClusterSpec
from hflow.planner.model_shape import ModelShape, trained_shape
from hflow.types.kernels import TransformerEngine


@dataclass(frozen=True)
class PlanRequest:
    """A cluster, where each model runs, and the settings of a run.

    By default every model runs on all devices, and the models take turns.
    """

    cluster: ClusterSpec
    batch: int
    """Groups (prompts) per step."""
    num_steps: int
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """Model name -> its configuration, with its `dtype` decided; missing models have the defaults. A layout
    that is None becomes `d{devices of its group}`, or if that does not fit into memory, the layout with the
    fewest tensor ranks and stages that does. A group that is None becomes the group of the first trained
    model, or `all`."""
    shapes: Mapping[str, ModelShape] = field(default_factory=dict)
    """Model name -> its sizes. Without them the plan has no memory, seconds or weight slices of a model."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Model name -> its `model_type`, also of families that the planner does not know; for messages."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Device group -> its devices. Empty: each group that models name gets as many devices as its largest
    layout needs, and groups without a layout share the rest."""
    placement: str | None = None
    """Devices and layouts of replicas in one line (`placement.placement_setting`). It excludes `groups`, and
    the groups and layouts of models."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    save_every: int = 0
    """Steps between two checkpoints; 0 saves only at the end."""
    seed: int = 0
    deterministic: bool = False
    """Whether two runs of the plan must be equal bit for bit."""
    free: frozenset[str] = frozenset()
    """Keys of the configuration that the user left at their defaults and the planner may set: `placement`,
    `schedule.max_concurrent`, `models.NAME.tokens_per_microbatch` and so on. Layouts that are None are free
    in any case."""
    hardware: Hardware | None = None
    """Figures of devices and links; None: no forecast."""
    larger_devices: tuple[Device, ...] = ()
    """Other devices of the same type with more memory, in this order: what to use if nothing fits."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat configuration (models, optimizers, data) that enters the plan and its digest."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Model -> the engine that a plan file names, where the model's configuration names none."""
    engine_problems: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why this machine cannot run it. Such an engine is never the default."""
    flash_attn: str | None = None
    """Version of the package flash-attn on this machine; None if there is none."""
    transformer_engine: TransformerEngine | None = None
    """Transformer Engine on this machine; None if it is not installed."""
    warnings: tuple[str, ...] = ()
    """Warnings about the configuration: allowed, but probably not intended."""

    def trained_shape(self, name: str) -> ModelShape | None:
        """Return the sizes of what training changes of a model: its adapters, if it has any."""
        shape = self.shapes.get(name)
        return None if shape is None else trained_shape(shape, self.model(name).lora)

    def model(self, name: str) -> ModelConfig:
        """Return the configuration of a model, or the defaults if it has none."""
        return self.models[name] if name in self.models else ModelConfig()
