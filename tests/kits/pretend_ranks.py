"""Results of two ranks on the pretend accelerator, which a test compares with one process on the CPU."""

from __future__ import annotations

import dataclasses
import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_twins as twins
import memory_kit
import pretend_device
import torch
import torch.distributed as dist
import torch_kit as kit
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init

from hflow.config.schema import LoraConfig
from hflow.models.settings import RankPosition
from hflow.training.fsdp import sharding as fsdp
from hflow.training.interface import TrainShard

CASES: dict[str, dict[str, Any]] = {
    "mask": {"activation_checkpointing": True},
    "seq-mean": {"dtype": "bf16"},
    "group-mean": {"lora": LoraConfig(r=4, alpha=8)},
}
"""A train node of `torch_kit`, and changes of its model."""


def move_to_device(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
    """Move tensors in place. FSDP sets `tensor.data`, which torch allows for its own devices only."""
    for tensor in (*parameters, *buffers):
        if tensor.device != device and not tensor.is_meta:
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            )


def run(rank: int, directory: str) -> None:
    """Train each case with FSDP2, infer and save; rank 0 writes metrics, weights, log-probs and waits."""
    fsdp.MIN_UNIT_BYTES = 0  # each layer is sharded by itself
    _fsdp_init._move_states_to_device = move_to_device
    with pretend_device.installed() as device:
        store = dist.FileStore(f"{directory}/store", 2)
        dist.init_process_group(device, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        results = {name: train(name, device, rank, Path(directory)) for name in CASES}
        if rank == 0:
            torch.save(results, f"{directory}/results.pt")
        dist.barrier()
        dist.destroy_process_group()


ON_HOST = {"optim": dataclasses.replace(kit.SETTINGS.optim, name="adamw_cpu")}
TWINS = (
    twins.Twin("ppo", tensor=2, settings=twins.SP),
    twins.Twin("sft", pipe=2, settings=twins.RECOMPUTED),
    twins.Twin("experts", data=2, expert=2, budget=20),
    twins.Twin("critic", context=2),
    twins.Twin("adapters", tensor=2, settings=twins.SP | twins.RECOMPUTED),
    twins.Twin("experts", data=2, expert=2, budget=20, settings=ON_HOST),
    twins.Twin("sft", data=2, settings=ON_HOST | {"dtype": "bf16", "offload": "optimizer"}),
)


def run_megatron(rank: int, directory: str) -> None:
    """Train each twin with megatron, and write metrics and weights of every rank."""
    with pretend_device.installed() as device:
        from hflow.training.megatron.device import prepare

        prepare(device)
        from hflow.training.megatron.backend import MegatronModel

        store = dist.FileStore(f"{directory}/store", 2)
        dist.init_process_group(device, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        for twin in TWINS:
            settings = twins.settings(twin, Path(directory) / "checkpoint")
            model = MegatronModel(
                dataclasses.replace(kit.SETTINGS, device=device, **settings),
                RankPosition(dist.group.WORLD, twin.layout),
            )
            shards = twins.shards(twin.data, twin.heads.index(rank)) if rank in twin.heads else []
            call, _ = twins.NODES[twin.node]
            metrics = [model.train(call, shards, step) for step in twins.STEPS]
            weights = {key: tensor.cpu().clone() for key, tensor in model.weights()}
            held = held_bytes(model._optimizer, device)
            torch.save((metrics, weights, held), f"{directory}/{twin.name}.{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()


def held_bytes(optimizer: Any, device: str) -> tuple[int, int, int]:
    """Return the bytes of an optimizer: of pinned states, of pinned buffers, and of states on the device."""
    parts = [part.optimizer for part in optimizer._parts]
    states = [x for part in parts for state in part.state.values() for x in state.values()]
    pinned = [x for x in states if x.device.type != device]
    buffers = [x for part in parts for x in getattr(part, "_buffers", ())]
    assert all(map(pretend_device._is_pinned, pinned + buffers))
    return tuple(sum(x.nbytes for x in held) for held in (pinned, buffers, optimizer.states()))


MEMORY_CASES: dict[str, dict[str, Any]] = {
    "zero 3": {},
    "zero 2": {"zero_stage": 2},
    "zero 1": {"zero_stage": 1},
    "recomputed": {"activation_checkpointing": True},
    "adapters": {"lora": LoraConfig(r=8)},
}
"""Changes of a model of `memory_kit.WIDE` in bf16, whose step has several micro-batches."""
SEQUENCES, LENGTH, MICROBATCHES = 16, 64, 2
"""Sequences of each rank, tokens of a sequence, and micro-batches of a step."""


def run_memory(rank: int, directory: str, limits: dict[str, tuple[int, int]]) -> None:
    """Train and infer each case within its limits in bytes; write the most bytes of each phase."""
    _fsdp_init._move_states_to_device = move_to_device
    batch = memory_kit.batch_of(SEQUENCES, LENGTH, memory_kit.WIDE["vocab_size"], seed=rank)
    infers = dataclasses.replace(kit.LOGPROBS, node="infers")
    with pretend_device.installed() as device:
        store = dist.FileStore(f"{directory}/store", 2)
        dist.init_process_group(device, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
        peaks = {}
        for name, changes in MEMORY_CASES.items():
            tokens = SEQUENCES * LENGTH // MICROBATCHES
            asked = {
                "tokens_per_microbatch": tokens,
                "architecture": memory_kit.WIDE,
                "dtype": "bf16",
            } | changes
            with pretend_device.memory() as memory:
                memory.limit = max(limits[name])
                model = kit.model(2, dist.group.WORLD, device=device, **asked)
                most = []
                for work, limit in zip(("train", "infer"), limits[name], strict=True):
                    memory.limit, memory.most = limit, 0
                    for step in range(2):
                        if work == "train":
                            model.train(memory_kit.TRAIN, [TrainShard((batch,))], step)
                        else:
                            model.infer(infers, [batch])
                    most.append(memory.most)
                peaks[name] = most
                del model
                gc.collect()
        torch.save(peaks, f"{directory}/{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()


def train(name: str, device: str, rank: int, directory: Path) -> Any:
    batch = kit.make_batch(kit.LENGTHS)
    model = kit.model(2, dist.group.WORLD, device=device, tokens_per_microbatch=20, **CASES[name])
    shard = [kit.halves(batch)[rank]]
    with pretend_device.host_syncs() as syncs:
        metrics = model.train(kit.CALLS[name], shard, 5)
    inferred = model.infer(kit.LOGPROBS, [batch])[0].columns["result"].values
    model.save(str(directory / name))()
    dist.barrier()  # the directory exists
    model.save_shards(str(directory / name / "shards"))()
    weights = {key: tensor.cpu().clone() for key, tensor in model.weights()}
    return metrics, weights, inferred, [(sync.kind, sync.place) for sync in syncs]
