"""How old a trained token can be: the certificate of a schedule, and the age rule that it rests on.

The lag of a token is the step that trains it minus the version of the weights that generated it.
"""

from __future__ import annotations

import math

from hflow.graph.edges import round_product, steps_ahead
from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule


def admission_limit(version: int, batch: int, max_staleness: float, sync_every: int = 1) -> int:
    """Return how many groups may have been accepted or be running in total under the weights of `version`.

    Args:
        version: steps completed in the weights that the engines hold.
        batch: groups per step (B).
        max_staleness: eta; if it is a fraction, the result is rounded down to whole groups.
        sync_every: steps between two weight syncs of the engines (s).
    """
    groups_per_sync = sync_every * max(1, batch)
    num_syncs = version // sync_every
    return (num_syncs + 1) * groups_per_sync + math.floor(round_product(max_staleness * groups_per_sync))


def certified_lag(max_staleness: float, sync_every: int) -> int:
    """Return the largest lag of a token whose group is never overtaken: L = ceil((eta + 1) s) - 1.

    A group admitted at the n-th sync is among the first `(eta + n + 1) * s * B`. Taken in the order of
    admission it trains at step `ceil((eta + n + 1) * s) - 1` at the latest, with weights of step `n * s`.
    """
    return sync_every + steps_ahead(max_staleness, sync_every) - 1


def splits_batch(schedule: Schedule) -> bool:
    """Return whether generation may start a part of a batch early, but not all of it."""
    eta, sync_every = schedule.settings.max_staleness, schedule.settings.sync_every
    return steps_ahead(eta, sync_every) != round_product(eta * sync_every)


def age_limit(schedule: Schedule) -> int | None:
    """Return the largest lag with which the age rule lets a sample train; None if the rule is off."""
    settings = schedule.settings
    if not settings.age_rule:
        return None
    if settings.drop_older_than is not None:
        return settings.drop_older_than
    return certified_lag(settings.max_staleness, settings.sync_every)


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
    settings = schedule.settings
    in_order = certified_lag(settings.max_staleness, settings.sync_every)
    limits = [age_limit(schedule), in_order if _keeps_order(schedule) else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _keeps_order(schedule: Schedule) -> bool:
    """Return whether all samples of one version are accepted before any sample of a newer one."""
    name = schedule.streams[0].name
    has_sample_nodes = any(node.stream == name and node.level is not Level.BATCH for node in schedule.nodes)
    settings = schedule.settings
    return settings.max_staleness == 0 or not (settings.interrupt or has_sample_nodes)
