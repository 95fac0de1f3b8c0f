"""Calls of workers and moves of samples on Ray, beside plain Ray actors that do nothing else.

    python -m benchmarks.speed.ray_calls [--workers 8] [--mib 256]

Both sides have as many actors, and are measured in turn.

- calls: a message without work to the devices of all workers, until all have answered;
- moves: samples on four data ranks to two others, as a batch node on other devices needs them. The driver's
  share is what it sends and receives itself, of the bytes that move.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.data_plane.redistribute import Move, Moves
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_processes, make_setup
from hflow.types import Unit
from hflow.workers.ray.ray_workers import RayWorkers

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
STREAM = "actor_gen"
SOURCES, DESTINATIONS = (0, 1, 2, 3), (4, 5)
SAMPLES_OF_SOURCE = 128
CALLS = 50
"""Calls that one measurement of calls averages over."""


class CountingWorkers(RayWorkers):
    """Counts the bytes of messages and of their answers."""

    num_bytes = 0

    def _send(self, worker: int, method: str, *arguments: Any) -> Any:
        self.num_bytes += len(pickle.dumps(arguments))
        return super()._send(worker, method, *arguments)


@ray.remote(num_cpus=0)
class Plain:
    """An actor that holds an array, and takes those of others."""

    def __init__(self, size: int) -> None:
        self._held = np.arange(size, dtype=np.int64)

    def nothing(self) -> None:
        """Answer."""

    def give(self, part: int) -> Any:
        """Return a half of the array."""
        return np.split(self._held, len(DESTINATIONS))[part]

    def take(self, sources: Sequence[Any], part: int) -> int:
        """Copy the halves of other actors into one array, as a worker's store does, and return its bytes."""
        parts = ray.get([source.give.remote(part) for source in sources])
        return int(np.concatenate(parts).nbytes)


async def fill(workers: RayWorkers, size: int) -> dict[int, tuple[int, ...]]:
    """Give each source samples with a field of `size` numbers in all, and return their ids."""
    ids = {}
    for source in SOURCES:
        samples = np.arange(SAMPLES_OF_SOURCE) + (source + 1) * 10_000
        lengths = np.full(len(samples), size // len(samples), np.int64)
        column = Column(Unit.TOKEN, np.arange(lengths.sum(), dtype=np.int64))
        parcel = ray.put({STREAM: Batch(samples, samples // 8, lengths, {"payload": column})})
        call = workers._actors[source].__ray_call__
        await call.remote(lambda actor, sent: actor._worker.receive(sent), parcel)
        ids[source] = tuple(samples.tolist())
    return ids


async def move(workers: CountingWorkers, ids: dict[int, tuple[int, ...]]) -> dict[str, float]:
    """Move half of each source's samples to each destination, and forget them there."""
    parts = {
        destination: {source: held[number :: len(DESTINATIONS)] for source, held in ids.items()}
        for number, destination in enumerate(DESTINATIONS)
    }
    moves = [
        Move(source, destination, samples, (f"{STREAM}/payload",))
        for destination, wanted in parts.items()
        for source, samples in wanted.items()
    ]
    workers.num_bytes, start = 0, time.perf_counter()
    num_bytes = await workers.transfer(Moves.of(moves))
    seconds = time.perf_counter() - start
    for destination, wanted in parts.items():
        moved = tuple(sample for samples in wanted.values() for sample in samples)
        await workers.release(destination, moved, STREAM, None)
    return {"seconds": seconds, "bytes": num_bytes, "driver_share": workers.num_bytes / num_bytes}


async def plain_move(actors: Sequence[Any]) -> dict[str, float]:
    """Do the same with plain actors."""
    sources, start = [actors[number] for number in SOURCES], time.perf_counter()
    takes = [actors[d].take.remote(sources, part) for part, d in enumerate(DESTINATIONS)]
    num_bytes = sum(await asyncio.gather(*takes))
    return {"seconds": time.perf_counter() - start, "bytes": num_bytes}


async def call(workers: RayWorkers, num_workers: int) -> dict[str, float]:
    """Ask all workers to pull nothing, several times."""
    nothing, start = Moves.of(()), time.perf_counter()
    for _ in range(CALLS):
        await workers._call_devices("pull", dict.fromkeys(range(num_workers), (nothing,)))
    return {"seconds": (time.perf_counter() - start) / CALLS}


async def plain_call(actors: Sequence[Any]) -> dict[str, float]:
    """Ask all plain actors for nothing, several times."""
    start = time.perf_counter()
    for _ in range(CALLS):
        await asyncio.gather(*(actor.nothing.remote() for actor in actors))
    return {"seconds": (time.perf_counter() - start) / CALLS}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    overrides = [f"cluster=cpu-1x{args.workers}", f"batch={8 * args.workers}", "models.actor.path=null"]
    setup = make_setup(compile_recipe(RECIPE, overrides))
    workers = CountingWorkers(make_processes(setup.plan))
    rows: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {"ray": [], "hflow": []} for name in ("calls", "moves")
    }
    try:
        await workers.start(setup)
        size = args.mib * 2**20 // 8 // len(SOURCES)
        ids, actors = await fill(workers, size), [Plain.remote(size) for _ in range(args.workers)]
        for _ in range(args.rounds + 2):
            rows["calls"]["ray"].append(await plain_call(actors))
            rows["calls"]["hflow"].append(await call(workers, args.workers))
            rows["moves"]["ray"].append(await plain_move(actors))
            rows["moves"]["hflow"].append(await move(workers, ids))
    finally:
        await workers.close()
    warm = {name: {side: found[2:] for side, found in sides.items()} for name, sides in rows.items()}
    for sides in warm.values():
        for found in sides.values():
            assert len({row.get("bytes") for row in found}) == 1
    return {
        "configuration": harness.numbers(args),
        **{
            name: {"summary": harness.compare(sides, "seconds", "ray"), **sides}
            for name, sides in warm.items()
        },
        "driver_share": max(row["driver_share"] for row in warm["moves"]["hflow"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256, help="bytes that move")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    for name in ("calls", "moves"):
        print(name, found[name]["summary"])
    print(f"driver's share {found['driver_share']:.2%}")
    print(harness.write("ray-calls", found))


if __name__ == "__main__":
    main()
