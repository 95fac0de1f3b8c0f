"""Results of two real ranks (gloo, FSDP2), which a test compares with one process."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import family_kit
import numpy as np
import reduction_cases
import torch
import torch.distributed as dist
import torch_kit as kit
from memory_kit import peak

from hflow.config.schema import BalanceConfig, LoraConfig
from hflow.data.batches.batch import Batch
from hflow.models.adapter import base_parameters
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training import hf_files
from hflow.training.fsdp import build, weight_export
from hflow.training.fsdp import sharding as fsdp
from hflow.training.fsdp.backend import TorchModel
from hflow.training.fsdp.optimizer import local_shard
from hflow.training.interface import TrainShard


def run(rank: int, directory: str) -> None:
    """Run a spawned rank; rank 0 writes the results to `ranks.pt`."""
    hf_files.MIN_FILE_BYTES = 4096  # so that both ranks write files of a tiny model
    weight_export.BUCKET_BYTES = 512  # and tensors are sent in pieces
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    results = scenarios(rank, dist.group.WORLD, Path(directory))
    if rank == 0:
        torch.save(results, f"{directory}/ranks.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_compiled(rank: int, directory: str) -> None:
    """Run a spawned rank that trains compiled layers, each sharded by itself, and write rank 0's results."""
    fsdp.MIN_UNIT_BYTES = 0
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    batch = kit.make_batch(kit.LENGTHS)
    backend = kit.model(2, dist.group.WORLD, compile=True)
    results = backend.train(kit.CALLS["token-mean"], [kit.halves(batch)[rank]], 5), kit.weights(backend)
    if rank == 0:
        torch.save(results, f"{directory}/compiled.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_replicated(rank: int, directory: str) -> None:
    """Run one of four spawned ranks, of which two shard the weights and two hold the same shard."""
    torch.set_num_threads(1)
    fsdp.MIN_UNIT_BYTES = 0
    hf_files.MIN_FILE_BYTES = 4096
    weight_export.BUCKET_BYTES = 4096
    store = dist.FileStore(f"{directory}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    results = replicated(rank, dist.group.WORLD, Path(directory))
    if rank == 0:
        torch.save(results, f"{directory}/replicated.pt")
    dist.barrier()
    dist.destroy_process_group()


QUARTERS = (([0, 1], [4], [5, 6], [7]), ([], [2], [3], []), ([8, 9], [], [10], [11]))
"""Rows of each minibatch on four ranks."""
REPLICATED = ("lora", "dora", "bf16", "gradients summed once", "untied")


def replicated(rank: int, group: Any, directory: Path) -> dict[str, Any]:
    """Train variants with a replicate axis; return metrics and weights, and what every rank holds."""
    batch = kit.make_batch(kit.LENGTHS)
    shard = [TrainShard(tuple(batch.take(rows[rank]) for rows in QUARTERS))]
    results: dict[str, Any] = {}
    num_groups = len(dist.distributed_c10d._world.pg_map)
    for name in REPLICATED:
        if "lora" in VARIANTS[name] and find_spec("peft") is None:
            continue
        backend = kit.model(4, group, replicate=2, tokens_per_microbatch=13, **VARIANTS[name])
        results[name] = (backend.train(call_of(name), shard, 5), kit.weights(backend))
        written = backend.save(str(directory / name))()
        results[f"{name} files"] = everywhere({path.name for path in written}, group)
        with backend.on_device():
            held = [(block.tensor, block.box, block.values.clone()) for block in backend.blocks()]
        results[f"{name} blocks"] = everywhere(held, group)
    backend.infer(kit.LOGPROBS, [batch])  # leaves weights whole on every rank
    backend.save_shards(str(directory / "shards"))()
    results["groups"] = len(dist.distributed_c10d._world.pg_map) - num_groups
    share = [batch.take([row for row in range(12) if row % 4 == rank and row < 9])]
    inferred = kit.model(4, group, replicate=2, tokens_per_microbatch=13, trainable=False)
    results["infer"] = everywhere(inferred.infer(kit.LOGPROBS, share)[0].columns["result"].values, group)
    return results


def scenarios(rank: int, group: Any, directory: Path) -> dict[str, Any]:
    """Run every training variant over two ranks; return metrics and weights after the step."""
    batch = kit.with_experts(kit.make_batch(kit.LENGTHS))
    shard = [kit.halves(batch)[rank]]
    whole_layers = fsdp.MIN_UNIT_BYTES
    results: dict[str, Any] = {}
    for name, call in kit.CALLS.items():
        backend = kit.model(2, group, tokens_per_microbatch=13)
        results[name] = (backend.train(call, shard, 5), kit.weights(backend))
    for name, changes in VARIANTS.items():
        if "lora" in changes and find_spec("peft") is None:
            continue
        has_units = name in ("replayed", "gathered once", "gradients summed once")
        fsdp.MIN_UNIT_BYTES = 0 if has_units else whole_layers
        backend = kit.model(2, group, tokens_per_microbatch=13, **changes)
        if name == "gradients summed once":
            skipped = backend.train(call_of(name), [kit.halves(with_infinite(batch))[rank]], 4)
            results["skipped"] = skipped["skipped_updates"]
        results[name] = (backend.train(call_of(name), shard, 5), kit.weights(backend))
        written = backend.save(str(directory / name))()
        results[f"{name} files"] = everywhere({path.name for path in written}, group)
        if "lora" in changes:
            results[name] += (adapters_off_and_on(backend, group, batch, shard),)
    dist.barrier(group)
    for name in READ:
        if "lora" in VARIANTS[name] and find_spec("peft") is None:
            continue
        backend = from_checkpoint(directory, name, group)
        loaded = kit.weights(backend)
        results[f"{name} read"] = loaded, (backend.train(call_of(name), shard, 6), kit.weights(backend))
    results["reductions"] = reductions(rank, group)
    for name, changes in SHARED.items() if find_spec("peft") is not None else ():
        fsdp.MIN_UNIT_BYTES = 0 if name == "offloaded" else whole_layers
        results[f"shared {name}"] = everywhere(shared_base(group, batch, shard, changes), group)
    fsdp.MIN_UNIT_BYTES = whole_layers
    results["infer"] = infer(rank, group, batch)
    backend = kit.model(2, group)
    backend.infer(kit.LOGPROBS, [batch])  # leaves weights whole on every rank
    held = [(block.tensor, block.box, block.values.clone()) for block in backend.blocks()]
    results["blocks"] = everywhere(held, group), kit.weights(backend)
    results["peaks"] = everywhere(peak_of_drawing(group), group)
    if rank == 1:
        kit.model().save(str(directory / "on the second rank alone"))()
    return results


def reductions(rank: int, group: Any) -> dict[Any, float]:
    """Return the loss of every case of `reduction_cases` on two ranks."""
    backend, batch = kit.model(2, group, tokens_per_microbatch=13), reduction_cases.make_batch()
    losses = {}
    for reduction, mask, num_minibatches in reduction_cases.CASES:
        shard = reduction_cases.shards_of(batch, num_minibatches, 2)[rank]
        metrics = backend.train(reduction_cases.call_of(reduction, mask), [shard], 0)
        losses[reduction, mask, num_minibatches] = metrics["loss"]
    return losses


HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
LORA = LoraConfig(r=4, alpha=8, save_merged=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"architecture": kit.ARCHITECTURE | {"tie_word_embeddings": False}},
    "value": {"head": "value"},
    "bf16": {"dtype": "bf16"},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"offload": "all"},
    "replayed": {"architecture": kit.MIXED, "activation_checkpointing": True},
    "balanced": {
        "architecture": family_kit.architecture("deepseek_v3"),
        "balance": BalanceConfig(coefficient=0.5, over="batch", bias_rate=1e-3),
        "activation_checkpointing": True,
    },
    "gathered once": {"zero_stage": 2},
    "gradients summed once": {
        "zero_stage": 1,
        "activation_checkpointing": True,
        "optim": dataclasses.replace(kit.SETTINGS.optim, on_nonfinite="skip"),
    },
    "lora": {"lora": LORA},
    "outer lora": {
        "lora": dataclasses.replace(LORA, targets=("all-linear", "embed_tokens", "lm_head")),
        "architecture": kit.ARCHITECTURE | {"tie_word_embeddings": False},
    },
    "experts lora": {
        "lora": dataclasses.replace(LORA, targets=("q_proj", *EXPERT_TARGETS)),
        "architecture": kit.MIXED,
    },
    **({"rounded lora": {"lora": dataclasses.replace(LORA, base="nf4")}} if HAS_BITSANDBYTES else {}),
    "dora": {"lora": dataclasses.replace(LORA, dora=True)},
    "lora recomputed in bf16": {
        "lora": LORA,
        "dtype": "bf16",
        "activation_checkpointing": True,
        "offload": "all",
    },
}


READ = {
    **{name: name for name in ("untied", "value", "bf16", "recomputed", "offloaded")},
    "lora": "recomputed",
    "dora": "recomputed",
    "outer lora": "untied",
    "experts lora": "replayed",
    "lora recomputed in bf16": "bf16",
}
"""Variants that are built from a checkpoint, of which each rank reads its rows -> the saved variant."""


def from_checkpoint(directory: Path, name: str, group: Any) -> TorchModel:
    """Build a model from a variant's checkpoint. It is an error if a rank of several reads all of it."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a rank reads the whole checkpoint")

    changes = VARIANTS[name] | {"architecture": None, "path": str(directory / READ[name]), "seed": 99}
    if group is None:
        return kit.model(**changes)
    whole, build._from_checkpoint = build._from_checkpoint, refuse  # type: ignore[assignment]
    try:
        backend = kit.model(2, group, tokens_per_microbatch=13, **changes)
    finally:
        build._from_checkpoint = whole
    return backend


LARGE = kit.ARCHITECTURE | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
LARGE |= {"num_hidden_layers": 8}


def peak_of_drawing(group: Any) -> int:
    """Return the most bytes that torch allocated at once to draw a model on this rank."""
    return peak(partial(kit.model, 2, group, trainable=False, architecture=LARGE))


def call_of(name: str) -> Any:
    """Return the train call of a variant."""
    calls = {"value": kit.VALUE, "replayed": kit.REPLAYED}
    return calls.get(name, kit.CALLS["token-mean"])


def with_infinite(batch: Batch) -> Batch:
    """Return a batch in which every advantage is infinite."""
    column = batch.columns["advantages"]
    return batch.with_columns({"advantages": dataclasses.replace(column, values=column.values * np.inf)})


def adapters_off_and_on(backend: TorchModel, group: Any, batch: Batch, shard: Any) -> Any:
    """Return log-probs without adapters, and the weights after training further."""
    base = backend.share_weights(dataclasses.replace(backend.settings, lora=None, trainable=False))
    (result,) = base.infer(kit.LOGPROBS, [batch])
    backend.train(kit.CALLS["token-mean"], shard, 6)
    return result.columns["result"].values, kit.weights(backend)


SHARED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, recomputed": {"dtype": "bf16", "activation_checkpointing": True, "zero_stage": 2},
    "offloaded": {"offload": "all"},
}
"""Changes to models with adapters, of which others use the weights."""


def shared_base(group: Any, batch: Batch, shard: Any, changes: dict[str, Any]) -> dict[str, bool]:
    """Train three models on one base and a copy of each with weights of its own, and compare them.

    The owner has adapters on two matrices, and the two others on all: a critic and a second policy.
    """
    few, num = dataclasses.replace(LORA, targets=("q_proj", "down_proj")), 1 if group is None else 2
    owner = kit.model(num, group, **{"lora": few, **changes})
    of_others = {**changes, "lora": LORA, "offload": "optimizer" if "offload" in changes else "none"}
    different = {"critic": {"head": "value"}, "other": {"seed": 5}}
    settings = {
        name: dataclasses.replace(kit.SETTINGS, **of_others, **own) for name, own in different.items()
    }
    models = {name: owner.share_weights(one) for name, one in settings.items()}
    ref = models["other"].share_weights(dataclasses.replace(owner.settings, lora=None, trainable=False))
    pairs = [(owner, kit.model(num, group, **{"lora": few, **changes}))]
    # The weights are drawn from the seed, so those with another one get the owner's here.
    pairs += [(models[name], with_base_of(owner, settings[name], group)) for name in models]
    (before,) = ref.infer(kit.LOGPROBS, [batch])
    equal = {}
    for step in range(2):
        for name, (one, alone) in zip(("actor", *models), pairs, strict=True):
            call = call_of("value" if name == "critic" else "")
            metrics = [backend.train(call, shard, 5 + step) for backend in (one, alone)]
            found = [kit.weights(backend) for backend in (one, alone)]
            equal[f"{name} {step}"] = metrics[0] == metrics[1] and all(
                torch.equal(tensor, found[1][tensor_name]) for tensor_name, tensor in found[0].items()
            )
    (after,) = ref.infer(kit.LOGPROBS, [batch])
    equal["ref"] = np.array_equal(before.columns["result"].values, after.columns["result"].values)
    with models["other"].on_device(), models["critic"].on_device():
        held = base_storages(owner)
        for name, model in models.items():
            equal[f"{name} has no base"] = base_storages(model) <= held
    return equal


def base_storages(model: Any) -> set[int]:
    """Return the addresses of a rank's weights but adapters and heads."""
    weight_export.reshard(model._runner.module)
    return {local_shard(x.detach()).data_ptr() for x in base_parameters(model._model).values()}


def with_base_of(owner: TorchModel, settings: ModelSettings, group: Any) -> TorchModel:
    """Return a model with weights of its own that are those of another one."""
    num = 1 if group is None else 2
    model = TorchModel(settings, RankPosition(group, Layout(num)))
    with owner.on_device(), model.on_device(changes=True), torch.no_grad():
        for backend in (owner, model):
            weight_export.reshard(backend._runner.module)
        held = base_parameters(owner._model)
        for name, weight in base_parameters(model._model).items():
            local_shard(weight.detach()).copy_(local_shard(held[name].detach()))
    return model


def infer(rank: int, group: Any, batch: Batch) -> Any:
    """Return log-probs of uneven shards: rank 1 has fewer micro-batches than rank 0."""
    share = batch.take(list(range(9)) if rank == 0 else [9, 10, 11])
    backend = kit.model(2, group, tokens_per_microbatch=13, trainable=False)
    (result,) = backend.infer(kit.LOGPROBS, [share])
    return everywhere(result.columns["result"].values, group)


def everywhere(mine: Any, group: Any) -> list[Any]:
    """Return the values of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return parts
