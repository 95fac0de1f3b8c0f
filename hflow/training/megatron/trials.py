"""Runs by which `hflow doctor` tries the megatron backend on real devices."""

from hflow.planner.models.descriptors import TrialRun

_EMBEDDED = "models.actor.gen.engine=embedded"
_DETERMINISTIC = "deterministic=true"
_MEGATRON = ("models.actor.backend=megatron", "models.actor.layout=d{half}t2p1")

TRIAL_RUNS = (
    TrialRun(
        "megatron",
        "tensor parallelism",
        (_EMBEDDED, *_MEGATRON),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron stages",
        "pipeline stages, whose state is in host memory between nodes",
        (
            *(_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{half}t1p2"),
            "models.actor.offload=all",
        ),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron context",
        "context ranks",
        (_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{half}c2"),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron experts",
        "expert ranks",
        (
            *(_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{n}e2"),
            *("model@models.actor=tiny-qwen3-moe", "models.actor.path=null"),
        ),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "equal runs of megatron",
        "megatron with deterministic=true",
        (_DETERMINISTIC, *_MEGATRON),
        min_devices=2,
        multiple=2,
        package="megatron",
        recipe="sft",
        is_repeated=True,
    ),
)
