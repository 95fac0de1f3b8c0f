"""Opens the weights of a Hugging Face checkpoint, and checks them without reading them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hflow.base.errors import BackendError
from hflow.base.files import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights, as safetensors calls them."""


def open_weight_files(path: Path, files: ExitStack) -> dict[str, Any]:
    """Return every tensor of a checkpoint as a slice that is read when it is indexed.

    Raises:
        BackendError: for weights that cannot be read, or are not floating-point numbers; names the file.
    """
    found: dict[str, Any] = {}
    for name in weight_file_names(path):
        try:
            file = files.enter_context(safe_open(path / name, framework="pt"))
            found |= {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(
                f"{path} has no readable weights: {name}: {reason}; check that its files are complete"
            ) from None
    for tensor, opened in found.items():
        if opened.get_dtype() not in _DTYPES:
            raise BackendError(
                f"{path}: {tensor} has dtype {opened.get_dtype()}, but weights are {', '.join(_DTYPES)}; use "
                "an unquantised checkpoint"
            )
    return found


def check_weight_files(path: Path, family: str, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint can be read and has the model's tensors, if their shapes are expected.

    Raises:
        BackendError: for weights that cannot be read, or that do not fit.
    """
    from hflow.models.expert_tensors import file_shapes  # imports torch

    expected = file_shapes(family, expected)
    with ExitStack() as files:
        stored = {name: tuple(opened.get_shape()) for name, opened in open_weight_files(path, files).items()}
    if any(name.startswith("model.layers.") for name in stored):  # else a backbone, whose names are shorter
        common = expected.keys() & stored.keys()
        misshapen = {name for name in common if expected[name] != stored[name]}
        check_tensors(path, expected.keys() - stored.keys(), (), misshapen)


def weight_file_names(path: Path) -> list[str]:
    """Return the names of the files that hold a checkpoint's tensors.

    Raises:
        BackendError: if there are none.
    """
    if (path / SINGLE).is_file():
        return [SINGLE]
    if not (path / INDEX).is_file():
        raise BackendError(f"{path} has no readable weights: neither {SINGLE} nor {INDEX}; set another path")
    return indexed_files(path)


def indexed_files(path: Path) -> list[str]:
    """Return the names of the files that the index of a checkpoint lists.

    Raises:
        BackendError: if it lists none.
    """
    weight_map = read_json_object(path / INDEX).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, Mapping) and _are_names(weight_map) else set()
    if not names:
        raise BackendError(
            f"{path} has no readable weights: {INDEX} does not map tensors to files beside it; restore it"
        )
    return sorted(names)


def _are_names(weight_map: Mapping[str, Any]) -> bool:
    return all(isinstance(name, str) and Path(name).name == name for name in weight_map.values())


def check_tensors(
    path: Path, missing: Iterable[str], unknown: Iterable[str], misshapen: Iterable[str]
) -> None:
    """Check that a checkpoint has exactly the model's tensors.

    `missing` are tensors of the model that the checkpoint lacks; `unknown` ones, the model.

    Raises:
        BackendError: if there is any such tensor; names the first ones.
    """
    for problem, names in (
        ("lacks", missing),
        ("has tensors that the model does not know:", unknown),
        ("has tensors of other shapes than its config says:", misshapen),
    ):
        if listed := sorted(names):
            raise BackendError(
                f"checkpoint {path} {problem} {_first_names(listed)}; use weights that match its config.json"
            )


def _first_names(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
