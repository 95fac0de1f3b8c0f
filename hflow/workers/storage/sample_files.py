"""Files of a checkpoint with the samples that are in no batch yet: `NAME.json` and `NAME.safetensors`.

The first describes the samples and has texts, JSON values and journals. The second has numbers, in one tensor
for all values of a field that have the same dtype, and the pixels of each image once. What is read is what
was written: the same bits, the same dtype, and packed or loose as before (`FieldColumn`). There are two
exceptions: tuples in JSON become lists, and loose numbers of a sample that are partly integers and partly
floats become floats. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hflow.base.errors import RunError
from hflow.data.images.files import read_image
from hflow.engines.interface import GenerationResult
from hflow.episodes.journal import Journal, JournalEntry
from hflow.types import Unit
from hflow.types.image import Colours, PlacedImage, ProcessedImage
from hflow.types.recorded import Recorded
from hflow.workers.interface import NotSaved
from hflow.workers.storage.field_column import Cell, FieldColumn, PackedValues
from hflow.workers.storage.sample_store import StoredStream

FORMAT = 1

_TOKENS = ("ids", "logprobs", "versions")
"""What a completion's entry of a journal has of each token."""
_TOKEN_DTYPES = (np.int64, np.float64, np.int64)
"""Wide enough for what Python holds, so that no bit is lost."""

_JSON, _PYTHON, _NUMPY, _PACKED, _BYTES = "json", "python", "numpy", "packed", "bytes"
"""Forms of values: text and JSON, Python numbers, numpy scalars, rows of packed values, and those of bytes.

Of entries of bytes there are two tensors: the number of bytes of each, and all bytes."""

Array = npt.NDArray[Any]


class _NotSavable(Exception):
    """A value that the files cannot hold."""


# Writing


@dataclass
class SampleFiles:
    """Samples and journals to write.

    Attributes:
        directory: where the files are written.
        name: the name of the files, without their ending.
        samples: source -> stream -> what is stored of its samples; a sample is saved with all of its source's
            streams or not at all.
        journals: source -> sample -> journal.
        not_saved: set by `write`: samples of which a value cannot be saved.
        without_journal: set by `write`: unfinished samples whose journal cannot be saved.
    """

    directory: Path
    name: str
    samples: Mapping[str, Mapping[str, StoredStream]]
    journals: Mapping[str, Mapping[int, Journal]]
    not_saved: list[NotSaved] = field(default_factory=list)
    without_journal: list[NotSaved] = field(default_factory=list)

    def write(self) -> list[Path]:
        """Write the files and return their paths; none if there is nothing to write."""
        tensors: dict[str, Array] = {}
        streams: dict[str, Any] = {}
        for source, family in self.samples.items():
            encoded, refused = _encode_family(family)
            self.not_saved += [NotSaved(source, sample, reason) for sample, reason in refused.items()]
            for stream, fields in encoded.items():
                shapes = {s: shape for s, shape in family[stream].shapes.items() if s not in refused}
                if shapes:
                    streams[stream] = _stream_row(shapes, fields, tensors, f"{len(streams)}.")
        images = self._write_images(tensors)
        journals = self._encode_journals(tensors)
        if not streams and not journals:
            return []
        content = {"format": FORMAT, "streams": streams, "journals": journals}
        content |= {"images": images} if images else {}
        paths = _paths(self.directory, self.name)
        paths[0].write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        save_file(tensors, paths[1])
        return list(paths)

    def _write_images(self, tensors: dict[str, Array]) -> dict[str, Any]:
        """Add the pixels of all images to `tensors`, and return the rest of each image by digest."""
        rows: dict[str, Any] = {}
        for stored in (stored for family in self.samples.values() for stored in family.values()):
            for unit, cells in stored.fields.values():
                for cell in cells.values() if unit is Unit.PIXELS else ():
                    for _, image in _object_of(cell):
                        rows[image.digest] = [image.grid, image.num_tokens, image.colours]
                        tensors[f"images.{image.digest}"] = image.pixels
        return rows

    def _encode_journals(self, tensors: dict[str, Array]) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        results: list[GenerationResult] = []
        for source, journals in self.journals.items():
            for sample, journal in journals.items():
                num_results = len(results)
                try:
                    entries = [_entry_row(entry, results) for entry in journal.entries]
                except (_NotSavable, RecursionError) as error:
                    del results[num_results:]
                    self.without_journal.append(NotSaved(source, sample, str(error)))
                    continue
                if entries:
                    rows.setdefault(source, {})[str(sample)] = entries
        for name, dtype in zip(_TOKENS, _TOKEN_DTYPES, strict=True):
            parts = [np.array(getattr(result, name), dtype) for result in results]
            tensors[f"journals.{name}"] = np.concatenate([np.zeros(0, dtype), *parts])
        if records := [entries for result in results for entries in result.recorded.values()]:
            tensors["journals.recorded"] = np.frombuffer(b"".join(chain.from_iterable(records)), np.uint8)
        return rows


@dataclass(frozen=True)
class _Value:
    """A value of one sample, as it is written."""

    form: str
    value: Any
    """JSON, or an array of one entry or of one per token."""


def _encode_family(
    family: Mapping[str, StoredStream],
) -> tuple[dict[str, dict[tuple[str, Unit], dict[int, _Value]]], dict[int, str]]:
    """Encode all values of a source's streams.

    Returns:
        Stream -> field and unit -> sample -> value; and the samples that cannot be saved, with reasons. Their
        values are left out.
    """
    refused: dict[int, str] = {}
    encoded: dict[str, dict[tuple[str, Unit], dict[int, _Value]]] = {}
    for stream, stored in family.items():
        encoded[stream] = {}
        for name, (unit, cells) in stored.fields.items():
            values = encoded[stream][name, unit] = {}
            for sample, cell in cells.items():
                try:
                    values[sample] = _encode(unit, cell)
                except (_NotSavable, RecursionError) as error:
                    refused.setdefault(sample, f"{stream}/{name}: {error}")
    for fields in encoded.values():
        for values in fields.values():
            for sample in refused:
                values.pop(sample, None)
    return encoded, refused


def _encode(unit: Unit, cell: Cell) -> _Value:
    packed, value = cell
    if unit.is_object:
        return _Value(_JSON, _json_value(_plain_object(unit, _object_of(cell))))
    if packed is not None:
        assert isinstance(packed.values, np.ndarray)
        start, stop = (value, value + 1) if packed.offsets is None else packed.offsets[value : value + 2]
        form = _BYTES if packed.values.dtype == object else _PACKED
        return _Value(form, packed.values[start:stop])
    numbers = list(value) if unit is Unit.TOKEN else [value]
    try:
        array = np.array(numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _NotSavable(f"{value!r:.60} is not made of numbers") from error
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        raise _NotSavable(f"{value!r:.60} is not made of numbers")
    is_python = not numbers or isinstance(numbers[0], bool | int | float)
    return _Value(_PYTHON if is_python else _NUMPY, array)


def _object_of(cell: Cell) -> Any:
    """Return the object of a cell."""
    packed, value = cell
    return value if packed is None else packed.values[value]


def _plain_object(unit: Unit, value: Any) -> Any:
    """Return an object as JSON: images as data URLs, and what a model sees by the digests."""
    if unit is Unit.PIXELS:
        return [[start, image.digest] for start, image in value]
    if unit is Unit.IMAGES:
        return [image.url for image in value]
    return value.url if unit is Unit.IMAGE else value


def _stream_row(
    shapes: Mapping[int, tuple[int, int]],
    fields: Mapping[tuple[str, Unit], Mapping[int, _Value]],
    tensors: dict[str, Array],
    prefix: str,
) -> dict[str, Any]:
    """Return the description of a stream, and add its arrays to `tensors`, named with a prefix."""
    rows: list[dict[str, Any]] = []
    for (name, unit), values in fields.items():
        alike: dict[tuple[Any, ...], dict[int, Any]] = {}
        for sample, encoded in values.items():
            is_array = encoded.form != _JSON
            kind = (encoded.form, *((encoded.value.dtype, encoded.value.shape[1:]) if is_array else ()))
            alike.setdefault(kind, {})[sample] = encoded.value
        for (form, *_), samples in alike.items():
            row = {"field": name, "unit": str(unit), "form": form, "samples": list(samples)}
            if form == _JSON:
                row["values"] = list(samples.values())
            else:
                row["lengths"] = [len(value) for value in samples.values()]
                row["tensor"] = f"{prefix}{len(rows)}"
                joined = np.concatenate(list(samples.values()))
                if form == _BYTES:
                    joined, tensors[f"{row['tensor']}.bytes"] = _split_bytes(joined)
                tensors[row["tensor"]] = joined
            rows.append(row)
    lengths, groups = zip(*shapes.values(), strict=True)
    return {"samples": list(shapes), "lengths": lengths, "groups": groups, "fields": rows}


def _entry_row(entry: JournalEntry, results: list[GenerationResult]) -> dict[str, Any]:
    """Return an entry of a journal as JSON. A completion's tokens are added to `results`."""
    row = {"kind": entry.kind, "model": entry.model, "is_done": entry.is_done}
    row["request"] = _json_value(entry.request)
    if isinstance(entry.outcome, GenerationResult):
        results.append(entry.outcome)
        row |= {"num_tokens": len(entry.outcome.ids), "stop_reason": entry.outcome.stop_reason}
        recorded = {name: list(map(len, entries)) for name, entries in entry.outcome.recorded.items()}
        return row | ({"recorded": recorded} if recorded else {})
    return row | {"outcome": _json_value(entry.outcome)}


def _split_bytes(entries: Array) -> tuple[Array, Array]:
    """Return the number of bytes of each entry, int64, and all bytes, uint8."""
    sizes = np.fromiter(map(len, entries), np.int64, len(entries))
    return sizes, np.frombuffer(b"".join(entries), np.uint8)


def _joined_bytes(sizes: Sequence[int] | Array, data: Array) -> Array:
    """Return the entries that `_split_bytes` split."""
    entries, whole = np.empty(len(sizes), object), data.tobytes()
    entries[:] = [whole[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]
    return entries


def _json_value(value: Any) -> Any:
    """Return a value as JSON reads it back.

    Raises:
        _NotSavable: when that would be another value. Tuples become lists.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_value(item) for key, item in value.items()}
    raise _NotSavable(f"{value!r:.60} is not JSON")


# Reading


class SampleFilesReader:
    """Reads files of a name that `SampleFiles.write` wrote to a directory.

    Raises:
        RunError: when they cannot be read.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path, self._tensors_path = _paths(directory, name)
        with _reading(self._path):
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"it has format {content['format']}, but this version reads {FORMAT}")
            self._streams, self._journals = content["streams"], content["journals"]
            self._image_rows: Mapping[str, Any] = content.get("images", {})
        self._images: dict[str, ProcessedImage] = {}
        with _reading(self._tensors_path):
            self._file: Any = safe_open(self._tensors_path, framework="numpy")

    def samples(self, streams: Sequence[str], samples: Sequence[int]) -> dict[str, StoredStream]:
        """Return everything that the files have of some samples, in these streams.

        Raises:
            RunError: when the files are damaged, or have one of the samples in none of the streams.
        """
        found: dict[str, StoredStream] = {}
        missing = set(samples)
        with _reading(self._path):
            for stream in streams:
                row = self._streams.get(stream)
                if row is not None:
                    found[stream] = self._stream(row, set(samples))
                    missing -= found[stream].shapes.keys()
            if missing:
                raise LookupError(f"it lacks sample {min(missing)} of {streams[0]}")
        return found

    def all_samples(self) -> dict[str, StoredStream]:
        """Return everything that the files have of all samples, by stream.

        Raises:
            RunError: when the files are damaged.
        """
        with _reading(self._path):
            return {name: self._stream(row, set(row["samples"])) for name, row in self._streams.items()}

    def journal(self, source: str, sample: int) -> Journal | None:
        """Return the journal of an unfinished sample; None if it has none.

        Raises:
            RunError: when the files are damaged.
        """
        with _reading(self._path):
            return self._all_journals.get((source, sample))

    def _stream(self, row: Mapping[str, Any], samples: set[int]) -> StoredStream:
        shapes = {
            sample: (_integer(length), _integer(group))
            for sample, length, group in zip(row["samples"], row["lengths"], row["groups"], strict=True)
            if sample in samples
        }
        stored = StoredStream(shapes)
        for field_row in row["fields"]:
            unit = Unit(field_row["unit"])
            _, cells = stored.fields.setdefault(field_row["field"], (unit, {}))
            cells.update(self._cells(field_row, unit, samples))
        return stored

    def _cells(self, row: Mapping[str, Any], unit: Unit, samples: set[int]) -> dict[int, Cell]:
        """Return the cells of those samples that a row of the description has."""
        form, held = row["form"], [s for s in row["samples"] if s in samples]
        if form == _JSON:
            values = dict(zip(row["samples"], row["values"], strict=True))
            return {sample: (None, self._object(unit, values[sample])) for sample in held}
        array = self._tensor(row["tensor"], row["lengths"])
        if form == _BYTES:
            array = _joined_bytes(array, self._tensor(f"{row['tensor']}.bytes", array.tolist()))
        offsets = np.cumsum([0, *row["lengths"]], dtype=np.int64)
        packed = PackedValues(array, offsets if unit is Unit.TOKEN else None)
        if form in (_PACKED, _BYTES):
            column = FieldColumn(row["field"], unit)
            column.put_packed(row["samples"], packed)
            lengths = dict(zip(row["samples"], row["lengths"], strict=True))
            selected = np.cumsum([0, *(lengths[s] for s in held)], dtype=np.int64)
            rows = PackedValues(column.column(held).values, None if packed.offsets is None else selected)
            return {sample: (rows, index) for index, sample in enumerate(held)}
        numbers = array.tolist() if form == _PYTHON else list(array)
        spans = dict(zip(row["samples"], pairwise(offsets), strict=True))
        values = {s: tuple(numbers[start:stop]) for s, (start, stop) in spans.items() if s in samples}
        return {s: (None, value if unit is Unit.TOKEN else value[0]) for s, value in values.items()}

    def _object(self, unit: Unit, value: Any) -> Any:
        """Return the object that `_plain_object` made JSON of."""
        if unit is Unit.PIXELS:
            return tuple(PlacedImage(_integer(start), self._image(digest)) for start, digest in value)
        if unit is Unit.IMAGES:
            return [read_image(url) for url in value]
        return read_image(value) if unit is Unit.IMAGE else value

    def _image(self, digest: str) -> ProcessedImage:
        """Return an image; the samples that have it share it."""
        if digest not in self._images:
            grid, num_tokens, (factor, mean, deviation) = self._image_rows[digest]
            colours = Colours(factor, tuple(mean), tuple(deviation))
            with _reading(self._tensors_path):
                pixels = self._file.get_tensor(f"images.{digest}")
            self._images[digest] = ProcessedImage(digest, pixels, tuple(grid), num_tokens, colours)
        return self._images[digest]

    def _tensor(self, name: str, lengths: Sequence[int]) -> Array:
        with _reading(self._tensors_path):
            tensor: Array = self._file.get_tensor(name)
            if len(tensor) != sum(lengths):
                raise ValueError(f"tensor {name} has {len(tensor)} entries, not {sum(lengths)}")
        return tensor

    @cached_property
    def _all_journals(self) -> dict[tuple[str, int], Journal]:
        """All journals by source and sample. Their tokens are in the order of the entries."""
        num_tokens = [
            row["num_tokens"]
            for rows in self._journals.values()
            for entries in rows.values()
            for row in entries
            if "num_tokens" in row
        ]
        tokens = {name: self._tensor(f"journals.{name}", num_tokens).tolist() for name in _TOKENS}
        sizes = [
            size
            for rows in self._journals.values()
            for entries in rows.values()
            for row in entries
            for of_kind in row.get("recorded", {}).values()
            for size in of_kind
        ]
        records = iter(_joined_bytes(sizes, self._tensor("journals.recorded", sizes)) if sizes else ())
        journals: dict[tuple[str, int], Journal] = {}
        start = 0
        for source, rows in self._journals.items():
            for sample, entries in rows.items():
                journal = []
                for row in entries:
                    stop = start + row.get("num_tokens", 0)
                    recorded = {
                        name: tuple(islice(records, len(of_kind)))
                        for name, of_kind in row.get("recorded", {}).items()
                    }
                    of_row = {name: x[start:stop] for name, x in tokens.items()}
                    journal.append(_entry(row, of_row, recorded))
                    start = stop
                journals[source, int(sample)] = Journal(tuple(journal))
        return journals


def _entry(row: Mapping[str, Any], tokens: Mapping[str, list[Any]], recorded: Recorded) -> JournalEntry:
    """Return the entry of a journal, with the tokens of its completion and what was recorded beside them."""
    outcome = row.get("outcome")
    if "num_tokens" in row:
        ids, logprobs, versions = (tuple(tokens[name]) for name in _TOKENS)
        outcome = GenerationResult(ids, logprobs, versions, row["stop_reason"], recorded)
    return JournalEntry(row["kind"], row["model"], row["request"], outcome, row["is_done"])


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}.safetensors"


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{value!r:.60} is not an integer")
    return value


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Report what is wrong with a file in one line."""
    try:
        yield
    except _DAMAGED as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise RunError(f"{path} cannot be read: {reason}; resume from an intact checkpoint") from None


_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)
"""What reading a damaged file raises."""
