"""What the page calls the things that a reader can choose: `node:NAME`, `edge:ID`, `replica:NAME` ..."""

from __future__ import annotations

from hflow.plan.ir import Plan


def ref_of(plan: Plan, name: str) -> str:
    """The reference of what takes time in a step: a node, or an engine that takes new weights."""
    return f"replica:{name}" if any(replica.name == name for replica in plan.replicas) else f"node:{name}"
