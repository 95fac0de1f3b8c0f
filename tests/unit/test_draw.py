"""Drawings of graphs and plans are valid Graphviz and Mermaid sources, and leave nothing out."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from model_configs import model_config
from plan_graphs import agent, changed, ema, grpo, ppo, request, sft

from hflow.config.schema import ModelConfig
from hflow.graph.draw import to_dot, to_mermaid
from hflow.graph.ir import Edge, EdgeKind, Graph
from hflow.planner.compile import compile_plan
from hflow.planner.plan.rows import Plan
from hflow.report.text.graph import plan_dot, plan_mermaid

STRING = r'"(?:[^"\\]|\\.)*"'
ATTRIBUTE = rf"\w+=(?:\w+|{STRING})"
ATTRIBUTES = rf"\[{ATTRIBUTE}(?:, {ATTRIBUTE})*\]"
DOT = {
    "digraph": re.compile(rf"digraph {STRING} \{{"),
    "subgraph": re.compile(r"subgraph cluster_\d+ \{"),
    "end": re.compile(r"\}"),
    "set": re.compile(rf"{ATTRIBUTE};"),
    "default": re.compile(rf"(?:node|edge) {ATTRIBUTES};"),
    "node": re.compile(rf"({STRING}) {ATTRIBUTES};"),
    "edge": re.compile(rf"({STRING}) -> ({STRING}) {ATTRIBUTES};"),
}
TEXT = r'"[^"]*"'
MERMAID = {
    "flowchart": re.compile(r"flowchart LR"),
    "subgraph": re.compile(rf"subgraph group\.\d+\[{TEXT}\]"),
    "end": re.compile(r"end"),
    "class": re.compile(r"classDef (\w+) fill:#[0-9a-f]{6},color:#[0-9a-f]{6}"),
    "node": re.compile(rf"([\w.]+)\[{TEXT}\]:::(\w+)"),
    "edge": re.compile(rf"([\w.]+) (?:-->|==>|-\.->)\|{TEXT}\| ([\w.]+)"),
}
"""The part of both grammars that drawings use, a statement a line."""


def parsed(source: str, grammar: dict[str, re.Pattern[str]]) -> dict[str, list[tuple[str, ...]]]:
    """The statements by kind; a line that is none of them fails."""
    found: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in grammar}
    for line in source.splitlines():
        kinds = [kind for kind, form in grammar.items() if form.fullmatch(line.strip())]
        assert len(kinds) == 1, line
        match = grammar[kinds[0]].fullmatch(line.strip())
        assert match is not None
        found[kinds[0]].append(match.groups())
    return found


def plan_of(graph: Graph, **models: ModelConfig) -> Plan:
    return compile_plan(graph, request(models=models, batch=64, cluster="h100-1x8"))


GRAPHS = [grpo(), ppo(), agent(), sft(), ema()]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_dot_parses_and_leaves_nothing_out(graph: Graph):
    plan = plan_of(graph)
    found = parsed(plan_dot(plan), DOT)
    assert len(found["end"]) == len(found["digraph"]) + len(found["subgraph"])
    names = [name.strip('"') for (name,) in found["node"]]
    assert sorted(names) == sorted(placement.node for placement in plan.placements)
    assert len(found["edge"]) == len(graph.edges) + len(plan.order)
    assert {end.strip('"') for edge in found["edge"] for end in edge} <= set(names)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_mermaid_parses_and_leaves_nothing_out(graph: Graph):
    plan = plan_of(graph)
    found = parsed(plan_mermaid(plan), MERMAID)
    assert len(found["end"]) == len(found["subgraph"])
    names = [name for name, _ in found["node"]]
    assert sorted(names) == sorted(placement.node for placement in plan.placements)
    assert len(found["edge"]) == len(graph.edges) + len(plan.order)
    assert {end for edge in found["edge"] for end in edge} <= set(names)
    assert {kind for _, kind in found["node"]} == {kind for (kind,) in found["class"]}


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_graphviz_accepts_the_source(graph: Graph):
    source = plan_dot(plan_of(graph))
    done = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_device_group_holds_its_nodes():
    plan = plan_of(grpo(), actor=model_config("d4", "d4", "train", "gen"))
    lines = [line.strip() for line in plan_dot(plan).splitlines()]
    ends = [i for i, line in enumerate(lines) if line == "}"]
    for title, inside in (
        ("group train: devices 0-3", {"ref_inf", "group_advantage", "actor_train", "save.actor"}),
        ("group gen: devices 4-7", {"actor_gen", "eval_gen"}),
    ):
        start = lines.index(f'label="{title}";')
        stop = next(end for end in ends if end > start)
        assert {line.split('"')[1] for line in lines[start + 1 : stop]} == inside
    assert 'subgraph group.1["group gen: devices 4-7"]' in plan_mermaid(plan)


def test_edges_show_kinds_and_lags():
    dot, mermaid = plan_dot(plan_of(ppo())), plan_mermaid(plan_of(ppo()))
    for label, line in {
        "weights of critic, lag 1": "==>",
        "weights of actor, lag ≤ 1 + max_staleness": "==>",
        "before critic is overwritten": "-.->",
        "order of all": "-.->",
        "order of all, lag 1": "-.->",
    }.items():
        assert f'label="{label}"' in dot
        assert f'{line}|"{label}"|' in mermaid
    (wrap,) = [line for line in dot.splitlines() if "order of all, lag 1" in line]
    assert wrap.strip().startswith('"save.actor" -> "actor_inf"')
    assert "constraint=false" in wrap
    assert "save(critic)" in dot


def test_a_graph_without_a_plan_is_drawn_too():
    assert parsed(to_dot(grpo()), DOT)["subgraph"] == []
    assert len(parsed(to_mermaid(grpo()), MERMAID)["node"]) == len(grpo().nodes)


def test_reserved_names_of_mermaid_are_escaped():
    graph = grpo()
    nodes = tuple(
        replace(node, spec=replace(node.spec, name="end")) if node.name == "score" else node
        for node in graph.nodes
    )
    edges = (Edge(EdgeKind.DATA, "actor_gen", "end", fields=("completion",)),)
    found = parsed(to_mermaid(replace(graph, nodes=nodes, edges=edges)), MERMAID)
    assert ("end_", "compute_") in found["node"]
    assert found["edge"] == [("actor_gen", "end_")]


def test_custom_verbs_and_quotes_are_escaped():
    graph = changed(grpo(), "score", kind="my audit")
    odd = replace(graph, name='a "b" \\c', edges=(Edge(EdgeKind.DATA, "score", "score", fields=('#"x"',)),))
    assert parsed(to_dot(odd), DOT)["edge"] == [('"score"', '"score"')]
    assert ("score", "my_audit_") in parsed(to_mermaid(odd), MERMAID)["node"]
    assert '|"#35;#quot;x#quot;"|' in to_mermaid(odd)
