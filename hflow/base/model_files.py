"""Checks a Hugging Face config before anything is built from it.

The files of a Hugging Face checkpoint that hflow leaves as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError

FILE_BYTES = 2 << 30
"""Files of a checkpoint are about this large at most, unless a single tensor is larger."""
MIN_FILE_BYTES = 64 << 20
"""Smaller models are not divided over more ranks than files of this size need."""
MAX_SIZE = 16_777_216
MAX_SIZES: Mapping[str, int] = {
    "hidden_size": 1_048_576,
    "intermediate_size": MAX_SIZE,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 65_536,
    "num_key_value_heads": 65_536,
    "head_dim": 65_536,
    "vocab_size": MAX_SIZE,
}
"""Key of a config -> more than any model has. Larger sizes would fill the memory."""
_DTYPES = (None, "auto", "float64", "float32", "bfloat16", "float16")
"""Precisions of unquantised weights."""


def check_model_config(config: Mapping[str, Any], may_be_quantised: bool = False) -> None:
    """Check what a config says of its model.

    Args:
        config: the content of `config.json`.
        may_be_quantised: the model is only planned.

    Raises:
        ConfigError: for a `model_type` that is no name, a size that no model has, a dtype that unquantised
            weights do not have, or a quantisation.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ConfigError(
            f"model_type is {family!r}; it must be the name of an architecture, such as 'qwen2'"
        )
    for key in MAX_SIZES:
        if config.get(key) is not None:
            check_size(family, key, config[key])
    for key in ("dtype", "torch_dtype"):
        if config.get(key) not in _DTYPES:
            raise ConfigError(
                f"{key} is {config[key]!r}; it must be one of {', '.join(map(str, _DTYPES[1:]))}"
            )
    if config.get("quantization_config") is not None and not may_be_quantised:
        raise ConfigError(
            "it is quantised (quantization_config), which cannot be trained; use unquantised weights"
        )
    text = config.get("text_config")
    if isinstance(text, Mapping):
        check_model_config({"model_type": family, **text}, may_be_quantised)


def check_size(family: str, key: str, size: Any) -> None:
    """Check a size of a model of this family.

    Raises:
        ConfigError: for anything but a whole number of at least 1, or a larger one than any model has.
    """
    most = MAX_SIZES.get(key, MAX_SIZE)
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"architecture {family!r}: {key} is {size!r}; it must be a whole number of at least 1"
        )
    if size > most:
        raise ConfigError(f"architecture {family!r}: {key} is {size:,}; it must be at most {most:,}")


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that a model has positions for; None if it has no bound."""
    text = config.get("text_config")  # of a model with several parts
    found = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    return found if type(found) is int and found > 0 else None


CONFIG = "config.json"
WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".ot", ".onnx", ".npz"),
    ".index.json",
)
"""How names of files with weights, in any format, and of their indexes end."""


def copy_other_files(source: Path, directory: Path, without: Collection[str] = ()) -> list[Path]:
    """Copy what a checkpoint has beside weights and architecture, unchanged; return the copies.

    This is everything, such as sampling defaults, the tokenizer, processors, licences and code, but weights
    in any format, `config.json`, adapters and hidden files. Nor are the folders `without` copied.
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
