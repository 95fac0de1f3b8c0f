"""The largest lag of a trained token, and the age rule that ensures it.

The lag of a token is the version that its step begins with, minus that of the weights that generated it.
"""

from __future__ import annotations

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Edge, Level
from hflow.planner.plan.rows import Schedule


def max_lag(edge: Edge, settings: ScheduleConfig) -> int:
    """Return the largest number of steps between writing and reading the weights of an edge.

    For generation it is `(max_staleness + 1) * sync_every`.
    """
    return edge.lag * settings.sync_every + settings.steps_ahead if edge.at_most else edge.lag


def age_limit(schedule: Schedule) -> int | None:
    """Return the largest lag with which the age rule lets a sample train; None if the rule is off."""
    settings = schedule.settings
    if not settings.age_rule:
        return None
    if settings.drop_older_than is not None:
        return settings.drop_older_than
    return settings.certified_lag


def staleness_bound(schedule: Schedule) -> int | None:
    """Return the largest lag that a trained token can have; None if nothing bounds it.

    Streams without trained weights have no versions, so their lag is 0. Otherwise the bound is the minimum of

    - the age limit: samples that would train with a larger lag are dropped;
    - L, if no sample can be overtaken by samples of newer weights. That holds with eta = 0, because all
      admitted samples must train before the engines get new weights. It also holds without interruptions if
      no node works on single samples or groups, because all admitted samples are accepted before, and the
      oldest train first.
    """
    trained = schedule.streams[0]
    written = {model for node in schedule.nodes for model in node.writes}
    if written.isdisjoint(trained.models):
        return 0
    in_order = schedule.settings.certified_lag if _keeps_order(schedule) else None
    limits = [age_limit(schedule), in_order]
    return min((limit for limit in limits if limit is not None), default=None)


def _keeps_order(schedule: Schedule) -> bool:
    """Return whether all samples of one version are accepted before any sample of a newer one."""
    name = schedule.streams[0].name
    has_sample_nodes = any(node.stream == name and node.level is not Level.BATCH for node in schedule.nodes)
    settings = schedule.settings
    return settings.max_staleness == 0 or not (settings.interrupt or has_sample_nodes)
