"""Bytes, seconds and memory of 512 samples of 32,000 tokens on their way from an episode to micro-batches.

    python -m benchmarks.memory.long_contexts

The real store, moves, micro-batches, ledger and checkpoint files, without a model. Seconds are processor
time; memory is that of the process after each part.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import harness, memory
from benchmarks.speed.ledger import HEADER
from hflow.data_plane.locations import DataLocations
from hflow.data_plane.minibatches import shards
from hflow.data_plane.redistribute import redistribute
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import EdgeRule
from hflow.runtime.ledger import Ledger
from hflow.training.loop.inputs import prepare_batch
from hflow.training.loop.microbatches import pack_sequences
from hflow.types import Trajectory
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore, pack, unpack
from hflow.workers.storage.sample_writer import sample_ready_event

GROUP = 8
FIELDS = ("gen/input_ids", "gen/loss_mask", "gen/behav_logprobs", "gen/versions")
TURN = 1_000
"""Tokens between two updates of the weights."""


def trajectory(length: int, draw: np.random.Generator) -> Trajectory:
    """Return the fields of a sample as lists of Python numbers. A tenth of the tokens are the prompt."""
    prompt = length // 10
    logprobs = (-draw.random(length, np.float32)).tolist()
    return Trajectory(
        input_ids=tuple(draw.integers(0, 150_000, length).tolist()),
        loss_mask=tuple(token >= prompt for token in range(length)),
        behav_logprobs=tuple(0.0 if token < prompt else logprobs[token] for token in range(length)),
        versions=tuple(-1 if token < prompt else token // TURN for token in range(length)),
        completion="",
        num_turns=1,
    )


class Parts:
    """Seconds and memory of the parts."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}
        self._least = memory.resident("VmRSS")

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a part of the way and note what it took; returns its result."""
        gc.collect()
        start = time.process_time()
        result = work()
        seconds = time.process_time() - start
        gc.collect()
        self.rows[name] = {"seconds": seconds, "memory_mb": (memory.resident("VmRSS") - self._least) / 1e6}
        print(name, {key: round(value, 3) for key, value in self.rows[name].items()}, flush=True)
        return result


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--budget", type=int, default=40_000, help="tokens of a micro-batch")
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    lengths = draw.integers(args.tokens // 2, args.tokens + 1, args.samples)
    lengths[::GROUP] = args.tokens
    samples, parts, store, locations = list(range(args.samples)), Parts(), SampleStore(), DataLocations()

    with tempfile.TemporaryDirectory() as out, Ledger(Path(out) / "ledger.sqlite", HEADER) as ledger:
        seconds = {"store": 0.0, "event": 0.0}
        for sample, length in enumerate(lengths.tolist()):
            made = trajectory(length, draw)
            start = time.process_time()
            store.put_trajectory("gen", sample, sample // GROUP, made, {})
            stored = time.process_time()
            event = sample_ready_event("gen", sample, (made,))
            ledger.record_result(event)
            locations.add_sample(sample, sample // GROUP % 4, length)
            seconds["store"] += stored - start
            seconds["event"] += time.process_time() - stored
        parts.measure("stored", lambda: None)
        parts.rows["stored"]["seconds"] = seconds["store"]
        parts.rows["reported and recorded"] = {"seconds": seconds["event"]}
        rule = EdgeRule("actor_train", "gen", FIELDS, (4, 5), by_group=False, policy="balanced")
        groups = {g: samples[g * GROUP : (g + 1) * GROUP] for g in range(args.samples // GROUP)}
        holders = locations.holders(FIELDS, samples)
        cut = parts.measure("assigned", lambda: shards(rule, None, groups, holders, seed=0, step=0))
        cluster = ClusterSpec("cpu-1x6", "cpu", 1, 6, 1 << 40)
        moves = parts.measure("moves planned", lambda: redistribute(rule, cut, holders, cluster))
        taken = [move for move in moves if move.dst == 4]
        packed = parts.measure("packed for rank 0", lambda: [pack(store, m.samples, m.fields) for m in taken])
        other = SampleStore()
        num_bytes = parts.measure("received by rank 0", lambda: sum(unpack(other, one) for one in packed))
        mine = sorted(sample for move in taken for sample in move.samples)
        batch = parts.measure("gathered by rank 0", lambda: other.gather("gen", FIELDS, mine))
        prepared = parts.measure("prepared", lambda: prepare_batch(batch, "lm", None, None))
        rows = parts.measure("first fit", lambda: pack_sequences(prepared.lengths, args.budget))
        parts.measure("cut into micro-batches", lambda: sum(len(prepared.take(one)) for one in rows))
        files = SampleFiles(Path(out), "worker-0", {"gen": {"gen": store.stored("gen", samples)}}, {})
        paths = parts.measure("saved", files.write)
        file_bytes = sum(path.stat().st_size for path in paths)
        parts.measure("read", lambda: SampleFilesReader(Path(out), "worker-0").samples(("gen",), samples))
    num_tokens = int(lengths.sum())
    result = {
        "tokens": num_tokens,
        "moved_bytes_of_rank_0": num_bytes,
        "file_bytes_per_token": file_bytes / num_tokens,
        "store_bytes_per_token": 1e6 * parts.rows["stored"]["memory_mb"] / num_tokens,
        "parts": parts.rows,
    }
    print({key: value for key, value in result.items() if key != "parts"})
    if not args.dry:
        print(harness.write("long-contexts", {"arguments": harness.numbers(args), **result}))


if __name__ == "__main__":
    main()
