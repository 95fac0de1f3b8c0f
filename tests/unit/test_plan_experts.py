"""Costs of experts, latent attention and sliding windows, with answers worked out by hand."""

import random
from dataclasses import replace

import pytest
from cost_kit import SMALL, side

from hflow.planner.cost.flops import (
    Work,
    attention_flops,
    causal_pairs,
    decode_attention_flops,
    head_flops,
    kv_entries,
    layer_flops,
    layers_parameters,
    stage_parameters,
    token_flops,
    touched_experts,
)
from hflow.planner.cost.generation import decode_step
from hflow.planner.cost.roofline import MEMORY, Part
from hflow.planner.model_shape import Experts, LatentAttention, ModelShape, SlidingWindow

MIXED = ModelShape(
    "qwen3_moe", 4, 64, 128, 4, 2, 16, 100, is_tied=False, experts=Experts(8, 2, 32, shared=16, first=1)
)
"""One layer with an MLP of 3 x 64 x 128 = 24,576 weights. Three with a router of 8 x 64, experts of 3 x 64 x
32 = 6,144 each, and shared ones of 3 x 64 x 16 = 3,072. Attention has 64 x (4 + 2) x 2 x 16 = 12,288."""


def test_active_and_all_experts():
    assert layers_parameters(MIXED, 0, 4) == 4 * 12_288 + 24_576 + 3 * (8 * 6_144 + 3_072 + 512)
    assert layers_parameters(MIXED, 0, 4, 2) == 4 * 12_288 + 24_576 + 3 * (2 * 6_144 + 3_072 + 512)
    active = layers_parameters(MIXED, 0, 4, 2)
    assert token_flops(MIXED, 1, 0) == 2 * (active + 6_400)
    assert layer_flops(MIXED, Work(1, 1, 10, 10, 0, 0)) == 2 * active / 4 * 10
    # The second of two stages has two layers with experts, which all take memory.
    assert stage_parameters(MIXED, 2) == 2 * 12_288 + 2 * (8 * 6_144 + 3_072 + 512) + 6_400


def test_experts_that_a_batch_touches():
    assert touched_experts(SMALL, 5) is None
    assert touched_experts(MIXED, 1) == 2
    # Two tokens miss an expert with probability (3/4)^2.
    assert touched_experts(MIXED, 2) == 8 * (1 - 9 / 16)
    assert touched_experts(MIXED, 1000) == pytest.approx(8)


def test_touched_experts_are_those_of_random_routing():
    rng = random.Random(0)
    drawn = [len({e for _ in range(5) for e in rng.sample(range(8), 2)}) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(touched_experts(MIXED, 5), rel=0.01)


def test_a_decode_step_reads_the_experts_that_it_touches():
    engine = side(MIXED)
    for num, touched in ((1, 2), (2, 3.5)):
        read = 4 * (layers_parameters(MIXED, 0, 4, touched) + 6_400)
        assert decode_step(engine, num, 0) == Part("decode", pytest.approx(read / 1e11), MEMORY)


DEEPSEEK_V3 = ModelShape(
    *("deepseek_v3", 61, 7168, 18432, 128, 128, 192, 129280),
    is_tied=False,
    experts=Experts(256, 8, 2048, shared=2048, first=3, has_router_bias=True),
    latent=LatentAttention(1536, 512, 128, 64, 128),
)


def test_latent_attention():
    # DeepSeek-V3 caches 576 entries per token and layer: 70 KB in bf16 (its report on hardware, table 1).
    assert kv_entries(DEEPSEEK_V3, 8) == 61 * 576
    assert kv_entries(DEEPSEEK_V3, 1) * 2 == 70_272
    # 250 GFLOPs per token of training at 4096 tokens (the same report, table 2).
    sequence = Work(1, 1, 4096, 4096, 4096, 4096**2)
    whole = 61 * layer_flops(DEEPSEEK_V3, sequence) + head_flops(DEEPSEEK_V3, sequence)
    assert 3 * whole / 4096 == pytest.approx(250e9, rel=0.02)
    assert attention_flops(DEEPSEEK_V3, 1) == 2 * 128 * (192 + 128)
    assert decode_attention_flops(DEEPSEEK_V3, 1) == 2 * 128 * (576 + 512)


def test_a_window_limits_attention():
    windowed = replace(SMALL, window=SlidingWindow(10, 2))
    # Two sequences of 100 tokens: 5000 pairs each in two layers, 10 x 100 - 50 in the two others.
    assert causal_pairs(windowed, Work(2, 2, 200, 200, 0, 20_000)) == (2 * 10_000 + 2 * 1_900) / 4
    assert causal_pairs(windowed, Work(2, 2, 12, 12, 0, 72)) == 36
    assert causal_pairs(SMALL, Work(2, 2, 200, 200, 0, 20_000)) == 10_000
