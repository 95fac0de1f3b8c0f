"""How old a trained token can be: the certificate of a schedule, and the age rule that it rests on.

The lag of a token is the step that trains it less the version of the weights that drew it.
"""

from __future__ import annotations

import math

from hflow.graph.edges import round_product, steps_ahead
from hflow.graph.ir import Level
from hflow.planner.ir import Schedule


def admission_limit(version: int, batch: int, max_staleness: float, sync_every: int = 1) -> int:
    """Groups that may ever have been accepted or be running under the weights of `version`.

    Args:
        version: steps completed in the weights that the engines hold.
        batch: groups a step trains on (B).
        max_staleness: eta; where it is a fraction, whole groups count.
        sync_every: steps between two weight updates of the engines (s).
    """
    groups_a_sync = sync_every * max(1, batch)
    syncs = version // sync_every
    return (syncs + 1) * groups_a_sync + math.floor(round_product(max_staleness * groups_a_sync))


def certified_lag(max_staleness: float, sync_every: int) -> int:
    """The largest lag that admission lets a token have that nobody overtakes: L = ceil((eta + 1) s) - 1.

    A group admitted at the n-th sync is among the first `(eta + n + 1) * s * B`; taken in the order of
    admission it trains at step `ceil((eta + n + 1) * s) - 1` at the latest, with weights of step `n * s`.
    """
    return sync_every + steps_ahead(max_staleness, sync_every) - 1


def splits_batch(schedule: Schedule) -> bool:
    """Whether generation may begin a part of a batch early, and not all of it."""
    eta, sync_every = schedule.settings.max_staleness, schedule.settings.sync_every
    return steps_ahead(eta, sync_every) != round_product(eta * sync_every)


def age_limit(schedule: Schedule) -> int | None:
    """The largest lag with which the age rule lets a sample train; None where the rule is off."""
    if not schedule.settings.age_rule:
        return None
    if schedule.settings.drop_older_than is not None:
        return schedule.settings.drop_older_than
    return certified_lag(schedule.settings.max_staleness, schedule.settings.sync_every)


def staleness_bound(schedule: Schedule) -> int | None:
    """The largest lag that a trained token can have; None where nothing bounds it.

    Streams without trained weights have no versions, so their lag is 0. Else the bound is the least of

    - the age limit: what would train with a larger lag is dropped before;
    - L where no sample can be overtaken by samples of newer weights. So it is with eta = 0, as all that
      was admitted must train before the engines get new weights; and without interruptions where nothing
      works on single samples or groups, as all that was admitted is accepted before, and the oldest go
      first.
    """
    trained = schedule.streams[0]
    written = {model for node in schedule.nodes for model in node.writes}
    if written.isdisjoint(trained.models):
        return 0
    natural = certified_lag(schedule.settings.max_staleness, schedule.settings.sync_every)
    limits = [age_limit(schedule), natural if _keeps_order(schedule) else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _keeps_order(schedule: Schedule) -> bool:
    """Whether all samples of some weights are accepted before there is any of newer ones."""
    name = schedule.streams[0].name
    scored = any(node.stream == name and node.level is not Level.BATCH for node in schedule.nodes)
    return schedule.settings.max_staleness == 0 or not (schedule.settings.interrupt or scored)
