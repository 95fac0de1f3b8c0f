"""References to what a reader can select on the page: `node:NAME`, `edge:ID`, `replica:NAME` ..."""

from __future__ import annotations

from hflow.planner.ir import PUBLISH_PREFIX, Plan


def ref_of(plan: Plan, name: str) -> str:
    """Return the reference of what takes time in a step: a node, or an engine that receives new weights."""
    engine = name.removeprefix(PUBLISH_PREFIX)
    return f"replica:{engine}" if any(replica.name == engine for replica in plan.replicas) else f"node:{name}"
