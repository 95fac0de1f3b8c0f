"""Sharded checkpoints: what is trained of a model, in boxes of its checkpoint tensors.

Every rank writes the boxes that it holds: fp32 weights and, once there are any, Adam's two moments. Each
box is written by one of its holders. An index, written last, says which file has which box; the directory
appears whole or not at all. As boxes are cut out of Hugging Face tensors, any layout and backend reads what
any other has written, each rank only what meets its own boxes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from hflow.backends.common.checks import refuse_tensors
from hflow.errors import BackendError
from hflow.types.tensor_slices import Box, meet, numel, within

INDEX = "shards.json"
FORMAT = 1
FILE_BYTES = 2 << 30
"""A rank begins another file when one has grown to this size."""

WEIGHT, MEAN, SQUARE = KINDS = ("weight", "mean", "square")
"""The weight, and the moving averages of its gradient and of the gradient's square."""

_VOLATILE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of an HF config that say nothing of what the model computes."""


@dataclass(frozen=True)
class BlockState:
    """One box of a checkpoint tensor as it is trained."""

    tensor: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    values: Mapping[str, Tensor]
    """Kind -> fp32 of the box's shape, a view of the model's or the optimizer's own storage."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Which model it is, and how far its optimizer is."""

    config: Mapping[str, Any]
    head: str
    num_steps: int
    """Steps of the optimizer. Where there was none, there are no moments."""

    @classmethod
    def of(cls, config: PreTrainedConfig, head: str, num_steps: int) -> CheckpointInfo:
        """Of a model with this HF config and head."""
        said = {key: value for key, value in config.to_diff_dict().items() if key not in _VOLATILE}
        return cls(json.loads(json.dumps(said, default=str)), head, num_steps)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is written of each box."""
        return KINDS if self.num_steps else (WEIGHT,)


def key(tensor: str, box: Box, kind: str) -> str:
    """The name of a box in its file."""
    spans = ",".join(f"{start}:{stop}" for start, stop in box)
    return f"{tensor}[{spans}].{kind}"


def write_shards(
    directory: Path, states: Iterable[BlockState], about: CheckpointInfo, group: ProcessGroup | None
) -> None:
    """Write this rank's states beside those of the others; a collective over the replica's ranks.

    Args:
        directory: on a file system that all ranks share; what was there is replaced.
        states: boxes that no other rank writes.
        about: the same on all ranks.
        group: the replica's ranks; None for one.

    Raises:
        BackendError: when this rank does not see what rank 0 has made.
    """
    rank = 0 if group is None else group.rank()
    fresh = directory.with_name(f".{directory.name}-unfinished")
    if rank == 0:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    _wait(group)
    if not fresh.is_dir():
        raise BackendError(
            f"rank {rank} does not see {fresh}, which rank 0 made: every rank writes its optimizer's state; "
            "set out to a directory that all machines share, or save_optimizer=false for the model"
        )
    for number, held in enumerate(_files(states, about.kinds)):
        _write(fresh / f"rank-{rank:05d}-{number:03d}.safetensors", held, about.kinds)
    _wait(group)
    if rank == 0:
        _publish(fresh, directory, about)
    _wait(group)


def _wait(group: ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)


def _files(states: Iterable[BlockState], kinds: tuple[str, ...]) -> Iterator[list[BlockState]]:
    """The states of each file."""
    held: list[BlockState] = []
    num_bytes = 0
    for state in states:
        held.append(state)
        num_bytes += sum(state.values[kind].nbytes for kind in kinds)
        if num_bytes >= FILE_BYTES:
            yield held
            held, num_bytes = [], 0
    if held:
        yield held


def _write(path: Path, states: list[BlockState], kinds: tuple[str, ...]) -> None:
    tensors = {
        key(state.tensor, state.box, kind): state.values[kind].detach().cpu().contiguous()
        for state in states
        for kind in kinds
    }
    rows = [(state.tensor, state.shape, state.box) for state in states]
    save_file(tensors, path, metadata={"boxes": json.dumps(rows)})
    _sync(path)


def _publish(fresh: Path, directory: Path, about: CheckpointInfo) -> None:
    """Write the index of all files, and give the directory its name."""
    tensors: dict[str, Any] = {}
    for path in sorted(fresh.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            rows = json.loads(file.metadata()["boxes"])
        for tensor, shape, box in rows:
            found = tensors.setdefault(tensor, {"shape": shape, "boxes": []})
            found["boxes"].append([box, path.name])
    said = {"head": about.head, "config": about.config, "num_steps": about.num_steps}
    index = {"format": FORMAT, **said, "tensors": tensors}
    (fresh / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    _sync(fresh / INDEX)
    _sync(fresh)
    shutil.rmtree(directory, ignore_errors=True)
    fresh.rename(directory)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# -------------------- Reads boxes out of a sharded checkpoint, whatever layout or backend wrote it.


@dataclass
class ShardReader:
    """A sharded checkpoint of which the index is read; files are opened when they are needed."""

    directory: Path
    about: CheckpointInfo
    boxes: Mapping[str, list[tuple[Box, str]]]
    """Tensor -> its boxes, each with its file."""
    _stack: ExitStack
    _files: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, tensor: str, box: Box, target: Tensor, kind: str = WEIGHT) -> None:
        """Copy a box of one kind into a tensor of its shape, reading no more than that.

        Raises:
            BackendError: when the checkpoint does not have all of it.
        """
        found = 0
        for stored, file in self.boxes[tensor]:
            met = meet(stored, box)
            if met is not None:
                part = self._read(file, key(tensor, stored, kind), within(met, stored))
                target[within(met, box)].copy_(part)
                found += numel(met)
        if found != numel(box):
            raise BackendError(f"{self.directory} has {found} of the {numel(box)} entries of {tensor} {box}")

    def _read(self, name: str, entry: str, at: tuple[slice, ...]) -> Tensor:
        try:
            if name not in self._files:
                path = self.directory / name
                self._files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            part: Tensor = self._files[name].get_slice(entry)[at]
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise BackendError(f"{self.directory / name} cannot be read: {reason}") from None
        return part


@contextmanager
def open_shards(
    directory: Path, about: CheckpointInfo, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ShardReader]:
    """A sharded checkpoint of this very model.

    Args:
        directory: that `write_shards` made.
        about: of the model that is to be filled.
        shapes: of all its tensors.

    Raises:
        BackendError: when there is none, or it is of another model: the key or the tensors are named.
    """
    index = _index(directory)
    found = CheckpointInfo(index["config"], index["head"], index["num_steps"])
    _check_model(directory, found, about)
    held = {name: tuple(row["shape"]) for name, row in index["tensors"].items()}
    misshapen = {name for name in held.keys() & shapes.keys() if held[name] != shapes[name]}
    refuse_tensors(directory, shapes.keys() - held.keys(), held.keys() - shapes.keys(), misshapen)
    boxes = {
        name: [(tuple((start, stop) for start, stop in box), file) for box, file in row["boxes"]]
        for name, row in index["tensors"].items()
    }
    with ExitStack() as stack:
        yield ShardReader(directory, found, boxes, stack)


def _index(directory: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        number = index["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BackendError(f"{directory} holds no sharded checkpoint ({INDEX}): {error}") from None
    if number != FORMAT:
        raise BackendError(f"{directory} has format {number}, this version reads format {FORMAT}")
    return index


def _check_model(directory: Path, found: CheckpointInfo, wanted: CheckpointInfo) -> None:
    ours, theirs = ({"head": about.head, **about.config} for about in (wanted, found))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise BackendError(
                f"{directory} is of another model: {name} is {theirs.get(name)!r} there and "
                f"{ours.get(name)!r} here"
            )
