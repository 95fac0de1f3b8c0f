"""What a plan computes, as facts: recipe, models, nodes, edges, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hflow.plan.diff.rows import Lone, Rows, Subjects, trained_models
from hflow.plan.diff.texts import Fact, fact, plain
from hflow.plan.serialise import portable

_OWN_NODE = ("name", "verb", "models", "body", "where", "knobs", "options")
"""Fields of a node's spec that have facts of their own, or none."""


def graph_facts(rows: Rows, lone: Lone) -> dict[str, Subjects]:
    """Facts by topic, causes before what follows from them."""
    graph = rows["graph"]
    return {
        "recipe": dict(_recipe(rows)),
        "stream": {stream["name"]: _stream(stream) for stream in graph["streams"]},
        "model": dict(_models(rows)),
        "shape": {m: _shape(sizes) for m, sizes in rows["shapes"] if m not in lone.models},
        "node": {node["spec"]["name"]: _node(node) for node in graph["nodes"]},
        "edge": dict(_edges(graph["edges"], lone)),
        "setting": dict(_settings(rows["settings"], lone)),
    }


def _stream(stream: Rows) -> dict[str, Fact]:
    return {"": fact(stream["source"])} | {key: fact(stream[key]) for key in ("dataset", "parent", "trained")}


def _recipe(rows: Rows) -> Iterator[tuple[str, dict[str, Fact]]]:
    graph = rows["graph"]
    yield "name", {"": fact(rows["recipe"])}
    yield "dataset", {"": fact(graph["dataset"])}
    yield "skipped", {"": fact(graph["skipped"])}
    for dataset in graph["datasets"]:
        text = ", ".join(f"{name}: {unit}" for name, unit in dataset["columns"])
        yield f"columns of {dataset['name']}", {"": Fact(dataset["columns"], text)}


def _models(rows: Rows) -> Iterator[tuple[str, dict[str, Fact]]]:
    trained = trained_models(rows)
    for model in rows["graph"]["models"]:
        state = "trained" if model["name"] in trained else "frozen"
        rest = {key: fact(model[key]) for key in ("head", "init_from")}
        yield model["name"], {"": fact(state), **rest}


def _shape(sizes: Rows) -> dict[str, Fact]:
    return {"": fact(sizes["family"])} | {key: fact(value) for key, value in sizes.items() if key != "family"}


def _node(node: Rows) -> dict[str, Fact]:
    """Attributes that a configuration may change begin with a dot, as in `actor_train.clip`."""
    spec = node["spec"]
    body = spec["body"]
    made = {
        "": fact(f"{spec['verb']}({', '.join(spec['models'])})"),
        "body": Fact(body["digest"], f"source {body['digest'][:8]}"),
        "name of the body": fact(f"{body['module']}.{body['qualname']}"),
    }
    made |= {
        f".{knob['name']}": Fact([knob["type"], knob["value"]], plain(knob["value"]))
        for knob in spec["knobs"]
    }
    made |= {f".{name}": fact(value) for name, value in spec["options"]}
    made |= {key: _listed(value) for key, value in spec.items() if key not in _OWN_NODE}
    return made | {key: _listed(node[key]) for key in ("stream", "reads", "unbound")}


def _listed(value: Any) -> Fact:
    """Rows by the names of what they speak of."""
    rows = value if isinstance(value, list) else []
    if rows and all(isinstance(row, Mapping) and "field" in row for row in rows):
        return Fact(value, ", ".join(dict.fromkeys(row["field"] for row in rows)))
    return fact(value)


def _edges(edges: list[Rows], lone: Lone) -> Iterator[tuple[str, dict[str, Fact]]]:
    for edge in edges:
        if lone.nodes.isdisjoint((edge["src"], edge["dst"])):
            of = f" of {edge['model']}" if edge["model"] else ""
            lag = f"lag {'at most ' if edge['at_most'] else ''}{edge['lag']}"
            known = {"": Fact([edge["lag"], edge["at_most"]], lag), "fields": fact(edge["fields"])}
            yield f"{edge['kind']}{of}, {edge['src']} -> {edge['dst']}", known


def _settings(settings: list[Any], lone: Lone) -> Iterator[tuple[str, dict[str, Fact]]]:
    for key, value in settings:
        section, _, rest = key.partition(".")
        if section != "models" or rest.partition(".")[0] not in lone.models:
            yield key, {"": fact(portable(value))}
