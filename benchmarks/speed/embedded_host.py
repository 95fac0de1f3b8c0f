"""CPU time of the embedded engine's host in a decode step, besides what it launches on a GPU.

    python -m benchmarks.speed.embedded_host

Steps are those of an engine with pages and graphs, on a CPU: a graph that does nothing, and tokens that are
not drawn. What remains is what the device waits for between two steps: tokens to requests, sequences that
end, pages, and the inputs of the next step. A line through the medians gives `sequence_us` of plans, and the
part of `step_us` that is no call of CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from benchmarks.lib import harness
from benchmarks.lib.neighbour import architecture
from hflow.engines.embedded import engine as embedded
from hflow.engines.embedded.decode_graphs import DecodeGraphs
from hflow.engines.embedded.dense_decoder import DenseDecoder
from hflow.engines.embedded.sampling import Drawn, SamplingRows
from hflow.engines.interface import SamplingParams
from hflow.models.seeds import uniforms
from hflow.models.settings import ModelSettings

MAX_LENGTH = 1024
SEQUENCES = (16, 64, 128, 256, 512)


class HostEngine(embedded.EmbeddedEngine):
    """An engine whose captured steps compute nothing."""

    _has_pages = True

    def _decode_graphs(self, decoder: DenseDecoder) -> DecodeGraphs:
        limits = self._options.max_running, self._max_length
        decoder.head = lambda hidden: hidden  # type: ignore[method-assign]
        return DecodeGraphs(decoder, self._cache, self._device, *limits, lambda run: lambda: None)  # type: ignore[arg-type]


def draw_nothing(
    logits: torch.Tensor, rows: SamplingRows, positions: np.ndarray, forced: torch.Tensor | None
) -> Drawn:
    """Return a token for each sequence, with the random numbers that a draw sends to the device."""
    uniforms(rows.words, positions)
    return Drawn(torch.full((2, len(positions)), 5.0, dtype=torch.float64), [b""] * len(positions))


def measure(sequences: int, steps: int) -> float:
    """Return the microseconds of a step."""
    settings = ModelSettings(name="actor", trainable=True, architecture=architecture(1, 128, MAX_LENGTH))
    engine = HostEngine(settings, {"max_running": sequences, "max_model_len": MAX_LENGTH})
    for i in range(sequences):
        engine.add(i, [5, 6, 7], SamplingParams(max_tokens=steps + 9, seed=i, stop_ids=(2,)))
    for _ in range(3):
        engine.step()
    start = time.thread_time()
    for _ in range(steps):
        engine.step()
    return (time.thread_time() - start) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    embedded.draw = draw_nothing  # type: ignore[assignment]
    rounds = [[measure(n, args.steps) for n in SEQUENCES] for _ in range(args.rounds)]
    step_us = [statistics.median(row[i] for row in rounds) for i in range(len(SEQUENCES))]
    medians = dict(zip(map(str, SEQUENCES), step_us, strict=True))
    slope, start = np.polyfit(SEQUENCES, step_us, 1)
    found = {"step_us": float(start), "sequence_us": float(slope), "medians": medians}
    print(found)
    print(harness.write("embedded-host", {"config": harness.numbers(args), **found}))


if __name__ == "__main__":
    main()
