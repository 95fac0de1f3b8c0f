"""What a decode step of the embedded engine launches on a GPU, and what plans count for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cost_kit import side
from test_decode_graphs import CapturingEngine
from test_engine import PROMPTS, settings
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hflow.config import RunConfig
from hflow.engines.interface import SamplingParams
from hflow.launch.planning.request import cluster_hardware
from hflow.planner.forecast.cost.generation import DecodeStep
from hflow.planner.plan.hardware import Hardware
from hflow.shapes.model_shape import ModelShape

VIEWS = (
    *("view", "t", "split", "split_with_sizes", "slice", "transpose", "detach", "as_strided", "unsqueeze"),
    *("select", "expand", "flatten"),
)
"""Operations of torch that launch nothing, on what is contiguous."""
LAYER = ["rms_norm", "addmm", "rotate_heads", "attention", "addmm_", "rms_norm", "mm", "gate", "addmm_"]
VLLM_KERNELS = 10
"""Kernels of a layer of vLLM: keys and values are stored by one of their own."""
QWEN_500M = ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151_936, is_tied=True, has_qkv_bias=True)


class Launches(TorchDispatchMode):
    """Lists what torch, and stand-ins for hflow's Triton kernels, launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.kernels = SimpleNamespace(
            rms_norm=self._kernel("rms_norm", lambda x, weight, eps: torch.zeros_like(x)),
            gate=self._kernel("gate", lambda joined: joined.chunk(2, dim=1)[0]),
            rotate_heads=self._kernel("rotate_heads", lambda *_: None),
            triton_decode_attention=self._kernel("attention", lambda q, *_: torch.zeros(q.shape)),
        )

    def _kernel(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            self.names.append(name)
            with _disable_current_modes():
                return call(*args)

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in VIEWS and name not in ("_unsafe_view", "empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_layer_launches_nine_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for num_layers in (2, 3):
        engine = CapturingEngine(settings(name, num_hidden_layers=num_layers), {"max_running": 4})
        engine.add(0, PROMPTS[0], SamplingParams(max_tokens=9))
        engine.step()
        engine.step()
        launches = Launches()
        for module in ("models.attention_kernels", "engines.embedded.dense_decoder"):
            monkeypatch.setattr(f"hflow.{module}.triton_kernels", lambda _, of=launches: of.kernels)
        with torch.inference_mode(), launches:
            next(iter(engine._graphs._graphs.values())).replay()
        found[num_layers] = launches.names
        monkeypatch.undo()
    first = next(i for i, name in enumerate(found[3]) if name == "rms_norm")
    products = [name.replace("addmm", "mm") for name in LAYER]
    for num_layers, names in found.items():
        layers = names[first : first + 9 * num_layers]
        assert [name.replace("addmm", "mm") for name in layers] == products * num_layers
    assert len(found[3]) - len(found[2]) == len(LAYER)


def hardware(cluster: str) -> Hardware:
    return cluster_hardware(RunConfig(name="test", cluster=cluster), Path("recipe.py"))[1]


@pytest.mark.parametrize("cluster", ["h100-1x2", "a100-80g-1x2", "b200-1x2"])
def test_plans_count_these_launches_as_vllms(cluster: str) -> None:
    host = hardware(cluster).calibration.host
    assert host["embedded"].gap_us == pytest.approx(len(LAYER) / VLLM_KERNELS * host["vllm"].gap_us)


@pytest.mark.parametrize("tokens", [128, 300, 1024])
@pytest.mark.parametrize("sequences", [16, 128, 256])
def test_decoding_is_planned_within_1_45_times_that_of_vllm(sequences: int, tokens: int) -> None:
    """Qwen2.5-0.5B on an H100."""
    seconds = [
        DecodeStep(
            side(
                QWEN_500M, backend=engine, hardware=hardware("h100-1x1"), dtype="bf16", max_running=sequences
            )
        )(sequences, sequences * tokens).seconds
        for engine in ("embedded", "vllm")
    ]
    assert 1 < seconds[0] / seconds[1] < 1.45


def test_the_seconds_of_a_step_by_kind() -> None:
    """256 sequences of 300 tokens: the logits, 256 x 151,936 in bf16, are written and read."""
    one = side(QWEN_500M, backend="embedded", hardware=hardware("h100-1x1"), dtype="bf16", max_running=256)
    step = DecodeStep(one).seconds(256, 256 * 300)
    assert step.others == pytest.approx(2 * 2 * 256 * 151_936 / (0.8 * 3350e9))
    assert step.gaps == pytest.approx(24 * 24.3e-6)
    assert step.launching == 0
