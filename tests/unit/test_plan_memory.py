"""The memory model: formulas worked out by hand, whole plans, refusals, and torch's own peaks."""

import math
import re
import weakref
from dataclasses import replace
from inspect import signature
from typing import Any

import memory_kit as kit
import numpy as np
import plan_graphs as graphs
import pytest
import ranks
import torch
from cost_kit import H100
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_kit import LLAMA_7B, SMALL, microbatch, named, rank
from model_configs import model_config
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hflow.base.errors import ConfigError, PlanError
from hflow.config.schema import LoraConfig, WorkloadConfig
from hflow.engines.embedded import dense_decoder
from hflow.engines.embedded import memory as embedded_memory
from hflow.engines.embedded.cache import SlotCache
from hflow.engines.embedded.engine import EmbeddedEngine, EngineOptions
from hflow.engines.interface import SamplingParams
from hflow.engines.request import GenerationRequest
from hflow.engines.vllm import memory as vllm_memory
from hflow.models.attention_kernels import Reach
from hflow.models.host_offload import MAX_LEAVING
from hflow.models.packed_attention import PackedLayout, attend
from hflow.models.settings import ModelSettings
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.memory import (
    MEMORY_MARGIN,
    activations,
    check_host_memory,
    check_memory,
    engine_caches,
    host_memory,
    host_memory_warnings,
    memory_phases,
    offload,
    parts,
    transfer,
    unknown_models,
)
from hflow.planner.forecast.memory.capacity import largest_part
from hflow.planner.forecast.memory.parts import largest_microbatch
from hflow.planner.forecast.memory.rank import stage_sizes
from hflow.planner.models.descriptors import training_backend
from hflow.planner.plan.forecast import HostMemory, MemoryCategory, MemoryItem
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.plan.traits import traits
from hflow.planner.plan.workload import Workload
from hflow.planner.search import nearest_fit, with_settings
from hflow.planner.weights.weight_routes import store_bytes
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import Experts, SlidingWindow, num_parameters
from hflow.training.fsdp import memory as torch_memory
from hflow.training.fsdp import sharding as fsdp
from hflow.training.loop import logprobs
from hflow.training.megatron import memory as megatron_memory
from hflow.types.kernels import varlen_groups_queries

NUM_7B = 6_738_415_616
MIB = 2**20


def model_state(asked):
    return training_backend(asked.replica.backend).memory.model_state(asked)


# ---------------------------------------------------------------------- entries and model state
def test_descriptors_of_backends_are_right():
    assert activations.CHUNK_BYTES == logprobs.CHUNK_BYTES
    assert activations.LOGITS_PER_TILE == logprobs.LOGITS_PER_TILE
    assert torch_memory.MIN_UNIT_BYTES == fsdp.MIN_UNIT_BYTES
    assert EngineOptions().max_tokens_per_step == parts.PREFILL_TOKENS
    assert embedded_memory.MIN_ARRANGED == dense_decoder.MIN_ARRANGED


def test_entries_of_a_whole_model():
    sizes = stage_sizes(SMALL, traits("torch"), Layout(), 0)
    assert (sizes.layer, sizes.num_layers, sizes.rest) == (36_992, 4, 12_864)
    assert sizes.embedding == sizes.output == 6_400
    assert sizes.total == sizes.total_shard == num_parameters(SMALL) == 160_832


def test_fsdp_shards_by_rows_rounded_up():
    # Over 3 ranks the first has 22 of 64 rows, 43 of 128 and 11 of 32 (k, v): q, o 2 x 22 x 64 = 2,816;
    # k, v 2 x 11 x 64 = 1,408; gate, up 2 x 43 x 64 = 5,504; down 22 x 128 = 2,816; norms 2 x 22.
    sizes = stage_sizes(SMALL, traits("torch"), Layout(3), 0)
    assert sizes.layer_shard == 2_816 + 1_408 + 5_504 + 2_816 + 44
    # Embedding and head: 34 of 100 rows each, final norm 22 of 64.
    assert sizes.rest_shard == 2 * 34 * 64 + 22
    assert sizes.layer == 36_992


def test_a_replicate_axis_leaves_each_rank_the_shard_of_its_set():
    assert stage_sizes(SMALL, traits("torch"), Layout(6, replicate=2), 0) == stage_sizes(
        SMALL, traits("torch"), Layout(3), 0
    )


def test_tensor_ranks_share_matrices_but_no_norms_and_stages_share_layers():
    # Half of 36,864 and both norms. The vocabulary of 100 is padded to 256: the first rank's part of 128 rows
    # has all the real ones.
    first = stage_sizes(SMALL, traits("megatron"), Layout(1, 2, 2), 0)
    last = stage_sizes(SMALL, traits("megatron"), Layout(1, 2, 2), 1)
    assert first.layer == last.layer == 36_864 // 2 + 128
    assert (first.num_layers, last.num_layers) == (2, 2)
    assert (first.rest, first.output) == (6_400, 0)
    assert (last.rest, last.embedding) == (6_400 + 64, 0)


def test_a_tied_matrix_is_on_both_end_stages():
    tied = replace(SMALL, is_tied=True)
    first, middle, last = (stage_sizes(tied, traits("megatron"), Layout(1, 1, 3), p) for p in range(3))
    assert (first.embedding, first.output) == (6_400, 0)
    assert (middle.rest, middle.num_layers) == (0, 1)
    assert (last.rest, last.output, last.embedding) == (6_464, 6_400, 0)


def test_7b_adamw_in_mixed_precision_takes_16_bytes_a_parameter_over_all_ranks():
    # fp32 weights 4, two moments 8; gradients of 4 come and go. All of its sizes divide by 8.
    state = model_state(rank(LLAMA_7B, "d8", dtype="bf16"))
    assert named(state) == {"weights": 4 * NUM_7B // 8, "optimizer": 8 * NUM_7B // 8}
    step = torch_memory.train_step(rank(LLAMA_7B, "d8", dtype="bf16", on_cpu=False), microbatch(1, 1))
    assert named(step)["gradients"] >= 4 * (NUM_7B - 262_148_096) // 8
    assert num_parameters(LLAMA_7B) == NUM_7B


@pytest.mark.parametrize(("data", "bytes_each"), [(1, 18), (4, 9), (64, 6.1875)])
def test_7b_on_megatron_takes_6_and_12_over_d_bytes_a_parameter(data, bytes_each):
    state = model_state(rank(LLAMA_7B, f"d{data}", "megatron", dtype="bf16"))
    assert named(state)["weights"] == 2 * NUM_7B
    assert named(state)["gradients"] == 4 * NUM_7B
    assert state.total() == pytest.approx(bytes_each * NUM_7B, rel=1e-6)


def test_megatron_in_fp32_steps_the_weights_themselves():
    # 4 weights + 4 gradients + two moments of 4 over d = 2.
    assert model_state(rank(SMALL, "d2", "megatron")).total() == (4 + 4 + 8 // 2) * 160_832


@pytest.mark.parametrize(("backend", "dtype", "expected"), [("torch", "bf16", 4), ("megatron", "bf16", 2)])
def test_an_inference_replica_has_weights_alone(backend, dtype, expected):
    state = model_state(rank(SMALL, "d1", backend, role="infer", dtype=dtype))
    assert named(state) == {"weights": expected * 160_832}


# ---------------------------------------------------------------------------------- activations
def test_weights_and_gradients_that_stay_whole_over_micro_batches():
    # 7B in bf16 on 8 ranks, recomputed, four micro-batches. At the start of the last layer's backward pass,
    # stage 3 has the weights of a layer and of the rest, and stage 2 those of all layers. The stream that
    # gathers keeps the buffers of the rest and of the first layer.
    layer, rest = 202_383_360, 262_148_096
    asked = {"dtype": "bf16", "activation_checkpointing": True, "on_cpu": False}
    three, two, one = (
        named(
            torch_memory.train_step(rank(LLAMA_7B, "d8", zero_stage=stage, **asked), microbatch(512, num=4))
        )
        for stage in (3, 2, 1)
    )
    assert two["gathered weights"] == 2 * (32 * layer + rest + rest + layer)
    assert three["gathered weights"] == 2 * (layer + rest + rest + layer)
    # fp32 shards of 1/8, or all of it, and the first gradients of the backward pass.
    first = 2 * (32_000 * 4_096 + layer)
    assert three["gradients"] == two["gradients"] == 4 * NUM_7B // 8 + first
    assert one["gradients"] == 4 * NUM_7B + first
    single = rank(LLAMA_7B, "d8", zero_stage=1, **asked), rank(LLAMA_7B, "d8", zero_stage=2, **asked)
    first, second = (torch_memory.train_step(each, microbatch(512)) for each in single)
    assert first == second


def test_activation_bytes_per_token_in_fp32():
    # D = 64, HE = 64, KE = 32, F = 128, H = 4. Two norms of three rows of D and one number each:
    # 2 x (3 x 64 + 1) x 4 = 1,544. q, k, v, out: (2 x 64 + 2 x 32) x 4 = 768, and a number a head, 16.
    # MLP: 4 x 128 x 4 = 2,048.
    assert activations.kept_per_token(rank(), pads=False) == (1_544, 768 + 16 + 2_048)
    assert activations.kept_by_layer(rank(), microbatch(10)) == 43_760


def test_activation_bytes_per_token_in_bf16():
    # A norm: its input in fp32, normed rows and output in bf16: (4 + 2 + 2) x 64 + 4 = 516.
    # q, k, v, out: 192 x 2 = 384, and 16 for the heads; MLP 4 x 128 x 2 = 1,024.
    assert activations.kept_per_token(rank(dtype="bf16"), pads=False) == (2 * 516, 384 + 16 + 1_024)


def test_activation_bytes_of_latent_attention_per_token():
    # D = 448, H = 8, queries 48, values 32. Norms of 448, 448, 128 and 96: (3 x 1,120 + 4) x 4 = 13,456, and
    # 16 rotated numbers, 64. q, k, v, out: 4 x 8 x 48 x 4 = 6,144, out alone 8 x 32 x 4 = 1,024, heads 32.
    found = rank(kit.shape_of(kit.LATENT))
    kept = activations.kept_per_token(found, pads=False, num_mlp=0)
    assert kept == (13_456 + 64, 6_144 + 1_024 + 32)


def test_sequences_of_different_lengths_are_padded_where_no_kernel_takes_them():
    # 8/7 of q, k, v, out and heads, and the output without padding (64 x 4).
    _, shared = activations.kept_per_token(rank(), pads=True)
    assert shared == pytest.approx(8 / 7 * (768 + 16) + 256 + 2_048)
    _, on_gpu = activations.kept_per_token(rank(dtype="bf16", on_cpu=False), pads=True)
    assert on_gpu == 384 + 16 + 1_024


def test_keys_and_values_that_older_kernels_of_torch_repeat_are_counted(monkeypatch):
    # 4 heads share 2 key heads. q, out: 2 x 64 x 2 = 256; k and v: 2 x 32 x 2 = 128, or twice that.
    on_gpu, number = rank(dtype="bf16", on_cpu=False), 16 + 1_024
    shapes = "hflow.planner.forecast.memory.rank"
    monkeypatch.setattr(f"{shapes}.varlen_groups_queries", lambda: False)
    assert activations.kept_per_token(on_gpu, pads=True)[1] == 256 + 2 * 128 + number
    assert activations.kept_per_token(rank(dtype="bf16"), pads=False)[1] == 256 + 128 + number
    monkeypatch.setattr(f"{shapes}.flash_versions", lambda: {"flash-attn": "2.8.3"})
    assert activations.kept_per_token(on_gpu, pads=True)[1] == 256 + 128 + number


@pytest.mark.parametrize(("on_gpu", "has_sinks"), [(False, False), (True, False), (False, True)])
def test_what_attention_in_fp32_saves_is_what_is_planned(monkeypatch, on_gpu, has_sinks):
    """On GPUs keys are repeated, which is done here on a CPU."""
    monkeypatch.setattr("hflow.models.attention_kernels.is_gpu", lambda kind: on_gpu)
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    num, size = 6, 16
    q, k, v = (torch.randn(2 * num, heads, size, requires_grad=True) * 1.0 for heads in (4, 2, 2))
    sinks = torch.randn(4) if has_sinks else None
    layout = PackedLayout.of(np.array([num, num]), "cpu", torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attend(q, k, v, layout, None, Reach(sinks=sinks))
    of_mlp, weights = 2_048, 0 if sinks is None else sinks.nbytes
    planned = activations.kept_per_token(rank(on_cpu=not on_gpu), pads=False)[1] - of_mlp
    assert sum(saved.values()) - weights == planned * 2 * num


@pytest.mark.parametrize(("version", "is_grouped"), [("2.11.0+cu128", False), ("2.12.1", True), (None, True)])
def test_the_torch_whose_kernel_groups_queries(monkeypatch, version, is_grouped):
    monkeypatch.setattr("hflow.types.kernels.distribution_version", lambda package: version)
    assert varlen_groups_queries.__wrapped__() == is_grouped


def test_the_installed_torch_groups_queries_if_its_version_says_so():
    assert varlen_groups_queries() == ("enable_gqa" in signature(varlen_attn).parameters)


def test_activations_split_over_tensor_ranks_as_in_korthikanti_2022():
    # GPT: h = D, F = 4h, as many key-value heads as heads. Their layer takes sbh (10 + 24 / t + 5as / (ht))
    # bytes in 16 bit, of which 5as/h are scores, that flash attention does not keep. What is not divided:
    # two norms' inputs and two linear inputs (2h each) and two dropout masks (h each), 10h. What is: q, k,
    # v, attention's output (2h each) and two rows of 4h (8h each), 24h.
    h, t = 64, 4
    gpt = replace(SMALL, num_kv_heads=4, intermediate=4 * h)
    whole, shared = activations.kept_per_token(rank(gpt, f"t{t}", "megatron", dtype="bf16"), pads=False)
    # Here norms take fp32 inputs (2h more each) and keep their normed rows (2h each), there is no dropout:
    # 10h + 4h + 4h - 2h. A gated MLP has two rows of 4h more (8h each); a head has the log of a sum.
    assert whole == 10 * h + 4 * h + 4 * h - 2 * h + 2 * 4
    assert shared == 24 * h + 16 * h + 4 * 4
    batch = microbatch(1_000)
    on_cpu = rank(gpt, f"t{t}", "megatron", dtype="bf16")
    assert activations.kept_by_layer(on_cpu, batch) == 1_000 * (whole + shared / t)
    # With sequence parallelism everything is divided: sbh / t (34 + ...).
    on_gpu = rank(gpt, f"t{t}", "megatron", dtype="bf16", on_cpu=False)
    assert activations.kept_by_layer(on_gpu, batch) == 1_000 * (whole + shared) / t
    # Whether it is there can be asked for.
    for is_on, device in ((True, on_gpu), (False, on_cpu)):
        asked = rank(
            gpt, f"t{t}", "megatron", dtype="bf16", on_cpu=not device.on_cpu, sequence_parallel=is_on
        )
        assert activations.kept_by_layer(asked, batch) == activations.kept_by_layer(device, batch)
    engine = rank(gpt, f"t{t}", "vllm", on_cpu=False, sequence_parallel=False)
    assert engine.token_share == t


def test_recomputation_keeps_inputs_and_one_layer():
    # 7B, one micro-batch of 4,096 tokens in bf16: an input is 2 x 4,096 x 4,096 = 32 MiB.
    asked = rank(LLAMA_7B, "d64", dtype="bf16", activation_checkpointing=True, on_cpu=False)
    batch = microbatch(4_096, 1_000)
    layer = activations.kept_by_layer(asked, batch)
    assert activations.layer_input(asked, batch) == 32 * MIB
    assert named(torch_memory.train_step(asked, batch))["activations"] <= 32 * 32 * MIB + layer
    kept = torch_memory.train_step(
        replace(asked, config=replace(asked.config, activation_checkpointing=False)), batch
    )
    # At its peak the backward pass is in the last layer but one.
    assert named(kept)["activations"] == 31 * layer


def test_inputs_of_recomputed_layers_are_on_the_host():
    # As above: 32 inputs of 32 MiB. The final norm keeps 8 bytes for each entry of the rows, and 4 a row.
    settings = {"activation_checkpointing": True, "offload_activations": True, "dtype": "bf16"}
    asked = rank(LLAMA_7B, "d64", on_cpu=False, **settings)
    kept, batch = (
        replace(asked, config=replace(asked.config, offload_activations=False)),
        microbatch(4_096, 1_000),
    )
    assert activations.inputs_in_host_memory(asked, batch) == 32 * 32 * MIB + 8 * 4_096 * 4_096 + 4 * 4_096
    assert activations.inputs_in_host_memory(kept, batch) == 0
    assert activations.NUM_COPIED == MAX_LEAVING
    assert activations.kept_by_layers(asked, batch, 32, 0) == 3 * 32 * MIB
    most, least = (named(torch_memory.train_step(one, batch))["activations"] for one in (kept, asked))
    assert most - least == 28 * 32 * MIB
    # Of a pipeline of two stages, the first has two micro-batches in flight.
    first, last = (rank(LLAMA_7B, "p2", "megatron", stage=i, on_cpu=False, **settings) for i in (0, 1))
    several = microbatch(4_096, 1_000, num=4)
    assert activations.inputs_in_host_memory(first, several) == 2 * 16 * 32 * MIB
    assert activations.inputs_in_host_memory(last, several) > 16 * 32 * MIB
    assert activations.inputs_in_host_memory(replace(asked, on_cpu=True), batch) == 0


def test_logits_exist_in_chunks():
    # 2^29 / 4 / 32,000 = 4,194 rows. Of 2^22 / 32,000 = 131 of them a copy, and in training exponentials.
    asked = rank(LLAMA_7B)
    assert activations.logits(asked, microbatch(9_000, 8_000), num_tiles=2) == (4 * 4_194 + 8 * 131) * 32_000
    assert activations.logits(asked, microbatch(900, 100), num_tiles=1) == (4 + 4) * 100 * 32_000


def test_exponentials_are_gone_when_the_output_matrix_has_its_gradient():
    # 100 rows of 32,000 logits in fp32, and two copies, or one and a gradient of more or of fewer bytes.
    asked, batch, size = rank(LLAMA_7B), microbatch(900, 100), 4 * 100 * 32_000
    assert named(activations.trained_logits(asked, batch, size - 1)) == {"logits": 3 * size}
    assert named(activations.trained_logits(asked, batch, size + 1)) == {
        "logits": 2 * size,
        "gradients": size + 1,
    }


def test_a_pipeline_stage_holds_one_micro_batch_per_remaining_stage():
    # Four stages of one layer, eight micro-batches; the embedding's and the head's parts aside.
    batch = microbatch(1_000, 0, num=8)
    layer = activations.kept_by_layer(rank(SMALL, "p4", "megatron"), batch, megatron_memory.NUM_MLP)
    held = [
        named(megatron_memory.train_step(rank(SMALL, "p4", "megatron", stage=p), batch))["activations"]
        for p in range(4)
    ]
    assert held[:3] == [4 * layer, 3 * layer, 2 * layer]
    assert held[3] >= layer
    two = megatron_memory.train_step(rank(SMALL, "p4", "megatron"), replace(batch, num=2))
    assert named(two)["activations"] == 2 * layer


def test_products_in_fp8_keep_a_byte_of_their_inputs_and_weights_in_two_layouts():
    # A layer keeps two norms of 64 and the product of 128 rows with a byte less each: 256 a token. Of its
    # 36,864 weights there are two bytes for each of the three micro-batches in flight.
    batch = microbatch(1_000, 0, num=8)
    options = {"dtype": "bf16", "stage": 1}
    plain, fp8 = (
        named(megatron_memory.train_step(rank(SMALL, "p4", "megatron", fp8=x, **options), batch))
        for x in (None, "tensorwise")
    )
    assert plain["activations"] - fp8["activations"] == 3 * 256 * 1_000
    assert fp8["weights in FP8"] == 3 * 2 * 36_864
    again = rank(SMALL, "p4", "megatron", fp8="tensorwise", activation_checkpointing=True, **options)
    assert named(megatron_memory.train_step(again, batch))["weights in FP8"] == 2 * 36_864
    inferring = megatron_memory.infer_step(again, batch)
    assert named(inferring)["weights in FP8"] == 36_864


# --------------------------------------------------------------------------------- micro-batches
def batch_of(plan, node, lengths, data, **asked):
    return largest_microbatch(plan, plan.graph.node(node), lengths, model_config(**asked), data)


def test_micro_batches_are_bounded_by_budget_longest_sequence_and_share():
    # 8 groups of 4 samples of at most 300 + 100 tokens, in 2 minibatches: 16 samples each, 8 on a rank.
    plan = compile_plan(graphs.grpo(minibatches=2), graphs.request())
    lengths = Workload(300, 50, 0.6, 100)
    found = batch_of(plan, "actor_train", lengths, 2, tokens_per_microbatch=1_000)
    assert (found.tokens, found.num, found.pads) == (1_000, 4, True)
    # At most 4 x 100 of a group's 700 computed tokens are learned. With answers of one token, 4 of them need
    # 304 computed tokens, and a prompt three times more.
    assert found.num_learned == -(-1_000 * 400 // 700)
    assert (found.repeated, found.mask) == (2_200, 100 * 400)  # the rank has 3,200 tokens in all
    few = batch_of(plan, "actor_train", lengths, 2, tokens_per_microbatch=500)
    assert few.repeated == 500 * 900 // 304
    assert batch_of(plan, "actor_train", lengths, 2, tokens_per_microbatch=100).tokens == 400
    everything = batch_of(plan, "actor_train", lengths, 2)
    assert (everything.tokens, everything.num, everything.num_learned) == (3_200, 1, 800)
    assert (everything.repeated, everything.mask) == (0, 0)
    observing = compile_plan(graphs.grpo(minibatches=2, observed="is_observed"), graphs.request())
    assert batch_of(observing, "actor_train", lengths, 2, tokens_per_microbatch=1_000).num_learned == 1_000
    # Inference sees the batch whole: 32 samples over 2 ranks.
    assert batch_of(plan, "ref_inf", lengths, 2).tokens == 6_400


# --------------------------------------------------------------------------------------- engines
def test_the_cache_of_a_7b_model():
    # 2 x 32 layers x 4,096 x 2 bytes = 512 KiB a token; half of it on each of two tensor ranks.
    assert parts.cache_bytes_per_token(rank(LLAMA_7B, "d1", "vllm", dtype="bf16")) == 512 * 1024
    assert parts.cache_bytes_per_token(rank(LLAMA_7B, "t2", "vllm", dtype="bf16")) == 256 * 1024


def test_more_tensor_ranks_than_key_value_heads_repeat_them():
    # 2 heads of 16 on 4 ranks: each has one. 2 x 4 layers x 16 x 4 bytes.
    wide = replace(SMALL, num_heads=8)
    assert parts.cache_bytes_per_token(rank(wide, "t4", "vllm")) == 2 * 4 * 16 * 4


def vllm_rank(layout="d1", on_cpu=False, **asked):
    return rank(LLAMA_7B, layout, "vllm", on_cpu=on_cpu, dtype="bf16", **{"max_model_len": 1_000} | asked)


TOKEN = 512 * 1024
"""Bytes of keys and values of a token of LLAMA_7B in bf16."""


def test_the_vllm_cache_has_whole_blocks_one_of_them_empty():
    # 1,000 tokens take 63 blocks of 16 on CUDA, and 8 blocks of 128 on a CPU.
    load = parts.EngineLoad(num_running=100, prompt=10, longest=1_000, prefill=10)
    block = 16 * TOKEN
    plenty, little = -(2**60), 2**60
    assert vllm_memory.cache_bytes(vllm_rank(), load, 0, plenty) == (100 * 63 + 1) * block
    assert vllm_memory.cache_bytes(vllm_rank("t2"), load, 0, plenty) == (100 * 63 + 1) * block // 2
    assert vllm_memory.cache_bytes(vllm_rank(on_cpu=True), load, 0, plenty) == (100 * 8 + 1) * 128 * TOKEN
    # 5,000 blocks and a bit are free within nine tenths of 100,000 blocks, when 85,000 are used.
    found = vllm_memory.cache_bytes(vllm_rank(), load, 100_000 * block, 85_000 * block - 1)
    assert found == 5_000 * block
    # vLLM does not start without the blocks of one sequence of max_model_len, here longer than any.
    assert vllm_memory.cache_bytes(vllm_rank(), load, 0, little) == 64 * block
    longer = vllm_rank(max_model_len=4_096)
    assert (
        vllm_memory.cache_bytes(longer, load, 0, little) == 257 * block == vllm_memory.smallest_cache(longer)
    )
    fixed = vllm_rank(cache_gib=1.5)
    assert vllm_memory.cache_bytes(fixed, load, 0, little) == 3 * 2**29


def test_the_smallest_vllm_cache_holds_steps_in_flight_besides_a_window():
    # Every second layer has a window of 1,024 tokens and holds two steps of 8,192 besides: 1,088 blocks of 16
    # tokens, and one as the window may begin within a block. The others hold 100,000 tokens, 6,250 blocks.
    shape = replace(LLAMA_7B, window=SlidingWindow(1024, 2))
    long = rank(shape, "d1", "vllm", on_cpu=False, dtype="bf16", max_model_len=100_000)
    assert vllm_memory.smallest_cache(long) == (1 + 3_670) * 16 * TOKEN
    # On a CPU one step at a time is in flight, as long as the longest prompt: all 782 blocks of 128 tokens.
    on_cpu = rank(shape, "d1", "vllm", on_cpu=True, dtype="bf16", max_model_len=100_000)
    assert vllm_memory.smallest_cache(on_cpu) == (1 + 783) * 128 * TOKEN


def test_the_largest_batch_of_a_vllm_cache():
    # 101 blocks, one of them empty: 25 sequences of 64 tokens, 20 of 65.
    cache = 101 * 16 * TOKEN
    assert vllm_memory.max_sequences(vllm_rank(), cache, 64) == 25
    assert vllm_memory.max_sequences(vllm_rank(), cache, 64.5) == 20
    assert vllm_memory.max_sequences(vllm_rank(), cache, 10_000) == 1


def test_the_pages_of_an_embedded_engine_on_a_gpu():
    """The pool holds the longest sequences within 90 % of the memory, and at least one sequence."""

    def on_gpu(**asked):
        return rank(
            LLAMA_7B, "d1", "embedded", on_cpu=False, dtype="bf16", **{"max_model_len": 1_000} | asked
        )

    load = parts.EngineLoad(num_running=100, prompt=10, longest=1_000, prefill=10)
    page = 16 * TOKEN
    assert embedded_memory.cache_bytes(on_gpu(), load, 0, -(2**60)) == (100 * 63 + 1) * page
    found = embedded_memory.cache_bytes(on_gpu(), load, 100_000 * page, 85_000 * page - 1)
    assert found == 5_000 * page
    assert embedded_memory.cache_bytes(on_gpu(), load, 0, 2**60) == 64 * page
    assert embedded_memory.cache_bytes(on_gpu(cache_gib=1.5), load, 0, 2**60) == 3 * 2**29
    assert embedded_memory.max_sequences(on_gpu(), 101 * page, 64.5) == 20
    # A full cache lets sequences be prefilled again: 8,192 tokens at once, whatever the prompts are.
    step = named(embedded_memory.decode_step(on_gpu(), load))
    assert step["activations"] > 8_192 * 3 * 11_008 * 2


def test_vllm_weights_have_a_padded_vocabulary():
    # 32,000 is a multiple of 64. With 32,001, 63 more rows of 4,096 in each of two matrices, halved by t2.
    odd = replace(LLAMA_7B, vocab=32_001)
    for layout, padding in (("d1", 63), ("t2", 0)):
        found = rank(odd, layout, "vllm", dtype="bf16")
        assert parts.engine_weights(found) == 2 * (found.sizes.total + padding * 4_096 * 2)
    tied = replace(odd, is_tied=True)
    found = rank(tied, "d1", "vllm", dtype="bf16")
    assert parts.engine_weights(found) == 2 * (found.sizes.total + 63 * 4_096)
    whole = rank(LLAMA_7B, "t2", "vllm", dtype="bf16")
    norms = 65 * 4_096
    assert parts.engine_weights(whole) == (NUM_7B - norms) + 2 * norms


def test_what_vllm_keeps_in_processes_of_its_own():
    # On a CPU 768 MiB, and with two tensor ranks half of the engine's own process besides.
    mib = 2**20
    assert named(vllm_memory.process_state(vllm_rank(on_cpu=True), 9)) == {"process": 768 * mib}
    assert named(vllm_memory.process_state(vllm_rank("t2", on_cpu=True), 9)) == {"process": 1152 * mib}
    # On CUDA the runtime once more, and graphs twice: 19 sizes up to 128 = 2 x 64, 32 layers, 256 KiB each.
    found = named(vllm_memory.process_state(vllm_rank(max_running=64), 9))
    assert found == {"process": 9, "CUDA graphs": 2 * 19 * 32 * 2**18}
    assert vllm_memory.graph_sizes(8) == [1, 2, 4, 8, 16]
    # At least up to vLLM's 512, in steps of 16 from 256 on.
    assert len(vllm_memory.graph_sizes(256)) == 3 + 31 + 17
    assert vllm_memory.graph_sizes(512)[-2:] == [496, 512]


def test_captured_steps_of_the_embedded_engine_take_memory_where_there_are_any():
    """Seven graphs of 4 to 128 rows, 348 in all, with 32 layers of 256 KiB, and hidden states in bf16."""

    def held(shape=LLAMA_7B, *, on_cpu=False, **asked):
        one = rank(shape, "d1", "embedded", on_cpu=on_cpu, dtype="bf16", max_running=128, **asked)
        return named(embedded_memory.captured_steps(one)), one

    found, one = held()
    between = activations.layer_without_gradient(one, 128, pads=False)
    assert found == {"CUDA graphs": 7 * 32 * 2**18 + 348 * 4096 * 2 + between}
    assert held(cuda_graphs=False)[0] == held(on_cpu=True)[0] == held(lora=LoraConfig(r=8))[0] == {}


def test_vllm_assembles_what_a_rank_holds_a_part_of_beside_the_module_that_it_makes_anew():
    # The largest module: gate and up, 2 x 11,008 rows of 4,096, or the 32,000 rows of the vocabulary.
    mlp, vocab = (2 * rows * 4_096 for rows in (2 * 11_008, 32_000))
    assert vocab > mlp
    loading = lambda layout, parts: named(vllm_memory.layer_being_loaded(vllm_rank(layout), parts))  # noqa: E731
    assert loading("d1", 8) == {"layer being loaded": vocab}  # in place, and anew
    assert loading("d1", 1) == {"layer being loaded": 2 * vocab}
    assert loading("t2", 8) == {"layer being loaded": vocab + vocab // 2}
    small = named(vllm_memory.layer_being_loaded(rank(replace(LLAMA_7B, vocab=128), "d1", "vllm"), 2))
    assert small == {"layer being loaded": 2 * mlp}  # fp32


def test_quantised_weights_take_a_byte_and_their_scales():
    # Matrices of 32 layers: 4 x 4,096^2 + 3 x 4,096 x 11,008 each. A scale of 4 bytes for 128 x 128 weights.
    matrices = 32 * (4 * 4_096**2 + 3 * 4_096 * 11_008)
    plain, quantized = (parts.engine_weights(vllm_rank(quantization=q)) for q in (None, "fp8"))
    assert plain == 2 * NUM_7B
    assert quantized == 2 * (NUM_7B - matrices) + matrices + matrices // 4_096
    halves = parts.engine_weights(vllm_rank("t2", quantization="fp8"))
    norms = 2 * 65 * 4_096
    assert halves == (quantized - norms) // 2 + norms  # every rank has all norms
    mixture = replace(SMALL, family="qwen3_moe", experts=Experts(8, 2, 32))
    plain, quantized = (
        parts.engine_weights(rank(mixture, "d1", "vllm", dtype="bf16", quantization=q)) for q in (None, "fp8")
    )
    # 4 layers: attention 2 x 64 x (4 + 2) x 16, and 8 experts of 3 x 64 x 32. The router of 8 x 64 remains.
    experts = 4 * (12_288 + 8 * 6_144)
    assert plain - quantized == experts - -(-4 * experts // 128**2)


def test_an_adapter_of_the_mlp_has_its_product_beside_the_sum():
    on_mlp, on_attention = (
        activations.added_by_adapter(rank(SMALL, "d2", lora=LoraConfig(targets=targets)), 10, "up_proj")
        for targets in (("up_proj",), ("q_proj",))
    )
    without = activations.added_by_adapter(rank(SMALL, "d2"), 10, "up_proj")
    assert (on_mlp, on_attention, without) == (4 * 128 * 10, 0, 0)


def test_graphs_take_no_memory_where_there_are_none():
    found = named(vllm_memory.process_state(vllm_rank(cuda_graphs=False), 9))
    assert found.get("CUDA graphs", 0) == 0


def test_a_cache_in_fp8_takes_a_byte_for_each_number():
    plain, small = (vllm_memory.block_bytes(vllm_rank(cache_dtype=x)) for x in (None, "fp8"))
    assert (plain, small) == (16 * 2 * 2 * 32 * 4_096, 16 * 2 * 32 * 4_096)
    assert parts.engine_weights(vllm_rank(cache_dtype="fp8")) == 2 * NUM_7B


def test_a_quantised_layer_is_loaded_in_bf16_and_quantised_beside_it():
    # Gate and up: 2 bytes as they arrived and as assembled, the result, and copies that are padded.
    mlp, vocab = 2 * 11_008 * 4_096, 2 * 32_000 * 4_096
    loading = lambda layout, parts: named(  # noqa: E731
        vllm_memory.layer_being_loaded(vllm_rank(layout, quantization="fp8"), parts)
    )
    assert loading("d1", 8) == {"layer being loaded": (2 + 2 + 1 + 3) * mlp}
    assert loading("d1", 8)["layer being loaded"] > 2 * vocab
    assert loading("t2", 8) == {"layer being loaded": 2 * mlp + 6 * mlp // 2}
    mixture = replace(SMALL, family="qwen3_moe", vocab=64, experts=Experts(8, 2, 32))
    one = rank(mixture, "d1", "vllm", dtype="bf16", quantization="fp8")
    experts = 8 * 3 * 64 * 32  # copies are made of one expert at a time
    found = named(vllm_memory.layer_being_loaded(one, 8))
    assert found == {"layer being loaded": 5 * experts + 3 * experts // 8}


@pytest.mark.parametrize("num_senders", [1, 2])
def test_a_bucket_of_each_sender_is_on_the_gpu_while_weights_arrive(num_senders):
    route = WeightRoute("m", "m@train", "m@gen", "pull", transport="collective")
    (arriving,) = named(transfer.receive_weights(vllm_rank(), route, num_senders)).values()
    part = 2 * 32_000 * 4_096 // num_senders  # the vocabulary's, which has a bucket of its own
    norms = num_senders * 10 * 8_192  # a few share the bucket
    assert 0 <= arriving - num_senders * part - transfer.BUCKET_BYTES < norms
    assert not transfer.receive_weights(vllm_rank(), replace(route, transport="ipc"), num_senders)


def test_an_engine_that_passes_buckets_on_holds_the_next_one_of_each_stream():
    # Of four trainers each of three engines passes on one or two; with one trainer nothing is passed on.
    route = WeightRoute("m", "m@train", "m@gen", "pull", transport="collective")
    for num_senders, num_buckets in ((1, 1), (4, 4 + 2)):
        (arriving,) = named(transfer.receive_weights(vllm_rank("d3"), route, num_senders)).values()
        bucket = transfer.largest_bucket(LLAMA_7B, 2, num_parts=num_senders)
        assert arriving == num_buckets * bucket + transfer.BUCKET_BYTES


def test_an_engine_on_its_own_devices_loads_weights_beside_its_cache():
    """Its cache leaves room for that; an engine that shares devices has no cache while it loads."""
    shapes = dict.fromkeys(("actor", "ref"), LLAMA_7B)
    asked = {"tokens_per_microbatch": 4_096, "activation_checkpointing": True}
    config = model_config(dtype="bf16", engine="vllm", max_running=64, max_model_len=4_096, **asked)
    numbers = {"workload": WorkloadConfig(300, 3_000, 0.6), "max_concurrent": 2_000, "hardware": H100}
    caches = {}
    for placement in ("actor,ref=0-1 actor.gen=2", "actor,ref,actor.gen=0-1"):
        wanted = graphs.request(
            "h100-1x3" if "2" in placement else "h100-1x2",
            models=dict.fromkeys(shapes, config),
            shapes=shapes,
            placement=placement,
            engine_problems={},
            **numbers,
        )
        plan = compile_plan(graphs.grpo(), wanted)
        (cache, _), *_ = engine_caches(plan, wanted).values()
        rows = [row for row in memory_phases(plan, wanted) if row.phase == "wake"]
        (loading,) = (row for row in rows if any("layer being" in one.name for one in row.transient))
        kept = sum(one.num_bytes for one in loading.resident if one.category is MemoryCategory.KV_CACHE)
        caches[placement] = kept
        if kept:
            total = sum(one.num_bytes for one in (*loading.resident, *loading.transient))
            assert kept == cache
            assert total <= parts.MEMORY_BUDGET * plan.cluster.memory_bytes
    assert [kept > 0 for kept in caches.values()] == [True, False]


def test_every_decode_step_has_a_graph():
    # Steps of 32 from 512, of 64 from 1,024, and of 96 from 1,536 sequences on.
    assert vllm_memory.graph_sizes(1_000)[-3:] == [960, 992, 1_000]
    assert vllm_memory.graph_sizes(1_700)[51:] == [
        *range(544, 1_024, 32),
        *range(1_024, 1_536, 64),
        1_536,
        1_632,
        1_700,
    ]
    found = named(vllm_memory.process_state(vllm_rank(max_running=1_024), 9))
    assert found["CUDA graphs"] == 2 * (51 + 16) * 32 * 2**18


def test_a_step_of_vllm_prefills_or_samples():
    # 64 rows of 32,000 logits, on t2 too: 2 bytes each and four times fp32.
    small = parts.EngineLoad(num_running=64, prompt=1, longest=2, prefill=1)
    for layout in ("d1", "t2"):
        found = named(vllm_memory.decode_step(vllm_rank(layout), small))
        assert found == {"logits": 64 * 32_000 * (2 + 16)}
    # A prefill of 8,192 tokens at most, for which the MLP needs 3 x 11,008 + 4 x 4,096 numbers a token.
    large = parts.EngineLoad(num_running=2, prompt=9_000, longest=9_100, prefill=18_000)
    found = named(vllm_memory.decode_step(vllm_rank(), large))
    assert found == {"activations": 8_192 * 2 * (3 * 11_008 + 4 * 4_096)}


@given(st.integers(1, 300), st.integers(2, 600))
def test_the_estimated_cache_grows_as_that_of_the_engine(prompt, response):
    real = SlotCache(max_slots=8)
    real.enter([GenerationRequest(0, SamplingParams(), [5] * prompt, prompt, 999)])
    for length in range(prompt + 1, prompt + response):
        assert real.grow(np.array([length])) == 1
    assert embedded_memory.slot_length(prompt, prompt + response) == real._length


# ------------------------------------------------------------------------------------- transfers
def route(transport="", how="pull", **changes):
    return WeightRoute("m", "m@train", "m@gen", how, transport=transport, **changes)


def test_a_bucket_is_closed_when_it_is_large_enough():
    assert transfer._buckets([3, 3, 3, 10, 1], 5) == [6, 13, 1]


def test_weights_of_a_small_model_travel_in_one_bucket():
    # fp32 over two ranks on a CPU: the whole, this rank's half twice, and gloo's copy: 3 x 4 x 160,832.
    assert named(transfer.send_weights(rank(SMALL, "d2"), route(how="gather"))) == {
        "buckets": 3 * 4 * 160_832
    }
    assert named(transfer.send_weights(rank(), route(how="shared"))) == {}


def test_on_a_cpu_the_copies_of_a_checkpoint_count():
    weights, state, num = "copy of the weights", "copy of the optimizer's state", 160_832
    needed = transfer.save_checkpoint(rank(SMALL, "d2"))
    pieces = 4 * 8_192  # of the largest tensor
    assert named(needed) == {"buckets": pieces, weights: 4 * num, state: 12 * num // 2}
    other = replace(rank(SMALL, "d2"), is_first=False)
    assert named(transfer.save_checkpoint(other)) == {"buckets": pieces, state: 12 * num // 2}
    assert named(transfer.save_checkpoint(rank(SMALL))) == {weights: 4 * num, state: 12 * num}
    assert weights not in named(transfer.save_checkpoint(replace(rank(SMALL, "d2"), on_cpu=False)))


@pytest.mark.parametrize(("backend", "per_rank"), [("torch", (4 + 8) / 8), ("megatron", 2 + 12 / 8)])
def test_offloaded_state_is_on_the_host(backend, per_rank):
    """Bytes a parameter on 8 ranks: torch shards fp32 weights, megatron has bf16 ones on every rank."""
    asked = rank(LLAMA_7B, "d8", backend=backend, dtype="bf16", on_cpu=False)
    memory = training_backend(backend).memory
    for value in ("none", "optimizer", "all"):
        one = replace(asked, config=replace(asked.config, offload=value))
        state, host = memory.model_state(one), offload.in_host_memory(one).total()
        assert offload.on_device(one, state, "everything") == state
        idle, inferring = (offload.on_device(one, state, use) for use in ("nothing", "weights"))
        assert (MemoryCategory.WEIGHTS in {key.category for key in idle}) is (value != "all")
        assert (MemoryCategory.OPTIMIZER in {key.category for key in inferring}) is (value == "none")
        assert offload.moved_bytes(one, "everything", changes=True) == 2 * host
        if value == "all":
            assert not idle
            assert host == pytest.approx(per_rank * NUM_7B, rel=0.02)
            assert offload.moved_bytes(one, "weights", changes=False) < host


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_every_rank_copies_its_share_of_a_large_model_and_a_tensor(backend):
    asked = rank(LLAMA_7B, "d8", backend=backend, dtype="bf16")
    copies = named(transfer.checkpoint_copies(replace(asked, is_first=False)))
    assert copies["copy of the weights"] == 2 * NUM_7B // 8 + 2 * 32_000 * 4_096


# ------------------------------------------------------------------------------------ whole plans
def compiled(graph, cluster="cpu-1x2", models=("actor", "ref", "critic"), **changes):
    """A plan whose models are SMALL (the critic with a value head): nothing is refused."""
    asked = changes.pop("asked", {})
    heads = {"critic": replace(SMALL, head="value")}
    known = [model.name for model in graph.models if model.name in models]
    configs = {name: model_config(**asked) for name in known}
    shapes = {name: heads.get(name, SMALL) for name in known}
    request = graphs.request(cluster, models=configs, shapes=shapes, **changes)
    return compile_plan(graph, request), request


def phase(rows, name, device=0):
    return next(row for row in rows if row.phase == name and device in row.devices)


PHASES = ("generate", "wake", "actor_train")


def test_phases_follow_the_order_of_the_group():
    plan, request = compiled(graphs.grpo())
    names = list(dict.fromkeys(row.phase for row in memory_phases(plan, request)))
    assert names == ["generate", "wake", "ref_inf", "group_advantage", "actor_train", "save.actor"]


def test_what_a_node_keeps_is_on_the_workers_that_run_it_and_in_every_phase():
    graph = graphs.changed(graphs.grpo(), "group_advantage", memory=3 << 30)
    without, kept = (memory_phases(*compiled(one, models=("actor", "ref"))) for one in (graphs.grpo(), graph))
    assert {row.devices for row in kept} == {(0,), (1,)}  # a batch node runs on the first worker
    for name in ("generate", "actor_train", "save.actor"):
        assert phase(kept, name).total - phase(without, name).total == 3 << 30
        assert phase(kept, name, device=1).total == phase(without, name, device=1).total
        assert named(phase(kept, name).resident)["group_advantage (node)"] == 3 << 30


def test_a_colocated_vllm_engine_counts_twice_on_a_cpu_and_frees_its_memory_on_cuda():
    on_cpu = memory_phases(*compiled(graphs.grpo(), asked={"engine": "vllm"}))
    generating, training = (
        named(phase(on_cpu, "generate").transient),
        named(phase(on_cpu, "actor_train").resident),
    )
    assert training["actor@train weights"] == 2 * 160_832
    # vLLM cannot sleep on a CPU: 28 rows pad each of two matrices of 64 columns.
    assert training["actor@gen weights (asleep)"] == 4 * (160_832 + 2 * 28 * 64)
    assert training["actor@gen KV cache (asleep)"] == generating["KV cache"]
    assert training["actor@gen process"] == 768 * MIB
    plan, request = compiled(graphs.grpo(), cluster="h100-1x2", asked={"engine": "vllm", "max_running": 8})
    on_cuda = memory_phases(plan, request)
    training = named(phase(on_cuda, "actor_train").resident)
    assert [name for name in training if name.startswith("actor@gen")] == ["actor@gen CUDA graphs"]
    assert training["actor@gen CUDA graphs"] == 2 * 5 * 4 * 2**18
    assert "actor@gen weights" in named(phase(on_cuda, "generate").resident)


@pytest.mark.parametrize(
    ("transport", "on_cpu", "is_loading", "is_kept"),
    [
        ("collective", False, False, True),
        ("ipc", False, True, True),
        ("ipc", False, False, False),
        ("shared", True, False, True),
        ("shared", False, True, False),
        ("store", True, True, False),
        ("disk", True, True, False),
    ],
)
def test_what_a_trainer_holds_of_a_published_version(transport, on_cpu, is_loading, is_kept):
    trainer, sent = rank(layout="d2", on_cpu=on_cpu), 4 * 160_832 / 2
    published = {"published weights": sent} if is_kept else {}
    found = transfer.published_weights(trainer, [(route(transport), 2)], is_loading=is_loading)
    assert named(found) == published
    delta = route(transport, delta=True)
    found = transfer.published_weights(trainer, [(delta, 2)], is_loading=is_loading)
    assert named(found) == published | {"weights sent last": sent}


@pytest.mark.parametrize(
    ("transport", "near", "on_cpu", "kept"),
    [
        ("ipc", "", False, 5000),
        ("shared", "ipc", False, 5000),
        ("store", "shared", True, 5000),
        ("shared", "", True, 4 * 160_832 / 2),
    ],
)
def test_what_a_trainer_holds_for_the_engine_on_its_device(transport, near, on_cpu, kept):
    """Four ranks of engines find 20,000 bytes in place."""
    sent = route(transport, near=near, held_bytes=20_000), 4
    found = transfer.published_weights(rank(layout="d2", on_cpu=on_cpu), [sent], is_loading=True)
    assert named(found) == {"published weights": kept}


@pytest.mark.parametrize(
    ("transport", "on_cpu", "is_kept"),
    [("shared", True, True), ("shared", False, False), ("ipc", False, True), ("collective", False, True)],
)
def test_what_an_engine_keeps_of_the_version_to_which_changes_apply(transport, on_cpu, is_kept):
    engine = rank(layout="t2", role="gen", backend="vllm", on_cpu=on_cpu, dtype="bf16")
    kept = {"weights received last": 2 * 160_832 / 2} if is_kept else {}
    assert named(transfer.received_weights(engine, route(transport, delta=True))) == kept
    assert named(transfer.received_weights(engine, route(transport))) == {}


def test_finding_changes_takes_a_mask_and_places():
    # All entries of the half model in one bucket, a byte and an int64 each.
    sent = transfer.send_weights(rank(layout="d2"), route("shared", delta=True))
    assert named(sent) == {"buckets": 4 * 160_832 / 2, "changes": 9 * 160_832 / 2}


def test_copies_of_changes_are_in_every_phase():
    asked = {"engine": "vllm", "delta": True}
    rows = memory_phases(*compiled(graphs.grpo(), asked=asked))
    for name in ("generate", "wake", "actor_train"):
        held = named(phase(rows, name).resident)
        assert (
            held["actor@train weights sent last"] == held["actor@train published weights"] == 4 * 160_832 / 2
        )
        assert held["actor@gen weights received last"] == 4 * 160_832
    assert named(phase(rows, "wake").transient)["changes"] == 9 * 160_832 / 2


def test_the_cache_of_a_vllm_engine_is_part_of_the_plan():
    plan, request = compiled(graphs.grpo(), cluster="h100-1x2", asked={"engine": "vllm"})
    cache = named(phase(memory_phases(plan, request), "generate").transient)["KV cache"]
    (found,) = engine_caches(plan, request).values()
    assert found[0] == cache
    assert engine_caches(*compiled(graphs.grpo())) == {}


def test_colocated_replicas_add_up_and_engines_sleep_on_the_host():
    plan, request = compiled(graphs.grpo())
    rows = memory_phases(plan, request)
    held = named(phase(rows, "group_advantage").resident)
    assert held["actor@train weights"] == held["ref@infer weights"] == 2 * 160_832
    assert held["actor@train optimizer"] == 4 * 160_832
    assert held["actor@gen weights (asleep)"] == 4 * 160_832
    assert held["actor@gen KV cache (asleep)"] == named(phase(rows, "generate").transient)["KV cache"]
    assert phase(rows, "group_advantage").transient == ()


def test_engines_leave_an_accelerator_to_others():
    plan, request = compiled(graphs.grpo(), "h100-1x2")
    rows = memory_phases(plan, request)
    assert "actor@gen weights" in named(phase(rows, "generate").resident)
    assert not [name for name, *_ in phase(rows, "actor_train").resident if "@gen" in name]


def test_an_engine_that_shares_its_trainers_storage_has_no_weights():
    plan, request = compiled(graphs.grpo(), "cpu-1x1")
    held = named(phase(memory_phases(plan, request), "generate").resident)
    assert "actor@gen weights" not in held
    plan, request = compiled(graphs.grpo(), "cpu-1x1", asked={"dtype": "bf16"})
    held = named(phase(memory_phases(plan, request), "generate").resident)
    assert held["actor@gen weights"] == 2 * 160_832


def test_weights_gathered_for_inference_stay_until_training():
    plan, request = compiled(graphs.ppo())
    rows = memory_phases(plan, request)
    kept = {row.phase: [n.split("@")[0] for n, *_ in row.resident if "gathered" in n] for row in rows}
    assert kept["critic_inf"] == ["actor", "ref"]
    assert kept["critic_train"] == ["actor", "ref"]
    assert kept["save.actor"] == ["ref"]
    assert kept["generate"] == ["ref"]


def test_a_model_of_unknown_sizes_is_left_out_and_named():
    plan, request = compiled(graphs.ppo(), models=("critic", "ref"))
    rows = memory_phases(plan, request)
    assert unknown_models(plan) == ("actor",)
    assert {row.phase for row in rows} == {"ref_inf", "critic_inf", "gae", "critic_train", "save.critic"}
    assert not [name for row in rows for name, *_ in row.resident if name.startswith("actor")]


def test_groups_of_their_own_have_their_own_phases():
    models = {"actor": model_config(group="train", gen_group="gen"), "ref": model_config(group="train")}
    groups = {"train": (0, 1), "gen": (2, 3)}
    request = graphs.request("cpu-1x4", models=models, shapes=dict.fromkeys(models, SMALL), groups=groups)
    plan = compile_plan(graphs.grpo(), request)
    rows = memory_phases(plan, request)
    assert {row.phase for row in rows if row.group == "gen"} == {"generate", "wake"}
    # Weights are pulled: each rank packs its half of them, and an engine puts the largest tensor together.
    assert named(phase(rows, "wake", 0).transient) == {"buckets": 4 * 160_832 // 2}
    assert named(phase(rows, "wake", 1).transient) == {"buckets": 4 * 160_832 // 2}
    assert named(phase(rows, "wake", 2).transient) == {"buckets": 4 * 64 * 128}


def test_what_was_published_on_the_device_is_free_before_the_cache_is_allocated():
    actor = model_config(engine="vllm", gen_layout="t2")
    actor = replace(actor, gen=replace(actor.gen, transport="shared"))
    models = {"actor": actor, "ref": model_config()}
    request = graphs.request("h100-1x2", models=models, shapes=dict.fromkeys(models, SMALL))
    plan = compile_plan(graphs.grpo(), request)
    assert [(route.transport, route.near) for route in plan.weights] == [("shared", "ipc")]
    rows = memory_phases(plan, request)
    published = {
        name: "actor@train published weights" in named(phase(rows, name).resident) for name in PHASES
    }
    assert published == {"generate": False, "wake": True, "actor_train": False}


def test_a_worker_and_an_engine_hold_two_buckets_that_are_handed_over():
    models = {"actor": model_config(engine="vllm", gen_layout="t2"), "ref": model_config()}
    request = graphs.request("h100-1x2", models=models, shapes=dict.fromkeys(models, SMALL))
    plan = compile_plan(graphs.grpo(), request)
    assert [(route.how, route.near) for route in plan.weights] == [("gather", "ipc")]
    wake = phase(memory_phases(plan, request), "wake")
    assert named(wake.transient)["buckets handed over"] == 2 * transfer.largest_bucket(SMALL, 4)
    assert "actor@train published weights" not in named(wake.resident)


@settings(max_examples=60)
@given(
    st.sampled_from(["torch", "megatron"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_device_has_every_phase_once(backend, data, tensor, pipe, on_cpu):
    layout = Layout(data, tensor, pipe) if backend == "megatron" else Layout(data)
    cluster = f"{'cpu' if on_cpu else 'h100'}-1x{layout.world + 1}"
    models = {
        "actor": model_config(layout=str(layout), backend=backend, gen_layout="d1"),
        "ref": model_config(layout="d1"),
    }
    request = graphs.request(cluster, models=models, shapes=dict.fromkeys(models, SMALL))
    rows = memory_phases(compile_plan(graphs.grpo(), request), request)
    for name in {row.phase for row in rows}:
        devices = [device for row in rows if row.phase == name for device in row.devices]
        assert sorted(devices) == list(range(layout.world + 1))
    assert all(size > 0 for row in rows for _, size, _ in (*row.resident, *row.transient))


@settings(max_examples=60)
@given(
    st.booleans(),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 3_000),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_recomputation_smaller_batches_and_more_ranks_never_need_more(recompute, dtype, tokens, num, on_cpu):
    batch = microbatch(tokens, tokens // 2, num)
    asked = rank(LLAMA_7B, "d8", dtype=dtype, activation_checkpointing=recompute, on_cpu=on_cpu)
    needed = torch_memory.train_step(asked, batch).total()
    again = replace(asked, config=replace(asked.config, activation_checkpointing=True))
    assert torch_memory.train_step(again, batch).total() <= needed
    assert torch_memory.train_step(asked, replace(batch, tokens=tokens + 1)).total() >= needed
    wider = rank(LLAMA_7B, "d16", dtype=dtype, activation_checkpointing=recompute, on_cpu=on_cpu)
    assert torch_memory.train_step(wider, batch).total() <= needed
    assert model_state(wider).total() < model_state(asked).total()


# ------------------------------------------------------------------------ the memory of machines
def on_host(cluster="h100-1x2", host_memory_gib=None, sync_every=2, **asked):
    """Name -> bytes in the memory of each kind of machine, and the warnings of the plan."""
    plan, _ = host_plan(cluster, host_memory_gib, sync_every, **asked)
    return [named(row.items) for row in plan.forecast.host], plan.warnings


def host_plan(cluster, host_memory_gib, sync_every, **asked):
    models = {name: model_config(**asked) for name in ("actor", "ref")}
    device = replace(H100.device, host_memory_gib=host_memory_gib)
    shapes = dict.fromkeys(models, SMALL)
    wanted = graphs.request(cluster, models=models, shapes=shapes, sync_every=sync_every)
    wanted = replace(wanted, hardware=replace(H100, device=device))
    return compile_plan(graphs.grpo(), wanted), wanted


NUM = 160_832
SAVED = "actor@train copy of the weights", "actor@train copy of the optimizer's state"


def kept_for_engines(items):
    return {name: size for name, size in items.items() if name not in SAVED}


def test_sleeping_engines_keep_weights_on_the_host():
    """Two whole engines take turns with the trainer; engines on their own devices only pause.

    With new weights in each step, an engine that wakes loads others.
    """
    (items,), _ = on_host(dtype="bf16", engine="embedded")
    assert kept_for_engines(items) == {"actor@gen weights (asleep)": 2 * 2 * NUM}
    (items,), _ = on_host(dtype="bf16", engine="embedded", sync_every=1)
    assert kept_for_engines(items) == {}
    (items,), _ = on_host("h100-1x4", dtype="bf16", engine="embedded", group="a", gen_group="b")
    assert kept_for_engines(items) == {}
    # vLLM pads two matrices of 64 columns by 28 rows.
    (items,), _ = on_host(dtype="bf16", engine="vllm", gen_layout="t2", transport="disk")
    assert kept_for_engines(items)["actor@gen weights (asleep)"] >= 2 * NUM


def test_versions_in_the_object_store_and_their_copies_are_counted():
    """Trainers on machine 0 store a version; machine 1 fetches it, and copies it for each of 2 engines."""
    apart = {"dtype": "bf16", "engine": "vllm", "group": "a", "gen_group": "b", "gen_layout": "d2"}
    sending, receiving = on_host("h100-2x2", layout="d2", transport="store", **apart)[0]
    stored, copied = "actor@gen weights in the object store", "actor@gen weights for engine processes"
    fetched = "actor@gen weights that the object store fetched"
    assert kept_for_engines(sending) == {stored: 2 * NUM}
    assert kept_for_engines(receiving) == {fetched: 2 * NUM, copied: 2 * 2 * NUM}
    sending, receiving = on_host("h100-2x2", layout="d2", transport="store", delta=True, **apart)[0]
    assert receiving["actor@gen weights received last"] == 2 * 2 * NUM
    (sending,), _ = on_host("h100-2x2", layout="d2", transport="disk", **apart)
    assert kept_for_engines(sending) == {}


def test_fetched_weights_take_what_is_left_of_the_object_store():
    """Ray drops them when it needs room, and writes only what was published here to disk."""
    wide = {"dtype": "bf16", "engine": "vllm", "group": "a", "gen_group": "b", "transport": "store"}
    plan, wanted = host_plan("h100-4x1", None, 2, layout="d2", gen_layout="d2", **wide)
    store = 3 * NUM // 2
    small = replace(H100.device, host_memory_gib=store / 0.3 / 2**30)
    sending, *_, receiving = host_memory(plan, replace(wanted, hardware=replace(H100, device=small)))
    assert kept_for_engines(named(sending.items)) == {"actor@gen weights in the object store": NUM}
    assert kept_for_engines(named(receiving.items)) == {
        "actor@gen weights that the object store fetched": store,
        "actor@gen weights for engine processes": 2 * NUM,
    }


def test_most_of_some_memory_is_more_than_half_of_it():
    assert largest_part(6, 10) == "Most of it is for"
    assert largest_part(3, 10) == "The largest part is for"


def test_too_little_host_memory_is_refused_and_little_is_warned_about():
    needed = 2 * 2 * NUM + sum(on_host(dtype="bf16", engine="embedded")[0][0][name] for name in SAVED)
    per_device = needed / 2 / 2**30
    with pytest.raises(
        PlanError, match=r"^machine 0 needs .* of host memory, but has .*\. Most of it is for"
    ):
        on_host(host_memory_gib=0.99 * per_device, dtype="bf16", engine="embedded")
    _, (warning,) = on_host(host_memory_gib=1.03 * per_device, dtype="bf16", engine="embedded")
    assert "of host memory are needed, without processes and data. Most of it is for" in warning
    assert on_host(host_memory_gib=1.1 * per_device, dtype="bf16", engine="embedded")[1] == ()


def test_what_is_largest_on_the_host_has_its_own_advice():
    def advice(name):
        row = HostMemory((0, 1), (MemoryItem(name, 2**30, MemoryCategory.WEIGHTS),), 2**29)
        with pytest.raises(PlanError, match=r"^machines 0-1 need 1.0 GiB of host memory") as error:
            check_host_memory([row])
        return str(error.value).partition("GiB). ")[2]

    more = ", or use more machines."
    assert advice("actor@gen weights (asleep)").startswith("Give the engine devices of its own, as in ")
    assert advice("ref@infer weights in host memory") == f"Set models.ref.offload=none{more}"
    assert advice("a@gen weights in the object store") == f"Set models.a.gen.transport=disk{more}"
    assert advice("a@train copy of the optimizer's state") == f"Set models.a.save_optimizer=false{more}"


def test_a_store_that_is_too_small_is_warned_about():
    """Ray's store has 30 % of a machine's memory, and at most 200 GB."""
    wanted = graphs.request("h100-1x8")
    for gib, expected in ((64, 0.3 * 8 * 64 * 2**30), (256, 200e9), (None, None)):
        device = replace(H100.device, host_memory_gib=gib)
        assert store_bytes(replace(wanted, hardware=replace(H100, device=device))) == expected
    rows = [
        HostMemory(machines, (MemoryItem("a@gen weights in the object store", size << 40, "buffers"),), None)
        for machines, size in (((0,), 2), ((1, 3), 1))
    ]
    small = replace(H100.device, host_memory_gib=64)
    (warning,) = host_memory_warnings(rows, replace(wanted, hardware=replace(H100, device=small)))
    assert warning.startswith("machines 0-1,3: published weights take up to 2048.0 GiB of Ray's object store")
    assert (
        "--object-store-memory=2199023255552, or set models.a.gen.transport=disk, which is slower" in warning
    )


# -------------------------------------------------------------------------------------- refusals
def refused(capacity, cluster="h100-1x2", graph=None, request=None, **asked):
    """What a plan is refused with on devices of which so many bytes may be used."""
    known = {"gen_layout": "d1", "max_running": 8, "max_model_len": 400} | asked
    shapes = dict.fromkeys(("actor", "ref"), known.pop("shape", SMALL))
    models = {name: model_config(**known) for name in shapes}
    numbers = {"workload": WorkloadConfig(300, 50, 0.6), "max_concurrent": 8} | (request or {})
    wanted = graphs.request(cluster, models=models, shapes=shapes, **numbers)
    graph, memory_bytes = graph or graphs.grpo(), math.ceil(capacity / (1 - MEMORY_MARGIN))
    small = replace(wanted, cluster=replace(wanted.cluster, memory_bytes=memory_bytes), hardware=H100)
    plan = compile_plan(graph, replace(wanted, cluster=replace(wanted.cluster, memory_bytes=2**60)))
    phases = memory_phases(plan, wanted)
    with pytest.raises(PlanError) as error:
        check_memory(
            phases,
            replace(small.cluster, memory_bytes=memory_bytes),
            lambda: nearest_fit(graph, small, small),
        )
    assert "\n" not in str(error.value)
    return str(error.value)


def peak_of(cluster="h100-1x2", **asked):
    known = {"gen_layout": "d1", "max_running": 8, "max_model_len": 400} | asked
    shapes = dict.fromkeys(("actor", "ref"), known.pop("shape", SMALL))
    numbers = {"shapes": shapes, "workload": WorkloadConfig(300, 50, 0.6), "max_concurrent": 8}
    models = {name: model_config(**known) for name in shapes}
    wanted = graphs.request(cluster, models=models, **numbers)
    return max(row.total for row in memory_phases(compile_plan(graphs.grpo(), wanted), wanted))


def test_smaller_micro_batches_are_advised_first():
    # 8 x 4 samples of 400 tokens on 2 ranks: 6,400 tokens in one micro-batch. At most 2,048 fit.
    capacity = peak_of(tokens_per_microbatch=2_048)
    message = refused(capacity)
    assert message.startswith("actor_train needs ")
    assert "is available on devices 0-1." in message
    assert "Most of it is for activations (" in message
    assert ". Set models.actor.tokens_per_microbatch=2048 (" in message


def test_recomputation_is_advised_where_one_sequence_is_too_large():
    capacity = peak_of(tokens_per_microbatch=400, activation_checkpointing=True, max_running=1)
    message = refused(capacity, tokens_per_microbatch=400, max_running=1)
    assert ". Set models.actor.activation_checkpointing=true (" in message


def test_recomputation_and_smaller_micro_batches_together():
    # Inference has the smaller micro-batches already.
    capacity = peak_of(tokens_per_microbatch=512, activation_checkpointing=True, max_running=1)
    message = refused(capacity, tokens_per_microbatch=800, max_running=1)
    assert "models.actor.tokens_per_microbatch=512 models.actor.activation_checkpointing=true (" in message


def test_fewer_sequences_at_once_are_advised_where_the_cache_is_too_large():
    # A token's cache is 2 x 4 x 32 x 4 = 1,024 bytes: 64 sequences of 400 tokens take 25 MiB and more.
    # Slots on CPUs take that, whatever there is; pages on a GPU take what there is.
    capacity = peak_of("cpu-1x2", tokens_per_microbatch=400, activation_checkpointing=True) + 8 * 500 * 1_024
    message = refused(
        capacity,
        "cpu-1x2",
        tokens_per_microbatch=400,
        activation_checkpointing=True,
        max_running=64,
        request={"max_concurrent": 64},
    )
    assert message.startswith("generate needs ")
    assert "for KV cache (" in message
    assert ". Set models.actor.gen.max_running=" in message


LARGE = {
    "shape": LLAMA_7B,
    "engine": "vllm",
    "tokens_per_microbatch": 400,
    "activation_checkpointing": True,
    "dtype": "bf16",
}


def test_more_data_ranks_on_the_same_devices():
    # Weights, moments and gradients of actor: 16 bytes a parameter on one rank, 8 on each of two; ref: 4.
    message = refused(NUM_7B * 16, layout="d1", **LARGE | {"gen_layout": "t2"})
    assert ". Set models.actor.layout=d2t1p1 (" in message
    message = refused(NUM_7B * 12, layout="d1", **LARGE | {"gen_layout": "t2"})
    assert ". Set models.ref.offload=all models.actor.layout=d2t1p1 (" in message


def test_more_tensor_ranks_on_the_same_devices():
    # Bytes a parameter of megatron as d4t1: 6 + 12 / 4, as d2t2: (6 + 12 / 2) / 2; of ref 2.
    message = refused(
        NUM_7B * 10, "h100-1x4", layout="d4", backend="megatron", **LARGE | {"gen_layout": "t4"}
    )
    assert re.search(r"\. Set models\.actor\.layout=d[12]t[124]p[124] \(", message)


def test_more_devices_where_nothing_else_helps():
    # 16 + 4 bytes a parameter of one model: 10 on each of two devices.
    message = refused(NUM_7B * 5, layout="d2", **LARGE | {"gen_layout": "t2"})
    assert re.search(r"\. Set cluster=h100-\dx\d placement='actor", message)


def test_what_is_advised_fits():
    """A circle of advice would end here: the plan with the advised settings is compiled."""
    shapes = dict.fromkeys(("actor", "ref"), LLAMA_7B)
    asked = {key: value for key, value in LARGE.items() if key != "shape"}
    models = {name: model_config(**asked, max_model_len=400) for name in shapes}
    request = graphs.request(
        "h100-1x2", models=models, shapes=shapes, workload=WorkloadConfig(300, 50, 0.6), max_concurrent=8
    )
    request = replace(request, cluster=replace(request.cluster, memory_bytes=NUM_7B * 5), hardware=H100)
    request = with_settings(request, {"models.actor.layout": "d2"})
    text = nearest_fit(graphs.grpo(), request, request)
    cluster = re.search(r"cluster=(\S+)", text)
    placement = re.search(r"placement='([^']*)'", text)
    assert cluster
    assert placement
    other = replace(graphs.cluster_of(cluster[1]), memory_bytes=NUM_7B * 5)
    settings: dict[str, Any] = dict(re.findall(r"(models\.\w+\.offload)=(\w+)", text))
    settings |= dict.fromkeys(re.findall(r"(models\.\S+)=null", text))
    assert settings["models.actor.layout"] is None
    other_request = with_settings(replace(request, cluster=other, placement=placement[1]), settings)
    assert compile_plan(graphs.grpo(), other_request).forecast


@pytest.mark.long
def test_a_model_whose_engine_fits_nowhere_is_refused():
    # The embedded engine holds the whole model: 13.5 GB in bf16. vLLM has tensor ranks.
    smallest = {"tokens_per_microbatch": 400, "activation_checkpointing": True}
    message = refused(10 * 10**9, shape=LLAMA_7B, dtype="bf16", **smallest)
    assert "models.actor.gen.engine=vllm" in message
    assert "Nothing fits on up to 1024 devices" in refused(2**30, shape=LLAMA_7B, dtype="bf16", **smallest)


def test_a_plan_with_little_to_spare_is_warned_about():
    peak = peak_of()
    shapes, models = dict.fromkeys(("actor", "ref"), SMALL), {}
    for name in shapes:
        models[name] = model_config(gen_layout="d1", max_running=8, max_model_len=400)
    numbers = {"shapes": shapes, "workload": WorkloadConfig(300, 50, 0.6), "max_concurrent": 8}
    wanted = replace(graphs.request("h100-1x2", models=models, **numbers), hardware=H100)
    plans = [
        compile_plan(
            graphs.grpo(), replace(wanted, cluster=replace(wanted.cluster, memory_bytes=math.ceil(peak * f)))
        )
        for f in (1.04, 1.06)
    ]
    (warning,) = set(plans[0].warnings) - set(plans[1].warnings)
    assert re.match(r"actor_train needs \d.* GiB of the \d.* GiB on devices 0-1, which leaves 0\.\d", warning)
    assert ". Set models.actor." in warning


def test_a_plan_that_fits_is_not_refused():
    plan, request = compiled(graphs.grpo())
    check_memory(memory_phases(plan, request), plan.cluster, pytest.fail)
    check_memory((), plan.cluster, pytest.fail)


# ----------------------------------------------------------------------- beside the real thing
class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that still exist."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self._known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            storage = one.untyped_storage() if isinstance(one, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._change(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._change, storage._cdata, -storage.nbytes())
        return made

    def _change(self, key, num_bytes):
        (self._known.add if num_bytes > 0 else self._known.discard)(key)
        self.now += num_bytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_moe", torch.bfloat16), ("mixtral", torch.float32)])
def test_copies_of_tokens_while_outputs_of_experts_are_weighted(family, dtype):
    sizes = {"hidden_size": 256, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 4}
    config = Qwen3MoeConfig(**sizes, experts_implementation="grouped_mm")
    experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight.requires_grad_(False), std=0.1)
    hidden = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    chosen, weights = torch.arange(4).expand(512, 4), torch.rand(512, 4, dtype=dtype).requires_grad_()
    shape = replace(kit.shape_of(kit.MIXED), family=family, hidden=256)
    planned = rank(replace(shape, experts=replace(shape.experts, per_token=4)), dtype="bf16")
    with _LiveBytes() as live:
        output = experts(hidden, chosen, weights)
        kept, live.most = live.now, 0
        output.backward(torch.ones_like(output))
    beyond = activations.weighted_copies(planned, 512, has_gradient=True)
    assert beyond == pytest.approx(live.most - kept, rel=0.05)
    with _LiveBytes() as live, torch.no_grad():
        experts(hidden, chosen, weights)
    in_all = activations.weighted_copies(planned, 512, has_gradient=False)
    of_layer = 4 * 2 * 256 * 512  # the layer's input and what is made of it before
    assert in_all - of_layer == pytest.approx(live.most, rel=0.1)


def transient(architecture, work, batch, data=1, **asked):
    found = rank(kit.shape_of(architecture), f"d{data}", **asked)
    return (torch_memory.train_step if work == "train" else torch_memory.infer_step)(found, batch).total()


def close_to(measured):
    return pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("architecture", "dtype", "recompute"),
    [
        (kit.ARCHITECTURE, "fp32", False),
        pytest.param(kit.ARCHITECTURE, "bf16", True, marks=pytest.mark.long),
        (kit.WIDE, "fp32", True),
        pytest.param(kit.WIDE, "bf16", False, marks=pytest.mark.long),
        (kit.MIXED, "fp32", False),
        (kit.LATENT, "fp32", False),
        pytest.param(kit.LATENT, "bf16", False, marks=pytest.mark.long),
        pytest.param(kit.BIASED, "fp32", False, marks=pytest.mark.long),
    ],
    ids=[
        "tied",
        "tied in bf16, recomputed",
        "wide, recomputed",
        "wide in bf16",
        "experts",
        "latent",
        "latent in bf16",
        "experts with biases",
    ],
)
def test_a_real_training_step_and_inference(architecture, dtype, recompute):
    trained, inferred = kit.real_peaks(architecture, 8, 64, dtype=dtype, activation_checkpointing=recompute)
    batch, asked = microbatch(512, 384), {"dtype": dtype, "activation_checkpointing": recompute}
    assert transient(architecture, "train", batch, **asked) == close_to(trained)
    assert transient(architecture, "infer", batch, **asked) == close_to(inferred)


def test_masks_of_windows_are_counted_where_a_kernel_needs_them():
    # Layers 2 and 4 attend to all tokens: of 300 x 300 entries in fp32 two of four layers keep each one.
    batch, windowed = replace(microbatch(600), longest=300), replace(SMALL, window=SlidingWindow(100, 2))
    assert activations.window_mask(rank(windowed), batch) == 4 * 300 * 300 // 2
    assert activations.window_mask(rank(windowed, on_cpu=False), batch) == 4 * 300 * 300 // 2
    for other in (
        rank(),
        rank(replace(windowed, window=SlidingWindow(300, 2))),
        rank(replace(windowed, has_sinks=True), on_cpu=False),
        rank(windowed, on_cpu=False, dtype="bf16"),
    ):
        assert activations.window_mask(other, batch) == 0


def test_a_real_training_step_of_long_sequences_with_sinks_in_windows():
    trained, _ = kit.real_peaks(kit.BIASED, 2, 512)
    batch = replace(microbatch(1_024, 768), longest=512)
    assert transient(kit.BIASED, "train", batch) == pytest.approx(trained, rel=0.02)


def test_a_real_training_step_in_several_micro_batches():
    trained, inferred = kit.real_peaks(kit.ARCHITECTURE, 8, 64, tokens_per_microbatch=128)
    batch = microbatch(128, 96, num=4)
    assert transient(kit.ARCHITECTURE, "train", batch) == close_to(trained)
    assert transient(kit.ARCHITECTURE, "infer", batch) == close_to(inferred)


@pytest.mark.parametrize("answer", [4, 100])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_training_step_on_prompts_that_groups_share(answer, recompute):
    """Two groups of eight: the keys of 120 tokens are there eight times, everything else of them once."""
    prompt, size, num = 120, 8, 16
    groups = {"group_size": size, "prompt": prompt}
    length = prompt + answer
    trained, inferred = kit.real_peaks(
        kit.WIDE, num, length, groups=groups, activation_checkpointing=recompute
    )
    computed = num // size * prompt + num * answer
    repeated, mask = num * length - computed, answer * length
    batch = replace(microbatch(computed, num * answer, pads=True), repeated=repeated, mask=mask)
    asked = {"activation_checkpointing": recompute}
    # Answers of one length need no padding, of which the plan counts a seventh.
    assert 1 <= transient(kit.WIDE, "train", batch, **asked) / trained < 1.2
    assert 1 <= transient(kit.WIDE, "infer", batch, **asked) / inferred < 1.2


def test_a_real_engine_in_its_second_turn():
    num_sequences, prompt, response = 16, 64, 64
    made = EmbeddedEngine(
        ModelSettings(name="m", architecture=kit.ARCHITECTURE), {"max_running": num_sequences}
    )

    def turn():
        for i in range(num_sequences):
            made.add(i, [i + 1] * prompt, SamplingParams(max_tokens=response, seed=i))
        while made.num_unfinished:
            made.step()

    turn()
    found = rank(kit.shape_of(kit.ARCHITECTURE), backend="embedded")
    # What MKL arranges is not in torch's memory.
    measured = made.cache_bytes + kit.peak(turn) + embedded_memory.arranged_weights(found)
    load = parts.EngineLoad(num_sequences, prompt, prompt + response, num_sequences * prompt)
    assert embedded_memory.cache_bytes(found, load, 0, 0) == made.cache_bytes
    assert made.cache_bytes + embedded_memory.decode_step(found, load).total() == close_to(measured)


class EngineWithPages(EmbeddedEngine):
    _has_pages = True


def test_a_real_engine_allocates_the_pages_of_the_plan():
    found = rank(kit.shape_of(kit.ARCHITECTURE), backend="embedded", on_cpu=False, max_model_len=128)
    load = parts.EngineLoad(16, 64, 100, 16 * 64)
    planned = embedded_memory.cache_bytes(found, load, 0, -(2**40))
    assert planned == (1 + 16 * 7) * embedded_memory.page_bytes(found)
    for size in (planned, embedded_memory.smallest_cache(found)):
        settings = ModelSettings(name="m", architecture=kit.ARCHITECTURE)
        options = {"max_running": 16, "max_model_len": 128, "cache_bytes": size}
        made = EngineWithPages(settings, options)
        for i in range(16):
            made.add(i, [i + 1] * 64, SamplingParams(max_tokens=36, seed=i))
        while made.num_unfinished:
            made.step()
        assert made.cache_bytes == size
    with pytest.raises(ConfigError, match="tokens needs"):
        EngineWithPages(settings, options | {"cache_bytes": size - 1})


@pytest.mark.long
def test_real_steps_of_megatron(tmp_path):
    """On up to four ranks. Between steps tensor ranks also keep the buffer in which they gather tokens.

    Frozen matrices need none.
    """
    import memory_ranks  # it imports megatron

    ranks.start(memory_ranks.run, (str(tmp_path),), 4)
    of_rank = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    batch = microbatch(memory_ranks.SEQUENCES * memory_ranks.LENGTH, memory_ranks.NUM_LEARNED)
    for case in memory_ranks.CASES:
        found = [of[case] for of in of_rank if case in of]
        planned = rank(kit.shape_of(case.architecture), case.layout, "megatron", **case.asked)
        has_buffer = planned.token_share > 1 and not planned.adapts
        gathered = planned.width * planned.shape.hidden * batch.tokens if has_buffer else 0
        for one in found:
            assert model_state(planned).total() + gathered == pytest.approx(one.state, rel=0.01), case
        trained, inferred = (min(getattr(one, name) for one in found) for name in ("trained", "inferred"))
        assert megatron_memory.train_step(planned, batch).total() == close_to(trained), case
        assert megatron_memory.infer_step(planned, batch).total() == close_to(inferred), case
