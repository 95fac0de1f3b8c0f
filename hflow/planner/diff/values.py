"""The values of a plan that a comparison shows: what it computes, where and when, and what it estimates.

They are read from a plan's JSON rows, and shown as short texts. What follows from other rows, such as the
schedule's copy of the graph, is left out, as it would repeat their differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.base.text import format_bytes_evenly
from hflow.planner.plan.serialise import without_directories
from hflow.shapes.layout import Layout

ABSENT = "none"
_NUM_RANGES = 6
"""Ranges of devices that are written out."""


@dataclass(frozen=True)
class ShownValue:
    """A value of a plan, and how it is shown."""

    value: Any
    text: str
    exact: str | None = None
    """A longer text, for a value that differs from one with the same text; None: `value` as JSON."""


def shown(value: Any) -> ShownValue:
    """Return a value that is shown as it is."""
    return ShownValue(value, format_plain(value))


def format_plain(value: Any) -> str:
    """Return a JSON value as short text: names and numbers without quotes, lists with commas."""
    if value is None or value == []:
        return ABSENT
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(format_plain, value))
    return json.dumps(value, ensure_ascii=False)


def format_devices(ids: Sequence[int]) -> str:
    """Return devices in their order, evenly spaced ones as ranges: `0-3 6 5`, `0-60 by 4`."""
    texts, start = [], 0
    while start < len(ids):
        stop = _evenly_spaced(ids, start)
        step = ids[start + 1] - ids[start] if stop > start + 1 else 1
        if stop - start < 3 and step != 1:
            stop = start + 1
        texts.append(_range(ids[start], ids[stop - 1], step))
        start = stop
    more = [f"... ({len(ids)})"] if len(texts) > _NUM_RANGES else []
    return " ".join([*texts[:_NUM_RANGES], *more]) or ABSENT


def _evenly_spaced(ids: Sequence[int], start: int) -> int:
    """Return the end of the longest evenly spaced run from `start` on."""
    stop = min(start + 2, len(ids))
    while stop < len(ids) and ids[stop] - ids[stop - 1] == ids[start + 1] - ids[start] > 0:
        stop += 1
    return stop


def _range(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"


def shown_bytes(num_bytes: int) -> ShownValue:
    """Return bytes as a value that is shown in a larger unit."""
    return ShownValue(num_bytes, format_bytes_evenly(num_bytes), f"{num_bytes:,} B")


def format_rounded_seconds(value: float) -> str:
    """Format seconds with three significant digits: plans whose seconds have equal texts count as equal."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_layout(text: str) -> str:
    """Return a layout without axes of size 1: `d2t1p1` is `d2`, and a single device is `d1`."""
    whole = Layout.parse(text)
    axes = {
        "d": whole.data,
        "t": whole.tensor,
        "p": whole.pipe,
        "c": whole.context,
        "e": whole.expert,
        "r": whole.replicate,
    }
    return "".join(f"{axis}{num}" for axis, num in axes.items() if num > 1) or "d1"


def is_equal(before: Any, after: Any) -> bool:
    """Return whether two JSON values have equal texts; 1, 1.0 and true do not."""
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def first_difference(before: Any, after: Any, path: str = "") -> tuple[str, Any, Any]:
    """Return the first path at which two JSON values differ, and both values there."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        key = next(k for k in {**before, **after} if not _have_equal(before, after, k))
        return first_difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        place = next(i for i, pair in enumerate(zip(before, after, strict=True)) if not is_equal(*pair))
        return first_difference(before[place], after[place], f"{path}[{place}]")
    return path, before, after


def _have_equal(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    return key in before and key in after and is_equal(before[key], after[key])


def distinct_texts(before: ShownValue, after: ShownValue) -> tuple[str, str]:
    """Return different texts for two different values."""
    if before.text != after.text:
        return before.text, after.text
    if before.exact is not None and after.exact is not None:
        return before.exact, after.exact
    path, one, other = first_difference(before.value, after.value)
    if isinstance(one, list) and isinstance(other, list):
        one, other = f"{len(one)} entries", f"{len(other)} entries"
    at = f"{path}: " if path else ""
    return f"{before.text} ({at}{json.dumps(one)})", f"{after.text} ({at}{json.dumps(other)})"


Rows = Mapping[str, Any]
"""`to_json(plan)`, or the contents of a plan file."""

Subjects = dict[str, dict[str, ShownValue]]
"""Subject -> attribute -> value."""


@dataclass(frozen=True)
class Unmatched:
    """Nodes and models that only one of two plans has. Their other values are not compared."""

    nodes: frozenset[str]
    models: frozenset[str]


def node_names(rows: Rows) -> frozenset[str]:
    """Return the nodes of the graph and those that save models."""
    return frozenset(placement["node"] for placement in rows["placements"])


def model_names(rows: Rows) -> frozenset[str]:
    """Return the models of the graph."""
    return frozenset(model["name"] for model in rows["graph"]["models"])


def trained_models(rows: Rows) -> frozenset[str]:
    """Return the models in a checkpoint: those that a node writes."""
    graph = rows["graph"]
    written = {model for node in graph["nodes"] for model in node["spec"]["writes_weights"]}
    return frozenset(written | {model["name"] for model in graph["models"] if model["trainable"]})


ESTIMATED_TOPICS = ("forecast", "hardware", "workload", "memory", "traffic", "time", "period")
ROUNDED_TOPICS = ("memory", "traffic", "time", "period")
"""Topics of estimates that are compared by their texts: any change of a plan changes their last digits."""


def estimated_values(rows: Rows, unmatched: Unmatched, with_rows: bool) -> dict[str, Subjects]:
    """Return the values of the forecast by topic. They are not part of the digest.

    `unmatched` rows, which only one plan has, are left out. Without forecasts of both plans, `with_rows`, the
    only value is whether this one has one.
    """
    forecast = rows["forecast"]
    if not with_rows or forecast is None:
        made = "none" if forecast is None else "made"
        return {"forecast": {"of bytes and seconds": {"": ShownValue(made, made)}}}
    return {
        "forecast": {"left out": {"": shown(forecast["missing"])}},
        "hardware": {part: _flat(figures or {}) for part, figures in (rows["hardware"] or {}).items()},
        "workload": {stream: _flat(lengths) for stream, lengths in forecast["workload"]},
        "memory": dict(_peaks(forecast["memory"])),
        "traffic": {
            row["consumer"]: {"": shown_bytes(row["num_bytes"])}
            for row in forecast["traffic"]
            if row["consumer"] not in unmatched.nodes
        },
        "time": {
            row["node"]: {"": ShownValue(row["seconds"], format_rounded_seconds(row["seconds"]))}
            for row in forecast["times"]
            if row["node"] not in unmatched.nodes
        },
        "period": dict(_period(forecast["period"])),
    }


def _flat(row: Mapping[str, Any]) -> dict[str, ShownValue]:
    """Return a row's values by key, nested ones by `key inner`. The name has an empty key."""
    flat: dict[str, ShownValue] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}".rstrip(): item for inner, item in _flat(value).items()}
        else:
            flat["" if key == "name" else key] = shown(value)
    return flat


def _peaks(phases: list[Rows]) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    """Yield the phase of each group that needs most memory."""
    totals: dict[str, list[tuple[int, str]]] = {}
    for phase in phases:
        total = sum(item[1] for item in (*phase["resident"], *phase["transient"]))
        totals.setdefault(phase["group"], []).append((total, phase["phase"]))
    for group, found in totals.items():
        total, name = max(found, key=lambda item: item[0])
        yield f"peak of {group}", {"": ShownValue([total, name], f"{format_bytes_evenly(total)} in {name}")}


def _period(period: Rows | None) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    if period is None:
        return
    step = max(period["seconds"], period.get("simulated") or 0.0)
    yield "a step", {"": ShownValue(step, format_rounded_seconds(step))}
    cycle = [[arc["node"], arc["why"], arc["lag"]] for arc in period["cycle"]]
    yield "critical cycle", {"": ShownValue(cycle, " > ".join(node for node, _, _ in cycle))}
    for group, share in period["idle"]:
        yield f"idle share of {group}", {"": ShownValue(share, f"{share:.0%}")}


_OWN_NODE = ("name", "verb", "kind", "models", "body", "where", "knobs", "options")
"""Fields of a node's spec that are shown separately or not at all."""


def graph_values(rows: Rows, unmatched: Unmatched) -> dict[str, Subjects]:
    """Return values by topic, causes before their consequences."""
    graph = rows["graph"]
    return {
        "recipe": dict(_recipe(rows)),
        "stream": {stream["name"]: _stream(stream) for stream in graph["streams"]},
        "model": dict(_models(rows)),
        "shape": {m: _shape(sizes) for m, sizes in rows["shapes"] if m not in unmatched.models},
        "node": {node["spec"]["name"]: _node(node) for node in graph["nodes"]},
        "edge": dict(_edges(graph["edges"], unmatched)),
        "setting": dict(_settings(rows["settings"], unmatched))
        | {"deterministic": {"": shown(rows.get("deterministic", False))}},
    }


def _stream(stream: Rows) -> dict[str, ShownValue]:
    return {"": shown(stream["source"])} | {
        key: shown(stream[key]) for key in ("dataset", "parent", "trained")
    }


def _recipe(rows: Rows) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    graph = rows["graph"]
    yield "name", {"": shown(rows["recipe"])}
    yield "dataset", {"": shown(graph["dataset"])}
    yield "skipped", {"": shown(graph["skipped"])}
    for dataset in graph["datasets"]:
        text = ", ".join(f"{name}: {unit}" for name, unit in dataset["columns"])
        yield f"columns of {dataset['name']}", {"": ShownValue(dataset["columns"], text)}


def _models(rows: Rows) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    trained = trained_models(rows)
    for model in rows["graph"]["models"]:
        state = "trained" if model["name"] in trained else "frozen"
        rest = {key: shown(model[key]) for key in ("head", "init_from")}
        yield model["name"], {"": shown(state), **rest}


def _shape(sizes: Rows) -> dict[str, ShownValue]:
    return {"": shown(sizes["family"])} | _flat({k: v for k, v in sizes.items() if k != "family"})


def _node(node: Rows) -> dict[str, ShownValue]:
    """Return a node's values. Those that a configuration can change begin with a dot, as `.clip`."""
    spec = node["spec"]
    body = spec["body"]
    made = {
        "": shown(f"{spec.get('kind') or spec['verb']}({', '.join(spec['models'])})"),
        "body": ShownValue(body["digest"], f"source {body['digest'][:8]}"),
        "name of the body": shown(f"{body['module']}.{body['qualname']}"),
    }
    made |= {
        f".{knob['name']}": ShownValue([knob["type"], knob["value"]], format_plain(knob["value"]))
        for knob in spec["knobs"]
    }
    made |= {f".{name}": shown(value) for name, value in spec["options"]}
    made |= {key: _listed(value) for key, value in spec.items() if key not in _OWN_NODE}
    return made | {key: _listed(node[key]) for key in ("stream", "reads", "unbound")}


def _listed(value: Any) -> ShownValue:
    """Show rows by the names of their fields."""
    rows = value if isinstance(value, list) else []
    if rows and all(isinstance(row, Mapping) and "field" in row for row in rows):
        return ShownValue(value, ", ".join(dict.fromkeys(row["field"] for row in rows)))
    return shown(value)


def _edges(edges: list[Rows], unmatched: Unmatched) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    for edge in edges:
        if unmatched.nodes.isdisjoint((edge["src"], edge["dst"])):
            of = f" of {edge['model']}" if edge["model"] else ""
            lag = f"lag {'at most ' if edge['at_most'] else ''}{edge['lag']}"
            known = {"": ShownValue([edge["lag"], edge["at_most"]], lag), "fields": shown(edge["fields"])}
            yield f"{edge['kind']}{of}, {edge['src']} -> {edge['dst']}", known


def _settings(settings: list[Any], unmatched: Unmatched) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    for key, value in settings:
        section, _, rest = key.partition(".")
        if section != "models" or rest.partition(".")[0] not in unmatched.models:
            yield key, {"": shown(without_directories(value))}


_NUMBERS = ("max_staleness", "sync_every", "max_concurrent", "max_refused_per_step")
_RULES = {"interrupt": True, "age_rule": True, "drop_older_than": None, "queue": None}
"""Rules of staleness, with their values in older plans, which do not have them."""


def placement_values(rows: Rows, unmatched: Unmatched) -> dict[str, Subjects]:
    """Return values by topic, causes before their consequences."""
    schedule = {**rows["schedule"], **rows["schedule"].get("settings", {})}  # older plans have no `settings`
    graph_nodes = {node["spec"]["name"] for node in rows["graph"]["nodes"]}
    return {
        "schedule": dict(_numbers(schedule)),
        "cluster": {key: {"": _cluster(key, value)} for key, value in rows["cluster"].items()},
        "group": {group["name"]: {"": _devices(group["devices"])} for group in rows["groups"]},
        "replica": {replica["name"]: _replica(replica) for replica in rows["replicas"]},
        "placement": {
            p["node"]: _placement(p) for p in rows["placements"] if p["node"] not in unmatched.nodes
        },
        "firing": {
            n["name"]: _firing(n, is_save=n["name"] not in graph_nodes)
            for n in schedule["nodes"]
            if n["name"] not in unmatched.nodes
        },
        "cut": {node: _cut(cut) for node, cut in rows["cuts"] if node not in unmatched.nodes},
        "order": dict(_orders(schedule)),
        "routing": dict(_routing(rows["routing"], unmatched)),
        "data": {r["consumer"]: _rule(r) for r in rows["rules"] if r["consumer"] not in unmatched.nodes},
        "weights": {f"{r['src']} -> {r['dst']}": _route(r) for r in rows["weights"]},
        "staleness": {"bound": {"": _bound(rows["staleness_bound"])}},
    }


def _numbers(schedule: Rows) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    yield "steps", {"": shown(schedule["num_steps"])}
    yield from ((key, {"": shown(schedule[key])}) for key in _NUMBERS)
    yield from ((key, {"": shown(schedule.get(key, default))}) for key, default in _RULES.items())
    for stream in schedule["streams"]:
        if stream["batch"] is not None:
            yield "batch", {"": shown(stream["batch"])}
        yield f"min_group of {stream['name']}", {"": shown(stream["min_group"])}


def _cluster(key: str, value: Any) -> ShownValue:
    return shown_bytes(value) if key == "memory_bytes" else shown(value)


def _devices(ids: list[int]) -> ShownValue:
    return ShownValue(ids, format_devices(ids))


def _replica(replica: Rows) -> dict[str, ShownValue]:
    return {
        "": ShownValue(replica["layout"], format_layout(replica["layout"])),
        "backend": shown(replica["backend"]),
        "group": shown(", ".join(replica["groups"])),
        "devices": _devices(replica["workers"]),
    }


def _placement(placement: Rows) -> dict[str, ShownValue]:
    on = placement["replicas"]
    return {
        "": ShownValue(
            [", ".join(placement["groups"]), on], ", ".join(on or placement["groups"]) or "workers"
        ),
        "dp-heads": _devices(placement["heads"]),
    }


def _firing(node: Rows, *, is_save: bool) -> dict[str, ShownValue]:
    """Return a node's level, and how often it runs if it saves. For other nodes, the graph has that."""
    fires = {"": ShownValue(node["level"], f"per {node['level']}")}
    return fires | ({"every": shown(node["every"]), "after": shown(node["after"])} if is_save else {})


def _cut(cut: Rows) -> dict[str, ShownValue]:
    return {"": shown(cut["minibatches"]), "epochs": shown(cut["epochs"]), "by_group": shown(cut["by_group"])}


def _orders(schedule: Rows) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    shared = dict(schedule["shared"])
    for group, nodes in schedule["orders"]:
        yield group, {"": ShownValue(nodes, " > ".join(nodes)), "engines": shown(shared.get(group, []))}


def _routing(rows: list[Rows], unmatched: Unmatched) -> Iterator[tuple[str, dict[str, ShownValue]]]:
    """Yield the workers of each replica's shards, of the source's data shards, and of plain indices."""
    tables: dict[str, list[list[Any]]] = {}
    for row in rows:
        key = row["key"]
        name = "source" if key.startswith("__data") else "workers"
        owner = key.strip("()").split(", ")[0] if key.startswith("(") else name
        tables.setdefault(owner, []).append([key, row["worker"]])
    for owner, table in tables.items():
        if owner.partition("@")[0] not in unmatched.models:
            yield (
                owner,
                {
                    "": ShownValue(
                        table, f"{_shards(table)} on {format_devices([worker for _, worker in table])}"
                    )
                },
            )


def _shards(table: list[list[Any]]) -> str:
    """Return the number of keys; for a replica, by axis."""
    coords = [key.strip("()").split(", ")[1:] for key, _ in table if key.startswith("(")]
    if len(coords) < len(table):
        return f"{len(table)} keys"
    return " x ".join(str(max(map(int, axis)) + 1) for axis in zip(*coords, strict=True)) + " shards"


def _rule(rule: Rows) -> dict[str, ShownValue]:
    unit = "groups" if rule["by_group"] else "samples"
    split = "all to one" if rule["policy"] == "single" else f"{unit}, {rule['policy']}"
    return {
        "": ShownValue([rule["policy"], rule["by_group"]], split),
        "fields": shown(rule["fields"]),
        "stream": shown(rule["stream"]),
    }


def _route(route: Rows) -> dict[str, ShownValue]:
    return {
        "": shown(route["how"]),
        "transport": shown(route["transport"]),
        "what a device holds": shown(route["near"]),
        "moved": shown_bytes(route["moved_bytes"]),
        "across machines": shown_bytes(route["node_bytes"]),
        "held already": shown_bytes(route["held_bytes"]),
        "saved by the order of ranks": shown_bytes(route["saved_bytes"]),
        "rows": ShownValue([route["rows"], route["worker_sets"]], f"{len(route['rows'])} rows"),
    }


def _bound(versions: int | None) -> ShownValue:
    return ShownValue(versions, "unbounded" if versions is None else str(versions))
