"""Models and layouts that megatron cannot build, the CPU shim, and process groups."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import megatron_kit as kit
import pytest
import torch
from late_megatron import megatron

from hflow.base.errors import BackendError
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.training.megatron.hf_mapping import ShardPosition


def assert_rejected(message: str, architecture: dict[str, Any], **changes: Any) -> None:
    with pytest.raises(BackendError, match=message) as error:
        megatron("model").build_stage(
            ModelSettings(name="actor", architecture=architecture, **changes),
            megatron("parallel_state").ParallelState.of(RankPosition()),
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"'actor': model_type 'gpt2' is not one that .* builds \(llama, mistral, "),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not silu or gelu_pytorch_tanh"),
        ({"model_type": "mixtral", "hidden_act": "gelu_pytorch_tanh"}, "is not silu, which"),
        (kit.GEMMA3 | {"final_logit_softcapping": 30.0}, "gemma3_text uses soft caps of logits"),
        (kit.GEMMA3 | {"attention_bias": True}, "gemma3_text has attention_bias"),
        ({"rope_parameters": kit.LLAMA3_ROPE | {"rope_type": "dynamic"}}, "'dynamic' is not one of"),
        ({"layer_types": ["chunked_attention"] * 3}, "qwen2 uses chunked_attention"),
    ],
)
def test_unsupported_architectures_are_rejected(changes, message):
    assert_rejected(message, kit.QWEN2 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "values"}, "head 'values' is not one of lm, value, score; did you mean 'value'"),
        ({"device": "tpu"}, "device 'tpu' is not one of cpu, cuda"),
    ],
)
def test_wrong_settings_are_rejected(changes, message):
    assert_rejected(message, kit.QWEN2, **changes)


def test_a_single_process_has_layout_1x1x1():
    """Also if it hosts all ranks of a replica."""
    one, all_of_four = (
        megatron("parallel_state").ParallelState.of(RankPosition()),
        megatron("parallel_state").ParallelState.of(RankPosition(None, Layout(data=2, tensor=2))),
    )
    for grid in (one, all_of_four):
        assert (grid.layout, grid.coords) == (Layout(), (0, 0, 0, 0))
        assert grid.is_first_stage
        assert grid.is_last_stage
        assert grid.is_head
        assert grid.shard_position == ShardPosition()
        assert grid.groups.tp.size() == grid.group.size() == 1


def test_building_keeps_the_random_state():
    state = torch.get_rng_state()
    megatron("model").build_stage(
        ModelSettings(name="actor", architecture=kit.QWEN2, sequence_parallel=True),
        megatron("parallel_state").ParallelState.of(RankPosition()),
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_the_shim_changes_only_megatron():
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    assert layers.torch is torch
    assert not any(hasattr(torch, name) or hasattr(torch.cuda, name) for name in ("__cpu_as_cuda__",))
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()


ON_CUDA = """
import sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
from hflow.training.megatron.device import prepare
print(prepare("cuda"), "hflow.training.megatron.cpu_shim" in sys.modules)
linear = sys.modules["megatron.core.tensor_parallel.layers"].ColumnParallelLinear
print("__cpu_as_cuda__" in linear.__init__.__code__.co_names, "cuda" in linear.__init__.__code__.co_names)
try:
    prepare("cpu")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is pretended")
def test_the_shim_is_not_used_on_cuda():
    """Neither in memory nor in the byte code on disk that processes share. Using both in a process raises."""
    done = subprocess.run([sys.executable, "-c", ON_CUDA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    device, names, error = done.stdout.splitlines()
    assert (device, names) == ("cuda:0 False", "False True")
    assert error.startswith("BackendError: megatron.core was imported before it was prepared for the CPU")
