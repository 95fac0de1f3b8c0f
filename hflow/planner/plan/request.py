"""`PlanRequest`: the input of `compile_plan` besides the graph; and the sample lengths that it assumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.base.errors import PlanError, nearest
from hflow.config.schema import ALL_LINEAR, LoraConfig, ModelConfig, ScheduleConfig, WorkloadConfig
from hflow.graph.ir import NodeSpec
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.hardware import Device, Hardware
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import PromptImages, Workload
from hflow.shapes.model_shape import ModelShape, adapted_shape, adapter_targets, expert_targets, outer_targets
from hflow.types.kernels import AttentionKernel, TransformerEngine


@dataclass(frozen=True)
class PlanRequest:
    """A cluster, where each model runs, and the settings of a run.

    By default every model runs on all devices, and the models take turns.
    """

    cluster: ClusterSpec
    hardware: Hardware
    """Figures of the cluster's devices and links."""
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
    """Devices and layouts of replicas in one line (`make.placement_setting`). It excludes `groups`, and
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
    larger_devices: tuple[Device, ...] = ()
    """Other devices of the same type with more memory, in this order: what to use if nothing fits."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    images: Mapping[str, PromptImages] = field(default_factory=dict)
    """Model that sees -> the images of its prompts, if they have any."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Flat configuration (models, optimizers, data) that enters the plan and its digest."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Model -> the engine that a plan file names, where the model's configuration names none."""
    engine_problems: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why this machine cannot run it. Such an engine is never the default."""
    backend_problems: Mapping[str, str] = field(default_factory=dict)
    """Training backend -> why this machine cannot run it. The planner does not choose such a backend."""
    flash_attn: Mapping[AttentionKernel, str] = field(default_factory=dict)
    """Packages with attention kernels on this machine -> version."""
    transformer_engine: TransformerEngine | None = None
    """Transformer Engine on this machine; None if it is not installed."""
    warnings: tuple[str, ...] = ()
    """Warnings about the configuration: allowed, but probably not intended."""

    def trained_shape(self, name: str) -> ModelShape | None:
        """Return the sizes of a model's trained part: its adapters, if it has any."""
        shape = self.shapes.get(name)
        return None if shape is None else trained_shape(shape, self.model(name).lora)

    def model(self, name: str) -> ModelConfig:
        """Return the configuration of a model, or the defaults if it has none."""
        return self.models[name] if name in self.models else ModelConfig()


def trained_shape(shape: ModelShape, lora: LoraConfig | None) -> ModelShape:
    """Return the shape whose tensors training changes: that of the adapters, if there are any.

    Raises:
        PlanError: if the model lacks a targeted module; names the nearest ones.
    """
    if lora is None:
        return shape
    of_layers = adapter_targets(shape)
    known = (*of_layers, *expert_targets(shape), *outer_targets(shape))
    for name in (chosen := lora.chosen(of_layers)):
        if name not in known:
            raise PlanError(
                f"lora.targets: the {shape.family} model has no matrix {name!r}{nearest(name, known)} "
                f"(known: {ALL_LINEAR}, {', '.join(known)}; routers, experts with biases and a tied "
                "embedding have no adapters)"
            )
    return adapted_shape(shape, lora.r, chosen, has_magnitudes=lora.dora)


DEFAULT_PROMPT = 512
"""Maximum tokens of a prompt if the user sets none."""
DEFAULT_CV = 0.6


def stream_workloads(plan: Plan, request: PlanRequest) -> tuple[tuple[str, Workload], ...]:
    """Return the lengths of each root stream's samples.

    A written stream has no `max_tokens`: its prompt is assumed to take at most half of the model's
    `max_model_len`, and its response half of the rest on average.

    Raises:
        PlanError: if the prompt leaves no room for a response.
    """
    return tuple(
        (stream.name, _workload(plan.graph.node(stream.source).spec, request))
        for stream in plan.schedule.streams
    )


def _workload(spec: NodeSpec, request: PlanRequest) -> Workload:
    assumed = request.workload
    max_length, model = min((request.model(name).gen.max_model_len, name) for name in spec.models)
    max_tokens = spec.option("max_tokens")
    max_prompt = max_length // 2 if max_tokens is None else max(1, max_length - max_tokens)
    images = next((request.images[name] for name in spec.models if name in request.images), None)
    of_images = 0 if images is None else images.tokens
    prompt = min(DEFAULT_PROMPT + of_images, max_prompt) if assumed.prompt is None else assumed.prompt
    if prompt < of_images:
        room = (
            f"{max_prompt} tokens for the prompts of {spec.name!r}; raise models.{model}.gen.max_model_len"
            if assumed.prompt is None
            else f"workload.prompt={prompt}; raise it"
        )
        raise PlanError(f"{images} are {of_images:,} tokens, but there are {room}, or lower workload.images")
    if prompt >= max_length:
        raise PlanError(
            f"prompts of {prompt} tokens leave no room for a response of {spec.name!r} in {max_length} "
            f"tokens; set workload.prompt to {max_length - 1} or less, or raise max_model_len of {model!r}"
        )
    max_response = max_length - prompt if max_tokens is None else min(max_tokens, max_length - prompt)
    return Workload(
        prompt=prompt,
        response_mean=max_response / 2 if assumed.response_mean is None else assumed.response_mean,
        response_cv=DEFAULT_CV if assumed.response_cv is None else assumed.response_cv,
        max_response=max_response,
        is_assumed=None in (assumed.prompt, assumed.response_mean, assumed.response_cv),
        images=images,
        shares=tuple(sorted(assumed.shares.items())),
    )
