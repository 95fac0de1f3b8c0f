"""Where and when a plan computes, and which bytes move, as facts.

What follows from other rows (the schedule's copy of the graph, say) is left out: whoever changes the one
changes the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hflow.planner.diff.formatting import Fact, devices, fact, layout, plain, seconds, size
from hflow.planner.diff.plan_rows import Lone, Rows, Subjects, trained_models
from hflow.planner.serialise import without_directories

# -------------------- What a plan's JSON rows estimate, as facts: bytes, seconds, the period. No part of
# the digest.


TOPICS = ("forecast", "hardware", "workload", "memory", "traffic", "time", "period")


def estimates(rows: Rows, lone: Lone, with_rows: bool) -> dict[str, Subjects]:
    """Facts of the forecast by topic.

    Args:
        rows: the plan.
        lone: what the other plan has not, so that it is left out.
        with_rows: whether both plans have a forecast; without, only that this one has one or none.
    """
    forecast = rows["forecast"]
    if not with_rows or forecast is None:
        made = "none" if forecast is None else "made"
        return {"forecast": {"of bytes and seconds": {"": Fact(made, made)}}}
    return {
        "forecast": {"left out": {"": fact(forecast["missing"])}},
        "hardware": {part: _flat(figures) for part, figures in (rows["hardware"] or {}).items()},
        "workload": {stream: _flat(lengths) for stream, lengths in forecast["workload"]},
        "memory": dict(_peaks(forecast["memory"])),
        "traffic": {
            row["consumer"]: {"": Fact(row["num_bytes"], size(row["num_bytes"]))}
            for row in forecast["traffic"]
            if row["consumer"] not in lone.nodes
        },
        "time": {
            row["node"]: {"": Fact(row["seconds"], seconds(row["seconds"]))}
            for row in forecast["times"]
            if row["node"] not in lone.nodes
        },
        "period": dict(_period(forecast["period"])),
    }


def _flat(row: Mapping[str, Any]) -> dict[str, Fact]:
    """A row's values by key, those of a mapping in it by `key value`; a name stands for the whole."""
    flat: dict[str, Fact] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}": fact(item) for inner, item in value.items()}
        else:
            flat["" if key == "name" else key] = fact(value)
    return flat


def _peaks(phases: list[Rows]) -> Iterator[tuple[str, dict[str, Fact]]]:
    """The fullest phase of each group's fullest devices."""
    totals: dict[str, list[tuple[int, str]]] = {}
    for phase in phases:
        total = sum(item[1] for item in (*phase["resident"], *phase["transient"]))
        totals.setdefault(phase["group"], []).append((total, phase["phase"]))
    for group, found in totals.items():
        total, name = max(found, key=lambda item: item[0])
        yield f"peak of {group}", {"": Fact([total, name], f"{size(total)} in {name}")}


def _period(period: Rows | None) -> Iterator[tuple[str, dict[str, Fact]]]:
    if period is None:
        return
    yield "a step", {"": Fact(period["seconds"], seconds(period["seconds"]))}
    cycle = [[arc["node"], arc["why"], arc["lag"]] for arc in period["cycle"]]
    yield "critical cycle", {"": Fact(cycle, " > ".join(node for node, _, _ in cycle))}
    for group, share in period["idle"]:
        yield f"idle share of {group}", {"": Fact(share, f"{share:.0%}")}


# -------------------- What a plan computes, as facts: recipe, models, nodes, edges, settings.


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
            yield key, {"": fact(without_directories(value))}


_NUMBERS = ("num_steps", "max_staleness", "sync_every", "max_concurrent", "max_refused_per_step")
_RULES = {"interrupt": True, "age_rule": True, "drop_older_than": None, "queue": None}
"""Rules of staleness, and what holds in plans that do not name them."""


def placed_facts(rows: Rows, lone: Lone) -> dict[str, Subjects]:
    """Facts by topic, causes before what follows from them."""
    schedule = {**rows["schedule"], **rows["schedule"].get("settings", {})}  # older plans have no `settings`
    graph_nodes = {node["spec"]["name"] for node in rows["graph"]["nodes"]}
    return {
        "schedule": dict(_numbers(schedule)),
        "cluster": {key: {"": _cluster(key, value)} for key, value in rows["cluster"].items()},
        "group": {group["name"]: {"": _devices(group["devices"])} for group in rows["groups"]},
        "replica": {replica["name"]: _replica(replica) for replica in rows["replicas"]},
        "placement": {p["node"]: _placement(p) for p in rows["placements"] if p["node"] not in lone.nodes},
        "firing": {
            n["name"]: _firing(n, is_save=n["name"] not in graph_nodes)
            for n in schedule["nodes"]
            if n["name"] not in lone.nodes
        },
        "cut": {node: _cut(cut) for node, cut in rows["cuts"] if node not in lone.nodes},
        "order": dict(_orders(schedule)),
        "routing": dict(_routing(rows["routing"], lone)),
        "data": {r["consumer"]: _rule(r) for r in rows["rules"] if r["consumer"] not in lone.nodes},
        "weights": {f"{r['src']} -> {r['dst']}": _route(r) for r in rows["weights"]},
        "staleness": {"bound": {"": _bound(rows["staleness_bound"])}},
    }


def _numbers(schedule: Rows) -> Iterator[tuple[str, dict[str, Fact]]]:
    yield from ((key, {"": fact(schedule[key])}) for key in _NUMBERS)
    yield from ((key, {"": fact(schedule.get(key, held))}) for key, held in _RULES.items())
    for stream in schedule["streams"]:
        if stream["batch"] is not None:
            yield "batch", {"": fact(stream["batch"])}
        yield f"min_group of {stream['name']}", {"": fact(stream["min_group"])}


def _cluster(key: str, value: Any) -> Fact:
    return Fact(value, size(value)) if key == "memory_bytes" else fact(value)


def _devices(ids: list[int]) -> Fact:
    return Fact(ids, devices(ids))


def _replica(replica: Rows) -> dict[str, Fact]:
    return {
        "": Fact(replica["layout"], layout(replica["layout"])),
        "backend": fact(replica["backend"]),
        "group": fact(replica["group"]),
        "devices": _devices(replica["workers"]),
    }


def _placement(placement: Rows) -> dict[str, Fact]:
    on = placement["replicas"]
    return {
        "": Fact([placement["group"], on], ", ".join(on) or placement["group"] or "workers"),
        "dp-heads": _devices(placement["heads"]),
    }


def _firing(node: Rows, *, is_save: bool) -> dict[str, Fact]:
    """When a node fires; how often, for those that save: the others' cadence is in the graph."""
    fires = {"": Fact(node["level"], f"per {node['level']}")}
    return fires | ({"every": fact(node["every"]), "after": fact(node["after"])} if is_save else {})


def _cut(cut: Rows) -> dict[str, Fact]:
    return {"": fact(cut["minibatches"]), "epochs": fact(cut["epochs"]), "by_group": fact(cut["by_group"])}


def _orders(schedule: Rows) -> Iterator[tuple[str, dict[str, Fact]]]:
    shared = dict(schedule["shared"])
    for group, nodes in schedule["orders"]:
        yield group, {"": Fact(nodes, " > ".join(nodes)), "engines": fact(shared.get(group, []))}


def _routing(rows: list[Rows], lone: Lone) -> Iterator[tuple[str, dict[str, Fact]]]:
    """The workers of each replica's shards, of the source's data shards, and of the bare indices."""
    tables: dict[str, list[list[Any]]] = {}
    for row in rows:
        key = row["key"]
        name = "source" if key.startswith("__data") else "workers"
        owner = key.strip("()").split(", ")[0] if key.startswith("(") else name
        tables.setdefault(owner, []).append([key, row["worker"]])
    for owner, table in tables.items():
        if owner.partition("@")[0] not in lone.models:
            yield owner, {"": Fact(table, f"{_shards(table)} on {devices([worker for _, worker in table])}")}


def _shards(table: list[list[Any]]) -> str:
    """How many keys there are, for a replica by axis."""
    coords = [key.strip("()").split(", ")[1:] for key, _ in table if key.startswith("(")]
    if len(coords) < len(table):
        return f"{len(table)} keys"
    return " x ".join(str(max(map(int, axis)) + 1) for axis in zip(*coords, strict=True)) + " shards"


def _rule(rule: Rows) -> dict[str, Fact]:
    unit = "groups" if rule["by_group"] else "samples"
    split = "all to one" if rule["policy"] == "single" else f"{unit}, {rule['policy']}"
    return {
        "": Fact([rule["policy"], rule["by_group"]], split),
        "fields": fact(rule["fields"]),
        "stream": fact(rule["stream"]),
    }


def _route(route: Rows) -> dict[str, Fact]:
    return {
        "": fact(route["how"]),
        "moved": Fact(route["moved_bytes"], size(route["moved_bytes"])),
        "across machines": Fact(route["node_bytes"], size(route["node_bytes"])),
        "held already": Fact(route["held_bytes"], size(route["held_bytes"])),
        "rows": Fact([route["rows"], route["worker_sets"]], f"{len(route['rows'])} rows"),
    }


def _bound(versions: int | None) -> Fact:
    return Fact(versions, "unbounded" if versions is None else str(versions))
