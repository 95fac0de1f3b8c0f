"""What vLLM is started with: environment variables, and the arguments of its engine.

A run's engine and the server that `hflow serve` starts have the same, so that both draw the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from hflow.base.devices import is_gpu
from hflow.base.errors import BackendError
from hflow.engines.interface import EngineSetup
from hflow.engines.vllm.checks import SCHEDULES_AHEAD_ON, adapter_buffers
from hflow.engines.vllm.memory import UNPLANNED_FRACTION, cache_without_plan, graph_sizes, step_tokens
from hflow.models.hf_config import read_config
from hflow.models.settings import ModelSettings
from hflow.shapes.architectures import read_shape
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.sampling_mask import SAMPLING_MASK

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""hflow's name of a dtype -> vLLM's."""
_CUDA_QUEUES = "8"
"""Hardware queues of a process: CUDA's default. A worker with tensor ranks of megatron has only one."""
_RANK_EXTENSION = "hflow.engines.vllm.rank.RankExtension"
_RECORDING_WORKER = "hflow.engines.vllm.cpu_recording.RecordingWorker"
_QUANTIZATIONS: Mapping[str | None, Mapping[str, Any]] = {
    None: {},
    # vLLM would quantise the routers of experts too, whose rounding changes which experts compute a token.
    "fp8": {"quantization": "fp8_per_block", "quantization_config": {"ignore": ["*.gate"]}},
}
"""`models.NAME.gen.quantization` -> the arguments of vLLM's engine."""
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Family -> keys of its config that transformers does not read, as it computes."""
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Keys of configs of gpt-oss that vLLM does not read, and what its layers compute."""
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {**SWIGLU, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": True}
}
"""Family -> keys of its config that vLLM does not read, and what its layers compute."""
_CACHE_DTYPES: Mapping[str | None, Mapping[str, Any]] = {None: {}, "fp8": {"kv_cache_dtype": "fp8"}}
"""`models.NAME.gen.cache_dtype` -> the arguments of vLLM's engine."""
_UNUSED_FRACTION = 0.01
"""`gpu_memory_utilization` where the size of the cache is given. vLLM does not start where less than the
fraction is free, although it does not size the cache by it."""


def environment(setup: EngineSetup) -> dict[str, str]:
    """Return the environment variables of a process, which vLLM reads when it is imported."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO" if setup.log else "ERROR",
        # Otherwise it depends on whether triton is installed. The second one draws the tokens of all requests
        # at once, the first one those of each request with a seed by themselves. A CPU has only the first.
        "VLLM_USE_V2_MODEL_RUNNER": str(int(setup.settings.device != "cpu")),
        # Forked ranks would hold the connection to the worker open. vLLM spawns them on a CPU by itself.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if is_gpu(setup.settings.device):
        # Without a list, the process has the devices of this one.
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(setup.devices)} if setup.devices else {}
        return variables | devices | {"CUDA_DEVICE_MAX_CONNECTIONS": _CUDA_QUEUES}
    cores = [",".join(map(str, rank_cores)) for rank_cores in setup.cores]
    num_threads = len(setup.cores[0]) if setup.cores else torch.get_num_threads()
    return {
        **variables,
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores) if setup.tensor > 1 and cores else "nobind",
    }


def engine_arguments(setup: EngineSetup, directory: str, max_length: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine (fields of its `EngineArgs`).

    It has room for as much as engines of its guests would have. `directory` has the model's `config.json`,
    and its weights if it has a path.
    """
    on_cpu = setup.settings.device == "cpu"
    has_graphs = not on_cpu and setup.options.get("cuda_graphs", True)
    max_running = sum(one.options["max_running"] for one in (setup, *setup.guests))
    return {
        "model": directory,
        "dtype": _DTYPES[setup.settings.dtype],
        "seed": 0,
        "generation_config": "vllm",
        "max_model_len": max_length,
        "max_num_seqs": max_running,
        "async_scheduling": setup.settings.device in SCHEDULES_AHEAD_ON,
        "max_num_batched_tokens": step_tokens(max_running, max_length, on_cpu),
        # Where vLLM divides a prompt, it turns the request's generator back, which one of a CPU cannot.
        "enable_chunked_prefill": not on_cpu,
        "tensor_parallel_size": setup.tensor,
        "distributed_executor_backend": "mp" if setup.tensor > 1 else "uni",
        "enforce_eager": not has_graphs,
        "logprobs_mode": "processed_logprobs",
        # Its own limit is 20. The stepper asks for those that sampling leaves.
        **({"max_logprobs": -1} if SAMPLING_MASK in setup.records else {}),
        "disable_log_stats": True,
        "worker_extension_cls": _RANK_EXTENSION,
        # The default of experts' kernels reorders their weights.
        **({} if on_cpu else {"moe_backend": "triton"}),
        # vLLM's own sizes end at 512, and larger batches would be decoded without a graph.
        **({"cudagraph_capture_sizes": graph_sizes(max_running)} if has_graphs else {}),
        **_family_options(setup.settings, on_cpu),
        **_QUANTIZATIONS[setup.options.get("quantization")],
        **_CACHE_DTYPES[setup.options.get("cache_dtype")],
        **(_recording(on_cpu) if ROUTED_EXPERTS in setup.records else {}),
        **_adapters(setup),
        **_memory(setup, max_running, max_length),
    }


def _family_options(settings: ModelSettings, on_cpu: bool) -> dict[str, Any]:
    """Return options that vLLM would read from keys that transformers ignores, or from the machine."""
    config = read_config(settings)
    _check_fixed(settings.name, config)
    overrides = dict(_OVERRIDES.get(config.model_type, {}))
    if getattr(config, "topk_method", None) == "greedy":
        overrides |= {"n_group": 1, "topk_group": 1}
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    return {
        **({"hf_overrides": overrides} if overrides else {}),
        # On a CPU with AMX, vLLM would delete a weight after packing it.
        **({"attention_backend": "CPU_MLA"} if on_cpu and is_latent else {}),
    }


def _check_fixed(model: str, config: Any) -> None:
    """Check that vLLM's layers compute what a config says.

    Raises:
        BackendError: if they compute something else.
    """
    family = config.model_type
    wanted = {name: (getattr(config, name, value), value) for name, value in _FIXED.get(family, {}).items()}
    if family == "gpt_oss":
        wanted["rope_type"] = config.rope_parameters["rope_type"], "yarn"
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        wanted["layer_types"] = windowed, [i % 2 == 0 for i in range(len(windowed))]
    for name, (asked, fixed) in wanted.items():
        if asked != fixed:
            raise BackendError(
                f"model {model!r}: {name} is {asked}, but vllm's layers of {family} have {fixed}; set "
                f"models.{model}.gen.engine=embedded"
            )


def _adapters(setup: EngineSetup) -> dict[str, Any]:
    """Return the options with which vLLM computes adapters beside the weights."""
    models = [one.settings for one in (setup, *setup.guests) if one.settings.lora is not None]
    if not models or setup.options.get("merges_adapters"):
        return {}
    buffers = [buffers_of(settings) for settings in models]
    modules = dict.fromkeys(module for _, targets in buffers for module in targets)
    return {
        "enable_lora": True,
        "max_loras": len(models),
        "max_lora_rank": max(rank for rank, _ in buffers),
        # Without a list of modules, the embedding and the output matrix would have buffers too.
        "lora_target_modules": list(modules),
    }


def buffers_of(settings: ModelSettings) -> tuple[int, tuple[str, ...]]:
    """Return the rank of vLLM's buffers of a model's adapters, and the modules that have some."""
    shape = read_shape(read_config(settings).to_dict())
    assert shape is not None, "the plan refuses models whose tensors are unknown"
    assert settings.lora is not None, "the model has no adapters"
    return adapter_buffers(shape, settings.lora)


def _recording(on_cpu: bool) -> dict[str, Any]:
    """Return the options that make vLLM record experts. Its store of them needs hashes of cached blocks."""
    if on_cpu:
        return {"enable_prefix_caching": True, "worker_cls": _RECORDING_WORKER}
    return {"enable_prefix_caching": True, "enable_return_routed_experts": True}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as vLLM's command line takes them."""
    words = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            words += [f"--{option}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{option}", *map(str, value)]
        else:
            words += [f"--{option}", str(value)]
    return words


def _memory(setup: EngineSetup, max_running: int, max_length: int) -> dict[str, Any]:
    """Return the size of the KV cache: the plan's, or one for a CPU, as vLLM does not choose that."""
    options = [one.options for one in (setup, *setup.guests)]
    is_planned = all("cache_bytes" in one for one in options)
    cache = sum(one["cache_bytes"] for one in options) if is_planned else None
    if cache is None and setup.settings.device == "cpu":
        cache = cache_without_plan(
            read_config(setup.settings).get_text_config(),
            setup.options.get("cache_dtype") or setup.settings.dtype,
            max_running,
            max_length,
            setup.tensor,
        )
    if cache is None:
        return {"gpu_memory_utilization": UNPLANNED_FRACTION}
    return {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": _UNUSED_FRACTION}
