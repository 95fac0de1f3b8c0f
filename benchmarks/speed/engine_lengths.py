"""Speed-up of the embedded engine by attention over bands of similar lengths, on one core, A B A B.

    python -m benchmarks.speed.engine_lengths

Slots are always full: a new prompt enters where a sequence ended, as in an asynchronous run. Responses are
geometric and truncated, so that lengths have a tail. The baseline is the same engine with all sequences in
one band, where attention covers the longest of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import numpy as np
import torch

from benchmarks.lib import harness
from benchmarks.lib.neighbour import architecture
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.models.settings import ModelSettings

PROMPT = 7


@contextmanager
def one_band() -> Iterator[None]:
    """Put all sequences into one band."""
    with mock.patch("hflow.engines.embedded.cache._band", np.zeros_like):
        yield


def tokens_per_second(args: argparse.Namespace, mean: int) -> float:
    """Measure steps after the lengths in the slots have diverged."""
    longest = 5 * mean
    sizes = architecture(args.layers, args.hidden, longest + 16)
    options = {"max_running": args.slots, "max_model_len": longest + 16}
    engine = EmbeddedEngine(ModelSettings(name="actor", architecture=sizes), options)
    random, drawn = Random(0), 0
    warm_up = 3 * mean
    for step in range(warm_up + args.steps):
        if step == warm_up:
            begin, drawn = time.perf_counter(), 0
        while engine.num_unfinished < args.slots:
            length = min(longest, 1 + int(random.expovariate(1 / mean)))
            prompt = [1, *(random.randrange(3, 14) for _ in range(PROMPT - 1))]
            params = SamplingParams(max_tokens=length, seed=random.randrange(2**31))
            engine.add(random.randrange(2**31), prompt, params)
        engine.step()
        drawn += args.slots
    return drawn / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--means", type=int, nargs="+", default=[32, 100, 200])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for mean in args.means:
        pairs = []
        for _ in range(args.rounds):
            bands = tokens_per_second(args, mean)
            with one_band():
                pairs.append((bands, tokens_per_second(args, mean)))
        rows.append(
            {
                "mean": mean,
                "bands": statistics.median(bands for bands, _ in pairs),
                "one_band": statistics.median(whole for _, whole in pairs),
                "ratio": statistics.median(bands / whole for bands, whole in pairs),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    print(harness.write("engine-lengths", {"config": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
