"""Parts of texts that several reports show: sizes of replicas, what means lack, the ends of curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from hflow.base.text import format_parameters, format_share, pluralize
from hflow.planner.plan.rows import Replica
from hflow.shapes.model_shape import ModelShape, num_parameters
from hflow.shapes.vision_shape import num_tower_parameters


def format_replica_size(replica: Replica, shape: ModelShape | None) -> str:
    """Return the family of a replica, its parameters and their precision; or whose they are."""
    adapters = replica.adapter_parameters
    if replica.base_of:
        size = f"those of {replica.base_of}"
        return f"{size} + {format_parameters(adapters)} in fp32" if adapters else size
    if shape is None:
        return "unknown"
    family = shape.family if shape.vision is None else shape.vision.family
    size = format_parameters(num_parameters(shape))
    if shape.vision is not None:
        size += f", {format_parameters(num_tower_parameters(shape.vision))} of them the tower,"
    size = f"{family}, {size} in {replica.dtype}"
    return f"{size} + {format_parameters(adapters)} in fp32" if adapters else size


def format_missing(num_refused: int, num_all: int) -> str:
    """Format what the means of an evaluation lack: `20 of 100 samples were not evaluated`."""
    return (
        f"{num_refused:,} of {pluralize(num_all, 'sample')} {'was' if num_all == 1 else 'were'} not evaluated"
    )


def format_rank_order(moved_bytes: int, saved_bytes: int) -> str:
    """Format what the order of an engine's ranks saves: `engine ranks ordered for 43 % fewer bytes`."""
    share = saved_bytes / (moved_bytes + saved_bytes)
    return f"engine ranks ordered for {format_share(share)} fewer bytes"


def format_cadence(every: int, after: int) -> str:
    """Format when a node executes: `, every 20 steps, after step 4`; empty if in each step."""
    steps = f"every {pluralize(every, 'step')}" if every > 1 else ""
    start = f"after step {after}" if after not in (0, every - 1) else ""
    return ", ".join(("", *(part for part in (steps, start) if part)))


Points = Sequence[tuple[int, float]]
"""(completed steps, value), ascending."""

END_SHARE = 0.1
"""Share of a curve's values whose mean is its first or its final value: single steps are noisy."""


MAX_POINTS = 240
"""Points of a curve that are drawn; more are averaged."""


def ends_of(points: Points) -> tuple[float, float]:
    """Return the means of the first and of the last tenth of a curve's values, at least of one."""
    count = max(1, math.floor(END_SHARE * len(points)))
    first, last = ([value for _, value in part] for part in (points[:count], points[-count:]))
    return statistics.fmean(first), statistics.fmean(last)


def thinned(points: Points, most: int) -> tuple[tuple[int, float], ...]:
    """Return at most `most` points: means of consecutive ones, at the last step of each."""
    count = min(most, len(points))
    edges = [len(points) * i // count for i in range(count + 1)] if count else []
    values = [value for _, value in points]
    return tuple((points[b - 1][0], statistics.fmean(values[a:b])) for a, b in pairwise(edges))
