"""Streams, bindings, edges and lags of the recipes in `tests/graphs/good`."""

from pathlib import Path

import pytest

from hflow.config.schema import ScheduleConfig
from hflow.dsl import apply_overrides, load_recipe
from hflow.graph.build import build_graph
from hflow.graph.edges import nodes_after_batch, same_step_order
from hflow.graph.ir import Edge, EdgeKind, Graph, Read, Stream
from hflow.graph.queries import keeps_groups_whole
from hflow.graph.render import render_text, stages
from hflow.planner.plan.staleness import max_lag
from hflow.types import Unit

GOOD = Path(__file__).parents[1] / "graphs" / "good"


def graph_of(name: str, **overrides: dict) -> Graph:
    return build_graph(apply_overrides(load_recipe(GOOD / f"{name}.py").spec(), overrides))


def edges(graph: Graph, kind: EdgeKind) -> set[tuple[str, str]]:
    return {(edge.src, edge.dst) for edge in graph.edges if edge.kind is kind}


def read(graph: Graph, node: str, parameter: str) -> Read:
    return next(read for read in graph.node(node).reads if read.parameter == parameter)


def test_the_nodes_of_ppo_run_in_order():
    graph = graph_of("ppo")
    assert [node.name for node in graph.nodes] == [
        *("actor_gen", "score", "actor_inf", "ref_inf", "critic_inf", "kl_reward", "gae"),
        *("critic_train", "actor_train"),
    ]
    depth = stages(graph)
    assert all(depth[edge.src] < depth[edge.dst] for edge in graph.edges if edge.lag == 0)
    assert not same_step_order(graph.edges).find_cycle()


def test_data_edges_of_ppo():
    graph = graph_of("ppo")
    assert ("ref_inf", "kl_reward") in edges(graph, EdgeKind.DATA)
    assert ("actor_gen", "critic_inf") in edges(graph, EdgeKind.DATA)
    assert Edge(EdgeKind.DATA, "gae", "critic_train", fields=("value_targets",)) in graph.edges
    tokens = next(e for e in graph.edges if (e.src, e.dst) == ("actor_gen", "actor_train") and not e.model)
    assert tokens.fields == ("behav_logprobs", "input_ids", "loss_mask", "versions")


def test_weights_of_ppo_have_lag_one_and_generation_at_most():
    graph = graph_of("ppo")
    lags = {(e.src, e.dst): e.at_most for e in graph.edges if e.kind is EdgeKind.WEIGHTS}
    assert lags == {
        ("actor_train", "actor_gen"): True,
        ("actor_train", "actor_inf"): False,
        ("actor_train", "actor_train"): False,
        ("critic_train", "critic_inf"): False,
        ("critic_train", "critic_train"): False,
    }
    assert {e.lag for e in graph.edges if e.kind is EdgeKind.WEIGHTS} == {1}


def test_readers_run_before_the_node_that_overwrites_their_weights():
    assert edges(graph_of("ppo"), EdgeKind.OVERWRITE) == {
        ("actor_inf", "actor_train"),
        ("critic_inf", "critic_train"),
    }
    assert edges(graph_of("ema"), EdgeKind.OVERWRITE) == {("ref_inf", "ema"), ("ema", "actor_train")}


@pytest.mark.parametrize(("staleness", "sync_every", "lag"), [(0, 1, 1), (2, 1, 3), (1, 4, 8)])
def test_largest_lag_of_generation(staleness: int, sync_every: int, lag: int):
    weights = Edge(EdgeKind.WEIGHTS, "actor_train", "actor_gen", lag=1, model="actor", at_most=True)
    settings = ScheduleConfig(max_staleness=staleness, sync_every=sync_every)
    assert max_lag(weights, settings) == lag
    exact = Edge(EdgeKind.WEIGHTS, "actor_train", "actor_inf", lag=1, model="actor")
    assert max_lag(exact, settings) == 1


def test_streams_of_the_tool_agent():
    graph = graph_of("tool_agent")
    assert graph.streams == (
        Stream("agent", "agent", "train", None, 8, trained=True),
        Stream("rm_view", "rm_view", None, "agent", 8, trained=True),
    )
    assert read(graph, "total", "rm_score").stream == "rm_view"
    assert read(graph, "rm_view", "messages") == Read(
        "messages", "messages", "agent", "agent", Unit.MESSAGES, Unit.JSON, "list[dict]"
    )
    assert graph.node("rew_inf").stream == "rm_view"


def test_a_derived_stream_sees_its_parents_columns():
    graph = graph_of("tool_agent")
    assert read(graph, "judge", "answer").producer == "agent"
    assert read(graph, "judge", "prompt").stream == "agent"


def test_two_players_have_two_streams_with_shared_fields():
    graph = graph_of("game")
    assert [(s.name, s.source, s.parent, s.trained) for s in graph.streams] == [
        ("alice_play", "game", None, True),
        ("bob_play", "game", None, True),
    ]
    assert read(graph, "alice_reward", "winner").stream == "alice_play"
    assert read(graph, "bob_reward", "winner").stream == "bob_play"
    assert read(graph, "bob_train", "prox_logprobs").producer == "bob_inf"
    assert read(graph, "alice_train", "advantages").producer == "alice_advantage"


def test_evaluation_is_a_stream_of_its_own_that_no_step_waits_for():
    graph = graph_of("eval_gen")
    assert graph.stream("eval_gen") == Stream("eval_gen", "eval_gen", "heldout", None, 1, every=10)
    later = same_step_order(graph.edges).descendants("eval_gen")
    assert later == {"eval_score"}


def test_prox_none_reads_behav_and_skips_the_unread_node():
    graph = graph_of("ppo", actor_train={"prox": "none"})
    assert graph.skipped == ("actor_inf",)
    assert read(graph, "actor_train", "prox_logprobs").field == "behav_logprobs"
    assert "actor_inf" not in {node.name for node in graph.nodes}
    assert all("actor_inf" not in (edge.src, edge.dst) for edge in graph.edges)


def test_prox_loglinear_is_made_by_the_train_node():
    graph = graph_of("ppo", actor_train={"prox": "loglinear"})
    assert graph.skipped == ("actor_inf",)
    assert read(graph, "actor_train", "prox_logprobs").producer == "actor_train"
    assert read(graph, "actor_train", "@versions").field == "versions"
    assert read(graph, "actor_train", "@behav_logprobs").producer == "actor_gen"


def test_prox_metrics_recomputes_and_reads_both_log_probs():
    graph = graph_of("ppo", actor_train={"prox": "metrics"})
    assert read(graph, "actor_train", "prox_logprobs").producer == "actor_inf"
    assert read(graph, "actor_train", "@versions").producer == "actor_gen"


def test_a_mask_is_a_read_of_its_own():
    mask = read(graph_of("dapo"), "actor_train", "@mask")
    assert (mask.field, mask.producer, mask.source_unit, mask.unit) == (
        *("train_mask", "score"),
        *(Unit.SEQUENCE, Unit.TOKEN),
    )


SUMS = """
from hflow import *

actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    return 1.0


@train(actor, reduce="token-mean")
def loss(out: Output, reward: PerSequence, seqs: Sequences) -> PerToken:
    return -out.logprobs * seqs.widen(of_group(reward, seqs))


def of_group(x, seqs):
    return (lambda: seqs.SUM(x))()


recipe = Recipe("sums", Dataset(prompt=Text), [use(nodes.actor_gen, actor), score, loss])
"""


@pytest.mark.parametrize("annotation", ["Sequences", "SeparateSequences"])
@pytest.mark.parametrize(("called", "is_read"), [("group_sum", True), ("members", True), ("mean", False)])
def test_a_body_that_sums_over_groups_reads_them(tmp_path, called, is_read, annotation):
    body = SUMS.replace("SUM", called).replace("seqs: Sequences", f"seqs: {annotation}")
    (tmp_path / "sums.py").write_text(f"from hflow.types import SeparateSequences\n{body}")
    node = build_graph(load_recipe(tmp_path / "sums.py").spec()).node("loss")
    reads = [read for read in node.reads if read.field == "group"]
    assert bool(reads) == is_read
    assert keeps_groups_whole(node) == (is_read or annotation == "Sequences")


def test_a_listed_actor_inf_replaces_the_implied_one():
    spec = load_recipe(GOOD / "ppo.py").spec()
    assert [node.name for node in spec.nodes if node.implicit] == ["actor_train_prox"]
    assert "actor_train_prox" not in {node.name for node in build_graph(spec).nodes}


def test_state_is_an_edge_of_lag_one_to_itself():
    graph = graph_of("own_kind")
    assert Edge(EdgeKind.DATA, "adaptive_kl", "adaptive_kl", lag=1, fields=("state",)) in graph.edges


def test_nodes_that_wait_for_the_batch():
    assert nodes_after_batch(graph_of("dapo")) == {"group_advantage", "actor_inf", "actor_train"}
    graph = graph_of("dapo", has_spread={}, score={})
    assert "has_spread" not in nodes_after_batch(graph)
    cadenced = graph_of("eval_gen", eval_score={"every": 2})
    assert "eval_score" in nodes_after_batch(cadenced)
    assert "eval_gen" not in nodes_after_batch(cadenced)


def test_unbound_parameters_are_noted_without_fields_that_the_node_reads():
    graph = graph_of("dapo")
    assert graph.node("actor_train").unbound == ("ref_logprobs", "behav_weights", "entropy_weights")
    assert graph.notes == (
        "actor_train(ref_logprobs) keeps its default",
        "actor_train(behav_weights) keeps its default",
        "actor_train(entropy_weights) keeps its default",
    )


def test_a_field_that_a_parameter_and_an_option_read_is_printed_once():
    (line,) = (
        line
        for line in render_text(graph_of("dapo")).splitlines()
        if "prox_logprobs" in line and "reads" in line
    )
    assert line.count(" behav_logprobs,") == 1
    assert "@" not in line


def test_the_same_file_gives_the_same_graph():
    assert graph_of("tool_agent") == graph_of("tool_agent")
