"""What vLLM is started with."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

from hflow.engines.interface import EngineSetup
from hflow.engines.vllm.launch_options import command_line, engine_arguments
from hflow.engines.vllm.memory import graph_sizes
from hflow.models.settings import ModelSettings


def arguments(device: str, max_running: int = 1024, **more: object) -> dict[str, Any]:
    settings = ModelSettings(name="actor", device=device, dtype="bf16")
    options = {"max_running": max_running, "cache_bytes": 1 << 20, **more}
    return engine_arguments(EngineSetup(settings, options), "model", 2048)


def test_a_gpu_has_asynchronous_scheduling_and_a_graph_for_each_batch() -> None:
    found = arguments("cuda")
    assert (found["async_scheduling"], found["enforce_eager"]) == (True, False)
    assert found["cudagraph_capture_sizes"] == graph_sizes(1024)
    assert max(graph_sizes(1024)) == found["max_num_seqs"] == 1024


def test_a_cpu_has_neither() -> None:
    found = arguments("cpu")
    assert (found["async_scheduling"], found["enforce_eager"]) == (False, True)
    assert "cudagraph_capture_sizes" not in found


def test_fp8_spares_the_routers_of_experts() -> None:
    assert "quantization" not in arguments("cuda")
    found = arguments("cuda", quantization="fp8")
    assert found["quantization"] == "fp8_per_block"
    (pattern,) = found["quantization_config"]["ignore"]
    layer = "model.layers.0.mlp"
    assert fnmatch(f"{layer}.gate", pattern)
    assert not any(fnmatch(f"{layer}.{name}", pattern) for name in ("gate_up_proj", "gate_proj", "experts"))


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllms_server_reads_the_same_arguments(device: str) -> None:
    argparse = pytest.importorskip("vllm.utils.argparse_utils")
    from vllm.engine.arg_utils import EngineArgs

    parser = EngineArgs.add_cli_args(argparse.FlexibleArgumentParser())
    found = arguments(device, max_running=600, quantization="fp8")
    read = vars(parser.parse_args(command_line(found)))
    ignored = found.pop("quantization_config")
    assert read["quantization_config"].ignore == ignored["ignore"]
    assert {name: read[name] for name in found} == found
