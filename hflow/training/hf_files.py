"""The files of a Hugging Face checkpoint: every rank writes some, so that none holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

from hflow.base.errors import BackendError
from hflow.base.model_files import FILE_BYTES, MIN_FILE_BYTES
from hflow.models.heads import head_file, save_head
from hflow.models.weight_files import INDEX, SINGLE

Copies = dict[str, dict[str, Tensor]]
"""Copies of tensors in host memory, by file and name."""


@dataclass(frozen=True)
class FileDivision:
    """The file of each tensor, and the rank that writes each file."""

    num_bytes: Mapping[str, int]
    """Name of a tensor -> its size."""
    file_of: Mapping[str, str]
    """Name of a tensor -> its file. Neighbouring tensors are in one file."""
    writer_of: Mapping[str, int]
    """File -> rank."""

    @classmethod
    def over_ranks(
        cls, num_bytes: Mapping[str, int], num_ranks: int, file_bytes: int = FILE_BYTES
    ) -> FileDivision:
        """Divide tensors so that each rank writes about the same number of bytes.

        A rank writes its equal share, and at most one tensor more. `num_bytes` are the sizes of tensors by
        name, in the order of the checkpoint, and `file_bytes` is the size that files should not exceed.
        """
        total = max(1, sum(num_bytes.values()))
        per_rank = _ceil_div(_ceil_div(total, num_ranks), file_bytes)
        count = min(per_rank * num_ranks, _ceil_div(total, min(MIN_FILE_BYTES, file_bytes)))
        numbers, start = {}, 0
        for name, size in num_bytes.items():
            numbers[name] = min(count - 1, (2 * start + size) * count // (2 * total))
            start += size
        used = list(dict.fromkeys(numbers.values()))
        names = {
            number: f"model-{i + 1:05d}-of-{len(used):05d}.safetensors" if len(used) > 1 else SINGLE
            for i, number in enumerate(used)
        }
        return cls(
            num_bytes,
            {name: names[number] for name, number in numbers.items()},
            {name: number * num_ranks // count for number, name in names.items()},
        )

    def writer(self, name: str) -> int:
        """Return the rank that writes a tensor. The first one writes a head that has a file of its own."""
        return self.writer_of[self.file_of[name]] if name in self.file_of else 0

    def write(
        self,
        directory: Path,
        copies: Copies,
        head: Mapping[str, Tensor],
        config: PreTrainedConfig | None,
        saved_in: Mapping[str, str],
    ) -> list[Path]:
        """Write this rank's files, and return their paths. The copies of a file are freed when it is written.

        Args:
            head: the weights of a head that has a file of its own, without its prefix; may be empty.
            config: on the first rank, the config to save.
            saved_in: name under which a tensor is saved -> its file, for the index of several files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / name for name in copies]
        while copies:
            name = next(iter(copies))
            save_file(copies.pop(name), directory / name, metadata={"format": "pt"})
        if head:
            save_head(directory, head)
            paths.append(head_file(directory))
        if config is not None:
            config.save_pretrained(directory)
            paths.append(directory / CONFIG_NAME)
            if len(self.writer_of) > 1:
                index = {
                    "metadata": {"total_size": sum(self.num_bytes.values())},
                    "weight_map": dict(saved_in),
                }
                (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
                paths.append(directory / INDEX)
        return paths


def check_is_shared(parent: Path, rank: int) -> None:
    """Check that a rank sees the directory in which a checkpoint is written.

    Raises:
        BackendError: if not.
    """
    if not parent.is_dir():
        raise BackendError(
            f"rank {rank} does not see {parent}, but every rank writes part of a checkpoint; set out to a "
            "directory that all machines share"
        )


def _ceil_div(one: int, other: int) -> int:
    return -(-one // other)
