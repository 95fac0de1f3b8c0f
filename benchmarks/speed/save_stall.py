"""How long training waits for a checkpoint: while it is copied, and how much writing slows the steps down.

One rank of the torch backend with Qwen2.5-0.5B's dimensions, in fp32, with Adam's moments: 4 bytes of Hugging
Face weights and 12 bytes of optimizer shards per parameter. Before, a step waited for the copy and the write.
`--layers 8` takes a third of the memory.

    python -m benchmarks.speed.save_stall --layers 24 --directory /tmp
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.lib import harness
from hflow.data.batches.batch import Batch, Column
from hflow.models.settings import ModelSettings, RankPosition
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit
from hflow.workers.background_writer import BackgroundWriter

MODEL = Path(__file__).parents[2] / "configs" / "model" / "qwen2.5-0.5b.yaml"
NUM_TOKENS = 16


def build(num_layers: int) -> TorchModel:
    """The model with random weights."""
    architecture = dict(yaml.safe_load(MODEL.read_text())["architecture"])
    # The configuration lists what each layer does.
    architecture.pop("layer_types", None)
    architecture["num_hidden_layers"] = num_layers
    return TorchModel(ModelSettings(name="actor", trainable=True, architecture=architecture), RankPosition())


def train(model: TorchModel, step: int) -> tuple[float, float]:
    """Seconds of a step on one short sequence, and CPU seconds of this thread."""
    columns = {
        "input_ids": Column(Unit.TOKEN, np.arange(NUM_TOKENS)),
        "loss_mask": Column(Unit.TOKEN, np.ones(NUM_TOKENS, bool)),
    }
    one = np.ones(1, np.int64)
    batch = Batch(0 * one, 0 * one, NUM_TOKENS * one, columns)
    call = NodeCall(
        node="sft",
        body=lambda out: -out.logprobs,
        reads=(),
        provided=(("out", "output"),),
        returns=(("loss", "token"),),
        metrics=False,
        knobs={},
        options={"reduce": "token-mean"},
    )
    start, cpu_start = time.perf_counter(), time.thread_time()
    model.train(call, [TrainShard((batch,))], step)
    return time.perf_counter() - start, time.thread_time() - cpu_start


def save(model: TorchModel, writer: BackgroundWriter, directory: Path) -> dict[str, Any]:
    """Save once while training continues; all figures in seconds.

    `cpu` are CPU seconds of the training thread, which a busy machine changes less.
    """
    alone = [train(model, 0) for _ in range(2)]
    directory.mkdir()
    start, cpu_start = time.perf_counter(), time.thread_time()
    writes = [model.save(str(directory)), model.save_shards(str(directory / "shards"))]
    copied, cpu_copied = time.perf_counter(), time.thread_time()
    written_at = 0.0

    def write() -> list[Path]:
        nonlocal written_at
        paths = [path for part in writes for path in part()]
        written_at = time.perf_counter()
        return paths

    writer.start("actor", str(directory), write)
    meanwhile = [train(model, 0) for _ in range(2)]
    files = writer.finish("actor", str(directory))
    row = {
        "gib": sum(size for size, _ in files.values()) / 2**30,
        "copy": copied - start,
        "write": written_at - copied,
        "write_sync_and_checksum": time.perf_counter() - copied,
        "step": statistics.mean(seconds for seconds, _ in alone),
        "step_while_writing": statistics.mean(seconds for seconds, _ in meanwhile),
        "cpu_copy": cpu_copied - cpu_start,
        "cpu_step": statistics.mean(cpu for _, cpu in alone),
        "cpu_step_while_writing": statistics.mean(cpu for _, cpu in meanwhile),
    }
    shutil.rmtree(directory)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, writer = build(args.layers), BackgroundWriter()
    num_parameters = sum(weight.numel() for _, weight in model.weights())
    train(model, 0)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        rounds = [save(model, writer, Path(name) / str(number)) for number in range(args.rounds)]
    writer.close()
    median = {key: round(statistics.median(row[key] for row in rounds), 3) for key in rounds[0]}
    stall = median["copy"] + 2 * (median["step_while_writing"] - median["step"])
    result = {
        "what": "seconds; stall_before: copy and write; stall: copy, and what writing slows two steps",
        "parameters": num_parameters,
        "threads": args.threads,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "median": median,
        "stall_before": round(median["copy"] + median["write_sync_and_checksum"], 3),
        "stall": round(stall, 3),
        "cpu_stall": round(
            median["cpu_copy"] + 2 * (median["cpu_step_while_writing"] - median["cpu_step"]), 3
        ),
        "rounds": rounds,
    }
    print({key: value for key, value in result.items() if key != "rounds"})
    print(harness.write("save-stall", result))


if __name__ == "__main__":
    main()
