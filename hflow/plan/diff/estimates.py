"""What a plan's JSON rows estimate, as facts: bytes, seconds, the period. No part of the digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hflow.plan.diff.rows import Lone, Rows, Subjects
from hflow.plan.diff.texts import Fact, fact, seconds, size

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
        total = sum(num_bytes for _, num_bytes in (*phase["resident"], *phase["transient"]))
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
