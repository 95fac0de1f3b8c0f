"""Every key of a run's configuration: its type, its default, its meaning.

`null` means "as planned" or "none", as each key says. The metadata `least` is the smallest value
that a number may have; everything else that a value must be is in its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hflow.types import ScheduleSettings


def _minimum(least: float, default: Any) -> Any:
    return field(default=default, metadata={"minimum": least})


def _empty() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule. Steps are optimizer steps, not steps of the run."""

    lr: float = _minimum(0, 1e-6)
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = _minimum(0, 1e-8)
    weight_decay: float = _minimum(0, 0.0)
    warmup_steps: int = _minimum(0, 0)
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from the warm-up's end to the run's."""
    min_lr_ratio: float = _minimum(0, 0.0)
    """The last learning rate over `lr`, for `linear` and `cosine`."""
    clip_grad: float = _minimum(0, 1.0)
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class GenConfig:
    """How a model generates."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """The generation engine. `vllm` is planned, but not run yet."""
    layout: str | None = None
    """Axes of its replica, such as `d4t1`; null: as planned."""
    group: str | None = None
    """Device group of its replica; null: as planned."""
    transport: Literal["auto", "store", "disk"] = "auto"
    """How new weights reach engines with devices of their own: through the object store, or files in the
    run's directory, which all machines must share then; `auto`: the plan chooses, and says why."""
    max_running: int = _minimum(1, 256)
    """Sequences that one engine decodes at once."""
    max_model_len: int = _minimum(2, 2048)
    """Tokens of prompt and completion together."""


@dataclass(frozen=True)
class ModelConfig:
    """One model of the recipe: `models.NAME`."""

    path: str | None = None
    """A local HF checkpoint directory: config, weights and tokenizer come from it."""
    architecture: Mapping[str, Any] | None = None
    """An HF config as a mapping with `model_type`. Without `path` the weights start at random; with
    it, this is what the planner reads while the checkpoint does not exist yet."""
    alphabet: str | None = None
    """Characters of a character tokenizer, for an `architecture` without a tokenizer of its own."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    backend: Literal["torch", "megatron"] = "torch"
    """The engine that trains and infers: `torch` (transformers, data parallelism by FSDP2) or `megatron`
    (megatron-core: tensor, pipeline and data parallelism)."""
    layout: str | None = None
    """Axes of the replica that trains (or infers), such as `d2t2p1`; null: as planned."""
    group: str | None = None
    """Its device group: replicas with one group's name share devices and take turns; null: as planned."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of the forward and backward pass; null: that of the model it starts from, or else fp32."""
    tokens_per_microbatch: int = _minimum(1, 16384)
    """Packed tokens of one forward. No result depends on it."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    save_optimizer: bool = True
    """Whether checkpoints of a trained model hold the optimizer's state too, in `shards/` beside the HF
    files: twelve bytes a parameter more, by every rank, so that all machines must share `out`."""
    resume: bool = False
    """Start from the `shards/` in `path`, the optimizer included, whatever layout and backend wrote them."""
    sequence_parallel: bool | None = None
    """Whether `megatron`'s tensor ranks share the tokens between their matrices too; null: on CUDA, where it
    saves memory at no cost."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    gen: GenConfig = field(default_factory=GenConfig)


@dataclass(frozen=True)
class DataConfig:
    """The rows of one dataset of the recipe: `data.NAME`. Either `path` or `generator`."""

    path: str | None = None
    """A `.jsonl` or `.parquet` file whose columns are those that the recipe declares."""
    generator: str | None = None
    """A named generator of rows, such as `addition`."""
    split: str = "train"
    """Which part of a generator's rows."""
    shuffle: bool = True
    """Whether every pass takes the rows in another order, seeded by `seed`."""
    limit: int | None = _minimum(1, None)
    """Rows to take; null: all."""


@dataclass(frozen=True)
class WorkloadConfig:
    """Lengths in tokens that the plan's estimates assume; null: hflow's guess, and the plan says so."""

    prompt: int | None = _minimum(1, None)
    """Tokens of a prompt."""
    response_mean: float | None = _minimum(1, None)
    """Mean tokens of a response."""
    response_cv: float | None = _minimum(0, None)
    """Standard deviation of the responses over their mean; 0: all alike."""


@dataclass(frozen=True)
class ReportConfig:
    """What a run shows while it runs: `report`."""

    show: tuple[str, ...] | None = None
    """Metrics in the live panel and the plain lines, as names or globs of `metrics.jsonl`, such as
    `[time/*,actor_train/grad_norm]`; null: losses, and what samples are scored with."""


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of one run."""

    name: str
    """The run's name, by default the recipe's file name. Results lie in OUT/NAME/TIME."""
    out: str = "runs"
    """Directory of results; like all paths, relative to the working directory."""
    seed: int = _minimum(0, 0)
    """Seeds the order of data, sampling, minibatches and random weights."""
    steps: int = _minimum(1, 100)
    """Training steps."""
    batch: int = _minimum(1, 32)
    """Groups a step; a group is one prompt with its samples."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """How far generation may run ahead of training."""
    save_every: int = _minimum(0, 0)
    """Steps from one checkpoint to the next; 0 keeps only the one at the end."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """What is shown while it runs."""
    workers: Literal["ray", "inproc"] = "ray"
    """Where workers live: in processes that Ray starts, or all in this one."""
    collective_timeout: float = _minimum(1, 600.0)
    """Seconds that a rank waits for the others of a collective; then the run ends, saying who is missing."""
    cluster: str = "cpu-1x1"
    """Devices: `h100-8x8` is eight machines with eight H100 each; a `cpu` device is one process."""
    cores: tuple[int, ...] | None = None
    """Processor cores of each device's worker, as in `[6,2]`, or of each alike, `[4]`: a worker is bound to
    its own, so that trainers and engines on one machine do not take them from each other; null: not bound."""
    network: str | None = None
    """The link between machines, such as `ib-ndr`; null: the usual one of such devices."""
    device_memory_gib: float | None = _minimum(0, None)
    """Memory of one device that the plan may use; null: all that such a device has."""
    placement: str | None = None
    """Devices and layouts in short, as in `actor=0-3:d2t2p1 actor.gen=4-7:d4`; null: `groups` and the
    models' own `group` and `layout`."""
    groups: Mapping[str, tuple[int, ...]] = _empty()
    """Devices of each device group that models name, as in `groups.gen=[4,5,6,7]`; empty: as planned."""
    models: Mapping[str, ModelConfig] = _empty()
    """By the recipe's model names."""
    data: Mapping[str, DataConfig] = _empty()
    """By the recipe's dataset names."""
    nodes: Mapping[str, Mapping[str, Any]] = _empty()
    """By the recipe's node names: knobs and decorator options, as in `nodes.actor_train.clip`."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    """What the plan's estimates assume of the data."""
