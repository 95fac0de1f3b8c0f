"""Bytes that four real ranks (gloo) hold with `MegatronModel`, which a test compares with the planner's."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import memory_kit as kit
import torch
import torch.distributed as dist
import torch_kit

from hflow.config.schema import LoraConfig, OptimConfig
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training.interface import TrainShard
from hflow.training.megatron.device import prepare

prepare("cpu")

from hflow.training.megatron.backend import MegatronModel  # noqa: E402

_MODELS = {"mixed": kit.MIXED, "dense": kit.WIDE, "latent": kit.LATENT, "biased": kit.BIASED}


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    layout: str
    dtype: str
    recompute: bool
    model: str = "mixed"
    lora: LoraConfig | None = None

    @property
    def architecture(self) -> dict[str, Any]:
        """The model."""
        return _MODELS[self.model]

    @property
    def asked(self) -> dict[str, Any]:
        """The settings besides the layout."""
        return {"dtype": self.dtype, "activation_checkpointing": self.recompute, "lora": self.lora}


LORA, DORA = LoraConfig(r=8), LoraConfig(r=8, dora=True)
OUTER = LoraConfig(r=8, targets=("all-linear", "embed_tokens", "lm_head"))
EXPERTS = LoraConfig(r=8, targets=("all-linear", *EXPERT_TARGETS))
CASES = (
    Case("d1", "fp32", recompute=False),
    Case("d2e2", "fp32", recompute=False),
    Case("d2e2", "bf16", recompute=True),
    Case("d2t2e2", "fp32", recompute=True),
    Case("d2t2e2", "bf16", recompute=False),
    Case("d4e4", "fp32", recompute=True),
    Case("d2t2", "fp32", recompute=False, model="dense"),
    Case("d2t2", "bf16", recompute=True, model="dense"),
    Case("d1", "fp32", recompute=False, model="dense", lora=LORA),
    Case("d2t2", "fp32", recompute=False, model="dense", lora=LORA),
    Case("d2t2", "bf16", recompute=True, model="dense", lora=LORA),
    Case("d1", "fp32", recompute=False, model="dense", lora=DORA),
    Case("d2t2", "fp32", recompute=False, model="dense", lora=DORA),
    Case("d2t2", "bf16", recompute=True, model="dense", lora=DORA),
    Case("d2t2", "fp32", recompute=False, model="dense", lora=OUTER),
    Case("d2t2e2", "fp32", recompute=False, lora=EXPERTS),
    Case("d2e2", "bf16", recompute=True, lora=EXPERTS),
    Case("d1", "fp32", recompute=False, model="latent"),
    Case("d2t2e2", "bf16", recompute=False, model="latent"),
    Case("d2e2", "fp32", recompute=False, model="biased"),
)
SEQUENCES, LENGTH = 16, 64
"""Of each data rank."""
NUM_LEARNED = SEQUENCES * LENGTH * 3 // 4
"""Tokens of `memory_kit.batch_of` that are learned, on each data rank."""


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank."""

    state: int
    """What the model holds between steps."""
    trained: int
    """The peak of a training step beyond the state."""
    inferred: int
    """The peak of an inference beyond the state."""


def run(rank: int, directory: str) -> None:
    """Write `Measured` of each case on this rank."""
    store = dist.FileStore(f"{directory}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=120))
    groups = {1: None, 2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    measured = {}
    for case in CASES:
        layout = Layout.parse(case.layout)
        if rank < layout.world:
            measured[case] = measure(case, layout, rank, groups[layout.world])
            gc.collect()
    torch.save(measured, Path(directory) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, layout: Layout, rank: int, group: Any) -> Measured:
    """Build a model, and train and infer.

    Memory that a thread of gloo frees seems to be held, so the smaller of two peaks counts.
    """
    architecture = case.architecture
    settings = ModelSettings(
        name="m", trainable=True, architecture=architecture, optim=OptimConfig(lr=1e-4), **case.asked
    )
    position = RankPosition(group, layout)
    data_rank, tensor_rank = divmod(rank, layout.tensor)
    batches = [kit.batch_of(SEQUENCES, LENGTH, architecture["vocab_size"], seed=data_rank)]
    batches = [] if tensor_rank else batches
    infers = dataclasses.replace(torch_kit.LOGPROBS, node="infers")
    models = []

    def train() -> None:
        models[0].train(kit.TRAIN, [TrainShard((batch,)) for batch in batches], 0)

    before = live_bytes()
    models.append(MegatronModel(settings, position))
    train()
    state = live_bytes() - before
    trained, inferred = (
        min(kit.peak(work) for _ in range(2)) for work in (train, lambda: models[0].infer(infers, batches))
    )
    return Measured(state, trained, inferred)


def live_bytes() -> int:
    """Return the bytes of all tensors that Python holds; tensors with the same storage count once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
