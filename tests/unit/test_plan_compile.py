"""What the planner decides: replicas, groups, orders, rules, routes, schedule."""

from dataclasses import replace
from itertools import pairwise

import pytest
from model_configs import model_config
from plan_graphs import agent, changed, ema, grpo, ppo, request, sft, without

from hflow.graph.ir import Level, Stream
from hflow.graph.queries import trained_models
from hflow.planner.compile import compile_plan
from hflow.planner.plan.rows import BatchCut, OrderEdge
from hflow.shapes.layout import Layout


def node_of(plan, name):
    return next(node for node in plan.schedule.nodes if node.name == name)


def routes(plan):
    return {row.key: row.worker for row in plan.routing}


# ---------------------------------------------------------------------------------- replicas
def test_by_default_everything_is_colocated_on_all_devices():
    plan = compile_plan(grpo(), request("cpu-1x2"))
    assert [(g.name, g.devices) for g in plan.groups] == [("all", (0, 1))]
    assert [r.name for r in plan.replicas] == ["actor@train", "actor@gen", "ref@infer"]
    for replica in plan.replicas:
        assert (replica.layout, replica.workers, replica.heads) == (Layout(2), (0, 1), (0, 1))
    assert [r.backend for r in plan.replicas] == ["torch", "embedded", "torch"]


def test_training_and_generation_have_their_own_rank_orders():
    models = {"actor": model_config(layout="d2t2p2", gen_layout="d2t2p2")}
    plan = compile_plan(grpo(), request("h100-1x8", models=models))
    assert plan.replica("actor@train").heads == (4, 6)
    assert plan.replica("actor@gen").heads == (2, 6)
    assert plan.placement("actor_train").heads == plan.rule("actor_train").heads == (4, 6)
    assert (routes(plan)["__data0__"], routes(plan)["__data1__"]) == (2, 6)
    assert routes(plan)["(actor@train, 1, 0, 1)"] == 6
    assert routes(plan)["(actor@gen, 1, 0, 1)"] == 6
    assert routes(plan)["7"] == 7


def test_named_groups_share_the_cluster_out():
    models = {"actor": model_config(layout="d4t2", group="train", gen_group="gen")}
    plan = compile_plan(grpo(), request("h100-2x8", models=models))
    assert {g.name: g.devices for g in plan.groups} == {
        "train": tuple(range(8)),
        "gen": tuple(range(8, 16)),
    }
    assert plan.replica("actor@gen").workers == tuple(range(8, 16))
    assert plan.replica("ref@infer").groups == ("train",)
    assert plan.schedule.shared == ()


def test_groups_may_list_their_devices():
    models = {"actor": model_config(group="a", gen_group="b", gen_layout="d1")}
    groups = {"a": (1, 3), "b": (0, 2)}
    plan = compile_plan(grpo(), request("cpu-1x4", models=models, groups=groups))
    assert plan.replica("actor@train").workers == (1, 3)
    assert plan.replica("actor@gen").workers == (0,)
    assert "actor@gen uses 1 of the 2 devices" in plan.warnings[0]


# ------------------------------------------------------------------------------------- order
def test_batch_nodes_of_a_group_run_in_topological_order_and_wrap_with_lag_one():
    plan = compile_plan(ppo(), request())
    ((group, order),) = plan.schedule.orders
    before = [(e.src, e.dst) for e in plan.graph.edges if e.lag == 0 and e.src in order]
    assert ("critic_inf", "critic_train") in before
    assert all(order.index(src) < order.index(dst) for src, dst in before if dst in order)
    assert order[order.index("critic_train") + 1] == "save.critic"
    assert order[-2:] == ("actor_train", "save.actor")
    wrap = [edge for edge in plan.order if edge.lag == 1]
    assert wrap == [OrderEdge((group,), order[-1], order[0], 1)]
    assert [(e.src, e.dst) for e in plan.order if e.lag == 0] == list(pairwise(order))


def test_groups_have_orders_of_their_own():
    models = {
        "actor": model_config(layout="d1", group="a"),
        "critic": model_config(layout="d1", group="b"),
        "ref": model_config(group="b"),
    }
    plan = compile_plan(ppo(), request(models=models))
    assert dict(plan.schedule.orders) == {
        "a": ("actor_inf", "actor_train", "save.actor"),
        "b": ("ref_inf", "critic_inf", "gae", "critic_train", "save.critic"),
    }
    assert plan.placement("gae").heads == (1,)
    assert plan.schedule.shared == (("a", ("actor@gen",)),)


def test_a_batch_compute_without_batch_inputs_runs_in_its_readers_group():
    models = {"actor": model_config(layout="d1", group="train", gen_group="gen")}
    graph = without(grpo(), "ref_inf")
    plan = compile_plan(graph, request("cpu-1x2", models=models))
    assert plan.placement("group_advantage").groups == ("train",)
    assert plan.placement("group_advantage").heads == plan.replica("actor@train").workers
    assert plan.placement("score").heads == plan.replica("actor@gen").heads


# ------------------------------------------------------------------------------------ levels
def test_per_group_inference_runs_as_groups_arrive_where_a_keep_waits_for_it():
    plan = compile_plan(agent(), request())
    assert node_of(plan, "rew_inf").level is Level.GROUP
    assert node_of(plan, "total").level is Level.SAMPLE
    assert plan.placement("rew_inf").groups == node_of(plan, "rew_inf").groups == ("all",)
    assert not any("rew_inf" in names for _, names in plan.schedule.orders)
    assert plan.placement("rew_inf").replicas == ("rm@infer",)
    assert plan.rule("rew_inf").by_group


def test_otherwise_inference_and_its_readers_wait_for_the_batch():
    plan = compile_plan(without(agent(), "has_spread"), request())
    assert node_of(plan, "rew_inf").level is Level.BATCH
    assert node_of(plan, "total").level is Level.BATCH
    assert node_of(plan, "total").needs == ("rew_inf",)
    assert plan.rule("total").policy == "single"
    assert plan.rule("total").fields == ("rm_view/rm_score",)
    assert dict(plan.schedule.orders)["all"][:3] == ("rew_inf", "total", "group_advantage")


def test_nor_does_it_wait_where_its_model_changes():
    graph = without(agent(), "has_spread")
    plan = compile_plan(changed(graph, "actor_train", writes_weights=("actor", "rm")), request())
    assert node_of(plan, "rew_inf").level is Level.GROUP


# ---------------------------------------------------------------------------------- schedule
def test_derived_streams_are_folded_into_their_root():
    plan = compile_plan(agent(), request())
    (stream,) = plan.schedule.streams
    assert (stream.name, stream.group_size, stream.batch, stream.min_group) == ("agent", 8, 8, 2)
    assert {node.stream for node in plan.schedule.nodes} == {"agent"}
    assert node_of(plan, "rm_view").level is Level.SAMPLE
    assert node_of(plan, "rm_view").needs == ()
    assert node_of(plan, "rew_inf").needs == ("rm_view",)
    assert node_of(plan, "has_spread").keep
    assert node_of(plan, "group_advantage").needs == ()


def test_side_streams_form_no_batches():
    plan = compile_plan(grpo(), request())
    trained, heldout = plan.schedule.streams
    assert (trained.name, trained.batch, trained.replicas) == ("actor_gen", 8, ("actor@gen",))
    assert (heldout.name, heldout.batch, heldout.every) == ("eval_gen", None, 10)
    assert node_of(plan, "eval_score").stream == "eval_gen"


def test_streams_of_one_source_share_their_samples():
    graph = grpo()
    second = Stream("second", "actor_gen", "data", None, 4, trained=True)
    plan = compile_plan(replace(graph, streams=(*graph.streams, second)), request())
    assert [stream.name for stream in plan.schedule.streams] == ["actor_gen", "eval_gen"]


def test_needs_reads_and_writes():
    plan = compile_plan(ppo(), request())
    assert set(node_of(plan, "actor_train").needs) == {"actor_inf", "gae"}
    assert set(node_of(plan, "critic_train").needs) == {"critic_inf", "gae"}
    assert node_of(plan, "critic_inf").reads == ("critic",)
    assert node_of(plan, "ref_inf").reads == ()
    assert node_of(plan, "actor_train").writes == ("actor",)


def test_a_written_stream_has_no_engines_and_no_lag():
    plan = compile_plan(sft(), request())
    (stream,) = plan.schedule.streams
    assert (stream.replicas, stream.models) == ((), ())
    assert plan.staleness_bound == 0
    assert plan.placement("sft_view").heads == plan.replica("actor@train").heads
    assert plan.weights == ()


@pytest.mark.parametrize(("eta", "sync_every", "bound"), [(0, 1, 0), (2, 1, 2), (0, 3, 2), (1, 3, 5)])
def test_staleness_bound(eta, sync_every, bound):
    plan = compile_plan(grpo(), request(max_staleness=eta, sync_every=sync_every))
    assert plan.staleness_bound == bound


@pytest.mark.parametrize(("save_every", "every", "after"), [(0, 10, 9), (4, 4, 3)])
def test_models_are_saved_after_their_writer(save_every, every, after):
    plan = compile_plan(grpo(), request(save_every=save_every))
    save = node_of(plan, "save.actor")
    assert (save.every, save.after, save.at_end) == (every, after, True)
    assert (save.needs, save.groups) == (("actor_train",), ("all",))
    assert plan.rule("save.actor").fields == ()


def test_updates_write_but_do_not_train():
    plan = compile_plan(ema(), request())
    assert trained_models(plan.graph) == ("actor",)
    assert [r.name for r in plan.replicas] == ["actor@train", "ref@infer", "ref@gen"]
    assert plan.placement("ema").replicas == ("ref@infer", "actor@train")
    assert {"save.actor", "save.ref"} < {node.name for node in plan.schedule.nodes}
    assert [(w.src, w.dst) for w in plan.weights] == [("ref@infer", "ref@gen")]


# ------------------------------------------------------------------------------------- rules
def test_data_rules_hold_all_fields_that_nodes_read():
    plan = compile_plan(ppo(minibatches=2, epochs=3), request())
    assert plan.rule("critic_inf").fields == ("actor_gen/input_ids", "actor_gen/loss_mask")
    assert plan.rule("gae").fields == tuple(
        f"actor_gen/{name}" for name in ("loss_mask", "ref_logprobs", "reward", "values")
    )
    assert set(plan.rule("actor_train").fields) == {
        f"actor_gen/{name}"
        for name in ("input_ids", "loss_mask", "behav_logprobs", "prox_logprobs", "advantages")
    }
    assert dict(plan.cuts) == dict.fromkeys(("critic_train", "actor_train"), BatchCut(2, 3, False))


def test_a_body_that_may_look_at_groups_keeps_them_whole():
    assert not compile_plan(grpo(), request()).rule("actor_train").by_group
    for graph in (
        changed(grpo(), "actor_train", options=(("reduce", "group-mean"),)),
        changed(grpo(), "actor_train", provided=(("out", "output"), ("seqs", "sequences"))),
    ):
        plan = compile_plan(graph, request())
        assert plan.rule("actor_train").by_group
        assert dict(plan.cuts)["actor_train"].by_group


@pytest.mark.parametrize(("asked", "least"), [(1, 1), (3, 3), (9, 4)])
def test_a_group_may_shrink_to_the_minimum_of_its_bodies(asked, least):
    graph = changed(grpo(group=4), "group_advantage", options=(("min_group", asked),))
    assert compile_plan(graph, request()).schedule.streams[0].min_group == least


# ----------------------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    ("cluster", "actor", "how"),
    [
        ("cpu-1x1", model_config(), "shared"),
        ("cpu-1x2", model_config(), "gather"),
        ("cpu-1x2", model_config(layout="d2", gen_layout="t2"), "gather"),
        ("cpu-1x2", model_config(layout="d2", gen_layout="d1"), "pull"),
        ("cpu-1x2", model_config(layout="d1", gen_layout="d1", group="a", gen_group="b"), "pull"),
    ],
)
def test_weight_routes(cluster, actor, how):
    plan = compile_plan(grpo(), request(cluster, models={"actor": actor}))
    (route,) = plan.weights
    assert (route.src, route.dst, route.how) == ("actor@train", "actor@gen", how)


def test_weights_that_are_never_written_have_no_route():
    graph = changed(grpo(), "eval_gen", reads_weights=("ref",), models=("ref",))
    plan = compile_plan(graph, request())
    assert plan.replica("ref@gen").layout == Layout(2)
    assert [route.model for route in plan.weights] == ["actor"]


# -------------------------------------------------------------------------------------- size
def test_a_thousand_devices():
    models = {"actor": model_config("d32t8p2", "d64t8", group="train", gen_group="gen")}
    plan = compile_plan(grpo(group=8), request("h100-128x8", batch=512, models=models))
    assert len(plan.replica("actor@train").workers) == 512
    assert plan.replica("actor@gen").heads == tuple(range(512, 1024, 8))
    assert len(plan.routing) == 512 + 512 + 512 + 64 + 1024
