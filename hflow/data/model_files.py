"""The files of a Hugging Face checkpoint that hflow leaves as they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

CONFIG = "config.json"
WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".ot", ".onnx", ".npz"),
    ".index.json",
)
"""How names of files with weights, in any format, and of their indexes end."""


def copy_other_files(source: Path, directory: Path, without: Collection[str] = ()) -> list[Path]:
    """Copy what a checkpoint has beside weights and architecture, unchanged; return the copies.

    This is everything, such as sampling defaults, the tokenizer, processors, licences and code, but weights
    in any format, `config.json`, adapters and hidden files.

    Args:
        source: directory of the checkpoint that a model started with.
        directory: where the model is saved.
        without: names of folders that are not copied.
    """
    copies = []
    for place, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        for name in sorted(files):
            if name == CONFIG or name.startswith((".", "adapter_")) or name.endswith(WEIGHT_ENDINGS):
                continue
            copy = directory / Path(place).relative_to(source) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(place) / name, copy)
            copies.append(copy)
    return copies
