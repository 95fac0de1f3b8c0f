"""Figures of a calibration from measured seconds, and how far they miss on what they were not fitted to.

Some measurements are held out (`split_held_out`): figures that were fitted to the others predict them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np

from hflow.planner.forecast.cost.roofline import roofline
from hflow.planner.plan.calibration import HostTimes, LinkRate, MatmulRate, MemoryRate
from hflow.planner.plan.hardware import Link

HALF_SIZES = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TILE_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
KERNEL_US = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SHARPNESSES = (1.0, 1.5, 2.0, 4.0, 8.0)
LAYER_US = np.geomspace(5.0, 5000.0, 150)
PASSES = np.linspace(0.0, 60.0, 121)
MIN_SLOPE = 1e-3
"""Least part of the seconds of the fastest message that its bytes take, for a line to show the bandwidth."""

HELD_OUT_EVERY = 3
"""The last of so many measurements, in order, is held out."""


@dataclass(frozen=True)
class ProductTime:
    """Seconds of a product of `[rows, inner]` and `[inner, columns]`."""

    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of a collective on some ranks of one machine."""

    num_bytes: int
    """The bytes of the whole tensor: before an all-reduce or a reduce-scatter, or after an all-gather."""
    ranks: int
    seconds: float
    is_all_reduce: bool = True

    @property
    def moved_bytes(self) -> float:
        """Bytes that a ring moves over each link: an all-reduce is a reduce-scatter and an all-gather."""
        once = (self.ranks - 1) / self.ranks * self.num_bytes
        return 2 * once if self.is_all_reduce else once


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step of an engine, or of a call of a backend, with the cost model's parts."""

    seconds: float
    kernel_seconds: float
    """Products, attention and optimizer."""
    pass_seconds: float
    """Element-wise kernels, if they read or write everything once (`passes` is 1)."""
    num_layers: int
    """Layers of all passes together: forward, and backward."""
    sequences: int


@dataclass(frozen=True)
class LoadTime:
    """Seconds in which an engine takes new weights."""

    num_tensors: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class ShardedTime:
    """Seconds that a training step takes longer on ranks that shard its weights, without copies."""

    moved_bytes: float
    """That a rank sends in its collectives."""
    seconds: float


Row = TypeVar("Row")
Found = TypeVar("Found")
Timed = TypeVar("Timed", ProductTime, CollectiveTime, LoadTime, ShardedTime, StepTime)


def split_held_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the measurements to fit figures to, and those that are held out."""
    fitted: list[Row] = []
    held_out: list[Row] = []
    for number, row in enumerate(rows, start=1):
        (fitted if number % HELD_OUT_EVERY else held_out).append(row)
    return fitted, held_out


def held_out_error(
    rows: Sequence[Timed],
    fit: Callable[[Sequence[Timed]], Found],
    seconds: Callable[[Timed, Found], float],
) -> float:
    """Return the mean absolute error of predictions, as a fraction of what was measured, on rows held out.

    `fit` finds figures for some rows; `seconds` predicts those of another row with them.
    """
    fitted, held_out = split_held_out(rows)
    found = fit(fitted)
    return float(np.mean([abs(seconds(row, found) / row.seconds - 1) for row in held_out]))


def fit_matmul(rows: Sequence[ProductTime], peak: float) -> MatmulRate:
    """Return the rate with the least squared error of logarithms, over a grid of shapes; `peak` in FLOP/s."""
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
    """Return share and launch time of a line through the seconds of collectives (Patarasuk and Yuan 2009).

    Large and small messages count equally: errors are relative.
    """
    moved = np.array([row.moved_bytes for row in rows])
    seconds = np.array([row.seconds for row in rows])
    latency = np.array([_latency(row, link) for row in rows])
    rate, launch = _rate_and_start(moved, seconds - latency, seconds)
    return LinkRate(share=rate / (link.gb_per_s * 1e9), launch_us=launch * 1e6)


def fit_sharded(rows: Sequence[ShardedTime]) -> tuple[float, float]:
    """Return the bytes per second that collectives reach in a step, and the seconds of each step besides."""
    seconds, moved = (np.array([getattr(row, name) for row in rows]) for name in ("seconds", "moved_bytes"))
    return _rate_and_start(moved, seconds, seconds)


def link_seconds(row: CollectiveTime, rate: LinkRate, link: Link) -> float:
    """Return the seconds of a collective, as the cost model has them."""
    return row.moved_bytes / (link.gb_per_s * 1e9 * rate.share) + rate.launch_us * 1e-6 + _latency(row, link)


def fit_loads(rows: Sequence[LoadTime], seconds_per_byte: float) -> float:
    """Return the seconds of each tensor in a weight update, given those of a byte; errors are relative."""
    seconds = np.array([row.seconds for row in rows])
    besides = seconds - seconds_per_byte * np.array([row.num_bytes for row in rows])
    tensors = np.array([[row.num_tensors] for row in rows])
    return _positive_least_squares(tensors / seconds[:, None], besides / seconds)[0]


def fit_memory(
    rows: Sequence[ProductTime], rate: MatmulRate, peak: float, bytes_per_s: float, itemsize: int
) -> tuple[float, float]:
    """Return the share of the memory bandwidth in which weights are read, and the sharpness of the corner.

    The rate is that of products whose weights do not come from memory, and `itemsize` the bytes of a weight.
    `peak` (FLOP/s) and `bytes_per_s` are those of the data sheet.
    """
    seconds = np.array([row.seconds for row in rows])
    best, best_error = (1.0, 1.0), math.inf
    for share, sharpness in product(np.geomspace(0.05, 4.0, 200), SHARPNESSES):
        memory = MemoryRate(float(share), 1.0, sharpness)
        predicted = [cold_seconds(row, rate, memory, peak, bytes_per_s, itemsize) for row in rows]
        error = float(np.mean(np.log(np.array(predicted) / seconds) ** 2))
        if error < best_error:
            best_error, best = error, (float(share), sharpness)
    return best


def cold_seconds(
    row: ProductTime, rate: MatmulRate, memory: MemoryRate, peak: float, bytes_per_s: float, itemsize: int
) -> float:
    """Return the seconds of a product whose weights come from memory, as the cost model of decoding has it.

    Each kernel takes no time of its own there (`HostTimes.gap_us`).
    """
    computing = replace(rate, kernel_us=0.0).seconds(row.rows, row.inner, row.columns, peak)
    reading = row.inner * row.columns * itemsize / (bytes_per_s * memory.decode)
    return roofline("product", computing, reading, sharpness=memory.sharpness).seconds


def fit_decode(rows: Sequence[StepTime]) -> HostTimes:
    """Return the seconds of a decode step besides its products: per layer, step, sequence and element."""
    seconds = np.array([row.seconds for row in rows])
    columns = [[row.num_layers, 1.0, row.sequences, row.pass_seconds] for row in rows]
    besides = seconds - np.array([row.kernel_seconds for row in rows])
    layer, step, sequence, passes = _positive_least_squares(
        np.array(columns) / seconds[:, None], besides / seconds
    )
    return HostTimes(gap_us=layer * 1e6, step_us=step * 1e6, sequence_us=sequence * 1e6, passes=passes)


def decode_seconds(row: StepTime, host: HostTimes) -> float:
    """Return the seconds of a decode step, as the cost model has them."""
    besides = host.gap_us * row.num_layers + host.step_us + host.sequence_us * row.sequences
    return row.kernel_seconds + (host.passes or 0.0) * row.pass_seconds + besides * 1e-6


def fit_training(rows: Sequence[StepTime], is_ahead: bool) -> HostTimes:
    """Return the seconds of a backend's calls besides products: per layer and pass, and per element.

    `is_ahead`: the host launches ahead of the device.
    """
    seconds, kernels, ones, layers = (
        np.array([getattr(row, name) for row in rows], float)
        for name in ("seconds", "kernel_seconds", "pass_seconds", "num_layers")
    )
    if not is_ahead:
        layer, passes = _positive_least_squares(
            np.stack([layers, ones], axis=1) / seconds[:, None], (seconds - kernels) / seconds
        )
        return HostTimes(layer_us=layer * 1e6, passes=passes)
    best, best_error = HostTimes(), math.inf
    for layer, passes in product(LAYER_US, PASSES):
        predicted = np.maximum(kernels + passes * ones, layers * layer * 1e-6)
        error = float(np.mean(np.log(predicted / seconds) ** 2))
        if error < best_error:
            best_error, best = error, HostTimes(layer_us=float(layer), passes=float(passes))
    return best


def training_seconds(row: StepTime, host: HostTimes, is_ahead: bool) -> float:
    """Return the seconds of a backend's call, as the cost model has them."""
    device = row.kernel_seconds + (host.passes or 0.0) * row.pass_seconds
    launching = host.layer_us * row.num_layers * 1e-6
    return max(device, launching) if is_ahead else device + launching


def _latency(row: CollectiveTime, link: Link) -> float:
    """Return the latency of a tree, which an all-reduce goes up and down."""
    passes = 2 if row.is_all_reduce else 1
    return passes * math.ceil(math.log2(row.ranks)) * link.latency_us * 1e-6


def _rate_and_start(moved: np.ndarray, transfer: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return the bytes per second of a line through transfers of `moved` bytes, and its seconds at 0 bytes.

    Errors are relative to the measured `seconds`.
    """
    slope, start = _positive_least_squares(
        np.stack([moved, np.ones_like(moved)], axis=1) / seconds[:, None], transfer / seconds
    )
    fastest = float(max(moved / seconds))
    # Messages that take equally long, whatever their size, only show that the link is no slower than this.
    return (1 / slope if slope * fastest > MIN_SLOPE else fastest), start


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
