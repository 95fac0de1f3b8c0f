"""Two real ranks (gloo) that split a vocabulary, which a test compares with whole logits."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hflow.training.loop import logprobs
from hflow.training.loop.kept_sets import KeptSets
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix

NUM_ROWS, HIDDEN, VOCAB, PART = 11, 6, 13, 8
"""The second rank has 5 of the 13 tokens and 3 rows of padding."""
TEMPERATURES = (1.0, 0.3)
CHUNKS = (NUM_ROWS, 4)
"""Rows whose logits may exist at once: all, or four, of which two are in fp32."""


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states `[N, D]`, output matrix `[V, D]`, drawn tokens `[N]` and others `[N, 3]`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, HIDDEN, generator=generator) * 3
    matrix = torch.randn(VOCAB, HIDDEN, generator=generator)
    drawn = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    others = torch.randint(0, VOCAB, (NUM_ROWS, 3), generator=generator)
    return rows, matrix, drawn, others


def kept_sets() -> list[list[int]]:
    """Return the tokens that each row's distribution is over: of one rank, of both, and all."""
    _, _, drawn, others = inputs()
    sets = [sorted({int(drawn[i]), *others[i].tolist()}) for i in range(NUM_ROWS)]
    return [[], [int(drawn[1])], [int(drawn[2]), 0, PART], *sets[3:]]


def combine(found: dict[str, Tensor]) -> Tensor:
    """Return one number to which every entry of every measure contributes with its own weight."""
    parts = [(x * torch.linspace(0.5, 2, x.numel()).view(x.shape)).sum() for x in found.values()]
    return torch.stack(parts).sum()


def measures(logits: Any, drawn: Tensor, others: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return all measures of logits; the ids of `topk` separately, as they have no gradient."""
    entropy, logprobs = logits.measure(["entropy", "logprobs"], drawn)
    ids, likeliest = logits.topk(others.shape[1])
    found = {"entropy": entropy, "logprobs": logprobs, "topk": likeliest, "of": logits.logprobs_of(others)}
    return found, ids


def run(rank: int, directory: str) -> None:
    """Run a spawned rank, which writes its results to `<rank>.pt`."""
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    results = {
        (t, size, restricted): compute(rank, t, size, restricted=restricted)
        for t in TEMPERATURES
        for size in CHUNKS
        for restricted in (False, True)
    }
    results["by hand"] = by_hand(rank)
    results["nothing"] = [x.shape for x in compute(rank, 1.0, CHUNKS[0], num_rows=0)[0].values()]
    torch.save(results, Path(directory) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def compute(
    rank: int, temperature: float, size: int, num_rows: int = NUM_ROWS, restricted: bool = False
) -> Any:
    """Return measures, top-k, gradients of the hidden states (summed) and of this rank's matrix."""
    logprobs.CHUNK_BYTES, logprobs.LOGITS_PER_TILE = 4 * PART * size, PART * (size // 2)
    rows, matrix, drawn, others = (x[:num_rows] if len(x) == NUM_ROWS else x for x in inputs())
    part = torch.zeros(PART, HIDDEN)
    mine = matrix[rank * PART : (rank + 1) * PART]
    part[: len(mine)] = mine
    rows.requires_grad_()
    part.requires_grad_()

    mine_of = OutputMatrix(part, None, rank * PART, len(mine), dist.group.WORLD)
    kept = KeptSets.of_ids([np.array(ids, np.int32) for ids in kept_sets()], rows.device)
    parallel = MatrixLogits(rows, mine_of, temperature, kept if restricted else None)
    found, ids = measures(parallel, drawn, drawn[:, None] if restricted else others)
    combine(found).backward()
    assert rows.grad is not None
    dist.all_reduce(rows.grad) if num_rows else None
    return {name: x.detach() for name, x in found.items()}, ids, rows.grad, part.grad


def by_hand(rank: int) -> tuple[float, ...]:
    """Return the log-prob of token 0 and the entropy of logits 0 and ln 3, one per rank, and their slopes."""
    weight = torch.tensor([[0.0, math.log(3)][rank : rank + 1]], requires_grad=True)
    logits = MatrixLogits(torch.ones(1, 1), OutputMatrix(weight, None, rank, None, dist.group.WORLD), 1.0)
    found = [logits.measure([name], torch.tensor([0]))[0] for name in ("logprobs", "entropy")]
    return *[x.item() for x in found], *[torch.autograd.grad(x.sum(), weight)[0].item() for x in found]
