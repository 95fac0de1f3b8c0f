"""What vLLM is started with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest
import vision_kit
from torch_kit import SETTINGS

from hflow.base.errors import BackendError
from hflow.config.schema import LoraConfig
from hflow.engines.interface import EngineSetup
from hflow.engines.vllm import vision_options
from hflow.engines.vllm.engine import vllm_launch
from hflow.engines.vllm.launch_options import command_line, engine_arguments
from hflow.engines.vllm.memory import graph_sizes, image_tokens
from hflow.engines.vllm.vision_options import image_options, model_overrides
from hflow.models.settings import ModelSettings

QWEN2 = {"model_type": "qwen2"}


def arguments(
    device: str, max_running: int = 1024, architecture: Mapping[str, Any] = QWEN2, **more: object
) -> dict[str, Any]:
    settings = ModelSettings(name="actor", device=device, dtype="bf16", architecture=architecture)
    options = {"max_running": max_running, "cache_bytes": 1 << 20, **more}
    return engine_arguments(EngineSetup(settings, options), "model", 2048)


def test_a_gpu_has_asynchronous_scheduling_and_a_graph_for_each_batch() -> None:
    found = arguments("cuda")
    assert (found["async_scheduling"], found["enforce_eager"]) == (True, False)
    assert found["cudagraph_capture_sizes"] == graph_sizes(1024)
    assert max(graph_sizes(1024)) == found["max_num_seqs"] == 1024


def test_an_engine_without_graphs_is_eager() -> None:
    found, plain = arguments("cuda", cuda_graphs=False), arguments("cuda")
    assert (found["enforce_eager"], found["async_scheduling"]) == (True, True)
    assert plain.keys() - found.keys() == {"cudagraph_capture_sizes"}


def test_a_cpu_has_neither() -> None:
    found = arguments("cpu")
    assert (found["async_scheduling"], found["enforce_eager"]) == (False, True)
    assert "cudagraph_capture_sizes" not in found


def test_families_with_latent_attention_compute_as_in_transformers_on_any_cpu() -> None:
    v2, v3 = {"model_type": "deepseek_v2"}, {"model_type": "deepseek_v3"}
    found = arguments("cpu", architecture=v3)
    assert found["attention_backend"] == "CPU_MLA"
    assert found["hf_overrides"] == {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    on_gpu = arguments("cuda", architecture={**v2, "topk_method": "greedy", "n_group": 4})
    assert "attention_backend" not in on_gpu
    unnormalised = {"scoring_func": "softmax", "norm_topk_prob": False}
    assert on_gpu["hf_overrides"] == {**unnormalised, "n_group": 1, "topk_group": 1}
    grouped = arguments("cuda", architecture={**v2, "topk_method": "group_limited_greedy"})
    assert grouped["hf_overrides"] == unnormalised
    assert not {"hf_overrides", "attention_backend"} & arguments("cpu").keys()


def test_fp8_spares_the_routers_of_experts() -> None:
    assert "quantization" not in arguments("cuda")
    found = arguments("cuda", quantization="fp8")
    assert found["quantization"] == "fp8_per_block"
    (pattern,) = found["quantization_config"]["ignore"]
    layer = "model.layers.0.mlp"
    assert fnmatch(f"{layer}.gate", pattern)
    assert not any(fnmatch(f"{layer}.{name}", pattern) for name in ("gate_up_proj", "gate_proj", "experts"))


def test_a_cache_in_fp8_has_half_the_blocks_bytes() -> None:
    assert "kv_cache_dtype" not in arguments("cuda")
    assert arguments("cuda", cache_dtype="fp8")["kv_cache_dtype"] == "fp8"
    setups = [
        EngineSetup(replace(SETTINGS, dtype="bf16"), {"max_running": 4, **x})
        for x in ({}, {"cache_dtype": "fp8"})
    ]
    plain, small = (engine_arguments(setup, "model", 64)["kv_cache_memory_bytes"] for setup in setups)
    assert plain == 2 * small


def test_adapters_have_buffers_of_the_next_rank_in_targeted_layers_only() -> None:
    settings = replace(SETTINGS, lora=LoraConfig(r=12, targets=("q_proj", "up_proj")))
    options = {"max_running": 4, "cache_bytes": 1 << 20}
    found = engine_arguments(EngineSetup(settings, options), "model", 64)
    assert (found["enable_lora"], found["max_lora_rank"]) == (True, 16)
    assert found["lora_target_modules"] == ["q_proj", "up_proj"]
    assert found["max_loras"] == 1
    other = EngineSetup(replace(settings, lora=LoraConfig(r=2, targets=("v_proj",))), options)
    frozen = EngineSetup(replace(SETTINGS, trainable=False), options)
    shared = engine_arguments(EngineSetup(settings, options, guests=(other, frozen)), "model", 64)
    assert (shared["max_loras"], shared["max_lora_rank"], shared["max_num_seqs"]) == (2, 16, 12)
    assert shared["lora_target_modules"] == ["q_proj", "up_proj", "v_proj"]
    assert shared["kv_cache_memory_bytes"] == 3 << 20
    merged = engine_arguments(EngineSetup(settings, {**options, "merges_adapters": True}), "model", 64)
    assert "enable_lora" not in merged


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllms_server_reads_the_same_arguments(device: str) -> None:
    argparse = pytest.importorskip("vllm.utils.argparse_utils")
    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(argparse.FlexibleArgumentParser())
    found = arguments(device, max_running=600, quantization="fp8", cache_dtype="fp8")
    found |= model_overrides(setup_of("qwen3_vl"))
    read = vars(parser.parse_args(command_line(found)))
    ignored = found.pop("quantization_config")
    assert read["quantization_config"].ignore == ignored["ignore"]
    assert {name: read[name] for name in found} == found


def setup_of(family: str) -> EngineSetup:
    return EngineSetup(vision_kit.settings(family), {"max_running": 8, "max_model_len": 400})


def test_vllm_knows_how_positions_of_images_turn_queries_and_keys() -> None:
    """transformers knows it without the config: the axes of Qwen3-VL are interleaved."""
    rope = {"mrope_section": [8, 4, 4], "mrope_interleaved": True}
    overrides = {"text_config": {"rope_parameters": rope}}
    found = model_overrides(setup_of("qwen3_vl"))
    assert found == {"hf_overrides": overrides}
    option, value = command_line(found)
    assert (option, json.loads(value)) == ("--hf-overrides", overrides)
    found = model_overrides(setup_of("qwen2_5_vl"))["hf_overrides"]["text_config"]
    assert found == {"rope_parameters": {"mrope_section": [4, 4, 8]}}
    assert model_overrides(setup_of("smolvlm")) == {}


def test_only_models_that_see_have_options_of_images() -> None:
    launch = vllm_launch(setup_of("qwen3_vl"))
    arguments = launch.arguments("model", 400)
    assert (arguments["skip_mm_profiling"], arguments["mm_encoder_tp_mode"]) == (True, "data")
    assert arguments["worker_extension_cls"].endswith("SeeingRankExtension")
    assert image_options(EngineSetup(SETTINGS)) == {}


def test_a_family_that_vllm_gets_no_images_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision_options, "SERVED", ("smolvlm",))
    with pytest.raises(BackendError, match=r"not of qwen3_vl\. Set models\.actor\.gen\.engine=embedded"):
        vllm_launch(setup_of("qwen3_vl"))


def test_a_model_that_sees_is_not_quantised() -> None:
    setup = EngineSetup(vision_kit.settings("qwen3_vl"), {"quantization": "fp8"})
    with pytest.raises(BackendError, match=r"Remove models\.actor\.gen\.quantization"):
        vllm_launch(setup)


def test_a_step_has_place_for_the_images_of_the_longest_prompt() -> None:
    assert image_tokens(256, 4096, on_cpu=False) == 8192
    assert image_tokens(256, 32_768, on_cpu=False) == 32_768
    assert image_tokens(10_000, 4096, on_cpu=True) == 10_000
