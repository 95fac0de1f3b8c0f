"""Reads boxes out of a sharded checkpoint, whatever layout or backend wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hflow.backends.common.checks import refuse_tensors
from hflow.backends.common.shards import FORMAT, INDEX, WEIGHT, About, key
from hflow.errors import BackendError
from hflow.types.boxes import Box, meet, numel, within


@dataclass
class ShardSource:
    """A sharded checkpoint of which the index is read; files are opened when they are needed."""

    directory: Path
    about: About
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
    directory: Path, about: About, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ShardSource]:
    """A sharded checkpoint of this very model.

    Args:
        directory: that `write_shards` made.
        about: of the model that is to be filled.
        shapes: of all its tensors.

    Raises:
        BackendError: when there is none, or it is of another model: the key or the tensors are named.
    """
    index = _index(directory)
    found = About(index["config"], index["head"], index["num_steps"])
    _check_model(directory, found, about)
    held = {name: tuple(row["shape"]) for name, row in index["tensors"].items()}
    misshapen = {name for name in held.keys() & shapes.keys() if held[name] != shapes[name]}
    refuse_tensors(directory, shapes.keys() - held.keys(), held.keys() - shapes.keys(), misshapen)
    boxes = {
        name: [(tuple((start, stop) for start, stop in box), file) for box, file in row["boxes"]]
        for name, row in index["tensors"].items()
    }
    with ExitStack() as stack:
        yield ShardSource(directory, found, boxes, stack)


def _index(directory: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        number = index["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BackendError(f"{directory} holds no sharded checkpoint ({INDEX}): {error}") from None
    if number != FORMAT:
        raise BackendError(f"{directory} has format {number}, this version reads format {FORMAT}")
    return index


def _check_model(directory: Path, found: About, wanted: About) -> None:
    ours, theirs = ({"head": about.head, **about.config} for about in (wanted, found))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise BackendError(
                f"{directory} is of another model: {name} is {theirs.get(name)!r} there and "
                f"{ours.get(name)!r} here"
            )
