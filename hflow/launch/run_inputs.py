"""Fingerprints of the files that a run reads, by which a resume finds what has changed since it began.

A file is known by its size and a hash of its content: of all of it where the files of an input are small,
else of blocks at equal distances. Where a file is stored does not matter, so a run may move with its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hflow.config import ModelConfig, RunConfig
from hflow.durable_files import file_fix
from hflow.errors import ConfigError
from hflow.graph.model import Model
from hflow.launch.compile import Compiled
from hflow.launch.model_metadata import source_model
from hflow.planner.diff import and_more
from hflow.planner.graph_queries import saved_models
from hflow.recipe_files import imported_files

FORMAT = 1
INPUT_BYTES = 256 << 20
"""Bytes of the files of an input that are hashed, divided over them. Reading them takes about a quarter of a
second."""
BLOCK_BYTES = 64 << 10
MIN_BLOCKS = 3
"""Blocks that are hashed of a file, however many files an input has."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", "/config.json")
"""How the paths of a checkpoint's files end that say what its model is."""
TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""How those of its tokenizer and its configuration end."""
RECIPE = "recipe"
"""Key of the input with the recipe's file and the modules beside it."""


@dataclass(frozen=True)
class FileFingerprint:
    """One file."""

    path: str
    """Absolute, without links."""
    size: int
    digest: str

    @property
    def content(self) -> tuple[int, str]:
        """What a file is known by."""
        return self.size, self.digest


@dataclass(frozen=True)
class RunInput:
    """Files that one part of the configuration names."""

    num_blocks: int
    """Blocks of each file that its hash reads. Of a file that has no more, it reads everything."""
    files: tuple[FileFingerprint, ...]
    """In the order in which they are read."""

    def by_name(self) -> dict[str, FileFingerprint]:
        """Return the files by their paths below the directory that all of them are in."""
        if not self.files:
            return {}
        root = os.path.commonpath([os.path.dirname(file.path) for file in self.files])
        return {os.path.relpath(file.path, root): file for file in self.files}


@dataclass(frozen=True)
class RunInputs:
    """The files that a run reads."""

    format: int
    inputs: Mapping[str, RunInput]
    """Key of the configuration, such as `data.train` or `models.ref` -> its files."""

    def to_json(self) -> str:
        """Return the content of `inputs.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class InputChange:
    """An input that is not what it was when the run began."""

    key: str
    change: str
    """What changed, such as `rows.jsonl has other content`."""
    fix: str
    """What to do; empty for one that may change, of which the run warns."""

    @property
    def is_refused(self) -> bool:
        """Whether the run cannot continue with it."""
        return bool(self.fix)


def read_inputs(file: Path) -> RunInputs | None:
    """Return the inputs of a run; None if an earlier version of hflow wrote none.

    Raises:
        ConfigError: if the file is damaged, or a later version wrote it.
    """
    if not file.is_file():
        return None
    try:
        known = _ADAPTER.validate_json(file.read_bytes(), strict=True)
        problem = "" if known.format == FORMAT else f"format: {known.format}, not {FORMAT}"
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
    if problem:
        raise ConfigError(
            f"{file} does not fit this version of hflow: {problem}. Use the version that wrote it, or remove "
            "the file to continue without comparing the files that the run reads."
        )
    return known


def run_inputs(
    compiled: Compiled, row_files: Mapping[str, Sequence[Path]], known: RunInputs | None = None
) -> RunInputs:
    """Return the fingerprints of the files that a run reads.

    Args:
        compiled: the recipe.
        row_files: dataset -> the files of its rows.
        known: fingerprints to compare with, whose hashes read the same blocks; None: there are none.
    """
    paths = {f"data.{name}": list(files) for name, files in row_files.items()}
    paths |= {f"models.{spec.name}": list(_model_files(compiled, spec)) for spec in compiled.graph.models}
    paths[RECIPE] = [compiled.recipe, *imported_files(compiled.recipe.resolve().parent)]
    inputs = {}
    for key, files in paths.items():
        before = None if known is None else known.inputs.get(key)
        num_blocks = max(MIN_BLOCKS, INPUT_BYTES // BLOCK_BYTES // max(1, len(files)))
        inputs[key] = fingerprint(files, num_blocks if before is None else before.num_blocks)
    return RunInputs(FORMAT, inputs)


def changed_inputs(
    before: RunInputs, after: RunInputs, earlier: RunConfig, compiled: Compiled
) -> Iterator[InputChange]:
    """Yield the inputs whose files have changed.

    Args:
        before: of the run when it began, or was continued last.
        after: of the run that is to continue.
        earlier: the configuration with which it ran before.
        compiled: the recipe that is to continue.
    """
    trained = {stream.dataset for stream in compiled.graph.streams if stream.trained}
    for key, old in before.inputs.items():
        section, _, name = key.partition(".")
        new = after.inputs.get(key)
        if new is None:  # the model or dataset is not in the recipe any more
            continue
        if key == RECIPE:
            old, new = _common(old, new), _common(new, old)
        change = describe_change(old, new)
        if change is None:
            continue
        fix = ""
        if section == "models" and not _is_chosen(compiled.graph.model(name), earlier, compiled):
            fix = _model_fix(name, old, compiled)
        if section == "data" and name in trained:
            fix = (
                "Put the files back as they were, or begin another run with models.NAME.path=CHECKPOINT/NAME "
                "models.NAME.resume=true"
            )
        yield InputChange(key, change, fix)


def describe_change(before: RunInput, after: RunInput) -> str | None:
    """Return the first difference of the files of an input; None if their contents are equal, in order."""
    if [file.content for file in before.files] == [file.content for file in after.files]:
        return None
    old, new = before.by_name(), after.by_name()
    changes = [f"{file.path} is gone" for name, file in old.items() if name not in new]
    changes += [f"{file.path} is new" for name, file in new.items() if name not in old]
    for name, file in new.items():
        if name in old and old[name].content != file.content:
            sizes = old[name].size, file.size
            changed = "" if sizes[0] == sizes[1] else f" ({sizes[0]:,} -> {sizes[1]:,} bytes)"
            changes.append(f"{file.path} has other content{changed}")
    first, *others = changes or ["its files are read in another order"]
    return first + and_more(len(others))


def fingerprint(files: Iterable[Path], num_blocks: int) -> RunInput:
    """Return the fingerprints of files.

    Args:
        files: in the order in which they are read.
        num_blocks: blocks of each that are hashed.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    return RunInput(num_blocks, tuple(_fingerprint(file.resolve(), num_blocks) for file in files))


def _fingerprint(path: Path, num_blocks: int) -> FileFingerprint:
    try:
        stat = path.stat()
        return _hashed(path, num_blocks, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; {file_fix(error.errno)}"
        ) from error


@cache
def _hashed(path: Path, num_blocks: int, size: int, modified: int) -> FileFingerprint:
    """Hash a file. Models that start from one checkpoint have the same files."""
    digest = hashlib.blake2b(digest_size=16)
    last = max(0, size - BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        if size <= num_blocks * BLOCK_BYTES:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        else:
            for number in range(num_blocks):
                file.seek(last * number // (num_blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    return FileFingerprint(str(path), size, digest.hexdigest())


def _model_files(compiled: Compiled, spec: Model) -> Iterator[Path]:
    """Yield the files that say what a model computes with, wherever it continues.

    Trained weights come from the run's checkpoint, unless adapters are trained beside them.
    """
    models = compiled.config.models
    own, source = (models.get(m.name, ModelConfig()) for m in (spec, source_model(compiled.config, spec)))
    is_saved = spec.name in saved_models(compiled.graph) and own.lora is None
    if source.path is not None:
        for path in sorted(Path(source.path).iterdir()):
            is_weight = str(path).endswith(WEIGHT_SUFFIXES)
            is_read = not is_saved if is_weight else path.name.endswith(TEXT_SUFFIXES)
            if is_read and path.is_file():
                yield path


def _common(side: RunInput, other: RunInput) -> RunInput:
    """Return the files that both have: a module may be imported late, or not."""
    names = other.by_name()
    return replace(side, files=tuple(file for name, file in side.by_name().items() if name in names))


def _is_chosen(spec: Model, earlier: RunConfig, compiled: Compiled) -> bool:
    """Return whether a model is frozen, and an override names another path for it than before."""
    before, now = (
        config.models.get(source_model(config, spec).name, ModelConfig()).path
        for config in (earlier, compiled.config)
    )
    return before != now and spec.name not in saved_models(compiled.graph)


def _model_fix(name: str, before: RunInput, compiled: Compiled) -> str:
    if not before.files:
        return "Remove the new files"
    directory = Path(before.files[0].path).parent
    if not _still_exists(before):
        return f"Put the files of {directory} back as they were, or begin another run"
    if name in saved_models(compiled.graph):
        return f"Let the configured path lead to {directory} again"
    return f"To continue with the model that the run began with, set models.{name}.path={directory}"


def _still_exists(before: RunInput) -> bool:
    """Return whether the files are where they were, with the same content."""
    try:
        return fingerprint((Path(file.path) for file in before.files), before.num_blocks) == before
    except ConfigError:
        return False


_ADAPTER = TypeAdapter(RunInputs)
