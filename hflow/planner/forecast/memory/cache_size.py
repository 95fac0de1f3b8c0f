"""A check that engines with a cache of a fixed size share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.descriptors import ServedModel
from hflow.planner.plan.hardware import GIB
from hflow.shapes.model_shape import ModelShape


def too_small_cache(
    served: ServedModel, shape: ModelShape, smallest_cache: Callable[[Rank], int]
) -> Iterator[str]:
    """Yield a reason where the configured cache of an engine does not hold the longest sequence.

    `smallest_cache` returns the bytes of the smallest one on a rank with which the engine starts.
    """
    gen = served.config.gen
    rank = Rank(served.replica, shape, served.config, 0, True, served.cluster.device == "cpu")
    if gen.cache_gib is not None and round(gen.cache_gib * GIB) < (smallest := smallest_cache(rank)):
        key = f"models.{served.replica.model}.gen.cache_gib"
        fitting = math.ceil(smallest / GIB * 1000) / 1000
        yield (
            f"{key} is {gen.cache_gib:g}, but a sequence of max_model_len {gen.max_model_len} needs "
            f"{fitting:g} GiB. Set {key}={fitting:g} or more, or a smaller max_model_len."
        )
