"""Which part of a recipe is its evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.dsl import load_recipe
from hflow.graph.build import build_graph
from hflow.graph.evaluation import Sampling, evaluation_spec
from hflow.graph.ir import Graph
from hflow.graph.queries import reported_field

RECIPES = Path(__file__).parents[2] / "recipes"


def evaluation(name: str, *streams: str, sampling: Sampling | None = None) -> Graph:
    spec = load_recipe(RECIPES / f"{name}.py").spec()
    graph = build_graph(spec)
    scoring = {node.name for node in graph.nodes if reported_field(graph, node.name)}
    reduced, bodies = evaluation_spec(spec, graph, scoring, streams, sampling)
    assert set(bodies) == {node.name for node in reduced.nodes}
    return build_graph(reduced)


def test_held_out_streams_remain_and_nothing_learns() -> None:
    graph = evaluation("ppo")
    assert [node.name for node in graph.nodes] == ["eval_gen", "accuracy"]
    assert not graph.learns
    assert not any(stream.trained for stream in graph.streams)
    assert [dataset.name for dataset in graph.datasets] == ["heldout"]
    assert [(model.name, model.trainable) for model in graph.models] == [("actor", False)]


def test_a_reward_model_is_evaluated_with_its_group_node() -> None:
    graph = evaluation("reward_model")
    assert {node.name for node in graph.nodes} == {"eval_pair", "eval_inf", "prefers_chosen"}
    assert graph.stream("eval_pair").group == 2


def test_several_policies_are_evaluated_together() -> None:
    graph = evaluation("self_play")
    assert {stream.name for stream in graph.streams} == {"alice_eval", "bob_eval"}
    assert len(graph.models) == 2


def test_a_trained_stream_is_scored_without_its_filter() -> None:
    graph = evaluation("dapo", "actor_gen")
    names = {node.name for node in graph.nodes}
    assert "actor_gen" in names
    assert not any(returned.field == "keep" for node in graph.nodes for returned in node.spec.returns)
    assert not names & {"actor_train", "group_advantage", "eval_gen"}
    assert any(reported_field(graph, name) == "reward" for name in names)


def test_experts_are_not_recorded_where_no_node_of_the_evaluation_replays_them() -> None:
    spec = load_recipe(RECIPES / "grpo.py").spec()
    recorded = (
        replace(n, options=(*n.options, ("routing_replay", n.name == "actor_gen"))) for n in spec.nodes
    )
    graph = build_graph(replace(spec, nodes=tuple(recorded)))
    assert any(read.field == "routed_experts" for read in graph.node("actor_train").reads)
    reduced, _ = evaluation_spec(spec, graph, {"score"}, ("actor_gen",))
    assert not any(node.option("routing_replay") for node in reduced.nodes)
    build_graph(reduced)


def test_copies_draw_several_samples_of_each_prompt() -> None:
    graph = evaluation("grpo", sampling=Sampling(num_samples=5, temperature=0.7))
    greedy, sampled = graph.stream("eval_gen"), graph.stream("eval_gen_sampled")
    assert (greedy.group, sampled.group) == (1, 5)
    assert graph.node("eval_gen").spec.option("temperature") == 0
    assert graph.node("eval_gen_sampled").spec.option("temperature") == 0.7
    assert graph.node("accuracy_sampled").stream == "eval_gen_sampled"


def test_bad_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eval_gen'"):
        evaluation("grpo", "evalgen")
    with pytest.raises(ConfigError, match="generates no samples"):
        evaluation("reward_model", sampling=Sampling(2, 1.0))
    with pytest.raises(ConfigError, match="scores no sample"):
        evaluation("tool_sft")
