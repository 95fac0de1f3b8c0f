"""`PlanRequest`: what `compile_plan` is asked for besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.plan.ir import ClusterSpec


@dataclass(frozen=True)
class ModelRequest:
    """Where one model runs. What is None is decided by the planner."""

    layout: str | None = None
    """Layout of the replica that trains or infers, as `d2t2p1`; None: `d{devices of its group}`."""
    gen_layout: str | None = None
    """Layout of the replica that generates; None: `d{devices of its group}`."""
    group: str | None = None
    """Device group of the train or infer replica; None: that of the first trained model, or `all`."""
    gen_group: str | None = None
    """Device group of the replica that generates; None: the same, so that they take turns."""
    backend: str = "torch"
    engine: str = "embedded"


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
    max_staleness: int = 0
    """eta: how many syncs the weights of a trained token may lag behind; 0 is synchronous."""
    sync_every: int = 1
    """Steps between two transfers of weights to the engines."""
    max_concurrent: int = 256
    """Samples in flight."""
    max_refused_per_step: int = 1000
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end only."""
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat bound values (models, optimizers, data) that enter the plan and its digest."""
