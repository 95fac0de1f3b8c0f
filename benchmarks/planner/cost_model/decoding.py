"""Published throughput of inference engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.planner.cost_model.comparison import (
    Comparison,
    PeerFigures,
    compare,
    costs,
    hardware,
    model,
    rows,
    seconds,
    whole_sequences,
)
from hflow.planner.forecast.cost.flops import kv_entries
from hflow.planner.forecast.cost.generation import (
    continuous_batching,
    decode_collectives,
    decode_step,
    prefill,
)
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.plan.hardware import GIB
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import cached_tokens

REQUESTS = {
    (128, 128): 30000,
    (128, 2048): 3000,
    (128, 4096): 1500,
    (500, 2000): 3000,
    (1000, 1000): 3000,
    (1000, 2000): 1500,
    (2048, 128): 3000,
    (2048, 2048): 1500,
    (5000, 500): 1500,
    (20000, 2000): 1000,
}
"""Prompt and response -> requests of TensorRT-LLM's runs, which all start at once; from the same page."""


def tensorrt_llm(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield engines at full load. With experts, ranks have whole sequences, and divide the experts."""
    for row in rows("tensorrt_llm"):
        num, prompt, response = (int(row[key]) for key in ("tensor", "prompt", "response"))
        is_dense = model(row["model"]).experts is None
        layout = Layout(1, num) if is_dense else Layout(num, expert=num)
        one = replace(costs(row["model"], hardware(row["device"]), layout, "vllm"), low_dtype="fp8")
        slots = cache_slots(one, prompt + response, 0.95)
        requests = math.ceil(REQUESTS[prompt, response] / layout.data)
        spent = seconds(prefill(one, whole_sequences(prompt, requests)))
        for phase in continuous_batching([response] * requests, prompt, slots):
            spent += phase.num_steps * decode_seconds(one, phase.sequences, phase.context / phase.sequences)
        predicted = layout.data * requests * response / spent
        measured = float(row["tokens_per_second"])
        name = f"{row['model']} {num}x{row['device']} {prompt}/{response}"
        topic = "decode" if is_dense else "MoE decode"
        yield compare("TensorRT-LLM", topic, name, row["device"], measured, predicted, row)


def qwen3_speed(figures: PeerFigures) -> Iterator[Comparison]:
    """Yield engines with one sequence."""
    for row in rows("qwen3_speed"):
        backend = {"sglang": "vllm", "transformers": "embedded"}[row["engine"]]
        one = costs(row["model"], hardware("h20"), Layout(1, int(row["tensor"])), backend)
        prompt, response = int(row["prompt"]), 2048
        spent = seconds(prefill(one, whole_sequences(prompt, 1)))
        spent += response * decode_seconds(one, 1, prompt + response / 2)
        name = f"{row['model']} {row['engine']} {prompt}"
        measured, predicted = float(row["tokens_per_second"]), (prompt + response) / spent
        topic = "decode" if one.shape.experts is None else "MoE decode"
        yield compare("Qwen3 speed", topic, name, "h20", measured, predicted, row)


def decode_seconds(one: ReplicaCosts, num: float, length: float) -> float:
    """Return the seconds of one decode step of sequences of a length."""
    return decode_step(one, num, num * length).seconds + decode_collectives(one, num).seconds


def cache_slots(one: ReplicaCosts, length: int, share: float) -> int:
    """Return the sequences that the cache holds in a share of what weights and runtime leave."""
    device = one.hardware.device
    room = share * (device.memory_bytes - device.overhead_gib * GIB - one.stage_weights * one.weight_bytes)
    per_token = kv_entries(one.shape, one.layout.tensor) * one.weight_bytes
    return min(2048, math.floor(room / per_token / cached_tokens(one.shape, length)))
