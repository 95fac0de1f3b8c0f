"""What two real ranks (gloo, FSDP2) hold at their peaks, for a test to compare with the memory model."""

from __future__ import annotations

from datetime import timedelta

import memory_kit as kit
import torch
import torch.distributed as dist

from hflow.backends.base import Seat

CASES = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "recomputed": {"activation_checkpointing": True},
    "several micro-batches": {"tokens_per_microbatch": 128},
}
NUM_SEQUENCES, LENGTH = 8, 64
ARCHITECTURE = kit.WIDE | {"intermediate_size": 2048}
"""A layer has 2.95 M parameters, so that it is gathered alone."""


def run(rank: int, directory: str) -> None:
    """Entry point of a spawned rank; rank 0 leaves the peaks in `peaks.pt`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    seat = Seat(dist.group.WORLD, 2)
    peaks = {
        name: kit.real_peaks(ARCHITECTURE, NUM_SEQUENCES, LENGTH, seat, **changes)
        for name, changes in CASES.items()
    }
    if rank == 0:
        torch.save(peaks, f"{directory}/peaks.pt")
    dist.barrier()
    dist.destroy_process_group()
