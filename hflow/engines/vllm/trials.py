"""Runs by which `hflow doctor` tries vLLM on real devices."""

from hflow.planner.models.descriptors import TrialRun

_VLLM = "models.actor.gen.engine=vllm"
_DETERMINISTIC = "deterministic=true"
_MEGATRON = ("models.actor.backend=megatron", "models.actor.layout=d{half}t2p1")

TRIAL_RUNS = (
    TrialRun(
        "vllm ranks",
        "vLLM with tensor ranks, beside FSDP2",
        (_VLLM, "models.actor.layout=d{n}", "models.actor.gen.layout=d{half}t2"),
        min_devices=2,
        multiple=2,
        package="vllm",
    ),
    TrialRun(
        "megatron with vllm",
        "vLLM with tensor ranks, beside megatron's",
        (_VLLM, *_MEGATRON, "models.actor.gen.layout=d{half}t2"),
        min_devices=2,
        multiple=2,
        package="vllm",
    ),
    TrialRun(
        "full memory",
        "vLLM beside the trainer, with a KV cache that takes the memory of the GPU",
        (_VLLM, "models.actor.layout=d{n}", "models.actor.gen.cache_gib={cache_gib}"),
        package="vllm",
        on_cpu=False,
        fills_memory=True,
    ),
    TrialRun(
        "routing replay",
        "experts of a mixture that vLLM records",
        (
            _VLLM,
            "model@models.actor=tiny-qwen3-moe",
            "models.actor.path=null",
            "nodes.actor_gen.routing_replay=true",
        ),
        1,
        package="vllm",
        replays_experts=True,
    ),
    TrialRun(
        "equal runs of vllm",
        "vLLM with deterministic=true, beside FSDP2",
        (_VLLM, _DETERMINISTIC, "models.actor.layout=d{n}"),
        package="vllm",
        on_cpu=False,
        is_repeated=True,
    ),
)
