"""Names of the trackers. To add one, write a file beside this one, and add one line to `TRACKERS`."""

from __future__ import annotations

from hflow.base.registry import Registry
from hflow.trackers.interface import TrackerKind

TRACKERS = Registry(
    "tracker",
    "hflow.trackers",
    {
        "wandb": "hflow.trackers.wandb:TRACKER",
        "mlflow": "hflow.trackers.mlflow:TRACKER",
    },
)
"""The trackers. The object `TRACKER` describes one."""


def tracker_kind(name: str) -> TrackerKind:
    """Return the descriptor of a tracker.

    Raises:
        PlanError: for an unknown name.
    """
    return TRACKERS.describe(name, TrackerKind)
