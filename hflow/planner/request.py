"""`PlanRequest`: what `compile_plan` is asked for besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hflow.planner.hardware import Hardware
from hflow.planner.ir import ClusterSpec
from hflow.planner.model_shape import ModelShape
from hflow.planner.workload import WorkloadRequest
from hflow.types import ScheduleSettings


@dataclass(frozen=True)
class ModelRequest:
    """Where one model runs. What is None is decided by the planner."""

    layout: str | None = None
    """Layout of the replica that trains or infers, as `d2t2p1`; None: `d{devices of its group}`, and where
    that does not fit, with the fewest tensor ranks and stages that do, if the backend has them."""
    gen_layout: str | None = None
    """Layout of the replica that generates; None: `d{devices of its group}`."""
    group: str | None = None
    """Device group of the train or infer replica; None: that of the first trained model, or `all`."""
    gen_group: str | None = None
    """Device group of the replica that generates; None: the same, so that they take turns."""
    backend: str = "torch"
    engine: str = "embedded"
    transport: Literal["auto", "store", "disk"] = "auto"
    """The way of new weights to engines with devices of their own."""
    shape: ModelShape | None = None
    """Its sizes; None where the planner does not know its family. With it come memory, time and routes."""
    dtype: str = "fp32"
    """`fp32` or `bf16`: what forward and backward passes compute in, and engines hold."""
    tokens_per_microbatch: int = 16384
    recompute: bool = False
    """Activations are recomputed in the backward pass (`activation_checkpointing`)."""
    sequence_parallel: bool | None = None
    """Whether tensor ranks share the tokens between their matrices; None: on CUDA."""
    saves_optimizer: bool = True
    """Whether every rank writes what its optimizer holds into a checkpoint (`save_optimizer`)."""
    max_running: int = 256
    """Sequences that one engine decodes at once."""
    max_model_len: int = 2048
    """Tokens of prompt and completion together."""

    def shares_tokens(self, on_cpu: bool) -> bool:
        """Whether tensor ranks of a training backend share the tokens between their matrices."""
        return not on_cpu if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True)
class PlanRequest:
    """A cluster, a place for every model, and the numbers of a run.

    By default every model runs on all devices, which take turns.
    """

    cluster: ClusterSpec
    batch: int
    """Groups (prompts) a step."""
    num_steps: int
    models: Mapping[str, ModelRequest] = field(default_factory=dict)
    """Model name -> where it runs; a model that is left out takes the defaults."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Device group -> its devices. Empty: the groups that models name share the cluster out, each
    as large as its largest layout; those without a layout share what is left."""
    placement: str | None = None
    """Devices and layouts of replicas in short, as `allocation.allocate` reads them; not together with
    groups and layouts above."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end only."""
    seed: int = 0
    hardware: Hardware | None = None
    """Devices and links; None: no forecast."""
    workload: WorkloadRequest = field(default_factory=WorkloadRequest)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat bound values (models, optimizers, data) that enter the plan and its digest."""
    warnings: tuple[str, ...] = ()
    """What is allowed in the configuration, but probably not meant."""

    def model(self, name: str) -> ModelRequest:
        """What is asked for a model; the defaults for one that is left out."""
        return self.models.get(name, ModelRequest())
