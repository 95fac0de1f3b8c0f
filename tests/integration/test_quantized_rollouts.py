"""vLLM quantises the weights of every version to FP8: what it computes with, and how faults are found.

vLLM's kernel for CPUs multiplies activations in bf16 with weights in FP8, and needs AMX; that of a
cache in FP8 needs AVX-512.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import test_engine_conformance as suite
import torch
from runs import run, steps_of
from torch import Tensor, nn
from transformers import DynamicCache

from hflow.base.errors import RunError
from hflow.config.schema import LoraConfig
from hflow.engines.interface import SamplingParams
from hflow.engines.process.engine import EngineLaunch, ProcessEngine
from hflow.engines.vllm.engine import vllm_launch
from hflow.runtime.ledger import audit
from hflow.weights.incoming import IncomingWeights

needs_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's FP8 kernel needs AMX")

ROWS = 128
WIDE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
"""Sizes that blocks of 128 do not divide."""
suite.ARCHITECTURES["wide"] = suite.ARCHITECTURES["tied"] | WIDE
suite.ADAPTED["wide adapters"] = ("wide", LoraConfig(r=4, alpha=12))
suite.ARCHITECTURES["wide untied"] = suite.ARCHITECTURES["untied"] | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
suite.ARCHITECTURES["wide experts"] = suite.ARCHITECTURES["experts"] | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}


def rounded(weight: Tensor) -> Tensor:
    """Return the values of a matrix in FP8, with a scale for each block of 128 x 128.

    The largest value of a block becomes 448, the largest of E4M3 (Micikevicius et al. 2022, "FP8 formats for
    deep learning").
    """
    result = torch.empty_like(weight)
    for rows in range(0, weight.shape[0], ROWS):
        for columns in range(0, weight.shape[1], ROWS):
            block = weight[rows : rows + ROWS, columns : columns + ROWS]
            scale = block.abs().max() / 448
            values = (block / scale).to(torch.float8_e4m3fn).float() * scale
            result[rows : rows + ROWS, columns : columns + ROWS] = values
    return result


def round_together(linears: Sequence[nn.Linear], num_ranks: int) -> None:
    """Round matrices that vLLM holds as one; each tensor rank has a part of the rows of each."""
    parts = [linear.weight.chunk(num_ranks) for linear in linears]
    for rank in range(num_ranks):
        of_rank = [chunks[rank] for chunks in parts]
        whole = rounded(torch.cat(of_rank))
        for part, values in zip(of_rank, whole.split([len(part) for part in of_rank]), strict=True):
            part.copy_(values)


def round_columns(linear: nn.Linear, num_ranks: int) -> None:
    """Round a matrix of which each tensor rank has a part of the columns."""
    parts = linear.weight.chunk(num_ranks, dim=1)
    for part in parts:
        part.copy_(rounded(part))


@cache
def quantized_reference(architecture: str, seed: int, num_ranks: int) -> Any:
    """Return the model in fp32, with the values that its weights have in vLLM."""
    if architecture in suite.ADAPTED:
        base = quantized_reference(suite.ADAPTED[architecture][0], suite.BASE, num_ranks)
        return suite.merged(architecture, suite.adapters(architecture, seed), base)
    module: Any = copy.deepcopy(suite.reference(architecture, seed))
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        round_together((attention.q_proj, attention.k_proj, attention.v_proj), num_ranks)
        round_columns(attention.o_proj, num_ranks)
        if hasattr(mlp, "experts"):
            for expert in (*mlp.experts.gate_up_proj, *mlp.experts.down_proj):
                expert.copy_(rounded(expert))
        else:
            round_together((mlp.gate_proj, mlp.up_proj), num_ranks)
            round_columns(mlp.down_proj, num_ranks)
    return module


def weights_in_bf16(architecture: str, seed: int) -> IncomingWeights:
    """Return a model's weights as a trainer sends them."""
    named = suite.sent(architecture, seed)
    return IncomingWeights.of_tensors(partial(list, [(name, x.bfloat16()) for name, x in named.items()]))


LogProbs = Callable[[Any, Sequence[int], Sequence[int]], Tensor]
"""Function of a model, a prompt and drawn tokens -> their log-probs."""


class Subject(suite.Subject):
    """An engine that quantises, of which versions from 101 on have faults."""

    def send(self, seed: int, version: int | None = None) -> None:
        """Load the weights of a seed as a version, by default the next one."""
        self.version = self.version + 1 if version is None else version
        weights = weights_in_bf16(self.architecture, seed)
        loaded = self.engine.load_weights([weights] * self.tensor, self.version)
        assert len(set(loaded.checksums)) == 1

    def gaps(self, seed: int, find: LogProbs = suite.logprobs) -> tuple[float, float]:
        """Return the median differences of log-probs from the model with and without quantised weights."""
        exact = quantized_reference(self.architecture, seed, self.tensor)
        return self.differences((exact, find), (suite.reference(self.architecture, seed), suite.logprobs))

    def differences(self, *models: tuple[Any, LogProbs]) -> tuple[float, ...]:
        """Return the median differences of log-probs from those of models, by functions that find them."""
        results = self.generate(suite.PROMPTS, SamplingParams(max_tokens=20, seed=5))
        drawn = torch.cat([torch.tensor(result.logprobs) for result in results])
        found = (
            torch.cat(
                [find(model, *one) for one in zip(suite.PROMPTS, (r.ids for r in results), strict=True)]
            )
            for model, find in models
        )
        return tuple(float((drawn - expected).abs().median()) for expected in found)


def build(architecture: str, tensor: int, **precisions: str) -> ProcessEngine:
    setup = suite.setup_of(architecture, tensor)
    options = {**setup.options, **precisions}
    setup = replace(setup, settings=replace(setup.settings, dtype="bf16"), options=options, records=())
    launch = vllm_launch(setup)
    path = os.pathsep.join([str(Path(__file__).parents[1] / "kits"), *sys.path])
    environment = {**launch.environment, "PYTHONPATH": path}
    stepper = "faulty_quantization:FaultyStepper" if tensor == 1 else launch.stepper
    return ProcessEngine(setup, EngineLaunch("vLLM", stepper, environment, launch.arguments))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("wide", 1), id="dense"),
        pytest.param(("wide adapters", 1), id="adapters"),
        pytest.param(("wide untied", 2), id="t2", marks=pytest.mark.long),
        pytest.param(("wide experts", 1), id="experts", marks=pytest.mark.long),
    ],
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    architecture, tensor = request.param
    engine = build(architecture, tensor, quantization="fp8")
    yield Subject("vllm", architecture, tensor, engine)
    engine.close()


@needs_amx
def test_log_probs_are_those_of_the_quantised_weights_of_each_version(subject: Subject) -> None:
    for seed in (3, 4):
        subject.send(seed)
        exact, plain = subject.gaps(seed)
        assert exact < 0.04
        assert plain > 3 * exact


FAULTS = {
    101: r"does not hold .* of 'model.layers.0.self_attn.v_proj.weight' as received",
    102: r"new weights of model.layers.0.self_attn.q_proj.weight did not reach the engine",
    103: r"does not hold model.layers.0.self_attn.qkv_proj as vllm quantised it",
}


@needs_amx
def test_a_layer_that_keeps_old_weights_is_found(subject: Subject) -> None:
    if subject.tensor > 1 or subject.architecture in suite.ADAPTED:
        pytest.skip("faults are those of weights that arrive in the engine's process")
    for version, message in FAULTS.items():
        with pytest.raises(RunError, match=message):
            subject.send(5, version)
        subject.send(6, version + 100)
        assert subject.gaps(6)[0] < 0.05


def truncated(x: Tensor) -> Tensor:
    """Return values in E4M3, rounded toward zero, as vLLM's kernel for CPUs does. 448 is the largest."""
    x = x.clamp(-448, 448)
    nearest = x.to(torch.float8_e4m3fn)
    is_larger = (nearest.float().abs() > x.abs()).to(torch.uint8)
    return (nearest.view(torch.uint8) - is_larger).view(torch.float8_e4m3fn).float()


class RoundedCache(DynamicCache):
    """A cache of keys and values in E4M3, without a scale."""

    def update(self, keys: Tensor, values: Tensor, *where: Any, **more: Any) -> tuple[Tensor, Tensor]:
        keys, values = map(truncated, (keys, values))
        return super().update(keys, values, *where, **more)


def cached_logprobs(module: nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Return the log-probs of drawn tokens, with keys and values in FP8."""
    return suite.logprobs(lambda tokens: module(tokens, past_key_values=RoundedCache()), prompt, ids)


def with_large_keys(seed: int) -> tuple[IncomingWeights, Any]:
    """Return weights with keys up to 900, as the biases of some models make them, and the model."""
    module: Any = copy.deepcopy(suite.reference("tied", seed))
    for layer in module.model.layers:
        layer.self_attn.k_proj.bias[:32] = torch.linspace(-900, 900, 32)
        layer.self_attn.q_proj.weight.mul_(0.005)
        layer.self_attn.q_proj.bias.mul_(0.005)
    named = [(name, x.bfloat16()) for name, x in suite.named_weights(module).items()]
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return IncomingWeights.of_tensors(partial(list, named)), module


def test_log_probs_are_those_of_a_cache_in_fp8() -> None:
    engine = build("tied", 1, cache_dtype="fp8")
    subject = Subject("vllm", "tied", 1, engine)
    for version, (weights, module) in enumerate(map(with_large_keys, (3, 4)), 1):
        engine.load_weights([weights], version)
        exact, plain = subject.differences((module, cached_logprobs), (module, suite.logprobs))
        assert exact < 0.04
        assert plain > 3 * exact
    engine.close()


@needs_amx
@pytest.mark.long
def test_weights_and_cache_in_fp8() -> None:
    engine = build("wide", 1, quantization="fp8", cache_dtype="fp8")
    subject = Subject("vllm", "wide", 1, engine)
    for seed in (3, 4):
        subject.send(seed)
        exact, plain = subject.gaps(seed, cached_logprobs)
        assert exact < 0.08
        assert plain > 3 * exact
    engine.close()


@needs_amx
@pytest.mark.long
def test_a_run_corrects_what_the_quantised_engine_draws(tmp_path: Path) -> None:
    options = ["models.actor.gen.engine=vllm", "models.actor.dtype=bf16", "nodes.eval_gen.after=99"]
    options += ["steps=3", "batch=8", "workers=inproc"]
    options += ["nodes.actor_train.prox=recompute", "nodes.actor_train.over_cap=truncate"]
    gaps = []
    for setting in ("quantization=null", "quantization=fp8", "cache_dtype=fp8"):
        summary = run("recipes/grpo.py", tmp_path, *options, f"models.actor.gen.{setting}")
        assert audit(summary.directory / "ledger.sqlite") == []
        gaps.append([row["actor_train/engine_kl"] for row in steps_of(summary)])
    plain, *quantized = gaps
    assert all(0 < 2 * max(plain) < min(found) < 0.01 for found in quantized), gaps
