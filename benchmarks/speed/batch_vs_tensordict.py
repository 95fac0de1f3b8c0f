"""Selecting and joining samples: `Batch` (packed numpy) against a TensorDict of jagged tensors.

python -m benchmarks.speed.batch_vs_tensordict        (needs `tensordict`)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.types import Unit

NUM_FIELDS = 5


def batch_of(lengths: np.ndarray) -> Batch:
    total, count = int(lengths.sum()), len(lengths)
    fields = {f"f{i}": Column(Unit.TOKEN, np.zeros(total, np.float32)) for i in range(NUM_FIELDS)}
    return Batch(np.arange(count), np.arange(count), lengths, fields)


def tensordict_of(lengths: np.ndarray) -> TensorDict:
    offsets = torch.tensor(np.concatenate(([0], np.cumsum(lengths))))
    values = torch.zeros(int(lengths.sum()))
    fields = {
        f"f{i}": torch.nested.nested_tensor_from_jagged(values.clone(), offsets) for i in range(NUM_FIELDS)
    }
    return TensorDict(fields, batch_size=[len(lengths)])


def pick_tensordict(data: TensorDict, rows: list[int]) -> TensorDict:
    """Jagged tensors cannot be indexed by a list of rows: unbind, pick, nest again."""
    fields = {}
    for name, value in data.items():
        parts = value.unbind()
        fields[name] = torch.nested.nested_tensor([parts[r] for r in rows], layout=torch.jagged)
    return TensorDict(fields, batch_size=[len(rows)])


def milliseconds(work: Callable[[], Any], repeats: int = 30) -> dict[str, float]:
    work()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return {"milliseconds": (time.perf_counter() - start) / repeats * 1e3}


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 200, 512)
    rows = rng.permutation(512)[:256]
    ours, theirs = batch_of(lengths), tensordict_of(lengths)
    measured = harness.interleave(
        {
            "tensordict": lambda: milliseconds(lambda: pick_tensordict(theirs, rows.tolist())),
            "batch": lambda: milliseconds(lambda: ours.take(rows)),
        },
        rounds=5,
    )
    summary = harness.compare(measured, "milliseconds", "tensordict")
    what = (
        f"pick 256 of 512 samples of 8 to 200 tokens, {NUM_FIELDS} fields; tensordict needs unbind and nest"
    )
    path = harness.write("batch-vs-tensordict", {"what": what, "summary": summary})
    print(json.dumps(summary, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
