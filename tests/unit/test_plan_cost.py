"""Formulas of the cost model, with answers worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path

import plan_graphs as graphs
import pytest
from cost_kit import (
    A100,
    LLAMA_7B,
    LLAMA_70B,
    NO_LOSS,
    SMALL,
    TOY,
    in_turns,
    named,
    rollout,
    side,
    total,
    work,
)
from hypothesis import given
from hypothesis import strategies as st

from hflow.config.schema import OptimConfig
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.forecast.cost.collectives import (
    RankPlacement,
    all_gather,
    all_reduce,
    axis_ranks,
    reduce_scatter,
    send,
)
from hflow.planner.forecast.cost.flops import (
    attention_flops,
    head_parameters,
    kv_entries,
    layer_flops,
    layer_parameters,
    stage_flops,
    stage_parameters,
    token_flops,
    work_of,
)
from hflow.planner.forecast.cost.generation import (
    DecodePhase,
    continuous_batching,
    decode_step,
    generate,
    prefill,
)
from hflow.planner.forecast.cost.kernels import layer_products, pass_seconds
from hflow.planner.forecast.cost.rank_collectives import (
    MIN_UNIT_BYTES,
    Passes,
    bucket_collectives,
    fsdp_gathers,
    fsdp_scatters,
    replicated_gradients,
)
from hflow.planner.forecast.cost.roofline import (
    COMPUTE,
    HOST,
    LATENCY,
    MEMORY,
    NETWORK,
    Part,
    Rates,
    node_time,
    roofline,
)
from hflow.planner.forecast.cost.training import (
    bubble,
    forward,
    local_weights,
    num_microbatches,
    train,
    update,
)
from hflow.planner.forecast.cost.transfers import (
    crossing_bytes,
    keep_weights,
    load_weights,
    publish_weights,
    redistribute,
    save_checkpoint,
)
from hflow.planner.forecast.memory import activations
from hflow.planner.plan.calibration import HostTimes, LinkRate, MatmulRate
from hflow.planner.plan.forecast import EdgeTraffic
from hflow.planner.plan.hardware import Link, Rack
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.planner.plan.workload import Workload
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import num_parameters, num_tensors, tensors
from hflow.training.fsdp.sharding import MIN_UNIT_BYTES as BACKEND_UNIT_BYTES
from hflow.training.loop import logprobs


# ------------------------------------------------------------------------------ FLOPs and weights
def test_one_token_of_llama_2_7b():
    # A layer: four 4096 x 4096 matrices of attention, three of 4096 x 11008.
    assert layer_parameters(LLAMA_7B) == 4 * 4096**2 + 3 * 4096 * 11008 == 202_375_168
    assert head_parameters(LLAMA_7B) == 4096 * 32000 == 131_072_000
    # 32 layers and the output matrix: 6,607,077,376 weights, two FLOPs each.
    assert token_flops(LLAMA_7B, 1, 0) == 2 * 6_607_077_376
    # A context of 1000 adds 4 x 1000 x 32 heads x 128 in each of 32 layers.
    assert token_flops(LLAMA_7B, 1, 1000) == 2 * 6_607_077_376 + 32 * 4 * 1000 * 4096


def test_grouped_queries_have_smaller_key_and_value_matrices():
    # Llama 2 70B: Q and O are 8192 x 8192, K and V 8192 x 1024.
    assert layer_parameters(LLAMA_70B) == 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672


def test_causal_attention_is_half_of_all_pairs():
    # One sample of 10 tokens: 100 pairs, of which 50 are seen; 4 FLOPs x 4 heads x 16 for each.
    assert attention_flops(SMALL, 50) == 4 * 50 * 64
    one = work_of([10], 0, 1)
    assert layer_flops(SMALL, one) == 2 * 36_864 * 10 + 4 * 50 * 64


@pytest.mark.parametrize("shape", [LLAMA_7B, LLAMA_70B, SMALL, replace(SMALL, is_tied=True)])
def test_one_stage_has_all_matrices(shape):
    norms = (2 * shape.num_layers + 1) * shape.hidden
    assert stage_parameters(shape, 1) == num_parameters(shape) - norms


def test_stages_have_their_layers_and_one_end():
    assert stage_parameters(LLAMA_7B, 2) == 16 * 202_375_168 + 131_072_000
    # Of three stages of 2 + 1 + 1 layers the first is the heaviest, with the embedding.
    assert stage_parameters(SMALL, 3) == 2 * 36_864 + 6_400
    # A tied output matrix is on the last of several stages too.
    assert stage_parameters(replace(SMALL, is_tied=True), 4) == 36_864 + 6_400


def test_the_heaviest_stage_counts():
    amount = work(10.0)
    layer, head = 2 * 36_864 * 10, 2 * 6_400 * 10
    assert stage_flops(SMALL, amount, 1, 3, 3) == 3 * (4 * layer + head)
    assert stage_flops(SMALL, amount, 2, 3, 4) == 3 * 2 * layer + 4 * head
    assert stage_flops(SMALL, amount, 3, 1, 1) == 2 * layer


def test_prompts_of_a_group_are_computed_once_in_a_micro_batch():
    lengths = [15, 16, 17, 15, 16, 17]  # two groups of three, prompts of 10
    shared = work_of(lengths, 10, 3, budget=28)
    assert (shared.groups, shared.sequences, shared.tokens, shared.learned) == (2, 6, 96, 36)
    assert shared.rows == 96 - 4 * 10
    assert shared.squares == 2 * (15**2 + 16**2 + 17**2) - 4 * 10**2
    assert work_of(lengths, 10, 3, budget=27).rows == 96 - 3 * 10  # two of three fit into a micro-batch
    assert work_of(lengths, 10, 3, budget=21).rows == 96
    assert work_of(lengths, 10, 3).rows == 96  # another backend
    assert shared.share(0.5).rows == 28


def test_keys_and_values_are_repeated_beyond_their_heads():
    assert kv_entries(LLAMA_7B, 1) == 2 * 32 * 32 * 128
    assert kv_entries(LLAMA_70B, 8) == kv_entries(LLAMA_70B, 16) == 2 * 80 * 128


def test_the_planners_traits_of_the_torch_backend_are_right():
    assert activations.CHUNK_BYTES == logprobs.CHUNK_BYTES
    assert MIN_UNIT_BYTES == BACKEND_UNIT_BYTES


# -------------------------------------------------------------------------------------- roofline
def test_the_slowest_of_three_bounds():
    rates = Rates.of(TOY, "fp32")
    assert (rates.flops, rates.memory) == (1e12, 1e11)
    assert roofline("x", 2.0, 1.0) == Part("x", 2.0, COMPUTE)
    assert roofline("x", 1.0, 3.0) == Part("x", 3.0, MEMORY)
    assert roofline("x", 1.0, 3.0, host=4.0) == Part("x", 4.0, HOST)
    # A soft corner: the square root of 3^2 + 4^2, and their sum.
    assert roofline("x", 3.0, 4.0, sharpness=2.0) == Part("x", 5.0, MEMORY)
    assert roofline("x", 3.0, 4.0, sharpness=1.0) == Part("x", 7.0, MEMORY)
    assert roofline("x", 3.0, 4.0, host=6.0, sharpness=2.0) == Part("x", 6.0, HOST)


def test_small_products_are_slow():
    rate = MatmulRate(share=0.8, half_size=100.0, kernel_us=2.0, tile_rows=64)
    # Sides of 300 and 100 of the weights reach 3/4 and 1/2; 32 rows fill half of a tile.
    assert rate.rate(1000, 300, 100) == pytest.approx(0.8 * 0.75 * 0.5)
    assert rate.rate(32, 300, 100) == pytest.approx(0.8 * 0.75 * 0.5 / 2)
    assert rate.seconds(1000, 300, 100, 1e12) == pytest.approx(2 * 1000 * 300 * 100 / 0.3e12 + 2e-6)
    assert MatmulRate(1.0).rate(1, 1, 1) == 1


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 10_000))
def test_larger_products_are_no_slower_for_each_flop(rows, inner, columns):
    rate = MatmulRate(share=0.7, half_size=64.0, kernel_us=3.0, tile_rows=64)

    def per_flop(*sizes):
        return rate.seconds(*sizes, 1e12) / math.prod(sizes)

    one = per_flop(rows, inner, columns)
    larger = ((2 * rows, inner, columns), (rows, 2 * inner, columns), (rows, inner, 2 * columns))
    assert all(per_flop(*sizes) <= one * (1 + 1e-12) for sizes in larger)


def test_the_products_of_a_layer_have_its_flops():
    for shape in (LLAMA_7B, LLAMA_70B, SMALL):
        parts = layer_products(shape, 10, 2)
        assert sum(2 * m * k * n for m, k, n in parts) == layer_flops(shape, work(10.0)) / 2


def test_other_kernels_of_a_layer_by_hand():
    # 6 passes over 64 hidden and 128 intermediate numbers of 4 bytes for each of 1000 tokens and 4 layers;
    # the backward pass takes twice the forward pass.
    memory = replace(NO_LOSS.memory, passes=6.0, stream=0.5)
    one = side(hardware=replace(TOY, calibration=replace(NO_LOSS, memory=memory)))
    seconds = 4 * 6 * 1000 * (64 + 128) * 4 / 0.5e11
    plain = named(forward(side(), work(1000.0)))["forward"]
    assert named(forward(one, work(1000.0)))["forward"] == pytest.approx(plain + seconds)
    both = named(train(side(), work(1000.0), 1))["forward and backward"]
    assert named(train(one, work(1000.0), 1))["forward and backward"] == pytest.approx(both + 3 * seconds)


def test_attention_has_a_rate_of_its_own():
    slow = side(hardware=replace(TOY, calibration=replace(NO_LOSS, attention=0.25)))
    amount = work_of([1000], 0, 1)
    matrices, pairs = 2 * 153_856 * 1000, 4 * attention_flops(SMALL, 1000**2 / 2)
    assert named(forward(slow, amount))["forward"] == pytest.approx(matrices / 1e12 + pairs / 0.25e12)
    own = replace(slow, host=HostTimes(attention=0.5))
    assert named(forward(own, amount))["forward"] == pytest.approx(matrices / 1e12 + pairs / 0.5e12)


def test_interleaved_stages_have_a_smaller_bubble():
    assert bubble(4, 8, 3) == 3 / 24


def test_collectives_that_run_beside_computation_still_slow_it_down():
    calibration = replace(NO_LOSS, overlap_cost=0.5)
    one = side(LLAMA_7B, "d8", replace(TOY, calibration=calibration), dtype="bf16")
    free = side(LLAMA_7B, "d8", dtype="bf16")
    costly, hidden = (named(train(each, work(16_000.0), 1))["all-gather"] for each in (one, free))
    # One of 33 units is seen whole, and half of the others.
    assert costly == pytest.approx(hidden * (1 + 0.5 * 32))


def test_a_replicate_axis_gathers_within_machines_and_sums_between_them_once():
    whole, sets = (side(LLAMA_7B, layout, TOY, per_machine=4) for layout in ("d8", "d8r2"))
    amount = Passes.of(3, 2)
    for one, other in zip(fsdp_gathers(whole, amount), fsdp_gathers(sets, amount), strict=True):
        assert (one.num_bytes, one.times) == (other.num_bytes, other.times)
    assert (whole.data, sets.shard, sets.replicate) == (
        RankPlacement(4, 2),
        RankPlacement(4, 1),
        RankPlacement(1, 2),
    )
    (sums,) = replicated_gradients(sets, amount)
    assert (sums.ranks, sums.times) == ("replicate", 33)
    assert sums.num_bytes * sums.times == pytest.approx(4 * whole.stage_weights / 4)
    assert not list(replicated_gradients(whole, amount))
    few, many = (named(train(each, work(100.0), 1)) for each in (whole, sets))
    assert many["all-gather"] < few["all-gather"]
    assert many["optimizer"] == pytest.approx(2 * few["optimizer"])


def test_a_distributed_optimizer_that_overlaps_hides_all_but_a_layer():
    beside = side(LLAMA_7B, "d4", backend="megatron", dtype="bf16")
    plain = replace(beside, traits=replace(beside.traits, overlaps_optimizer=False))
    amount = work(100_000.0)
    whole, seen = (named(train(each, amount, 1)) for each in (plain, beside))
    for part in ("reduce-scatter", "all-gather"):
        assert seen[part] == pytest.approx(whole[part] / 33)


def test_gradients_of_interleaved_stages_are_hidden_by_more_than_one_pass():
    # 3 pieces on 2 stages: (2 x 2 + 1) / 3 backward passes hide the sum, of which each is 2 of 3 passes.
    plain = side(LLAMA_7B, "d2p2", backend="megatron", dtype="bf16")
    one, three = (named(train(replace(plain, virtual_stages=num), work(10.0), 1)) for num in (1, 3))
    unhidden = replace(plain, traits=replace(plain.traits, overlaps_optimizer=False))
    whole = named(train(unhidden, work(10.0), 1))["reduce-scatter"]
    backward = one["forward and backward"] * 2 / 3 * 16 / 17
    assert one["reduce-scatter"] == pytest.approx(whole - backward)
    assert three["reduce-scatter"] == pytest.approx(whole - 5 / 3 * backward)


def test_gradients_and_weights_may_be_exchanged_in_fewer_bytes():
    whole = side(layout="d4", backend="megatron", dtype="bf16")
    few = replace(whole, low_dtype="fp8", gathers_low=True, gradient_bytes=2)
    for kind in ("reduce-scatter", "all-gather"):
        (one,), (half,) = (bucket_collectives(kind, each) for each in (whole, few))
        assert half.num_bytes == one.num_bytes / 2


def test_what_programs_reach_scales_the_data_sheet():
    rates = Rates.of(A100, "bf16")
    assert rates.flops == pytest.approx(0.45 * 312e12)
    assert rates.memory == pytest.approx(0.7 * 2039e9)


def test_parts_add_up_to_a_node():
    row = node_time("n", [Part("a", 1.0, COMPUTE), Part("b", 0.0, LATENCY), Part("c", 2.0, NETWORK)])
    assert (row.seconds, row.parts, row.limit) == (3.0, (("a", 1.0), ("c", 2.0)), NETWORK)


def test_the_limit_of_a_node_is_that_of_most_of_its_seconds():
    collectives = [Part("all-gather", 18.0, NETWORK), Part("reduce-scatter", 18.1, NETWORK)]
    assert node_time("n", [Part("forward", 22.8, COMPUTE), *collectives]).limit == NETWORK
    assert node_time("n", [Part("forward", 36.2, COMPUTE), *collectives]).limit == COMPUTE
    assert node_time("n", []).limit == LATENCY


def test_decoding_turns_from_memory_to_compute():
    # fp32 without context: 2 b FLOPs and 4 bytes a weight, so b = 4 x 1e12 / (2 x 1e11) = 20.
    one = side()
    assert decode_step(one, 19, 0).limit == MEMORY
    assert decode_step(one, 21, 0).limit == COMPUTE
    assert decode_step(one, 19, 0).seconds == decode_step(one, 1, 0).seconds == 4 * 153_856 / 1e11
    assert decode_step(one, 40, 0).seconds == pytest.approx(2 * decode_step(one, 20, 0).seconds)


def test_a_context_is_read_once_a_step():
    # 2 x 4 layers x 2 key-value heads x 16 x 4 bytes = 1024 a token.
    one = side()
    more = decode_step(one, 1, 1000).seconds - decode_step(one, 1, 0).seconds
    assert more == pytest.approx(1000 * 1024 / 1e11)


def test_stages_share_the_cache_but_each_part_of_a_batch_reads_all_weights():
    whole, halves = side(), side(layout="p2")
    assert decode_step(halves, 4, 0).seconds == decode_step(whole, 4, 0).seconds
    cache = [decode_step(s, 4, 1e6).seconds - decode_step(s, 4, 0).seconds for s in (whole, halves)]
    assert cache[0] == pytest.approx(2 * cache[1])


# ----------------------------------------------------------------------------------- collectives
def test_a_ring_on_one_machine():
    # 2 x 3/4 of 1 GB over 10 GB/s, and two doublings of 1 us, down and up.
    wire = all_reduce(1e9, RankPlacement(4, 1), TOY)
    assert (wire.transfer, wire.latency) == pytest.approx((0.15, 4e-6))
    assert all_gather(1e9, RankPlacement(4, 1), TOY).transfer == pytest.approx(0.075)


def test_a_ring_over_machines():
    # Within: 2 x 3/4 of 1 GB over 10 GB/s. Between: each of four ports carries 2 x 1/2 of a quarter over
    # 1 GB/s. One rank a machine has nothing within.
    wire = all_reduce(1e9, RankPlacement(4, 2), TOY)
    assert (wire.transfer, wire.latency) == pytest.approx((0.15 + 0.25, 24e-6))
    assert all_reduce(1e9, RankPlacement(1, 8), TOY).transfer == pytest.approx(2 * 7 / 8)


def test_a_ring_over_racks():
    # Two racks of two machines with four ranks each, at 10, 5 and 1 GB/s. 3/4 of 1 GB crosses the links of a
    # machine, 1/2 of a quarter those of a rack, and 1/2 of an eighth those between racks.
    racked = replace(TOY, rack=Link("leaf", 5.0, 2.0))
    wire = all_gather(1e9, RankPlacement(4, 4, 2), racked)
    assert (wire.transfer, wire.latency) == pytest.approx((0.075 + 0.025 + 0.0625, 2e-6 + 2e-6 + 10e-6))
    # Machines of one rack do not use the links between racks, and without racks all use them.
    assert all_gather(1e9, RankPlacement(4, 2), racked).transfer == pytest.approx(0.075 + 0.025)
    assert all_gather(1e9, RankPlacement(4, 4), TOY).transfer == pytest.approx(0.075 + 0.1875)


def test_a_rack_with_the_links_of_a_machine_is_one_large_machine():
    racked = replace(TOY, rack=TOY.intra)
    assert all_gather(1e9, RankPlacement(4, 18), racked).transfer == pytest.approx(
        all_gather(1e9, RankPlacement(72), TOY).transfer
    )


def test_racks_of_the_ranks():
    device = replace(TOY.device, rack=Rack(8, "leaf"))
    racked = replace(TOY, device=device, rack=Link("leaf", 5.0, 2.0))
    cluster = graphs.cluster_of("cpu-4x4")
    assert RankPlacement.of(range(8), cluster, racked) == RankPlacement(4, 2, 1)
    assert RankPlacement.of(range(16), cluster, racked) == RankPlacement(4, 4, 2)
    links = [RankPlacement.of(range(num), cluster, racked).slowest_link(racked) for num in (4, 8, 16)]
    assert links == [racked.intra, racked.rack, racked.inter]


def test_the_launch_of_a_collective_is_added_once_for_each_level():
    calibration = replace(NO_LOSS, intra=LinkRate(1.0, 5.0), inter=LinkRate(0.5, 7.0))
    slow = replace(TOY, calibration=calibration)
    assert all_reduce(0, RankPlacement(4, 2), slow).latency == pytest.approx((2 * 2 + 5 + 2 * 10 + 7) * 1e-6)
    assert send(1e9, slow.inter, slow).seconds == pytest.approx(2.0 + 17e-6)
    assert all_reduce(0, RankPlacement(), slow).seconds == 0


@given(st.floats(0, 1e9), st.sampled_from([2, 4, 8]), st.floats(0.1, 1000), st.floats(0, 100))
def test_ranks_across_machines_are_never_faster(size, num, gb_per_s, latency):
    hardware = replace(TOY, inter=Link("other", gb_per_s, latency + TOY.intra.latency_us))
    within = all_reduce(size, RankPlacement(num, 1), hardware).seconds
    for per_machine in (n for n in (1, 2, 4) if n < num):
        across = all_reduce(size, RankPlacement(per_machine, num // per_machine), hardware).seconds
        assert across >= within * (1 - 1e-9)


def test_one_rank_sends_nothing():
    assert all_reduce(1e9, RankPlacement(), TOY).seconds == 0


@given(st.floats(1, 1e12), st.integers(1, 8), st.integers(1, 16))
def test_an_all_reduce_is_a_scatter_and_a_gather(size, per_machine, machines):
    ranks = RankPlacement(per_machine, machines)
    parts = reduce_scatter(size, ranks, TOY).transfer + all_gather(size, ranks, TOY).transfer
    assert all_reduce(size, ranks, TOY).transfer == pytest.approx(parts)


def test_the_bound_of_a_message():
    assert send(1e9, TOY.intra, TOY).part("x") == Part("x", 0.1 + 1e-6, NETWORK)
    assert send(10, TOY.intra, TOY).part("x").limit == LATENCY


def test_machines_of_the_ranks_of_each_axis():
    cluster = graphs.cluster_of("cpu-2x4")
    eight = tuple(range(8))

    def axes(role, text):
        layout = Layout.parse(text)
        heads = tuple(layout.dp_heads(rank_order(role)))
        replica = Replica("m", "m", role, "torch", layout, ("all",), eight, heads)
        return [axis_ranks(replica, axis, cluster, TOY) for axis in ("data", "tensor", "pipe")]

    assert axes("train", "d2t4") == [RankPlacement(1, 2), RankPlacement(4, 1), RankPlacement(1, 1)]
    # Training puts stages outermost, generation data shards.
    assert axes("train", "d2t2p2") == [RankPlacement(2, 1), RankPlacement(2, 1), RankPlacement(1, 2)]
    assert axes("gen", "d2t2p2") == [RankPlacement(1, 2), RankPlacement(2, 1), RankPlacement(2, 1)]
    assert RankPlacement.of([0, 1, 2, 4], cluster, TOY) == RankPlacement(1, 2)


# -------------------------------------------------------------------------------------- training
def test_a_minibatch_by_hand():
    # 1000 tokens in one micro-batch: 2 x (4 x 36,864 + 6,400) x 1000 FLOPs forward, three times that in all.
    amount = work(1000.0)
    parts = named(train(side(), amount, num_updates=2))
    flops = 2 * 153_856 * 1000
    assert parts["forward and backward"] == pytest.approx(2 * 3 * flops / 1e12)
    # AdamW: 40 bytes for each of the weights, with the embedding.
    assert parts["optimizer"] == pytest.approx(2 * 40 * (153_856 + 6_400) / 1e11)
    assert set(parts) == {"forward and backward", "optimizer"}
    assert named(forward(side(), amount)) == {"forward": pytest.approx(flops / 1e12)}


def test_recomputing_costs_a_forward_of_the_layers():
    amount = work(1000.0)
    kept, again = (
        named(train(side(activation_checkpointing=flag), amount, 1))["forward and backward"]
        for flag in (False, True)
    )
    assert again - kept == pytest.approx(2 * 4 * 36_864 * 1000 / 1e12)


def test_offloaded_inputs_of_layers_are_copied_twice():
    # 4 layers x 1,000 tokens x 64 x 4 bytes, out and back at 20 GB/s.
    offloaded = side(activation_checkpointing=True, offload_activations=True)
    parts = train(offloaded, work(1000.0), 1)
    compute = named(parts)["forward and backward"]
    there = 4 * 1000 * 64 * 4 / 2e10
    assert compute / 4 > there  # a forward pass
    assert total(part for part in parts if part.name == "layer inputs") == pytest.approx(2 * there / 4)
    slow = replace(offloaded, hardware=replace(TOY, host=replace(TOY.host, gb_per_s=0.2)))
    seen = [part.seconds for part in train(slow, work(1000.0), 1) if part.name == "layer inputs"]
    # Three of four layers hide what lasts no longer than a forward pass, and than the rest.
    assert seen == pytest.approx(
        [100 * there - min(100 * there, each * compute) * 3 / 4 for each in (1 / 4, 3 / 4)]
    )


def test_logits_that_do_not_fit_are_made_twice():
    # 2^29 bytes of logits of a vocabulary of 100 are 1,342,177 rows in fp32.
    fits, large = work(1_342_000.0), work(1_343_000.0)
    one = side(tokens_per_microbatch=10**7)
    seconds = [named(train(one, amount, 1))["forward and backward"] for amount in (fits, large)]
    assert seconds[0] == pytest.approx(3 * 2 * 153_856 * 1_342_000 / 1e12)
    assert seconds[1] == pytest.approx((3 * 153_856 + 6_400) * 2 * 1_343_000 / 1e12)


def test_few_tokens_are_bound_by_reading_the_weights_for_every_micro_batch():
    one = side(tokens_per_microbatch=2)
    parts = forward(one, work(10.0))
    assert num_microbatches(one, work(10.0)) == 5
    assert parts[0] == Part("forward", 5 * 4 * 160_256 / 1e11, MEMORY)


def test_a_host_that_issues_every_operation_bounds_small_passes():
    one = side(host=HostTimes(layer_us=850))
    assert forward(one, work(10.0))[0] == Part("forward", 4 * 0.85e-3, HOST)
    assert train(one, work(10.0), 1)[0] == Part("forward and backward", 2 * 4 * 0.85e-3, HOST)


def test_small_layers_are_gathered_at_once_and_seen_whole():
    # One unit of 160,256 weights in fp32 over two ranks: half of 641,024 bytes over 10 GB/s, and 1 us. They
    # stay gathered for the backward pass, and their gradients are scattered.
    parts = named(train(side(layout="d2"), work(1000.0), 1))
    gather = 0.5 * 4 * 160_256 / 1e10 + 1e-6
    assert parts["all-gather"] == pytest.approx(gather)
    assert parts["reduce-scatter"] == pytest.approx(gather)
    assert parts["gradient norm"] == pytest.approx(2e-6, rel=1e-2)
    assert parts["optimizer"] == pytest.approx(40 * 160_256 / 2 / 1e11)
    assert named(forward(side(layout="d2"), work(1000.0)))["all-gather"] == pytest.approx(gather)


def test_shards_are_copied_where_the_device_is_its_own_host():
    # 641,024 bytes over two ranks, at 1e11 bytes/s. In training, a rank reads and writes its half of the
    # weights, all weights, and all gradients.
    cpu = replace(TOY, device=replace(TOY.device, type="cpu"))
    half, whole = 2 * 641_024 / 2 / 1e11, 2 * 641_024 / 1e11
    on_cpu = side(layout="d2", hardware=cpu)
    assert named(train(on_cpu, work(1000.0), 1))["copies of shards"] == pytest.approx(half + 2 * whole)
    assert named(forward(on_cpu, work(1000.0)))["copies of shards"] == pytest.approx(half + whole)
    assert "copies of shards" not in named(train(side(layout="d2"), work(1000.0), 1))
    waiting = side(layout="d2", hardware=cpu, host=HostTimes(step_us=500))
    assert named(train(waiting, work(1000.0), 3))["ranks"] == pytest.approx(3 * 500e-6)
    assert "ranks" not in named(forward(waiting, work(1000.0)))


def test_large_layers_are_gathered_while_others_compute():
    # 33 units, of which 32 hide behind the computation. 6,738,149,376 weights over eight ranks, 10 GB/s: the
    # 6,476,005,376 of layers are gathered twice in bf16, the others once; gradients are scattered in fp32.
    one = side(LLAMA_7B, "d8", dtype="bf16")
    weights, in_layers = 6_738_149_376, 6_476_005_376
    gather = 7 / 8 * (weights + in_layers) * 2 / 1e10 + 65 * 3e-6
    scatter = 7 / 8 * weights * 4 / 1e10 + 33 * 3e-6
    long = named(train(one, work(16_000.0), 1))
    assert long["forward and backward"] > gather + scatter
    assert long["all-gather"] == pytest.approx(gather / 33)
    assert long["reduce-scatter"] == pytest.approx(scatter / 33)
    short = named(train(one, work(100.0), 1))
    seen = gather + scatter - short["forward and backward"] * 32 / 33
    assert short["all-gather"] + short["reduce-scatter"] == pytest.approx(seen)


def test_what_is_exchanged_once_for_all_micro_batches():
    # Four micro-batches of 4,096 tokens; the numbers of the test before this one.
    weights = 6_738_149_376
    gather, scatter = 7 / 8 * weights * 2 / 1e10 + 33 * 3e-6, 7 / 8 * weights * 4 / 1e10 + 33 * 3e-6
    three, two, one = (
        side(LLAMA_7B, "d8", dtype="bf16", tokens_per_microbatch=4_096, zero_stage=stage)
        for stage in (3, 2, 1)
    )
    amount, passes = work(16_384.0), Passes.of(4, 2)
    for sides, num in ((three, (4 * 64, 4)), (two, (32, 1)), (one, (32, 1))):
        assert tuple(row.times for row in fsdp_gathers(sides, passes)) == num
    assert [sum(row.times for row in fsdp_scatters(s, passes)) for s in (three, two, one)] == [132, 132, 33]
    # A third of a micro-batch is its forward pass.
    seconds = named(train(three, amount, 1))["forward and backward"] / 4
    found = {name: named(train(sides, amount, 1)) for name, sides in (("two", two), ("one", one))}
    hidden_gather, hidden_scatter = seconds / 3 * 32 / 33, seconds * 2 / 3 * 32 / 33
    for parts in found.values():
        assert parts["all-gather"] == pytest.approx(max(gather / 33, gather - hidden_gather))
    assert found["one"]["reduce-scatter"] == pytest.approx(max(scatter / 33, scatter - hidden_scatter))
    assert found["two"]["reduce-scatter"] == pytest.approx(
        max(4 * scatter / 33, 4 * (scatter - hidden_scatter))
    )


def test_ranks_of_a_machine_share_its_memory_for_steps_on_the_host():
    def stepping(layout):
        fast = replace(TOY, host=Link("host", 1e6, 0.0))
        one = side(layout=layout, hardware=fast, backend="megatron", optim=OptimConfig(name="adamw_cpu"))
        return named(train(one, work(64.0), 1))["optimizer on the host"]

    # Each has half of the weights, and half of the memory's rate.
    assert stepping("t2") == stepping("d2") == pytest.approx(stepping("d1"), rel=0.02)


def test_a_distributed_optimizer_exchanges_gradients_and_weights():
    # 160,256 weights and 9 x 64 of norms.
    parts = named(train(side(layout="d4", backend="megatron", dtype="bf16"), work(1000.0), 1))
    assert parts["reduce-scatter"] == pytest.approx(0.75 * 4 * 160_832 / 1e10 + 2e-6)
    assert parts["all-gather"] == pytest.approx(0.75 * 2 * 160_832 / 1e10 + 2e-6)


def test_tensor_ranks_share_the_work_and_sum_hidden_states():
    # Two micro-batches of 500 tokens; 4 all-reduces in each of 4 layers of 500 x 64 x 4 bytes, one of what
    # the embedding returns, and one of the gradient of the last layer's output.
    one = side(layout="t2", backend="megatron", tokens_per_microbatch=500, sequence_parallel=False)
    parts = named(train(one, work(1000.0), 1))
    assert parts["forward and backward"] == pytest.approx(3 * 2 * 153_856 * 1000 / 2 / 1e12)
    message = 500 * 64 * 4 / 1e10 + 2e-6
    # One number of each learned token, and then three.
    sums = 2 * (500 * 4 * (1 + 3) / 1e10 + 2 * 2e-6)
    assert parts["tensor all-reduce"] == pytest.approx(2 * 18 * message + sums)
    recomputing = replace(one, config=replace(one.config, activation_checkpointing=True))
    parts = named(train(recomputing, work(1000.0), 1))
    assert parts["tensor all-reduce"] == pytest.approx(2 * (18 + 8) * message + sums)
    assert named(forward(one, work(1000.0)))["tensor all-reduce"] == pytest.approx(2 * 9 * message + sums)


def test_tensor_ranks_that_share_tokens_gather_and_scatter_them():
    # Each of 16 all-reduces of a micro-batch is a scatter and a gather. The backward pass gathers the inputs
    # of 8 products again, beside others. The embedding's output is scattered and the last layer's gathered,
    # and their gradients likewise.
    one = side(layout="t2", backend="megatron", sequence_parallel=True)
    parts = named(train(one, work(1000.0), 1))
    half = 500 * 64 * 4 / 1e10 + 1e-6
    sums = 1000 * 4 * (1 + 3) / 1e10 + 2 * 2e-6
    beside = 8 * NO_LOSS.overlap_cost
    assert parts["tensor all-reduce"] == pytest.approx((2 * 16 + 4 + beside) * half + sums)
    # Gradients of nine norms.
    assert parts["shared gradients"] == pytest.approx(9 * 64 * 4 / 1e10 + 2e-6)


def test_the_bubble_of_a_pipeline():
    assert bubble(4, 8) == 3 / 8
    assert bubble(1, 8) == 0
    one = side(layout="p2", backend="megatron", tokens_per_microbatch=100)
    parts = named(train(one, work(800.0), 1))
    # Eight micro-batches: the last stage has two layers and the head, and sends 100 x 64 x 4 bytes 16 times.
    assert parts["forward and backward"] == pytest.approx(3 * 2 * (2 * 36_864 + 6_400) * 800 / 1e12)
    assert parts["between stages"] == pytest.approx(16 * (100 * 64 * 4 / 1e10 + 1e-6))
    busy = parts["forward and backward"] + parts["between stages"]
    assert parts["pipeline bubble"] == pytest.approx(busy / 8)


def test_ranks_that_share_tokens_hand_on_their_part():
    apart = side(layout="t2p2", backend="megatron", sequence_parallel=False)
    together = side(layout="t2p2", backend="megatron", sequence_parallel=True)
    whole, part = (named(train(one, work(800.0), 1))["between stages"] for one in (apart, together))
    assert whole == pytest.approx(2 * (800 * 64 * 4 / 1e10 + 1e-6))
    assert part == pytest.approx(2 * (400 * 64 * 4 / 1e10 + 1e-6))


def test_an_update_reads_two_weights_and_writes_one():
    assert update(side(layout="d2")) == [Part("update", 12 * 160_256 / 2 / 1e11, MEMORY)]
    assert local_weights(side(LLAMA_7B, "d2t2p2")) == (16 * 202_375_168 + 131_072_000) / 4


# ------------------------------------------------------------------------------------ generation
def test_continuous_batching_by_hand():
    # Two slots, prompts of 10. The response of one token leaves with its prompt; the one of five enters.
    # Steps 1 and 2: contexts 11 + 11, then 12 + 12. Steps 3 and 4: one sequence with 13, then 14.
    assert list(continuous_batching([3, 1, 5], 10, 2)) == [DecodePhase(2, 2, 23.0), DecodePhase(2, 1, 13.5)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 20))
def test_every_token_after_the_first_is_one_step_of_one_sequence(responses, slots, prompt):
    phases = list(continuous_batching(responses, prompt, slots))
    assert sum(p.num_steps * p.sequences for p in phases) == sum(n - 1 for n in responses)
    assert all(1 <= phase.sequences <= slots for phase in phases)
    # Token i of a response attends to its prompt and i tokens.
    seen = sum(prompt + i for n in responses for i in range(1, n))
    assert sum(p.num_steps * p.context for p in phases) == pytest.approx(seen)
    num_steps = sum(phase.num_steps for phase in phases)
    assert num_steps >= max(responses) - 1
    if slots >= len(responses):
        assert num_steps == max(responses) - 1


def test_equal_responses_by_hand():
    # Two engines with two groups of two each: prompts of 50 tokens once a group, then 9 steps of 4
    # sequences at contexts 51 to 59. All is bound by reading the weights, 4 x 153,856 bytes a step, and
    # 4 x 100 logits are written and read.
    one = side(layout="d2", backend="embedded")
    parts = named(generate(one, Workload(50, 10.0, 0.0, 20), rollout(4, 2)))
    pairs = 2 * 50 * 50 / 2
    prefill = 4 * (2 * 36_864 * 100 + 4 * pairs * 64) / 1e12
    assert parts["prefill"] == pytest.approx(prefill)
    assert parts["decode"] == pytest.approx(9 * (4 * 153_856 + 4 * 55 * 1024 + 2 * 4 * 400) / 1e11)
    assert set(parts) == {"prefill", "decode"}


def test_a_step_waits_for_the_longest_of_the_whole_batch():
    # An engine's own 16 responses stay the same, whatever other engines have.
    workload = Workload(100, 200.0, 0.8, 5000)
    alone, among_many = (
        named(generate(side(LLAMA_7B, layout, dtype="bf16"), workload, rollout(groups)))
        for layout, groups in (("d1", 16), ("d64", 1024))
    )
    assert among_many["decode"] == pytest.approx(alone["decode"])
    assert among_many["tail"] > 1.5 * alone["tail"]


def test_further_batches_fill_the_free_slots():
    workload = Workload(100, 200.0, 0.8, 5000)
    one = side(LLAMA_7B, "d2", dtype="bf16")
    waiting, ahead = (generate(one, workload, rollout(16, 8, max_concurrent=256, ahead=n)) for n in (0, 1))
    assert "tail" in named(waiting)
    assert "tail" not in named(ahead)
    assert total(ahead) < total(waiting)


def test_steady_decoding_by_hand():
    # Four sequences of 3 steps on one engine with all 8 slots of two batches full: 12 / 8 steps. A token of a
    # 4-token response attends to 11, 12, 13: on average 12.
    one = side(backend="embedded")
    parts = named(generate(one, Workload(10, 4.0, 0.0, 4), rollout(4, ahead=1, max_concurrent=8)))
    assert parts["decode"] == pytest.approx(12 / 8 * decode_step(one, 8, 8 * 12).seconds)


def test_fewer_samples_in_flight_than_engines_leave_engines_idle():
    workload = Workload(10, 20.0, 0.0, 20)
    few = generate(side(layout="d8"), workload, rollout(8, 2, max_concurrent=4))
    two = generate(side(layout="d2"), workload, rollout(8, 2, max_concurrent=4))
    assert total(few) == total(two)


def test_tensor_ranks_sum_hidden_states_in_every_step():
    # Nine steps of one sequence: 2 all-reduces in 4 layers of 64 x 4 bytes on two ranks.
    one = side(layout="t2", backend="vllm")
    parts = named(generate(one, Workload(10, 10.0, 0.0, 10), rollout(1)))
    assert parts["decode collectives"] == pytest.approx(9 * 8 * (256 / 1e10 + 2e-6))
    # The prompt's are of 10 tokens.
    assert parts["prefill collectives"] == pytest.approx(8 * (2560 / 1e10 + 2e-6))


def test_host_time_between_steps_is_added():
    one = in_turns(side(backend="vllm", host=HostTimes(step_us=2500, sequence_us=20)))
    step = decode_step(one, 1, 0)
    assert (step.name, step.limit) == ("decode", HOST)
    assert step.seconds == pytest.approx(4 * 153_856 / 1e11 + 2.5e-3 + 20e-6)
    # Each running sequence adds 20 us on the host.
    several = decode_step(one, 100, 0)
    arithmetic = decode_step(side(backend="vllm"), 100, 0)
    assert several.seconds - arithmetic.seconds == pytest.approx(2.5e-3 + 2e-3)


def test_host_time_is_hidden_where_the_engine_schedules_ahead():
    ahead = side(backend="vllm", host=HostTimes(gap_us=100, step_us=2500, sequence_us=20))
    device = replace(ahead, host=HostTimes(gap_us=100))
    # The host takes 4.5 ms. The device takes less with short sequences, and more with long ones.
    assert decode_step(device, 100, 0).seconds < 4.5e-3 < decode_step(device, 100, 1e8).seconds
    assert decode_step(ahead, 100, 0) == Part("decode", pytest.approx(4.5e-3), HOST)
    assert decode_step(ahead, 100, 1e8) == decode_step(device, 100, 1e8)
    added = decode_step(in_turns(ahead), 100, 1e8).seconds - decode_step(device, 100, 1e8).seconds
    assert added == pytest.approx(4.5e-3)


def test_kernels_that_are_no_graph_are_launched_after_scheduling():
    host = HostTimes(layer_us=600, step_us=500)
    eager, captured = (side(backend="vllm", host=host, cuda_graphs=x) for x in (False, True))
    assert decode_step(captured, 1, 0) == Part("decode", pytest.approx(5e-4), HOST)
    assert decode_step(eager, 1, 0) == Part("decode", pytest.approx(4 * 6e-4 + 5e-4), HOST)
    assert decode_step(eager, 1, 1e9) == decode_step(captured, 1, 1e9)


# -------------------------------------------------------------------------- what lies in between
def test_inputs_take_as_long_as_the_busiest_worker():
    edge = EdgeTraffic("n", 4000, 0, 0, 1.0, (), 1, num_node_bytes=1000, busiest_bytes=2000)
    # A quarter of the busiest one's 2000 bytes goes to another machine.
    part = redistribute(edge, TOY.inter, TOY)
    assert part.seconds == pytest.approx(1500 / 1e10 + 500 / 1e9 + 11e-6)
    local = replace(edge, num_node_bytes=0)
    assert redistribute(local, TOY.inter, TOY).seconds == pytest.approx(2000 / 1e10 + 2e-6)
    assert redistribute(replace(edge, num_bytes=0), TOY.inter, TOY).seconds == 0


def test_new_weights_by_hand():
    # Four engines on two machines need 1.28 GB each, hold an eighth, and take half of it from elsewhere;
    # the two on a machine need the same slices, and fetch them once.
    need = 1_280_000_000
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), need * 7 // 2, need * 2, need // 2)
    weights, copy, tensors = load_weights(
        route, side(layout="d4", per_machine=2), RankPlacement(2, 2), TOY.inter, 4
    )
    between = need // 4
    within = need * 7 // 8 - between
    num_buckets = math.ceil(need / 2**26)
    assert num_buckets == 20
    assert weights.seconds == pytest.approx(within / 1e10 + between / 1e9 + 20 * 11e-6)
    assert copy == Part("copy", 2 * need / 1e11, MEMORY)
    assert tensors.seconds == 0
    assert load_weights(replace(route, how="shared"), side(), RankPlacement(), TOY.inter, 1) == []


@pytest.mark.parametrize(
    ("transport", "arrival", "published"),
    [
        # 1 GiB on one machine, all of it from other devices.
        ("collective", {"weights": 2**30 / 1e10 + 16e-6}, {"copy": 2**31 / 1e11}),
        ("ipc", {}, {"copy": 2**31 / 1e11}),
        ("shared", {"PCIe": 2**30 / 20e9}, {"copy": 2**31 / 1e11, "PCIe": 2**30 / 20e9}),
        (
            "store",
            {"weights": 16e-6, "PCIe": 2**30 / 20e9},
            {"copy": 2**31 / 1e11, "PCIe": 2**30 / 20e9, "object store": 2**30 / 5e9},
        ),
        (
            "disk",
            {"disk": 2**30 / 1e9, "PCIe": 2**30 / 20e9},
            {"copy": 2**31 / 1e11, "PCIe": 2**30 / 20e9, "disk": 2**30 / 1e9},
        ),
    ],
)
def test_new_weights_over_each_transport_of_a_gpu(transport, arrival, published):
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 2**30, 0, 0, transport)
    one, copy = side(), {"copy": 2**31 / 1e11}
    assert named(load_weights(route, one, RankPlacement(), TOY.inter, 1)) == pytest.approx(arrival | copy)
    assert named(publish_weights(route, one, one)) == pytest.approx(published)


def test_weights_that_every_rank_gathers_by_hand():
    # 160,256 weights and 9 x 64 of norms, of 4 bytes each, reach both ranks. For the process of the engine
    # they are packed and copied, before the weights are loaded.
    weights = 4 * 160_256
    whole = weights + 4 * 9 * 64
    route = WeightRoute("m", "m@train", "m@gen", "gather", moved_bytes=whole, held_bytes=whole)
    gathered = {"all-gather": whole / 2 / 1e10 + 1e-6, "tensors": 0}
    engines = side(layout="d2")
    for near, num_copies in (("", 0), ("ipc", 2)):
        parts = load_weights(replace(route, near=near), engines, RankPlacement(2), TOY.inter, 2)
        copy = {"copy": 2 * (weights + num_copies * whole) / 1e11}
        assert {part.name: part.seconds for part in parts} == pytest.approx(gathered | copy)
    # An engine's rank loads its half only.
    parts = load_weights(replace(route, near="ipc"), side(layout="t2"), RankPlacement(2), TOY.inter, 2)
    assert named(parts)["copy"] == pytest.approx(2 * (weights / 2 + 2 * whole) / 1e11)


def test_what_several_trainers_broadcast_goes_to_an_engine_first():
    # Two engines need 1 GiB each in 16 buckets. Of one trainer they take it in one broadcast, of two by way
    # of one engine: while that broadcasts a bucket it takes the next one, so only the first is waited for.
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 2**31, 0, 0, "collective")
    engines = side(layout="d2")
    for num_sources, num_buckets, latencies in ((1, 16, 16), (2, 17, 32)):
        weights, *_ = load_weights(route, engines, RankPlacement(2), TOY.inter, num_sources)
        assert weights.seconds == pytest.approx(num_buckets * 2**26 / 1e10 + latencies * 1e-6)
    across = replace(route, node_bytes=2**31)
    weights, *_ = load_weights(across, engines, RankPlacement(2), TOY.inter, 2)
    assert weights.seconds > 2**30 / 1e9


def test_what_a_device_holds_takes_no_road():
    # 1 GiB comes from other devices, and 3 GiB are in the memory of the same GPU.
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 2**30, 0, 3 * 2**30, "shared", near="ipc")
    one, packed = side(), {"copy": 2**33 / 1e11}
    road = {"PCIe": 2**30 / 20e9}
    assert named(load_weights(route, one, RankPlacement(), TOY.inter, 1)) == pytest.approx(packed | road)
    assert named(publish_weights(route, one, one)) == pytest.approx(packed | road)


def test_the_busiest_port_is_a_senders_if_few_send():
    # Eight receivers on four machines need 1 GB each, two on a machine the same: 0.5 GB through each port.
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 0, 8 * 10**9, 0, "store")
    assert crossing_bytes(route, 8, 2, 4, sources=8) == 0.5e9
    # One sender serves each machine from the object store, and broadcasts once.
    assert crossing_bytes(route, 8, 2, 4, sources=1) == 4e9
    assert crossing_bytes(replace(route, transport="collective"), 8, 2, 4, sources=1) == 1e9


RECIPES = Path(__file__).parents[2] / "recipes"


def test_each_tensor_takes_a_moment():
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 0, 0, 0, "ipc")
    calibration = replace(NO_LOSS, transfers=replace(NO_LOSS.transfers, tensor_us=100.0))
    one = side(hardware=replace(TOY, calibration=calibration))
    few = load_weights(route, one, RankPlacement(), TOY.inter, 1, num_tensors=5)
    assert named(few) == {"tensors": pytest.approx(5e-4)}
    all_of_them = len(tensors(one.shape)) * 1e-4
    assert named(load_weights(route, one, RankPlacement(), TOY.inter, 1)) == {
        "tensors": pytest.approx(all_of_them)
    }


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen3-30b-a3b", "llama-3.1-8b"])
def test_all_tensors_of_a_route_are_counted(name: str):
    plan = compile_recipe(
        RECIPES / "grpo.py", [f"model@models.actor={name}", "models.actor.path=null", "cluster=h100-4x8"]
    ).plan
    rows = {(row.tensor, row.layers) for route in plan.weights for row in route.rows}
    counted = sum(layers[1] - layers[0] if layers else 1 for _, layers in rows)
    assert num_tensors(dict(plan.shapes)["actor"]) == counted


def test_transports_through_memory_take_no_road_on_a_cpu():
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 2**30, 0, 0, "shared")
    one = side(hardware=replace(TOY, device=replace(TOY.device, type="cpu")))
    assert named(load_weights(route, one, RankPlacement(), TOY.inter, 1)) == {"copy": 2**31 / 1e11}
    assert named(publish_weights(route, one, one)) == {"copy": 2**31 / 1e11}


def test_changes_take_a_comparison_and_a_copy():
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 2**30, 0, 0, "ipc", delta=True)
    one, once = side(), 2**31 / 1e11
    assert named(publish_weights(route, one, one)) == pytest.approx({"copy": once, "comparison": once})
    assert named(load_weights(route, one, RankPlacement(), TOY.inter, 1)) == pytest.approx({"copy": 2 * once})


def test_checksums_of_weights_take_time_where_their_rate_is_known():
    transfers = replace(NO_LOSS.transfers, checksum_gb_per_s=2.0)
    one = side(hardware=replace(TOY, calibration=replace(NO_LOSS, transfers=transfers)))
    # 1 GB is summed where it is sent, and three times where it arrives; 0.5 GB that was in place twice.
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 10**9, 0, 5 * 10**8, transport="store")
    assert named(publish_weights(route, one, one))["checksums"] == pytest.approx(0.5)
    loading = named(load_weights(route, one, RankPlacement(), TOY.inter, 1))
    assert loading["checksums"] == pytest.approx((3 * 1.0 + 2 * 0.5) / 2)
    # An engine in a process of its own is sent that too.
    near = replace(route, near="ipc")
    assert named(publish_weights(near, one, one))["checksums"] == pytest.approx(0.75)
    assert named(load_weights(near, one, RankPlacement(), TOY.inter, 1))["checksums"] == pytest.approx(2.25)
    # Shared weights, 4 x 36,864 and 2 x 6,400 numbers of 4 bytes, are summed once.
    shared = replace(route, how="shared", moved_bytes=0, held_bytes=0)
    parts = named(load_weights(shared, one, RankPlacement(), TOY.inter, 1))
    assert parts == pytest.approx({"checksums": 4 * 160_256 / 2e9})


def test_kept_weights_go_to_the_host_and_back():
    # 4 x 36,864 weights in layers and 2 x 6,400 in the embedding and the head, in bf16 over two ranks.
    engine = side(layout="t2", backend="vllm", dtype="bf16")
    assert named(keep_weights(engine)) == pytest.approx({"sleep": 2 * 2 * 160_256 / 2 / 20e9})
    assert keep_weights(side(hardware=replace(TOY, device=replace(TOY.device, type="cpu")))) == []


FP8_TOY = replace(TOY, device=replace(TOY.device, tflops={"fp32": 1.0, "bf16": 2.0, "fp8": 4.0}))


def test_a_quantised_engine_reads_a_byte_a_weight_and_multiplies_in_fp8():
    engine = side(backend="vllm", dtype="bf16", quantization="fp8", hardware=FP8_TOY, host=HostTimes())
    plain = replace(engine, low_dtype=None)
    # 4 x 36,864 weights of layers and 6,400 of the output matrix, which stays in bf16, as the KV cache does.
    assert decode_step(engine, 1, 0).seconds == pytest.approx((147_456 + 2 * 6_400) / 1e11)
    assert decode_step(plain, 1, 0).seconds == pytest.approx(2 * 153_856 / 1e11)
    compute = 2 * 1e4 * (147_456 / 4e12 + 6_400 / 2e12)
    assert decode_step(engine, 1e4, 0).seconds == pytest.approx(compute)
    caches = [decode_step(one, 1, 1e4).seconds - decode_step(one, 1, 0).seconds for one in (plain, engine)]
    assert caches[1] == pytest.approx(caches[0])
    prompt = work(1e6, learned=0.0)
    fast, slow = (named(prefill(one, prompt))["prefill"] for one in (engine, plain))
    assert slow == pytest.approx(2 * 1e6 * 147_456 / 2e12)
    assert fast == pytest.approx(slow / 2)


def test_an_engine_reads_a_byte_for_each_number_of_a_cache_in_fp8():
    plain, small = (
        side(backend="vllm", dtype="bf16", cache_dtype=x, hardware=FP8_TOY, host=HostTimes())
        for x in (None, "fp8")
    )
    assert decode_step(small, 1, 0) == decode_step(plain, 1, 0)
    caches = [decode_step(one, 1, 1e4).seconds - decode_step(one, 1, 0).seconds for one in (plain, small)]
    assert caches[0] == pytest.approx(2 * caches[1])


def test_a_device_without_fp8_multiplies_quantised_weights_in_the_compute_dtype():
    engine = side(backend="vllm", dtype="bf16", quantization="fp8", host=HostTimes())
    assert decode_step(engine, 1e4, 0).seconds == pytest.approx(2 * 1e4 * 153_856 / 2e12)
    assert decode_step(engine, 1, 0).seconds == pytest.approx((147_456 + 2 * 6_400) / 1e11)


def test_layers_of_a_trainer_multiply_in_fp8_and_quantise_inputs_weights_and_gradients():
    options = {"backend": "megatron", "dtype": "bf16", "hardware": FP8_TOY, "host": HostTimes(passes=0.0)}
    fast, plain = (side(**options, fp8=fp8) for fp8 in ("tensorwise", None))
    # Forward and backward of 4 x 36,864 weights in fp8, and of 6,400 of the output matrix in bf16.
    batch = work(1e6)
    products = 6e6 * (147_456 / 4e12 + 6_400 / 2e12)
    # A token's inputs are 64, 64, 64 and 128 values, gradients of outputs 128, 64, 256 and 64; 6 bytes each.
    quantised = 6 * 4 * (1e6 * (320 + 512) + 36_864) / 1e11
    assert pass_seconds(fast, batch, 1, 3, 3, 3) == pytest.approx(products + quantised)
    assert pass_seconds(plain, batch, 1, 3, 3, 3) == pytest.approx(6e6 * 153_856 / 2e12)


def test_new_weights_are_quantised_when_they_are_loaded():
    engine = side(layout="t2", backend="vllm", dtype="bf16", quantization="fp8", hardware=FP8_TOY)
    route = WeightRoute("m", "m@train", "m@gen", "pull", transport="shared", moved_bytes=1_000)
    (seconds,) = (
        part.seconds
        for part in load_weights(route, engine, RankPlacement(), TOY.inter, 1)
        if part.name == "quantisation"
    )
    assert seconds == pytest.approx(17 * 147_456 / 2 / 1e11)
    # A sleeping engine keeps a byte of each of these weights, and two of the others.
    assert named(keep_weights(engine)) == pytest.approx({"sleep": 2 * (147_456 + 2 * 12_800) / 2 / 20e9})
    trainer = side(dtype="bf16", quantization="fp8", hardware=FP8_TOY)
    assert trainer.dtype == "bf16"


def test_saving_gathers_and_copies_fp32_to_the_host():
    # 160,256 weights: one file, which the first rank copies, and half of the optimizer's state.
    assert named(save_checkpoint(side(layout="d2"))) == pytest.approx(
        {"all-gather": 0.5 * 4 * 160_256 / 1e10 + 1e-6, "PCIe": (4 + 12 / 2) * 160_256 / 20e9}
    )
    bare = named(save_checkpoint(side(layout="d2", save_optimizer=False)))
    assert bare["PCIe"] == pytest.approx(4 * 160_256 / 20e9)
    shared = named(save_checkpoint(side(layout="d2", backend="megatron")))
    assert shared["PCIe"] == pytest.approx((4 + 12 / 2) * 160_256 / 20e9)
    host = side(hardware=replace(TOY, device=replace(TOY.device, type="cpu")))
    assert named(save_checkpoint(host))["copy"] == pytest.approx(2 * 16 * 160_256 / host.rates.stream)
