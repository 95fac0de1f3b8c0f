"""Where and when a plan computes, and which bytes move, as facts.

What follows from other rows (the schedule's copy of the graph, say) is left out: whoever changes the one
changes the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hflow.plan.diff.rows import Lone, Rows, Subjects
from hflow.plan.diff.texts import Fact, devices, fact, layout, size

_NUMBERS = ("num_steps", "max_staleness", "sync_every", "max_concurrent", "max_refused_per_step")
_RULES = {"interrupt": True, "age_rule": True, "drop_older_than": None, "queue": None}
"""Rules of staleness, and what holds in plans that do not name them."""


def placed_facts(rows: Rows, lone: Lone) -> dict[str, Subjects]:
    """Facts by topic, causes before what follows from them."""
    schedule = rows["schedule"]
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
