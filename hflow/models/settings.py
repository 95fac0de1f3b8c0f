"""What a training backend or a generation engine builds a model from, and the names of what it saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from hflow.base.validation import CHECKED
from hflow.config.schema import ModelConfig
from hflow.shapes.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARDS = "shards"
"""Subdirectory of a saved model that holds its sharded checkpoint (`ModelBackend.save_shards`)."""
SHARDS_INDEX = "shards.json"
"""File of that checkpoint that lists its tensors, and says after how many optimizer steps it was saved."""
MERGED = "merged"
"""Subdirectory of a saved adapter that holds the merged model, where that is saved too."""


@checked_dataclass(frozen=True, kw_only=True, config=CHECKED)
class ModelSettings(ModelConfig):
    """A model's configuration, with what it left open, from which a backend or an engine builds the model.

    It has either `path` or `architecture`.
    """

    name: str
    head: str = "lm"
    """`lm`, `value` (a critic) or `score` (a reward model)."""
    trainable: bool = False
    seed: int = 0
    """Seed of the random weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: str = "cpu"
    """`cpu` or `cuda`."""
    kernels: Literal["torch", "transformer_engine"] = "torch"
    num_updates: int = 0
    """Optimizer steps of the model until the end of the run, over which its learning rate decays. Those that
    a resumed optimizer had made before the run count too."""
    saved: str | None = None
    """The directory in which the optimizer's state was saved, to `resume` it; None: `path`."""

    base: str | None = None
    """The model of the Hub, with its commit, or the adapter whose files, or merged ones, are in `path`; None:
    `path` was named."""

    @property
    def shards(self) -> str:
        """The directory of the sharded checkpoint that a resumed model loads."""
        return f"{self.saved or self.path}/{SHARDS}"


@dataclass(frozen=True)
class RankPosition:
    """The process group of a replica, and its layout. The group's ranks are in `RankOrder.TRAIN`."""

    group: ProcessGroup | None = None
    """The replica's ranks; None where one process hosts them all."""
    layout: Layout = field(default_factory=Layout)
