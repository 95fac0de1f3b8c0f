"""Layouts that cannot cut their model are refused in one line with the nearest that can."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config
from plan_graphs import grpo, hardware_of

from hflow.base.errors import PlanError
from hflow.config.schema import ModelConfig, OptimConfig
from hflow.planner.checks.layouts import check_layouts
from hflow.planner.compile import compile_plan
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BACKENDS, ENGINES, traits
from hflow.planner.weights.sharding import tensor_shards
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape, tensors

QWEN_7B = ModelShape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, is_tied=False, has_qkv_bias=True)
"""28 heads, 4 key-value heads, an intermediate size of 2**9 * 37."""
EVEN = replace(QWEN_7B, num_kv_heads=28, intermediate=28 * 64, vocab=28 * 64)
"""Whatever divides its 28 heads divides the rest."""


def check(layout, shape=QWEN_7B, backend="megatron", role="train"):
    actor = Replica(f"actor@{role}", "actor", role, backend, Layout.parse(layout), ("all",), (), ())
    cluster = ClusterSpec("test", "cpu", 1, 1024, 2**30)
    shapes = {} if shape is None else {"actor": shape}
    check_layouts((actor,), PlanRequest(cluster, hardware_of(cluster), 8, 1, shapes=shapes))


def refusal(*arguments, **options):
    with pytest.raises(PlanError) as caught:
        check(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape", "backend", "message"),
    [
        # 7 divides all that 8 does not, and 4 does so on the same 16 devices.
        ("d2t8", EVEN, "megatron", "28 heads cannot be split over 8 tensor ranks; 7 and 4 fit: d4t4p1"),
        # 7 divides 28 heads, but neither 4 key-value heads nor the intermediate size.
        ("d2t8p2", QWEN_7B, "megatron", "28 heads cannot be split over 8 tensor ranks; 4 fits: d4t4p2"),
        (
            "t7",
            QWEN_7B,
            "megatron",
            "4 key-value heads cannot be split over 7 tensor ranks; 4 and 1 fit: d7t1p1",
        ),
        (
            "t4",
            replace(QWEN_7B, intermediate=18942),
            "megatron",
            "an intermediate size of 18942 cannot be split over 4 tensor ranks; 2 fits: d2t2p1",
        ),
        (
            "d4t2",
            replace(QWEN_7B, vocab=152065),
            "embedded",
            "a vocabulary of 152065 cannot be split over 2 tensor ranks; 1 fits: d8t1p1",
        ),
        (
            "p32",
            QWEN_7B,
            "megatron",
            "28 layers cannot be split over 32 pipeline stages; 28 and 16 fit: d2t1p16",
        ),
        (
            "p4",
            replace(QWEN_7B, num_layers=2),
            "torch",
            "2 layers cannot be split over 4 pipeline stages; 2 fits: d2t1p2",
        ),
        # Both axes are wrong: the proposal changes both.
        ("t8p32", QWEN_7B, "megatron", "28 heads cannot be split over 8 tensor ranks; 4 fits: d4t4p16"),
    ],
)
def test_the_number_and_the_nearest_layout_are_named(layout, shape, backend, message):
    assert refusal(layout, shape, backend) == f"actor@train: {message}"


@pytest.mark.parametrize(
    ("layout", "shape", "backend"),
    [
        ("d2t4p7", QWEN_7B, "megatron"),
        ("p3", QWEN_7B, "megatron"),
        ("d1024", QWEN_7B, "torch"),
        # 4 key-value heads on 8 ranks: two ranks to each.
        ("t8", replace(QWEN_7B, num_heads=32), "vllm"),
        # Padded: 152065 tokens on 2 ranks.
        ("t2", replace(QWEN_7B, vocab=152065), "megatron"),
        ("t2", replace(QWEN_7B, vocab=152065), "vllm"),
    ],
)
def test_layouts_that_divide_pass(layout, shape, backend):
    check(layout, shape, backend)


def test_vllm_pads_to_64_tokens_which_not_every_tensor_size_divides():
    # 24 heads, key-value heads and rows of the MLP allow 3 ranks; 192 tokens would, 256 do not.
    shape = replace(QWEN_7B, num_heads=24, num_kv_heads=24, intermediate=48, vocab=200)
    assert refusal("t3", shape, "vllm", "gen") == (
        "actor@gen: a vocabulary of 200 cannot be split over 3 tensor ranks; 2 and 1 fit: d3t1p1"
    )
    check("t3", replace(shape, vocab=192), "vllm", "gen")


def test_a_plan_is_refused_before_anything_is_laid_out():
    models = {"actor": model_config(layout="t2", gen_layout="d2")}
    shapes = {"actor": replace(QWEN_7B, num_heads=7, num_kv_heads=7)}
    cluster = ClusterSpec("test", "cpu", 1, 2, 2**30)
    request = PlanRequest(cluster, hardware_of(cluster), 8, 1, models, shapes)
    with pytest.raises(PlanError, match="actor@train: 7 heads cannot be split over 2 tensor ranks"):
        compile_plan(grpo(), request)


def test_a_model_of_unknown_sizes_passes():
    check("t5p99", shape=None)


@given(
    st.builds(Layout, st.integers(1, 6), st.integers(1, 8), st.integers(1, 6)),
    st.integers(1, 6),
    st.sampled_from((1, 2, 3, 4, 6, 8)),
    st.integers(1, 3),
    st.integers(1, 130),
    st.sampled_from(sorted((*BACKENDS, *ENGINES))),
)
def test_a_layout_passes_just_when_it_cuts_and_what_is_proposed_passes(
    layout, layers, kv, times, vocab, backend
):
    shape = ModelShape("llama", layers, 8, 12, kv * times, kv, 2, vocab, is_tied=False)
    try:
        cuts = bool([tensor_shards(spec, traits(backend), layout) for spec in tensors(shape)])
    except PlanError:
        cuts = False
    if cuts and layout.pipe <= layers:
        check(str(layout), shape, backend)
    else:
        proposed = refusal(str(layout), shape, backend).rpartition(": ")[2]
        assert Layout.parse(proposed).world == layout.world
        check(proposed, shape, backend)


def test_copies_of_key_value_heads_are_not_quantised():
    """Their blocks have other entries on each tensor rank, so the copies would become different."""
    actor = Replica("actor@train", "actor", "train", "megatron", Layout.parse("t4"), ("all",), (), ())
    cluster, shapes = ClusterSpec("test", "cpu", 1, 1024, 2**30), {"actor": replace(QWEN_7B, num_kv_heads=2)}
    request = PlanRequest(cluster, hardware_of(cluster), 8, 1, shapes=shapes)
    check_layouts((actor,), request)
    models = {"actor": ModelConfig(optim=OptimConfig(name="adamw_8bit"))}
    with pytest.raises(PlanError, match=r"copies of 2 key-value heads, which adamw_8bit .* 2 tensor ranks"):
        check_layouts((actor,), replace(request, models=models))
