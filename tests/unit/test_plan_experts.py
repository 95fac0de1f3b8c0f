"""Costs and memory of experts, latent attention, windows, context and expert ranks, worked out by hand."""

import random
from dataclasses import replace
from pathlib import Path

import plan_graphs as graphs
import pytest
import yaml
from cost_kit import NO_LOSS, SMALL, TOY, named, side
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config

from hflow.base.errors import NotYetError, PlanError
from hflow.base.shipped import shipped_directory
from hflow.engines.vllm import memory as vllm_memory
from hflow.launch.planning.compile import compile_plan_file, compile_recipe, plan_file_text
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.planner.checks.layouts import check_layouts
from hflow.planner.forecast.cost.collectives import (
    RankPlacement,
    all_gather,
    all_to_all,
    axis_ranks,
    dispatch,
)
from hflow.planner.forecast.cost.flops import (
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
from hflow.planner.forecast.cost.generation import decode_step
from hflow.planner.forecast.cost.rank_collectives import (
    Passes,
    bucket_collectives,
    context_collectives,
    expert_collectives,
    total_time,
)
from hflow.planner.forecast.cost.replica_costs import expert_exchange
from hflow.planner.forecast.cost.roofline import MEMORY, Part
from hflow.planner.forecast.cost.training import forward, local_weights
from hflow.planner.forecast.cost.transfers import publish_weights
from hflow.planner.forecast.memory.parts import MicroBatch, cache_bytes_per_token
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.forecast.traffic import field_size
from hflow.planner.plan.calibration import HostTimes, LinkRate
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.planner.weights.sharding import mean_copies
from hflow.report.content import experts_line
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import (
    Experts,
    LatentAttention,
    ModelShape,
    SlidingWindow,
    expert_parameters,
    num_parameters,
)

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


# ------------------------------------------------------------------------- context and expert ranks
def test_tokens_are_dispatched_once_to_each_rank():
    # One copy of 1 GB: each of 4 ranks keeps a quarter and sends the rest over 10 GB/s.
    wire = dispatch(1e9, 1, RankPlacement(4, 1), TOY)
    assert (wire.transfer, wire.latency) == pytest.approx((0.075, 2e-6))
    # Two copies reach 4 (1 - (3/4)^2) = 1.75 of 4 ranks.
    assert dispatch(1e9, 2, RankPlacement(4, 1), TOY).transfer == pytest.approx(1.75 * 0.075)
    # With 4 ranks on each of 2 machines they reach 1.875 of 8 ranks, and 1.5 machines, over 1 GB/s.
    assert dispatch(1e9, 2, RankPlacement(4, 2), TOY).transfer == pytest.approx(1.875 * 0.075 + 1.5 * 0.5)
    assert dispatch(1e9, 2, RankPlacement(), TOY).seconds == 0


def test_many_ranks_at_once_use_every_port():
    slow = replace(TOY, calibration=replace(NO_LOSS, inter=LinkRate(0.25)))
    two = RankPlacement(1, 2)
    assert dispatch(1e9, 1, two, slow).transfer == pytest.approx(0.5 / 0.25)
    faster = replace(slow, calibration=replace(slow.calibration, exchange=LinkRate(0.5)))
    assert dispatch(1e9, 1, two, faster).transfer == pytest.approx(0.5 / 0.5)
    assert all_gather(1e9, two, faster).transfer == all_gather(1e9, two, slow).transfer


def test_the_device_waits_for_the_host_in_layers_with_experts():
    # 3 of 4 layers have experts, in two micro-batches of a forward pass.
    replica = side(MIXED, "d4e4", backend="megatron", host=HostTimes(expert_us=100), tokens_per_microbatch=64)
    work = Work(1, 2, 128, 128, 128, 8192)
    assert named(forward(replica, work))["experts' host"] == pytest.approx(2 * 3 * 100e-6)
    assert "experts' host" not in named(forward(side(MIXED, "d4e4", backend="megatron"), work))


def test_tokens_that_are_sent_once_to_each_rank():
    # 100 tokens of 64 numbers of fp32 for 2 experts each, on 1.75 of 4 ranks; 3 of 4 are elsewhere, in 3
    # layers, twice.
    by_nccl = side(MIXED, "d4e4", backend="vllm")
    one = replace(by_nccl, traits=replace(by_nccl.traits, has_exchange_kernels=True))
    assert expert_exchange(one, 100).transfer == pytest.approx(6 * 175 * 64 * 4 * 3 / 4 / 1e10)
    # NCCL sends both copies.
    assert expert_exchange(by_nccl, 100).transfer == pytest.approx(6 * 200 * 64 * 4 * 3 / 4 / 1e10)
    assert expert_exchange(one, 100).latency == pytest.approx(6 * 2e-6)
    assert expert_exchange(side(MIXED, "d4", backend="vllm"), 100).seconds == 0
    assert expert_exchange(side(SMALL, "d4", backend="vllm"), 100).seconds == 0


def test_copies_of_tokens_go_to_their_experts_and_back():
    def time(layout: str, num_passes: int) -> float:
        replica = side(MIXED, layout, backend="megatron")
        work = Work(1, 1, 100, 100, 0, 10_000)
        return total_time(expert_collectives(replica, work, Passes.of(1, num_passes)), replica).transfer

    # 100 tokens of 64 numbers of fp32, twice, and one weight of each; 3 of 4 are elsewhere, in 3 layers. Each
    # rank learns the numbers of tokens of 8 experts from all.
    sent, counts = 200 * 4 * 3 / 4 / 1e10, 4 * 8 * 8 * 3 / 4 / 1e10
    assert time("d4e4", 1) == pytest.approx(3 * ((2 * 64 + 1) * sent + counts))
    assert time("d4e4", 2) == pytest.approx(3 * (2 * (2 * 64 + 1) * sent + counts))
    assert time("d4", 2) == 0
    # Two tensor ranks have a half of the tokens each, and gather the copies; they sum the results.
    gathered, counts = 200 * 4 / 2 / 1e10, 2 * 8 * 8 / 2 / 1e10
    assert time("d4t2", 1) == pytest.approx(3 * ((2 * 64 + 1) * gathered + counts))
    dense = side(SMALL, "d4t2", backend="megatron")
    assert list(expert_collectives(dense, Work(1, 1, 100, 100, 0, 10_000), Passes.of(1, 2))) == []


def test_an_all_to_all_takes_the_link_to_each_rank():
    # 3 of 4 parts of 1 GB go elsewhere, over 10 GB/s.
    assert all_to_all(1e9, RankPlacement(4), TOY).transfer == pytest.approx(0.075)
    # With 4 ranks on each of 2 machines 3 of 8 stay on the machine, and 4 of 8 go over 1 GB/s.
    assert all_to_all(1e9, RankPlacement(4, 2), TOY).transfer == pytest.approx(0.0375 + 0.5)
    assert all_to_all(1e9, RankPlacement(), TOY).seconds == 0


def test_small_messages_of_an_all_to_all_take_the_latency_of_each_other_machines_rank():
    # 4 x 31 messages of 10 us, and two doublings of 1 us within a machine.
    latency = TOY.inter.latency_us * 1e-6
    small = all_to_all(128, RankPlacement(4, 32), TOY)
    assert small.seconds == pytest.approx(4 * 31 * latency + 2 * TOY.intra.latency_us * 1e-6, rel=1e-3)
    # Large ones hide it: of 1 GB, 124 of 128 parts go over 1 GB/s.
    assert all_to_all(1e9, RankPlacement(4, 32), TOY).seconds == pytest.approx(124 / 128, rel=3e-3)


def test_keys_and_values_pass_every_context_rank():
    # A rank has 50 of 200 tokens. Keys and values of the others: 3/4 of 200 x 2 x 2 x 16 numbers of fp32. In
    # four layers they are gathered, and their gradients scattered. Log-probs of 20 tokens are summed.
    def time(layout: str) -> float:
        replica = side(SMALL, layout, backend="megatron")
        work = Work(1, 1, 50, 50, 5, 10_000)
        return total_time(context_collectives(replica, work, Passes.of(1, 2)), replica).transfer

    assert time("c4") == pytest.approx((2 * 4 * 200 * 64 * 4 + 2 * 20 * 4) * 3 / 4 / 1e10)
    assert time("d4") == 0


def test_ranks_of_experts():
    replica = side(MIXED, "d4t2c2e4", backend="megatron", per_machine=4)
    assert (replica.data.num, replica.context.num, replica.expert.num, replica.expert_data.num) == (
        8,
        2,
        4,
        2,
    )
    # Context ranks and their tensor ranks are on one machine of four, four expert ranks on two.
    assert (replica.context.machines, replica.expert.machines, replica.expert_data.machines) == (1, 2, 2)


def test_weights_with_expert_ranks():
    rest, norms = layers_parameters(MIXED, 0, 4, 0) + 2 * 6_400, 9 * 64
    experts = 3 * 8 * 6_144
    whole, divided = (side(MIXED, layout, backend="megatron") for layout in ("d4", "d4e4"))
    assert (whole.stage_weights, divided.stage_weights) == (rest + experts, rest + experts / 4)
    assert local_weights(whole) == local_weights(divided) == (rest + experts) / 4
    # The rest is reduced over four ranks, the experts of a rank over none.
    (one,) = bucket_collectives("all-gather", divided)
    assert (one.ranks, one.times, one.num_bytes) == ("data", 1, 4 * (rest + norms))
    pairs = side(MIXED, "d4e2", backend="megatron")
    time = total_time(bucket_collectives("all-gather", pairs), pairs)
    assert time.transfer == pytest.approx(((rest + norms) * 3 / 4 + experts / 2 / 2) * 4 / 1e10)


def test_experts_are_sent_to_fewer_ranks_than_other_weights():
    rest, experts = layers_parameters(MIXED, 0, 4, 0) + 2 * 6_400, 3 * 8 * 6_144
    assert side(MIXED, "d4", backend="vllm").mean_copies == 4
    one = side(MIXED, "d4e4", backend="vllm")
    assert one.mean_copies == pytest.approx((4 * rest + experts) / (rest + experts))
    # Four source ranks pack a quarter of a version each: 4 bytes a weight, read and written.
    route = WeightRoute("m", "m@train", "m@gen", "pull", (), (), 4 * (4 * rest + experts), 0, 0, "collective")
    (copy,) = publish_weights(route, side(MIXED, "d4", backend="megatron"), one)
    assert copy.seconds == pytest.approx(2 * (rest + experts) / 1e11)


def test_decoding_with_expert_ranks_reads_what_the_tokens_of_all_touch():
    # Each of two engines decodes one token. A rank has half of the experts, of which both tokens touch 1.75.
    one = decode_step(side(MIXED, "d2e2", backend="vllm"), 1, 0)
    read = 4 * (layers_parameters(MIXED, 0, 4, 1.75) + 6_400)
    assert one.seconds == pytest.approx(read / 1e11)


def test_context_ranks_divide_a_step():
    # Twice the ranks take half of the arithmetic of the same samples.
    whole = forward(side(SMALL, "d1", backend="megatron"), Work(1, 1, 4096, 4096, 0, 4096**2))
    half = forward(side(SMALL, "c2", backend="megatron"), Work(1, 1, 4096, 4096, 0, 4096**2).share(0.5))
    assert half[0].seconds == pytest.approx(whole[0].seconds / 2)
    assert [part.name for part in half if part.seconds] == ["forward", "keys and values"]


def rank_of(layout, shape=MIXED, role="train", backend="megatron", stage=0, **asked):
    replica = Replica("m", "m", role, backend, Layout.parse(layout), "all", (), ())
    return Rank(replica, shape, model_config(**asked), stage, True, False)


def test_memory_with_expert_ranks():
    others = num_parameters(MIXED) - 3 * 8 * 6_144
    sizes = rank_of("d4e4").sizes
    assert (sizes.total, sizes.experts) == (others + 3 * 2 * 6_144, 3 * 2 * 6_144)
    assert sizes.layer == 12_288 + 2 * 64 + 24_576  # the one without experts is larger than a part of others
    # Four ranks divide the optimizer state of the rest; a rank's experts are its own.
    assert rank_of("d4e4").optimizer_share(12, 12) == 12 * others // 4 + 12 * 3 * 2 * 6_144
    assert rank_of("d4e2").optimizer_share(12, 12) == 12 * others // 4 + 12 * 3 * 4 * 6_144 // 2
    assert rank_of("d2c2e4").optimizer_share(12, 12) == rank_of("d4e4").optimizer_share(12, 12)


def test_memory_of_layers_of_two_kinds():
    sizes = rank_of("p2", stage=0).sizes
    dense, mixed = 12_288 + 128 + 24_576, 12_288 + 128 + 512 + 3_072 + 8 * 6_144
    assert (sizes.layers, sizes.layer, sizes.num_layers) == (dense + mixed, mixed, 2)
    assert rank_of("p2", stage=1).sizes.layers == 2 * mixed


def test_caches_of_latent_attention_are_whole_on_every_tensor_rank():
    ranks = [rank_of(layout, DEEPSEEK_V3, "gen", "vllm", dtype="bf16") for layout in ("t1", "t8")]
    assert [cache_bytes_per_token(rank) for rank in ranks] == [70_272, 70_272]
    on_cpu = replace(ranks[0], on_cpu=True)
    assert [vllm_memory.block_bytes(rank) for rank in (ranks[0], on_cpu)] == [16 * 70_272] * 2


def test_a_microbatch_is_divided_over_context_ranks():
    assert MicroBatch(1001, 500, 3, True).divided(4) == MicroBatch(251, 125, 3, True)


def test_an_average_parameter_has_fewer_copies_where_experts_are_divided():
    assert mean_copies(SMALL, Layout(8)) == mean_copies(SMALL, Layout(4, context=2)) == 8
    experts = expert_parameters(MIXED) / num_parameters(MIXED)
    assert expert_parameters(MIXED) == 3 * 8 * 6_144
    assert mean_copies(MIXED, Layout(8, expert=4)) == pytest.approx(8 - 6 * experts)


@given(st.data())
def test_ranks_of_an_axis_are_those_whose_other_coordinates_are_equal(data):
    """Against groups made from coordinates, on machines of three devices."""
    d, t, p, c = (data.draw(st.integers(1, 3)) for _ in range(4))
    role = data.draw(st.sampled_from(("train", "gen")))
    c = 1 if role == "gen" else c
    expert = data.draw(st.sampled_from([size for size in range(1, d * c + 1) if d * c % size == 0]))
    layout = Layout(d, t, p, c, expert)
    order, cluster = rank_order(role), replace(graphs.cluster_of("cpu-1x3"), num_nodes=99)
    replica = Replica("m", "m", role, "megatron", layout, "all", tuple(range(layout.world)), ())
    fixed = {
        "data": lambda d, t, p, c: (t, p),
        "tensor": lambda d, t, p, c: (d, p, c),
        "pipe": lambda d, t, p, c: (d, t, c),
        "context": lambda d, t, p, c: (d, t, p),
        "expert": lambda d, t, p, c: (t, p, layout.copy_index(d, c) // expert),
        "expert data": lambda d, t, p, c: (t, p, layout.expert_index(d, c)),
    }
    for axis, others in fixed.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world):
            groups.setdefault(others(*layout.coords(order, rank)), []).append(rank)
        placements = {RankPlacement.of(ranks, cluster, TOY) for ranks in groups.values()}
        found = axis_ranks(replica, axis, cluster, TOY)
        assert found in placements
        assert found.machines == max(placement.machines for placement in placements)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("qwen3-235b-a22b", 470), ("deepseek-v3", 1342), ("gpt-oss-120b", 234)]
)
def test_the_ranks_of_one_copy_hold_the_published_weights(name, gigabytes):
    """In bf16: experts are once on all ranks, and the rest on the tensor ranks of both stages."""
    file = shipped_directory("configs") / "model" / f"{name}.yaml"
    shape = read_shape(yaml.safe_load(file.read_text())["architecture"])
    total = 0.0
    for stage in range(2):
        sizes = rank_of("d8t4p2e8", shape, "gen", "vllm", stage, dtype="bf16").sizes
        total += 2 * (4 * 8 * sizes.experts + 4 * (sizes.total - sizes.experts))
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("replica", "message"),
    [
        (
            ("d4e4", "train", SMALL),
            "m@train: layout d4t1p1e4 has an expert axis, but a model of family llama has no experts; "
            "d4t1p1 fits",
        ),
        (
            ("d3e3", "train", MIXED),
            "m@train: 8 experts cannot be split over 3 expert ranks; 1 fits: d3t1p1",
        ),
        (
            ("d2c2", "gen", SMALL),
            "m@gen: layout d2t1p1c2 has a context axis, but generation does not divide sequences; "
            "d4t1p1 fits",
        ),
    ],
)
def test_layouts_that_cannot_be(replica, message):
    layout, role, shape = replica
    kind = "megatron" if role == "train" else "vllm"
    wrong = Replica(f"m@{role}", "m", role, kind, Layout.parse(layout), "all", (), ())
    request = graphs.request("cpu-1x4", shapes={"m": shape})
    with pytest.raises(PlanError) as refusal:
        check_layouts([wrong], request)
    assert str(refusal.value) == message


LARGE = ["model@models.actor=qwen3-30b-a3b", "models.actor.path=null", "cluster=h100-4x8"]
GRPO = Path(__file__).parents[2] / "recipes" / "grpo.py"


def test_expert_ranks_run_where_a_backend_has_them():
    engine = [*LARGE, "models.actor.gen.engine=vllm", "models.actor.gen.layout=d4t8"]
    trainer = ["models.actor.backend=megatron", "models.actor.layout=d4t4c2e8"]
    plan = compile_recipe(GRPO, [*engine, *trainer]).plan
    assert plan.replica("actor@train").heads == (0, 8, 16, 24)
    assert plan.unrunnable == ()
    assert compile_recipe(GRPO, [*engine, "models.actor.layout=d32e8"]).plan.unrunnable[0] == (
        "actor@train has layout d32t1p1e8, but torch does not divide experts. Remove e8 from the layout, or "
        "set models.actor.backend=megatron."
    )


def test_the_plan_says_that_no_loss_balances_experts():
    plan = compile_recipe(GRPO, [*LARGE, "models.actor.backend=megatron"]).plan
    assert experts_line(plan) == (
        "actor: 8 of 128 for each token. No loss balances them: router_aux_loss_coef of a config is not used"
    )
    assert experts_line(compile_recipe(GRPO, []).plan) == ""


REPLAY = "nodes.actor_gen.routing_replay=true"
ON_CPU = ["model@models.actor=tiny-qwen3-moe", "models.actor.path=null", "cluster=cpu-1x2"]


def test_nodes_of_the_generating_model_replay_its_experts():
    plan = compile_recipe(
        GRPO.with_name("ppo.py"), [*ON_CPU, REPLAY, "nodes.actor_train.prox=recompute"]
    ).plan
    nodes = plan.graph.nodes
    assert {"actor_inf", "ref_inf", "critic_inf"} < {node.name for node in nodes}
    readers = {node.name for node in nodes for read in node.reads if read.field == "routed_experts"}
    assert readers == {"actor_train", "actor_inf"}
    assert "actor_gen/routed_experts" in plan.rule("actor_train").fields
    # Two layers with two experts of a token, one byte each.
    shapes = dict(plan.shapes)
    assert field_size(plan.graph, "actor_gen/routed_experts", shapes).of(prompt=3, response=5) == 8 * 4
    assert plan.unrunnable == ()


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_every_engine_records_experts(engine):
    assert compile_recipe(GRPO, [*ON_CPU, REPLAY, f"models.actor.gen.engine={engine}"]).plan.unrunnable == ()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            ["cluster=cpu-1x2"],
            "actor has no routed experts (family qwen2). Remove nodes.actor_gen.routing_replay.",
        ),
        (
            [*ON_CPU, "models.actor.compile=true"],
            "compiled layers do not replay experts. Set models.actor.compile=false.",
        ),
    ],
    ids=["dense", "compile"],
)
def test_experts_that_cannot_be_replayed(keys, reason):
    unrunnable = compile_recipe(GRPO, [*keys, REPLAY]).plan.unrunnable
    assert f"nodes.actor_gen.routing_replay is set, but {reason}" in unrunnable


def test_tensor_ranks_share_tokens_in_models_with_experts():
    keys = [*LARGE, "models.actor.backend=megatron", "models.actor.sequence_parallel=false"]
    with pytest.raises(PlanError, match="which is sequence parallelism; remove it"):
        compile_recipe(GRPO, keys)
    for shape, share in ((MIXED, 2), (SMALL, 1)):
        replica = Replica("m", "m", "train", "megatron", Layout(2, 2), "all", (), ())
        assert Rank(replica, shape, model_config(), 0, True, True).token_share == share


def test_a_plan_file_of_a_family_that_is_only_planned_is_not_run(tmp_path: Path):
    keys = ["model@models.actor=gemma-2-2b", "models.actor.path=null", "cluster=h100-1x8"]
    file = tmp_path / "lock.json"
    file.write_text(plan_file_text(compile_recipe(GRPO, keys)))
    with pytest.raises(NotYetError) as refusal:
        run_compiled(compile_plan_file(file), False, RunEnvironment())
    assert str(refusal.value) == (
        "models.actor is of family gemma2, which caps scores and logits, so that it can be planned but not "
        "run. Use a model of another family, such as llama, mistral, qwen2, qwen3, qwen2_moe, qwen3_moe, "
        "mixtral."
    )
