"""Figures of a calibration from measured seconds, and how far they miss on what they were not fitted to.

Every third measurement is held out: it is predicted by figures that were fitted to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from hflow.planner.calibration import HostTimes, LinkRate, MatmulRate
from hflow.planner.hardware import Link

HALF_SIZES = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TILE_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
KERNEL_US = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class ProductTime:
    """Seconds of a product of `[rows, inner]` and `[inner, columns]`."""

    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of an all-reduce of some bytes on each of some ranks of one machine."""

    num_bytes: int
    ranks: int
    seconds: float


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of a decode step of an engine, and those of its kernels alone as the cost model has them."""

    num_layers: int
    sequences: int
    context: int
    """Tokens of all sequences together."""
    seconds: float
    kernel_seconds: float


Timed = TypeVar("Timed", ProductTime, CollectiveTime, DecodeTime)


def held_out_error(
    rows: Sequence[Timed], predict: Callable[[Sequence[Timed]], Callable[[Timed], float]]
) -> float:
    """Return the mean absolute error of predictions, as a fraction of what was measured.

    Args:
        rows: measurements with `seconds`; every third one is held out.
        predict: fits to some rows, and returns the function that predicts the seconds of a row.
    """
    seen = [row for i, row in enumerate(rows) if i % 3 != 2]
    unseen = [row for i, row in enumerate(rows) if i % 3 == 2]
    prediction = predict(seen)
    return float(np.mean([abs(prediction(row) / row.seconds - 1) for row in unseen]))


def fit_matmul(rows: Sequence[ProductTime], peak: float) -> MatmulRate:
    """Return the rate with the smallest squared error of logarithms, over a grid of shapes.

    Args:
        rows: measurements.
        peak: FLOP/s of the data sheet.
    """
    m, k, n = (np.array([getattr(row, side) for row in rows], float) for side in ("rows", "inner", "columns"))
    seconds = np.array([row.seconds for row in rows])
    best, best_error = MatmulRate(share=1.0), math.inf
    for half, tile, kernel in product(HALF_SIZES, TILE_ROWS, KERNEL_US):
        rate = np.minimum(1.0, m / tile) * k / (k + half) * n / (n + half)
        base = 2 * m * k * n / (peak * rate)
        working = seconds - kernel * 1e-6
        if (working <= 0).any():
            continue
        share = float(np.exp(np.mean(np.log(base / working))))
        error = float(np.mean(np.log((base / share + kernel * 1e-6) / seconds) ** 2))
        if error < best_error - 1e-12:
            best_error = error
            best = MatmulRate(share=share, half_size=half, kernel_us=kernel, tile_rows=tile)
    return best


def fit_link(rows: Sequence[CollectiveTime], link: Link) -> LinkRate:
    """Return share and launch time of a line through the seconds of all-reduces.

    A ring all-reduce moves `2 (n - 1) / n` of its bytes over each link (Patarasuk and Yuan 2009). Large and
    small messages count equally: errors are relative.

    Args:
        rows: measurements on the ranks of one machine.
        link: between them.
    """
    moved = np.array([2 * (row.ranks - 1) / row.ranks * row.num_bytes for row in rows])
    seconds = np.array([row.seconds for row in rows])
    latency = np.array([_tree_latency(row.ranks, link) for row in rows])
    slope, launch = _positive_least_squares(
        np.stack([moved, np.ones_like(moved)], axis=1) / seconds[:, None], (seconds - latency) / seconds
    )
    return LinkRate(share=1 / (slope * link.gb_per_s * 1e9), launch_us=launch * 1e6)


def link_seconds(row: CollectiveTime, rate: LinkRate, link: Link) -> float:
    """Return the seconds of an all-reduce, as the cost model has them."""
    moved = 2 * (row.ranks - 1) / row.ranks * row.num_bytes
    return moved / (link.gb_per_s * 1e9 * rate.share) + rate.launch_us * 1e-6 + _tree_latency(row.ranks, link)


def fit_host(rows: Sequence[DecodeTime]) -> HostTimes:
    """Return what a decode step takes besides its kernels: per layer, per step and per sequence."""
    seconds = np.array([row.seconds for row in rows])
    columns = [[row.num_layers, 1.0, row.sequences] for row in rows]
    besides = seconds - np.array([row.kernel_seconds for row in rows])
    layer, step, sequence = _positive_least_squares(np.array(columns) / seconds[:, None], besides / seconds)
    return HostTimes(gap_us=layer * 1e6, step_us=step * 1e6, sequence_us=sequence * 1e6)


def host_seconds(row: DecodeTime, host: HostTimes) -> float:
    """Return the seconds of a decode step, as the cost model has them."""
    besides = host.gap_us * row.num_layers + host.step_us + host.sequence_us * row.sequences
    return row.kernel_seconds + besides * 1e-6


def _tree_latency(ranks: int, link: Link) -> float:
    """Return the latency of an all-reduce, which goes up and down a tree."""
    return 2 * math.ceil(math.log2(ranks)) * link.latency_us * 1e-6


def _positive_least_squares(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Return the solution without negative entries: the worst of those is set to 0 until none is left."""
    columns = list(range(matrix.shape[1]))
    while columns:
        found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if (found >= 0).all():
            break
        columns.pop(int(np.argmin(found)))
    solution = [0.0] * matrix.shape[1]
    for column, value in zip(columns, found if columns else (), strict=True):
        solution[column] = float(value)
    return solution
