"""Datasets: rows by index, with the columns that a recipe declares, from files, the Hub or a generator."""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic.dataclasses import dataclass as checked_dataclass

from hflow.base.errors import DataError
from hflow.base.hub import DATASET_PREFIX
from hflow.base.registry import Registry
from hflow.base.validation import CHECKED
from hflow.config.schema import WeightedSourceConfig
from hflow.data.images.files import ImageSource
from hflow.data.rows.generated import GeneratedRows
from hflow.data.rows.hf_datasets import is_saved, open_hub, open_saved
from hflow.data.rows.json_lines import JsonLines
from hflow.data.rows.row_schema import Check, RowSchema
from hflow.types import Unit

if TYPE_CHECKING:
    from hflow.data.rows.parquet import Parquet

NUM_CHECKED_GENERATED = 100
"""Rows of a function of the recipe that are checked before a run."""
NUM_CHECKED_ROWS = 20_000
"""Rows of each source that are checked before a run. Others are checked when they are read."""


@checked_dataclass(frozen=True, config=CHECKED)
class DataSettings(WeightedSourceConfig):
    """The configuration of a dataset with one source, or several sources."""

    shuffle: bool = True
    """Whether each epoch has a new random order (see `RowOrder`)."""
    sources: tuple[DataSettings, ...] = ()
    """The sources of a dataset that has several. It has no path and no generator then."""
    key: str = "data.NAME"
    """The source's key in the configuration, for errors."""
    function: Callable[..., Any] | None = None
    """The recipe's function that `generator` names; None: it names one of `GENERATORS`."""

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The recipe's functions that make the rows of this dataset."""
        return [source.function for source in (self, *self.sources) if source.function is not None]


class RowSource(Protocol):
    """Rows by index."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the rows, in the order in which they are read."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return the declared columns of row `index`.

        Raises:
            DataError: if the row does not have them.
        """
        ...

    def where(self, index: int) -> str:
        """Return the name of a row in errors: its file and number."""
        ...


class JoinedRows:
    """The rows of several sources, one source after the other.

    Attributes:
        sources: the sources.
        sizes: the number of rows of each.
    """

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.sizes = tuple(map(len, sources))
        self.sources = sources
        self._starts = list(accumulate(self.sizes, initial=0))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of all sources."""
        return tuple(file for source in self.sources for file in source.files)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`, counted over all sources."""
        source, index = self._find(index)
        return source.row(index)

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        source, index = self._find(index)
        return source.where(index)

    def _find(self, index: int) -> tuple[RowSource, int]:
        """Return the source of a row, and its number there."""
        source = bisect_right(self._starts, index) - 1
        return self.sources[source], index - self._starts[source]


def open_dataset(
    settings: DataSettings, columns: Mapping[str, Unit], checks: Mapping[str, Check] | None = None
) -> RowSource:
    """Open a dataset and check its first row, so that a wrong file fails at once.

    With several sources it is a `JoinedRows` of them.

    Args:
        checks: what the readers of a column of messages need.

    Raises:
        DataError: if the dataset does not exist, is empty or lacks a declared column; names file, row and
            column.
    """
    if settings.sources:
        return JoinedRows([open_dataset(source, columns, checks) for source in settings.sources])
    if (settings.path is None) == (settings.generator is None):
        raise DataError("a dataset needs either a path or a generator; set one of them")
    schema = _schema(settings, columns, checks)
    is_read = settings.path is not None
    source = _open_paths(settings, schema) if is_read else _open_generator(settings, schema)
    if settings.limit is not None:
        source = _FirstRows(source, settings.limit)
    if len(source) == 0:
        raise DataError(
            f"{settings.path or settings.generator} has no rows; add some, or use another dataset"
        )
    source.row(0)
    return source


def check_columns(
    settings: DataSettings, columns: Mapping[str, Unit], checks: Mapping[str, Check] | None = None
) -> None:
    """Check the first row of each file that is on this machine, without opening the whole dataset.

    Of a generator, the task, the arguments and the columns are checked, unless it starts a program for that.

    Raises:
        DataError: for a source without the declared columns, as `open_dataset` raises.
    """
    for source in settings.sources or (settings,):
        schema = _schema(source, columns, checks)
        if source.function is not None or (source.generator and not _starts_program(source)):
            _open_generator(source, schema)
        paths = (source.path,) if isinstance(source.path, str) else source.path or ()
        for pattern in paths:
            names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
            for file in map(Path, sorted(names)):
                if file.is_file() and file.suffix in _FORMATS:
                    _reader(file).check_columns(file, _with_directory(schema, file.parent))


def check_rows(settings: DataSettings, source: RowSource) -> None:
    """Check the first rows of each file, so that most mistakes are found before a run, and not during it.

    Raises:
        DataError: for a row that does not have the declared columns.
    """
    if settings.sources and isinstance(source, JoinedRows):
        for part, rows in zip(settings.sources, source.sources, strict=True):
            check_rows(part, rows)
        return
    if isinstance(source, _FirstRows):
        source = source.source
    if isinstance(source, GeneratedRows):
        source.check(min(NUM_CHECKED_GENERATED, settings.limit or NUM_CHECKED_GENERATED))
    if settings.generator is not None:
        return
    sizes = source.sizes if isinstance(source, JoinedRows) else (len(source),)
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        for index in range(end - size, end - size + min(size, NUM_CHECKED_ROWS)):
            source.row(index)


def _schema(
    settings: DataSettings, columns: Mapping[str, Unit], checks: Mapping[str, Check] | None
) -> RowSchema:
    images = ImageSource(fetches=settings.fetch_images, key=settings.key)
    schema = RowSchema(columns, settings.map, settings.key, checks or {}, images)
    if settings.fetch_images and not {Unit.IMAGE, Unit.IMAGES, Unit.MESSAGES} & {*columns.values()}:
        raise DataError(
            f"{settings.key}.fetch_images has no effect, as the recipe declares no column of images or "
            "messages; remove it"
        )
    return schema


def _with_directory(schema: RowSchema, directory: Path) -> RowSchema:
    """Return a schema whose rows may name images by a path, relative to a directory."""
    return replace(schema, images=replace(schema.images, directory=directory))


def _open_paths(settings: DataSettings, schema: RowSchema) -> RowSource:
    paths = (settings.path,) if isinstance(settings.path, str) else settings.path or ()
    names = [name for path in paths for name in _matches(path, schema.key)]
    sources = [_open_path(name, settings.split, schema) for name in names]
    for source in sources:
        if len(source):
            source.row(0)
    return sources[0] if len(sources) == 1 else JoinedRows(sources)


def _matches(path: str, key: str) -> list[str]:
    """Return the files that a pattern matches, in order of their names, and a path that is none as it is."""
    if path.startswith(DATASET_PREFIX) or Path(path).exists() or not glob.has_magic(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise DataError(f"no file matches {path}; set {key}.path to existing files")
    return found


def _open_path(path: str, split: str, schema: RowSchema) -> RowSource:
    if path.startswith(DATASET_PREFIX):
        return open_hub(path, split, _with_directory(schema, Path()))
    file = Path(path)
    if file.is_dir():
        if is_saved(file):
            return open_saved(path, split, _with_directory(schema, file))
        raise DataError(
            f"{path} is a directory that save_to_disk did not write; set {schema.key}.path to its files, as "
            f"in '{path}/*.jsonl'"
        )
    if not file.is_file():
        raise DataError(f"there is no data file {path}; set {schema.key}.path to an existing file")
    if file.suffix not in _FORMATS:
        raise DataError(
            f"{path} has none of the formats that hflow reads: {', '.join(_FORMATS)}; convert it to one"
        )
    if "[" in split:  # the name of a split may be left from a generator that the file replaces
        raise DataError(
            f"{schema.key}.split is {split}, but {path} is a file, all of which would be read; set "
            f"{schema.key}.split={DataSettings.split}, and {schema.key}.limit to read its first rows only"
        )
    return _reader(file)(file, _with_directory(schema, file.parent))


def _reader(file: Path) -> type[JsonLines] | type[Parquet]:
    if file.suffix == ".parquet":
        from hflow.data.rows.parquet import Parquet

        return Parquet
    return JsonLines


def _open_generator(settings: DataSettings, schema: RowSchema) -> RowSource:
    if settings.function is not None:
        return GeneratedRows(settings.function, settings.split, settings.arguments, schema)
    name, _, task = str(settings.generator).partition(":")
    source: RowSource = GENERATORS.load(name)(task, settings.split, settings.arguments, schema)
    return source


def _starts_program(settings: DataSettings) -> bool:
    name = str(settings.generator).partition(":")[0]
    return getattr(GENERATORS.load(name), "starts_program", False)


class _FirstRows:
    """The first rows of a source."""

    def __init__(self, source: RowSource, limit: int) -> None:
        self.source = source
        self._limit = limit

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the source."""
        return self.source.files

    def __len__(self) -> int:
        return min(self._limit, len(self.source))

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of the source."""
        return self.source.row(index)

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return self.source.where(index)


_FORMATS = (".jsonl", ".parquet")
"""Suffixes of the files that hflow reads."""
GENERATORS = Registry(
    "generator of rows",
    "hflow.generators",
    {
        "addition": "hflow.data.rows.addition:Addition",
        "addition-chat": "hflow.data.rows.addition:AdditionChat",
        "addition-pairs": "hflow.data.rows.addition:AdditionPairs",
        "drawn-shapes": "hflow.data.rows.shapes:DrawnShapes",
        "reasoning-gym": "hflow.data.rows.reasoning_gym:ReasoningGym",
        "verifiers": "hflow.environments.verifiers.rows:VerifiersRows",
    },
)
"""Name -> what makes a `RowSource` of `(task, split, arguments, schema)`. The task is the part of
`data.NAME.generator` after a colon. `hflow check` and `plan` do not open one with `starts_program = True`."""
