"""Seconds of kernels, copies, collectives and decode steps on the device at hand, by torch.

Everything is repeated for a moment, and the median counts, as runs have no better luck than that. The
same code runs on a CPU, where a device is one core and collectives use gloo, and on CUDA, with NCCL.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, product
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import linear

from hflow.base.devices import collective_backend, is_gpu
from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.models.dtypes import DTYPES
from hflow.models.packed_attention import PackedLayout, attend
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.models.descriptors import factories
from hflow.profiling.fit import CollectiveTime, LoadTime, ProductTime
from hflow.shapes.layout import Layout
from hflow.training.fsdp.shard_collectives import gather_in_place, sum_parts
from hflow.training.interface import ModelBackend, NodeCall, TrainShard
from hflow.types import Output, Unit
from hflow.weights.checksum import weights_checksum
from hflow.weights.incoming import IncomingWeights
from hflow.workers.process_setup import keep_freed_memory

SECONDS_EACH = 0.1
"""Time in which one measurement is repeated."""
MIB = 2**20
ROWS = (64, 256, 1024)
SIDES = ((128, 512), (512, 512), (512, 1536), (1024, 1024), (1536, 512))
CUDA_ROWS = (64, 512, 4096, 16384)
CUDA_SIDES = ((512, 2048), (2048, 2048), (4096, 1024), (4096, 4096), (4096, 12288))
COLLECTIVE_BYTES = (4 * 1024, 64 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
VOCABULARY = 256
COLD_ROWS = (1, 8, 32)
COLD_BYTES = {"cpu": 128 * MIB, "cuda": 512 * MIB}
"""More than caches hold."""
SEQUENCES, LENGTHS = (1, 8, 32, 128), (32, 128)
BATCHES = ((1, 16), (8, 16), (16, 32), (32, 32))
"""Sequences and tokens of each."""
WARM_STEPS, TIMED_STEPS = 3, 12
SHARDED_STEPS = 9


def use_one_core(device: str) -> None:
    """Compute as workers do: with one thread, and on a CPU with freed memory that stays with the process."""
    torch.set_num_threads(1)
    if device == "cpu":
        keep_freed_memory()


@contextmanager
def neighbours(device: str, num: int) -> Iterator[Event]:
    """Keep other devices of the machine busy, as in a run: those of a CPU share its caches and memory.

    They decode until the event is set, and train from then on.

    Raises:
        RunError: if a process that is to keep one busy ends.
    """
    context = get_context("spawn")
    trains, is_busy = context.Event(), [context.Event() for _ in range(num if device == "cpu" else 0)]
    processes = [context.Process(target=_keep_busy, args=(event, trains), daemon=True) for event in is_busy]
    for process in processes:
        process.start()
    try:
        for event, process in zip(is_busy, processes, strict=True):
            while not event.wait(1.0):
                if not process.is_alive():
                    raise RunError(f"a process beside the profile ended with exit code {process.exitcode}")
        yield trains
    finally:
        for process in processes:
            process.kill()
            process.join()


def _keep_busy(is_busy: Event, trains: Event) -> None:
    """Decode, and later train, until the process is killed."""
    use_one_core("cpu")
    decoding = chain.from_iterable(decode_steps("cpu", "fp32") for _ in count())
    training = chain.from_iterable(training_steps("torch", "cpu", "fp32", MODELS, BATCHES) for _ in count())
    while True:
        next(training if trains.is_set() else decoding)
        is_busy.set()


def repeated(work: Callable[[], object], device: str) -> float:
    """Return the seconds of some work."""

    def wait() -> None:
        if is_gpu(device):
            torch.cuda.synchronize()

    work()
    wait()
    times: list[float] = []
    end = time.perf_counter() + SECONDS_EACH
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def products(device: str, dtype: str) -> list[ProductTime]:
    """Return the seconds of products of matrices, by their shape."""
    num_rows, sides = (CUDA_ROWS, CUDA_SIDES) if is_gpu(device) else (ROWS, SIDES)
    found = []
    for m, (k, n) in product(num_rows, sides):
        rows = torch.randn(m, k, device=device).to(DTYPES[dtype])
        weights = torch.randn(n, k, device=device).to(DTYPES[dtype])
        found.append(ProductTime(m, k, n, repeated(partial(linear, rows, weights), device)))
    return found


def attention_flops(device: str, dtype: str) -> float:
    """Return the FLOP/s of causal attention over a long sequence, counting only the pairs that it needs."""
    heads, tokens, size = 8, 2048 if is_gpu(device) else 512, 64
    q, k, v = (torch.randn(tokens, heads, size, device=device).to(DTYPES[dtype]) for _ in range(3))
    layout = PackedLayout.of(np.array([tokens]), device, DTYPES[dtype])
    seconds = repeated(lambda: attend(q, k, v, layout, None), device)
    return 4 * heads * size * tokens * (tokens + 1) / 2 / seconds


def copy_rate(device: str) -> float:
    """Return the bytes of memory per second that a long copy reads and writes."""
    source = torch.zeros((1024 if is_gpu(device) else 128) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / repeated(lambda: target.copy_(source), device)


def cold_products(device: str, dtype: str) -> list[ProductTime]:
    """Return the seconds of products with few rows, whose weights come from memory, as in decoding."""
    sides = CUDA_SIDES if is_gpu(device) else SIDES
    found = []
    for k, n in sides:
        weights = torch.randn(n, k, device=device).to(DTYPES[dtype])
        num = max(2, COLD_BYTES[device] // (weights.numel() * weights.element_size()))
        copies = [weights.clone() for _ in range(num)]
        for m in COLD_ROWS:
            rows = torch.randn(m, k, device=device).to(DTYPES[dtype])
            seconds = repeated(partial(_each_product, rows, copies), device) / num
            found.append(ProductTime(m, k, n, seconds))
    return found


def _each_product(rows: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    for matrix in weights:
        linear(rows, matrix)


def host_copy_rate(device: str) -> float:
    """Return the bytes per second from the memory of the machine to the device."""
    source = torch.zeros(128 * MIB, dtype=torch.uint8, pin_memory=is_gpu(device))
    target = torch.empty_like(source, device=device)
    return source.numel() / repeated(lambda: target.copy_(source, non_blocking=True), device)


def checksum_rate() -> float:
    """Return the bytes per second of the checksum that verifies weights, on the host."""
    weights = {str(i): torch.randn(512, 1536) for i in range(COLD_BYTES["cpu"] // (512 * 1536 * 4))}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    return num_bytes / repeated(partial(weights_checksum, weights), "cpu")


def disk_rate() -> float:
    """Return the bytes per second that reach a file in the working directory, written and flushed once."""
    data = bytes(128 * MIB)
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        return len(data) / (time.perf_counter() - start)


def collectives(device: str, ranks: int) -> list[CollectiveTime]:
    """Return the seconds of collectives by size, on processes of this machine."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(_time_collectives, args=(ranks, device, directory), nprocs=ranks)
        times = json.loads((Path(directory) / "times.json").read_text())
    return [CollectiveTime(size, ranks, seconds, is_all_reduce) for size, seconds, is_all_reduce in times]


def sharded_steps(ranks: int) -> list[float]:
    """Return the seconds of each model's training by the torch backend, sharded over processes of a CPU.

    Each rank has the first batch.
    """
    with tempfile.TemporaryDirectory() as directory:
        spawn(_time_sharded_steps, args=(ranks, MODELS, BATCHES[0], directory), nprocs=ranks)
        times: list[float] = json.loads((Path(directory) / "times.json").read_text())
    return times


def _time_sharded_steps(
    rank: int, ranks: int, models: Sequence[SmallModel], batch: tuple[int, int], directory: str
) -> None:
    """Time steps on one rank; rank 0 writes what it measured."""
    use_one_core("cpu")
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=ranks)
    times = []
    for model in models:
        position = RankPosition(dist.group.WORLD, Layout(ranks))
        backend = _training_backend("torch", model, "cpu", "fp32", position)
        _, training = _steps(backend, _batch(*batch))
        times.append(collective_seconds(training, "cpu", SHARDED_STEPS))
    if rank == 0:
        (Path(directory) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _time_collectives(rank: int, ranks: int, device: str, directory: str) -> None:
    """Time collectives on one rank; rank 0 writes what it measured."""
    use_one_core(device)
    if is_gpu(device):
        torch.cuda.set_device(rank)
    file = Path(directory) / "rendezvous"
    dist.init_process_group(
        collective_backend(device), init_method=f"file://{file}", rank=rank, world_size=ranks
    )
    times = []
    for num_bytes in COLLECTIVE_BYTES:
        num_elements = num_bytes // 4 // ranks
        whole, part = (torch.zeros(n, device=device) for n in (num_elements * ranks, num_elements))
        for work in ring_collectives(whole, part):
            num = max(3, min(50, 16 * MIB // num_bytes))
            times.append((num_bytes, collective_seconds(work, device, num), work.func is dist.all_reduce))
    if rank == 0:
        (Path(directory) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def ring_collectives(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[partial[Any], ...]:
    """Return the collectives that training uses: all-reduce, all-gather and reduce-scatter.

    `whole` has one `part` for each rank.
    """
    return (
        partial(dist.all_reduce, whole, group=group),
        partial(gather_in_place, whole, group),
        partial(sum_parts, part, whole, group),
    )


def collective_seconds(
    work: Callable[[], object], device: str, num: int, ranks: dist.ProcessGroup | None = None
) -> float:
    """Return the median seconds of some executions, which all of these ranks begin together; None: the world.

    The first one is not counted.
    """
    return statistics.median([_seconds_together(work, device, ranks) for _ in range(num + 1)][1:])


def _seconds_together(work: Callable[[], object], device: str, ranks: dist.ProcessGroup | None) -> float:
    dist.barrier(ranks)
    start = time.perf_counter()
    work()
    if is_gpu(device):
        torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclass(frozen=True)
class SmallModel:
    """A model that backends train and engines decode with."""

    hidden: int
    intermediate: int
    num_layers: int
    head_size: int = 32
    max_tokens: int = 512
    """Tokens of the longest sequence."""

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        num_heads = self.hidden // self.head_size
        heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2}
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.intermediate}
        more = {"num_hidden_layers": self.num_layers, "max_position_embeddings": self.max_tokens}
        return {"model_type": "qwen2", "vocab_size": VOCABULARY, **sizes, **heads, **more}


def decode_steps(device: str, dtype: Literal["fp32", "bf16"]) -> Iterator[tuple[SmallModel, int, int, float]]:
    """Yield (model, sequences, tokens of all sequences, seconds) of decode steps of the embedded engine."""
    for model, num_sequences, prompt in product(MODELS, SEQUENCES, LENGTHS):
        settings = ModelSettings(name="actor", architecture=model.architecture, device=device, dtype=dtype)
        engine = EmbeddedEngine(settings, {"max_running": num_sequences, "max_model_len": 512})
        num_steps = WARM_STEPS + TIMED_STEPS
        for i in range(num_sequences):
            tokens = [(i + j) % VOCABULARY for j in range(prompt)]
            engine.add(i, tokens, SamplingParams(max_tokens=num_steps + 2, seed=i))
        times = []
        for step in range(num_steps):
            start = time.perf_counter()
            engine.step()
            if step >= WARM_STEPS:
                times.append(time.perf_counter() - start)
        context = num_sequences * (prompt + WARM_STEPS + TIMED_STEPS // 2)
        yield model, num_sequences, context, statistics.median(times)


def loads(dtype: Literal["fp32", "bf16"]) -> list[LoadTime]:
    """Return the seconds in which the embedded engine on a CPU takes and verifies new weights."""
    found = []
    for model in MODELS:
        settings = ModelSettings(name="actor", architecture=model.architecture, device="cpu", dtype=dtype)
        engine = EmbeddedEngine(settings, {"max_running": 1, "max_model_len": model.max_tokens})
        weights = list(factories()["torch"](settings, RankPosition()).weights())
        num_bytes = sum(tensor.nbytes for _, tensor in weights)
        found.append(LoadTime(len(weights), num_bytes, repeated(partial(_load, engine, weights), "cpu")))
    return found


def _load(engine: EmbeddedEngine, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    engine.load_weights([IncomingWeights.of_tensors(lambda: weights)], engine.version + 1)


def training_steps(
    backend: str,
    device: str,
    dtype: Literal["fp32", "bf16"],
    models: Sequence[SmallModel],
    batches: Sequence[tuple[int, int]],
) -> Iterator[tuple[SmallModel, int, int, bool, float]]:
    """Yield (model, sequences, tokens of each, whether it trains, seconds) of a backend's node."""
    for model in models:
        built = _training_backend(backend, model, device, dtype, RankPosition())
        for num_sequences, num_tokens in batches:
            works = _steps(built, _batch(num_sequences, num_tokens))
            for trains, work in zip((False, True), works, strict=True):
                yield model, num_sequences, num_tokens, trains, repeated(work, device)


def _training_backend(
    name: str, model: SmallModel, device: str, dtype: Literal["fp32", "bf16"], position: RankPosition
) -> ModelBackend:
    settings = ModelSettings(
        name="actor", trainable=True, architecture=model.architecture, device=device, dtype=dtype
    )
    backend: ModelBackend = factories()[name](settings, position)
    return backend


def _steps(backend: ModelBackend, batch: Batch) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        partial(backend.infer, INFER, [batch]),
        partial(backend.train, TRAIN, [TrainShard((batch,))], 0),
    )


MODELS = (SmallModel(128, 512, 2), SmallModel(256, 768, 6), SmallModel(768, 2048, 3))
"""The models' weights fit a cache of the second level, of the third level, and no cache of most CPUs."""
LAYERS = {
    "cpu": (SmallModel(512, 1536, 3), (64, 32)),
    "cuda": (SmallModel(3584, 18944, 2, head_size=128, max_tokens=1024), (8, 1024)),
}
"""Device -> a model that keeps it busy (on GPUs layers of 7B); sequences of a batch, and tokens of each."""


def _logprobs(out: Output) -> torch.Tensor:
    return out.logprobs


def _loss(out: Output) -> torch.Tensor:
    return -out.logprobs


OUTPUT = (("out", "output"),)
INFER = NodeCall("infer", _logprobs, (), OUTPUT, (("logprobs", "token"),), False, {}, {})
TRAIN = NodeCall("train", _loss, (), OUTPUT, (("loss", "token"),), False, {}, {"reduce": "token-mean"})


def _batch(num_sequences: int, num_tokens: int) -> Batch:
    """Return sequences of equal length, the first quarter of which is a prompt."""
    ids = np.arange(num_sequences * num_tokens) % VOCABULARY
    is_learned = np.tile(np.arange(num_tokens) >= num_tokens // 4, num_sequences)
    columns = {"input_ids": Column(Unit.TOKEN, ids), "loss_mask": Column(Unit.TOKEN, is_learned)}
    numbers = np.arange(num_sequences)
    return Batch(numbers, numbers, np.full(num_sequences, num_tokens), columns)
