"""Sharded checkpoints: fp32 weights and the optimizer's state, stored as boxes of the model's HF tensors.

Every rank copies the boxes that it holds to host memory, and writes them while training continues; where
several ranks hold a box, one of them writes it. An index says which file has which box. Boxes refer to whole
HF tensors. Any layout and backend can therefore read what another has written, and each rank reads only what
overlaps its own boxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, StrictInt
from pydantic.dataclasses import dataclass as pydantic_dataclass
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from hflow.base.durable_files import WriteFiles
from hflow.base.errors import BackendError, ConfigError
from hflow.base.files import read_json_object
from hflow.base.model_files import FILE_BYTES
from hflow.base.validation import CHECKED, from_mapping
from hflow.config.schema import OptimConfig
from hflow.models.host_copy import HostCopies
from hflow.models.settings import SHARDS_INDEX
from hflow.models.weight_files import check_tensors
from hflow.training.optimizers.interface import STATE_OPTIONS, StepOptimizer, states_at
from hflow.types.tensor_slices import Box, TensorBox, intersect, numel, slices_within

FORMAT = 1

_OTHER_CHECKPOINT = "use an intact checkpoint, or set the model's resume=false to load its weights only"
"""The fix for optimizer state that cannot be read."""

_DEFAULT_OPTIMIZER = OptimConfig()
"""The optimizer of checkpoints that name none."""

WEIGHT = "weight"
"""The kind of value that a weight is. The others are those of the optimizer (`OptimizerTraits.states`)."""

_IGNORED_KEYS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of an HF config that do not change what the model computes."""


BoxesOfFiles = dict[str, list[TensorBox]]
"""Name of a file -> the boxes in it."""

Size = Annotated[StrictInt, Field(ge=0)]


@dataclass(frozen=True)
class BlockState(TensorBox):
    """A box of a tensor and its training state on this rank."""

    values: Mapping[str, Tensor]
    """Kind -> tensor of the box's shape, a view of the model's or the optimizer's storage, or a copy."""

    @property
    def place(self) -> TensorBox:
        """The box without the state."""
        return TensorBox(self.tensor, self.shape, self.box)


@dataclass(frozen=True)
class CheckpointInfo:
    """The model of a checkpoint, and the number of optimizer steps that it has made."""

    config: Mapping[str, Any]
    head: str
    num_steps: int
    """0 means that there is no optimizer state."""
    optimizer: OptimConfig | None = _DEFAULT_OPTIMIZER
    """The settings of the optimizer that trains it, of which name and options count; None: it is frozen."""

    @classmethod
    def of(cls, config: PreTrainedConfig, head: str, optimizer: StepOptimizer | None) -> CheckpointInfo:
        """Describe a model with this HF config and head; a frozen model has no optimizer."""
        keys = {key: value for key, value in config.to_diff_dict().items() if key not in _IGNORED_KEYS}
        num_steps, optim = (0, None) if optimizer is None else (optimizer.num_steps, optimizer.optim)
        return cls(json.loads(json.dumps(keys, default=str)), head, num_steps, optim)

    def kinds_of(self, tensor: str, num_axes: int) -> tuple[str, ...]:
        """Return the kinds of values that are stored of each box of a tensor."""
        if not self.num_steps or self.optimizer is None:
            return (WEIGHT,)
        return (WEIGHT, *(state.name for state in states_at(self.optimizer, tensor, num_axes)))


def copy_shards(
    directory: Path,
    states: Iterable[BlockState],
    info: CheckpointInfo,
    group: ProcessGroup | None,
    host: HostCopies,
) -> WriteFiles:
    """Copy this rank's part of a checkpoint, and return the function that writes it; a collective.

    Args:
        states: the boxes that this rank writes; no other rank writes them.

    Raises:
        BackendError: if this rank does not see the directory in which it will be.
    """
    rank = 0 if group is None else group.rank()
    if not directory.parent.is_dir():
        raise BackendError(
            f"rank {rank} does not see {directory.parent}, but every rank writes part of the optimizer's "
            "state; set out to a directory that all machines share, or save_optimizer=false for the model"
        )
    files = {
        f"rank-{rank:05d}-{number:03d}.safetensors": file_states
        for number, file_states in enumerate(_split_into_files(_copy(state, info, host) for state in states))
    }
    boxes = _gather({name: [state.place for state in held] for name, held in files.items()}, group)

    def write() -> list[Path]:
        directory.mkdir(exist_ok=True)
        paths = [directory / name for name in files]
        while files:  # a file's copy is freed when it is written
            name = next(iter(files))
            _write_file(directory / name, files.pop(name))
        if boxes is not None:
            paths.append(_write_index(directory, boxes, info))
        return paths

    return write


@contextmanager
def open_shards(
    directory: Path, info: CheckpointInfo, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ShardReader]:
    """Open a sharded checkpoint of a model.

    Args:
        shapes: the shapes of all tensors of the model.

    Raises:
        BackendError: if there is no checkpoint, or it is of another model; names the config key or tensors.
    """
    index = _read_index(directory)
    stored = index.info
    _check_model(directory, stored, info)
    stored_shapes = {name: row.shape for name, row in index.tensors.items()}
    common = stored_shapes.keys() & shapes.keys()
    _check_states(directory, stored, info, shapes)
    misshapen = {name for name in common if stored_shapes[name] != shapes[name]}
    missing, unknown = shapes.keys() - stored_shapes.keys(), stored_shapes.keys() - shapes.keys()
    check_tensors(directory, missing, unknown, misshapen)
    boxes = {name: list(row.boxes) for name, row in index.tensors.items()}
    with ExitStack() as stack:
        yield ShardReader(directory, stored, boxes, stack)


def check_shards(directory: Path) -> None:
    """Check, without reading weights, that a sharded checkpoint has an index and complete files.

    Raises:
        BackendError: if not; names the file.
    """
    index = _read_index(directory)
    stored = index.info
    entries: dict[str, set[str]] = {}
    for tensor, row in index.tensors.items():
        for box, file in row.boxes:
            kinds = stored.kinds_of(tensor, len(row.shape))
            names = (entry_name(tensor, box, kind) for kind in kinds)
            entries.setdefault(file, set()).update(names)
    with ExitStack() as stack:
        reader = ShardReader(directory, stored, {}, stack)
        for file, expected in entries.items():
            reader.check(file, expected)


@dataclass
class ShardReader:
    """An open sharded checkpoint. Its files are opened when they are first read."""

    directory: Path
    info: CheckpointInfo
    boxes: Mapping[str, list[tuple[Box, str]]]
    """HF name -> its boxes, each with its file."""
    _stack: ExitStack
    _files: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, tensor: str, box: Box, target: Tensor, kind: str = WEIGHT) -> None:
        """Copy a box into a tensor of its shape, reading only that box.

        Raises:
            BackendError: if the checkpoint lacks a part of it, or a file cannot be read.
        """
        num_copied = 0
        for stored, file in self.boxes[tensor]:
            overlap = intersect(stored, box)
            if overlap is not None:
                part = self._read(file, entry_name(tensor, stored, kind), slices_within(overlap, stored))
                target[slices_within(overlap, box)].copy_(part)
                num_copied += numel(overlap)
        if num_copied != numel(box):
            raise BackendError(
                f"{self.directory} has {num_copied} of the {numel(box)} entries of {tensor} {box}; "
                f"{_OTHER_CHECKPOINT}"
            )

    def check(self, name: str, entries: Set[str]) -> None:
        """Check that a file is complete and has these entries.

        Raises:
            BackendError: if not.
        """
        with self._errors_of(name):
            missing = entries - set(self._open(name).keys())
        if missing:
            raise BackendError(f"{self.directory / name} has no {min(missing)}; {_OTHER_CHECKPOINT}")

    def _read(self, name: str, entry: str, at: tuple[slice, ...]) -> Tensor:
        with self._errors_of(name):
            part: Tensor = self._open(name).get_slice(entry)[at]
        return part

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self.directory / name
            self._files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[name]

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise BackendError(
                f"{self.directory / name} cannot be read: {reason}; {_OTHER_CHECKPOINT}"
            ) from None


def entry_name(tensor: str, box: Box, kind: str) -> str:
    """Return the name of a box in its file."""
    spans = ",".join(f"{start}:{stop}" for start, stop in box)
    return f"{tensor}[{spans}].{kind}"


def _copy(state: BlockState, info: CheckpointInfo, host: HostCopies) -> BlockState:
    return replace(
        state,
        values={
            kind: host.copy(state.values[kind]) for kind in info.kinds_of(state.tensor, len(state.shape))
        },
    )


def _gather(boxes: BoxesOfFiles, group: ProcessGroup | None) -> BoxesOfFiles | None:
    """Return the files of all ranks on rank 0, and None on the others; a collective."""
    if group is None:
        return boxes
    by_rank: list[BoxesOfFiles] = [{}] * group.size()
    dist.all_gather_object(by_rank, boxes, group=group)  # for a gather NCCL would connect every pair of ranks
    if group.rank() > 0:
        return None
    return {name: rows for files in by_rank for name, rows in files.items()}


def _split_into_files(states: Iterable[BlockState]) -> Iterator[list[BlockState]]:
    """Yield the states of each file."""
    file_states: list[BlockState] = []
    num_bytes = 0
    for state in states:
        file_states.append(state)
        num_bytes += sum(values.nbytes for values in state.values.values())
        if num_bytes >= FILE_BYTES:
            yield file_states
            file_states, num_bytes = [], 0
    if file_states:
        yield file_states


def _write_file(path: Path, states: list[BlockState]) -> None:
    tensors = {
        entry_name(state.tensor, state.box, kind): values
        for state in states
        for kind, values in state.values.items()
    }
    save_file(tensors, path)


def _write_index(directory: Path, boxes: BoxesOfFiles, info: CheckpointInfo) -> Path:
    """Write which file has which box, and return the path."""
    tensors: dict[str, Any] = {}
    for name, places in boxes.items():
        for place in places:
            entry = tensors.setdefault(place.tensor, {"shape": place.shape, "boxes": []})
            entry["boxes"].append([place.box, name])
    model: dict[str, Any] = {"head": info.head, "config": info.config, "num_steps": info.num_steps}
    if info.num_steps and info.optimizer is not None:
        values = {key: getattr(info.optimizer, key) for key in STATE_OPTIONS}
        changed = {key: value for key, value in values.items() if value != getattr(_DEFAULT_OPTIMIZER, key)}
        model |= {"optimizer": changed} if changed else {}
    index = {"format": FORMAT, **model, "tensors": tensors}
    path = directory / SHARDS_INDEX
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return path


@pydantic_dataclass(frozen=True, config=CHECKED)
class _StoredTensor:
    """A tensor in the index."""

    shape: tuple[Size, ...]
    boxes: tuple[tuple[tuple[tuple[Size, Size], ...], str], ...] = ()
    """Boxes as (start, stop) of each axis, each with its file."""

    def __post_init__(self) -> None:
        for box, file in self.boxes:
            if len(box) != len(self.shape) or Path(file).name != file:
                raise ValueError(f"boxes has {box} in {file!r}, which is no part of a tensor {self.shape}")


@pydantic_dataclass(frozen=True, config=CHECKED)
class _StoredIndex:
    """The index of a checkpoint."""

    format: int
    config: Mapping[str, Any]
    head: str
    num_steps: Size
    tensors: Mapping[str, _StoredTensor]
    optimizer: OptimConfig = _DEFAULT_OPTIMIZER

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint's model."""
        return CheckpointInfo(self.config, self.head, self.num_steps, self.optimizer)


def _read_index(directory: Path) -> _StoredIndex:
    try:
        values = read_json_object(directory / SHARDS_INDEX, "sharded checkpoint")
        if values.get("format", FORMAT) != FORMAT:
            raise BackendError(
                f"{directory} has format {values['format']}, but this version of hflow reads format "
                f"{FORMAT}; {_OTHER_CHECKPOINT}"
            )
        return from_mapping(_StoredIndex, values, str(directory / SHARDS_INDEX))
    except ConfigError as error:
        raise BackendError(
            f"{directory} holds no sharded checkpoint: {error}; {_OTHER_CHECKPOINT}"
        ) from error


def _check_model(directory: Path, stored: CheckpointInfo, wanted: CheckpointInfo) -> None:
    ours, theirs = ({"head": info.head, **info.config} for info in (wanted, stored))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise BackendError(
                f"{directory} is of another model: {name} is {theirs.get(name)!r} there and "
                f"{ours.get(name)!r} here; set the model's path to a checkpoint of this model"
            )


def _check_states(
    directory: Path, stored: CheckpointInfo, wanted: CheckpointInfo, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the state of a checkpoint is what the optimizer keeps with its present options."""
    if not stored.num_steps or stored.optimizer is None or wanted.optimizer is None:
        return
    name, other = wanted.optimizer.name, stored.optimizer.name
    if name != other:
        raise BackendError(
            f"{directory} has state of the optimizer {other}, but the model's optim.name is {name}; set "
            f"optim.name={other}, or the model's resume=false to load its weights only"
        )
    for tensor, shape in shapes.items():
        theirs, ours = (info.kinds_of(tensor, len(shape)) for info in (stored, replace(wanted, num_steps=1)))
        if theirs != ours:
            raise BackendError(
                f"{directory} has {' and '.join(theirs)} of {tensor}, but {name} keeps "
                f"{' and '.join(ours)} with the model's optim; set its options as they were, or the model's "
                "resume=false to load its weights only"
            )
