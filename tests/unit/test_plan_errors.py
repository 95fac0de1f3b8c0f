"""Requests that do not fit are refused with the number and a change that fits."""

from dataclasses import replace

import pytest
from model_configs import model_config
from plan_graphs import changed, compute, grpo, ppo, request, sft, train, without

from hflow.base.errors import NotYetError, PlanError
from hflow.config.schema import LoraConfig, OptimConfig, ScheduleConfig, WorkloadConfig
from hflow.graph.ir import Level, Node, Stream
from hflow.planner.checks.settings import check_unused_keys, without_unused_keys
from hflow.planner.compile import compile_plan


def refused(graph, message, cluster="cpu-1x2", **changes):
    with pytest.raises(PlanError, match=message):
        compile_plan(graph, request(cluster, **changes))


def actor(**changes):
    return {"actor": model_config(**changes)}


def test_a_layout_larger_than_its_group_is_refused():
    refused(grpo(), r"d4t1p1 needs 4 devices.*has 2; d2t1p1 fits", models=actor(layout="d4"))
    refused(grpo(), r"give it at least 4 devices", models=actor(layout="t4"))
    refused(grpo(), r"actor@gen: layout d2t2p1 needs 4", models=actor(gen_layout="d2t2"))


def test_sequence_parallel_needs_a_backend_with_tensor_ranks():
    for value in (True, False):
        message = (
            rf"models.actor.sequence_parallel is {str(value).lower()}, but the torch backend has no tensor"
        )
        refused(grpo(), message, models=actor(sequence_parallel=value))
    compile_plan(grpo(), request(models=actor(sequence_parallel=True, backend="megatron")))


def test_an_offload_that_has_no_effect_is_refused():
    ref = {"ref": model_config(offload="optimizer")}
    refused(grpo(), "models.ref.offload is optimizer, but no node trains ref; set it to all", models=ref)
    plan = compile_plan(grpo(), request("cpu-1x1", models=actor(offload="all")))
    (reason,) = plan.unrunnable
    assert "weights that actor@gen uses in place. Set models.actor.offload=optimizer" in reason
    assert any("models.actor.offload=all saves no memory on a CPU" in line for line in plan.warnings)


def test_states_that_are_on_the_host_are_not_offloaded():
    """With megatron, gradients and weights in fp32 are."""
    asked = {"optim": OptimConfig(name="adamw_cpu"), "offload": "optimizer"}
    refused(grpo(), "adamw_cpu has its states in host memory already; remove", models=actor(**asked))
    compile_plan(grpo(), request(models=actor(**asked, backend="megatron")))


def test_shares_of_a_mask_that_no_infer_node_has_are_refused():
    shares = WorkloadConfig(shares={"is_low": 0.5})
    with pytest.raises(
        PlanError, match=r"workload.shares.is_low is set, but no infer node has mask='is_low'"
    ):
        check_unused_keys(grpo(), request(workload=shares))


def test_offloaded_activations_without_recomputation_are_refused():
    refused(
        grpo(),
        "offload_activations keeps the inputs .*; set models.actor.activation_checkpointing=true",
        models=actor(offload_activations=True),
    )
    asked = actor(offload_activations=True, activation_checkpointing=True)
    (warning,) = compile_plan(grpo(), request("cpu-1x1", models=asked)).warnings
    assert "offload_activations=true saves no memory on a CPU" in warning


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "megatron"}, "is 1, but the megatron backend shards optimizer states alone; .*=torch"),
        ({"layout": "d1"}, "is 1, but no ranks of actor@train divide weights with layout d1t1p1; remove it"),
        (
            {"tokens_per_microbatch": 10**6},
            "is 1, but a rank of actor@train has one micro-batch .*; set models.actor.zero_stage=2",
        ),
    ],
)
def test_a_stage_of_zero_that_has_no_effect_is_refused(changes, message):
    models = actor(**{"zero_stage": 1, "layout": "d2"} | changes)
    refused(grpo(), f"models.actor.zero_stage {message}", models=models)
    compile_plan(grpo(), request(models=actor(zero_stage=1, layout="d2", tokens_per_microbatch=64)))
    compile_plan(grpo(), request(models=actor(zero_stage=2, layout="d2")))


def test_what_cannot_be_compiled_is_refused():
    message = (
        "models.actor.compile compiles layers of the torch backend, but models.actor.backend is megatron"
    )
    refused(grpo(), message, models=actor(compile=True, backend="megatron"))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "ref",
            {"optim": OptimConfig(lr=1.0)},
            "models.ref.optim.lr is set, but no node trains ref; remove it, .* 1e-06",
        ),
        (
            "ref",
            {"activation_checkpointing": True},
            "activation_checkpointing is set, but no node trains ref",
        ),
        ("ref", {"offload_activations": True}, "offload_activations is set, but no node trains ref"),
        ("ref", {"zero_stage": 2}, "models.ref.zero_stage is set, but no node trains ref; .* default, 3"),
        ("ref", {"lora": LoraConfig()}, "models.ref.lora is set, but no node trains ref; .* default, null"),
        ("ref", {"save_optimizer": False}, "models.ref.save_optimizer is set, but no node changes ref"),
        ("ref", {"max_running": 3}, "models.ref.gen.max_running is set, but no node generates with ref"),
        ("actor", {"layout": "d1"}, "models.actor.layout is set, but no node trains actor or infers with it"),
        ("actor", {"compile": True}, "models.actor.compile is set, but no node trains actor or infers"),
        ("actor", {"offload": "all"}, "models.actor.offload is set, but no node trains actor or infers"),
        ("actor", {"backend": "megatron"}, "models.actor.backend is set, but no node trains actor or infers"),
    ],
)
def test_keys_that_no_node_uses_are_refused(model, changes, message):
    graph = grpo() if model == "ref" else without(grpo(), "actor_train")
    with pytest.raises(PlanError, match=message):
        check_unused_keys(graph, request(models={model: model_config(**changes)}))


def test_keys_that_describe_a_model_may_be_unused():
    graph, config = without(grpo(), "actor_train"), model_config(layout="d1", max_running=3, max_model_len=64)
    check_unused_keys(grpo(), request(models={"ref": model_config(max_model_len=64)}))
    assert without_unused_keys(graph, "actor", config) == model_config(max_running=3, max_model_len=64)
    assert without_unused_keys(grpo(), "ref", config) == model_config(layout="d1", max_model_len=64)
    assert without_unused_keys(grpo(), "actor", config) == config


@pytest.mark.parametrize(
    "changes", [{"max_staleness": 2}, {"sync_every": 2}, {"queue": 512}, {"interrupt": False}]
)
def test_rules_of_generation_need_generated_samples(changes):
    message = f"schedule.{next(iter(changes))} is set, but no node generates the samples that are trained"
    with pytest.raises(PlanError, match=message):
        check_unused_keys(sft(), request(schedule=ScheduleConfig(**changes)))
    check_unused_keys(grpo(), request(schedule=ScheduleConfig(**changes)))


def test_a_group_that_no_model_names_is_refused():
    groups = {"all": (0,), "gen": (1,)}
    refused(grpo(), "groups.gen is set, but no model names it; set models.NAME.group=gen", groups=groups)
    compile_plan(grpo(), request("cpu-1x2", groups=groups, models=actor(gen_group="gen")))


def test_a_malformed_layout_is_refused():
    refused(grpo(), "d2t2p1, d4, d8t2e8 or d16r2", models=actor(layout="two"))


def test_an_unknown_model_or_group_is_refused():
    refused(grpo(), "no model 'acter'; did you mean 'actor'", models={"acter": model_config()})
    groups = {"train": (0,), "gen": (1,)}
    refused(
        grpo(),
        "unknown device group 'trian'; did you mean 'train'",
        models=actor(group="trian"),
        groups=groups,
    )


def test_groups_that_do_not_fit_are_refused():
    both = actor(group="a", gen_group="b")
    refused(grpo(), "both have device 1", models=both, groups={"a": (0, 1), "b": (1,)})
    refused(
        grpo(), "device 5, but cluster cpu-1x2 has devices 0 to 1", models=both, groups={"a": (5,), "b": (1,)}
    )
    refused(grpo(), "list each of its devices once", models=both, groups={"a": (0, 0), "b": (1,)})
    large = actor(layout="d2", group="a", gen_group="b")
    refused(grpo(), r"more than the 2 devices .*\(a 2, b at least 1\)", models=large)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("batch", 0, 1),
        ("num_steps", 0, 1),
        ("save_every", -1, 0),
    ],
)
def test_numbers_below_their_minimum_are_refused(name, value, least):
    refused(grpo(), f"{name} is {value}; it must be at least {least}", **{name: value})


def test_a_group_that_can_never_be_admitted_is_refused():
    refused(grpo(group=4), "set schedule.max_concurrent to 4 or more", max_concurrent=3)


def test_a_batch_smaller_than_its_minibatches_is_refused():
    refused(ppo(minibatches=4), "batch to 4 or more, or minibatches to 3 or less", batch=3)
    compile_plan(ppo(minibatches=4), request("cpu-1x1", batch=4))


def test_groups_that_cannot_be_split_over_ranks_are_refused():
    pairs = changed(grpo(), "actor_train", options=(("reduce", "group-mean"), ("minibatches", 4)))
    refused(pairs, "minibatch of 1 groups cannot be split over 2 dp ranks; set batch to 8 or more", batch=7)
    compile_plan(pairs, request(batch=8))


def test_samples_that_cannot_be_split_over_ranks_are_refused():
    refused(sft(), "2 samples cannot be split over 4 dp ranks; set batch to 4", "cpu-1x4", batch=2)
    compile_plan(sft(), request("cpu-1x4", batch=4))


def test_training_on_a_side_stream_is_refused():
    graph = grpo()
    node = Node(train("eval_train", "actor", reduce="token-mean"), "eval_gen")
    refused(replace(graph, nodes=(*graph.nodes, node)), "is not trained; move it to stream 'actor_gen'")


def test_a_side_stream_may_have_batch_nodes_of_any_size():
    graph = grpo()
    node = Node(compute("eval_mean", "mean", Level.BATCH), "eval_gen")
    plan = compile_plan(replace(graph, nodes=(*graph.nodes, node)), request())
    assert "eval_mean" in dict(plan.schedule.orders)["all"]


def test_a_recipe_without_a_trained_stream_is_refused():
    graph = sft()
    streams = tuple(replace(stream, trained=False) for stream in graph.streams)
    refused(replace(graph, streams=streams), "no stream fed by 'data'")


def test_two_trained_streams_are_not_yet_run():
    graph = grpo()
    heldout = Stream("eval_gen", "eval_gen", "data", None, 1, trained=True)
    with pytest.raises(NotYetError, match="'actor_gen' and 'eval_gen'"):
        compile_plan(replace(graph, streams=(graph.streams[0], heldout)), request())


def test_staleness_rules_that_no_batch_can_meet_are_refused():
    refused(grpo(), "set schedule.drop_older_than to 2 or more", sync_every=3, drop_older_than=1)
    refused(
        grpo(),
        "schedule.queue is 1, but a batch has 4 groups; set schedule.queue to 4 or more",
        batch=4,
        queue=1,
    )
    refused(grpo(), "age_rule is off; remove one of them", drop_older_than=3, age_rule=False)


@pytest.mark.parametrize("rule", [{"age_rule": False}, {"drop_older_than": 2}, {"queue": 8}])
def test_staleness_rules_without_staleness_are_refused(rule: dict):
    """`test_state_async.py` shows that they change nothing. A shorter queue lets less be generated ahead."""
    settings = {"batch": 4, "sync_every": 2, **rule}
    (name,) = rule
    refused(grpo(), f"schedule.{name} is set, but schedule.max_staleness=0 trains all samples", **settings)
    compile_plan(grpo(), request(**settings, max_staleness=1))
    if name == "queue":
        compile_plan(grpo(), request(**settings | {"queue": 7}))


def test_a_machine_with_more_devices_than_any_has_is_a_typing_error():
    refused(
        grpo(),
        "cluster 'cpu-4x9000' has 9,000 devices per machine, and a machine has at most 1,024; write "
        "DEVICE-NODESxDEVICES, as in cpu-4x8",
        cluster="cpu-4x9000",
    )
    assert request("cpu-1x1024").cluster.num_devices == 1024
    refused(grpo(), "has 1,025 devices per machine", cluster="cpu-1x1025")
    refused(grpo(), "more than 65,536 devices, the most that can be planned", cluster="cpu-65x1024")
