"""Rows of the `datasets` library: datasets of the Hugging Face Hub, and what `save_to_disk` wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hflow.base.errors import DataError, reason_of
from hflow.base.hub import COMMIT, DATASET_PREFIX, quiet_loggers
from hflow.data.rows.row_schema import RowSchema

_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*){0,2})(@(?P<revision>[\w./-]+))?", re.ASCII)
_SAVED = ("dataset_dict.json", "state.json")
"""Files of which `save_to_disk` writes one into its directory."""
_REASON_CHARACTERS = 300
_SECONDS = 10.0
"""Longest wait for the Hub to say which commit a dataset has."""
_OFFLINE = "load it once where there is a network, as {key}.path=DIRECTORY takes what its save_to_disk wrote"


def is_saved(directory: Path) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return any((directory / name).is_file() for name in _SAVED)


class HuggingFaceRows:
    """Rows of a `datasets.Dataset`, which are memory-mapped.

    Args:
        where: names the dataset in errors.

    Raises:
        DataError: if the dataset lacks a declared column.
    """

    def __init__(self, dataset: Any, schema: RowSchema, where: str) -> None:
        schema.check(dataset.column_names, where)
        # As Arrow, since images would be decoded, and encoded again.
        self._rows = dataset.select_columns(schema.source_columns).with_format("arrow")
        self._schema = schema
        self._where = where

    @property
    def files(self) -> tuple[Path, ...]:
        """The Arrow files that hold the rows."""
        return tuple(Path(file["filename"]) for file in self._rows.cache_files)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            DataError: if a value does not have its column's declared type.
        """
        from hflow.data.rows.parquet import plain_row

        return self._schema.row(plain_row(self._rows[index], 0), self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"{self._where} row {index}"


def open_saved(directory: str, split: str, schema: RowSchema) -> HuggingFaceRows:
    """Open what `save_to_disk` wrote: a dataset, or one split of several.

    Raises:
        DataError: if it cannot be read, or has no such split.
    """
    library = _library(directory)
    try:
        saved = library.load_from_disk(directory)
    except Exception as error:  # whatever is wrong with the files
        raise DataError(
            f"{directory} cannot be read: {reason_of(error, _REASON_CHARACTERS)}; save it again"
        ) from error
    if not isinstance(saved, library.DatasetDict):
        return HuggingFaceRows(saved, schema, directory)
    if split not in saved:
        raise DataError(
            f"{directory} has no split {split!r}; set {schema.key}.split to one of {', '.join(saved)}"
        )
    return HuggingFaceRows(saved[split], schema, f"{directory} ({split})")


def open_hub(path: str, split: str, schema: RowSchema) -> HuggingFaceRows:
    """Open a dataset of the Hub, or its copy in the cache of the library.

    Args:
        path: `hf:OWNER/NAME`, or `hf:OWNER/NAME/CONFIG` for one of several configurations. `@` and a branch,
            tag or commit may follow.
        split: a split, which may be a part of one, as in `train[:10%]`.

    Raises:
        DataError: if it cannot be loaded.
    """
    name, revision = _parsed(path)
    library = _library(path)
    parts = name.split("/")
    try:
        with quiet_loggers("huggingface_hub", "datasets"):
            rows = library.load_dataset("/".join(parts[:2]), *parts[2:], split=split, revision=revision)
    except Exception as error:  # of the network, the Hub, the library or the files
        raise DataError(
            f"{path} cannot be loaded: {reason_of(error, _REASON_CHARACTERS)}; "
            f"{_fix(error, path, schema.key)}"
        ) from error
    found = HuggingFaceRows(rows, schema, f"{path} ({split})")
    # Without a network the library takes the newest that it has.
    others = {file.parent.name for file in found.files} - {revision}
    if revision is not None and COMMIT.fullmatch(revision) and any(map(COMMIT.fullmatch, others)):
        raise DataError(
            f"{path} is not in the cache of datasets, which has commit {min(others)} of it; load it where "
            f"there is a network, or set {schema.key}.path to that commit"
        )
    return found


def pinned_path(path: str) -> str:
    """Return the path of a dataset of the Hub with the commit that it means now.

    Any other path is returned as it is, and so is that of a dataset that the Hub does not give: what is wrong
    with it is found when it is opened, and without a network it may be in the cache.

    Raises:
        DataError: for a path that names no dataset.
    """
    if not path.startswith(DATASET_PREFIX):
        return path
    name, revision = _parsed(path)
    if revision is not None and COMMIT.fullmatch(revision):
        return path
    from huggingface_hub import HfApi

    try:
        with quiet_loggers("huggingface_hub"):
            info = HfApi().dataset_info("/".join(name.split("/")[:2]), revision=revision, timeout=_SECONDS)
    except Exception:  # noqa: BLE001 - of the network, the Hub or the HTTP library, which is not one for all versions
        return path
    return path if info.sha is None else f"{DATASET_PREFIX}{name}@{info.sha}"


def _parsed(path: str) -> tuple[str, str | None]:
    """Return name and revision of a dataset of the Hub."""
    match = _NAME.fullmatch(path.removeprefix(DATASET_PREFIX))
    if match is None:
        raise DataError(f"{path} names no dataset; write hf:OWNER/NAME, or hf:OWNER/NAME/CONFIG")
    return match["name"], match["revision"]


def _library(path: str) -> Any:
    """Return the `datasets` library, which an extra installs.

    Raises:
        DataError: if it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} needs the library datasets, which cannot be imported ({error}); pip install "
            "'hflow-rl[data]'"
        ) from error
    return datasets


def _fix(error: Exception, path: str, key: str) -> str:
    """Return the fix for a dataset of the Hub that cannot be loaded."""
    text = str(error)
    if isinstance(error, ConnectionError) or "offline" in text.lower():
        return _OFFLINE.format(key=key)
    if "split" in text.lower():
        return f"set {key}.split to one of them"
    if "config" in text.lower():
        return f"name a configuration, as in {'/'.join(path.split('/')[:2])}/CONFIG"
    return f"set {key}.path to another dataset"
