"""Seconds of kernels, copies, collectives and decode steps on the device at hand, by torch.

Everything is repeated for a moment, and the fastest time counts: something else disturbed the others. The
same code runs on a CPU, where a device is one core and collectives use gloo, and on CUDA, with NCCL.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.backends.interface import ModelSettings, SamplingParams
from hflow.launch.profiling.fit import CollectiveTime, ProductTime

SECONDS_EACH = 0.15
"""Time in which one measurement is repeated."""
MIB = 2**20
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (16, 64, 256, 512)
SIDES = ((128, 512), (512, 512), (512, 1536), (1024, 1024), (1536, 512))
CUDA_ROWS = (64, 512, 4096, 16384)
CUDA_SIDES = ((512, 2048), (2048, 2048), (4096, 1024), (4096, 4096), (4096, 12288))
COLLECTIVE_BYTES = (4 * 1024, 64 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
VOCABULARY = 256
LAYERS, SEQUENCES, LENGTHS = (2, 6), (1, 8, 32, 96), (32, 160)
WARM_STEPS, TIMED_STEPS = 3, 12


def repeated(work: Callable[[], object], device: str) -> float:
    """Return the seconds of some work."""

    def wait() -> None:
        if device == "cuda":
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
    return min(times)


def products(device: str, dtype: str) -> list[ProductTime]:
    """Return the seconds of products of matrices, by their shape."""
    rows, sides = (CUDA_ROWS, CUDA_SIDES) if device == "cuda" else (ROWS, SIDES)
    found = []
    for m, (k, n) in product(rows, sides):
        left = torch.randn(m, k, device=device).to(TORCH_DTYPES[dtype])
        right = torch.randn(k, n, device=device).to(TORCH_DTYPES[dtype])
        found.append(ProductTime(m, k, n, repeated(partial(torch.matmul, left, right), device)))
    return found


def attention_flops(device: str, dtype: str) -> float:
    """Return the FLOP/s of causal attention over a long sequence, counting only the pairs that it needs."""
    heads, tokens, size = 8, 2048 if device == "cuda" else 512, 64
    shape = (1, heads, tokens, size)
    q, k, v = (torch.randn(shape, device=device).to(TORCH_DTYPES[dtype]) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = repeated(lambda: attend(q, k, v, is_causal=True), device)
    return 4 * heads * size * tokens * (tokens + 1) / 2 / seconds


def copy_rate(device: str) -> float:
    """Return the bytes of memory per second that a long copy reads and writes."""
    source = torch.zeros((1024 if device == "cuda" else 128) * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / repeated(lambda: target.copy_(source), device)


def vector_rate(device: str, dtype: str) -> float:
    """Return the bytes of weights per second that a product with one row reads, as decoding does."""
    side = 8192 if device == "cuda" else 4096
    matrix = torch.zeros(side, side, device=device, dtype=TORCH_DTYPES[dtype])
    vector = torch.zeros(side, device=device, dtype=TORCH_DTYPES[dtype])
    return matrix.numel() * matrix.element_size() / repeated(lambda: matrix @ vector, device)


def host_copy_rate(device: str) -> float:
    """Return the bytes per second from the memory of the machine to the device."""
    source = torch.zeros(128 * MIB, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)
    return source.numel() / repeated(lambda: target.copy_(source, non_blocking=True), device)


def disk_rate() -> float:
    """Return the bytes per second that reach a file in the working directory, written and flushed once."""
    data = bytes(128 * MIB)
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        return len(data) / (time.perf_counter() - start)


def collectives(device: str, ranks: int) -> list[CollectiveTime]:
    """Return the seconds of all-reduces by size, on processes of this machine."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(_all_reduce, args=(ranks, device, directory), nprocs=ranks)
        times = json.loads((Path(directory) / "times.json").read_text())
    return [CollectiveTime(num_bytes, ranks, seconds) for num_bytes, seconds in times]


def _all_reduce(rank: int, ranks: int, device: str, directory: str) -> None:
    """Time all-reduces on one rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, file = ("nccl", "gloo")[device == "cpu"], Path(directory) / "rendezvous"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    times = []
    for num_bytes in COLLECTIVE_BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        num = max(3, min(50, 16 * MIB // num_bytes))
        each = []
        for _ in range(num + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            each.append(time.perf_counter() - start)
        times.append((num_bytes, min(each[1:])))
    if rank == 0:
        (Path(directory) / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def architecture(num_layers: int) -> dict[str, Any]:
    """Return the small model that engines decode with."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": num_layers}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768}
    return {"model_type": "qwen2", **sizes, **heads, "max_position_embeddings": 512}


def decode_steps(device: str, dtype: str) -> Iterator[tuple[int, int, int, float]]:
    """Yield (layers, sequences, tokens of all sequences, seconds) of decode steps of the embedded engine."""
    for num_layers, num_sequences, prompt in product(LAYERS, SEQUENCES, LENGTHS):
        settings = ModelSettings("actor", architecture=architecture(num_layers), device=device, dtype=dtype)
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
        yield num_layers, num_sequences, context, min(times)
