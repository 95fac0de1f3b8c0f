"""Samples and journals of a checkpoint: what is read is what was written, and damaged files are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.engines.interface import GenerationResult
from hflow.episodes.journal import Journal, JournalEntry
from hflow.types import Trajectory, Unit
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore

FLOATS = st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, -math.inf])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.just(np.int32(7))
# Of a field with floats, only integers that float64 holds are accepted.
NUMBERS = (
    FLOATS | FLOATS.map(np.float32) | st.integers(-(2**53), 2**53) | st.booleans() | st.just(np.int32(7))
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
DTYPES = (np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_)


def trajectory(ids: list[int], logprobs: list[float]) -> Trajectory:
    return Trajectory(
        tuple(ids), (True,) * len(ids), tuple(logprobs), tuple(range(len(ids))), ({"role": "user"},), "text"
    )


def round_trip(store: SampleStore, path: Path, samples: list[int], wanted: list[int]) -> SampleStore:
    """Return a store with those samples of another that are wanted, after they were written and read."""
    files = SampleFiles(path, "worker-0", {"gen": {"gen": store.stored("gen", samples)}}, {})
    files.write()
    assert not files.not_saved
    again = SampleStore()
    for stream, stored in SampleFilesReader(path, "worker-0").samples(["gen", "view"], wanted).items():
        again.put_stored(stream, stored)
    return again


def bits(value: Any) -> Any:
    """Return a value in a form in which equal means the same type and the same bits."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, np.shape(value), value.tobytes()
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, float):
        return np.float64(value).tobytes()
    return type(value), value


def assert_same(store: SampleStore, again: SampleStore, samples: list[int]) -> None:
    for name, column in store._columns["gen"].items():
        held = [sample for sample in samples if sample in column]
        assert held == [sample for sample in samples if again.has("gen", name, sample)]
        if not held:
            continue
        assert bits(again.values("gen", name, held)) == bits(store.values("gen", name, held)), name
        theirs, mine = (x._columns["gen"][name].column(held) for x in (again, store))
        assert (theirs.unit, bits(theirs.values)) == (mine.unit, bits(mine.values)), name
    assert again.lengths("gen", samples) == store.lengths("gen", samples)
    assert [again.group("gen", s) for s in samples] == [store.group("gen", s) for s in samples]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Loose values of every kind, and packed values of every dtype, of which some samples are read."""
    store, samples = SampleStore(), list(range(data.draw(st.integers(1, 5))))
    lengths = [data.draw(st.integers(1, 3)) for _ in samples]
    scalars = data.draw(st.sampled_from([INTEGERS, NUMBERS]))
    for sample, length in zip(samples, lengths, strict=True):
        ids = data.draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length))
        logprobs = data.draw(st.lists(FLOATS, min_size=length, max_size=length))
        columns = {"prompt": (Unit.TEXT, data.draw(st.text())), "row": (Unit.JSON, data.draw(JSON))}
        store.put_trajectory("gen", sample, sample // 2, trajectory(ids, logprobs), columns)
        if data.draw(st.booleans()):
            store.add_value("gen", "reward", Unit.SEQUENCE, (sample,), data.draw(scalars))
            numbers = data.draw(st.sampled_from([FLOATS, st.integers(-9, 9), st.booleans()]))
            tokens = data.draw(st.lists(numbers, min_size=length, max_size=length))
            store.add_value("gen", "scores", Unit.TOKEN, (sample,), tokens)
    for number, dtype in enumerate(DTYPES):
        some = data.draw(st.lists(st.sampled_from(samples), unique=True))
        shape = (sum(lengths[s] for s in some), *data.draw(st.sampled_from([(), (2,)])))
        raw = np.random.default_rng(number).integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
        tokens = raw.view(dtype).reshape(shape)
        batch = Batch(
            np.array(some, np.int64),
            np.array([s // 2 for s in some], np.int64),
            np.array([lengths[s] for s in some], np.int64),
            {
                f"tokens {number}": Column(Unit.TOKEN, tokens),
                f"number {number % 3}": Column(Unit.SEQUENCE, np.arange(len(some)).astype(dtype)),
                "answer": Column(Unit.TEXT, [f"answer {s}" for s in some]),
            },
        )
        store.add("gen", batch)
    wanted = data.draw(st.lists(st.sampled_from(samples), unique=True))
    again = round_trip(store, tmp_path_factory.mktemp("samples"), samples, wanted)
    if wanted:
        assert_same(store, again, wanted)


def filled(path: Path) -> Path:
    """Write two samples of a stream, one of a stream that derives from it, and a journal."""
    store = SampleStore()
    for sample in (3, 5):
        store.put_trajectory(
            "gen", sample, 1, trajectory([1, 2], [-0.5, -0.25]), {"row": (Unit.JSON, {"a": 1})}
        )
    store.put_trajectory("view", 3, 1, trajectory([4], [0.0]), {}, parent="gen")
    family = {stream: store.stored(stream, (3, 5, 7)) for stream in ("gen", "view")}
    result = GenerationResult((1, 2), (-0.1, -math.pi), (0, 0), "abort")
    journal = Journal(
        (
            JournalEntry("time", "actor", {}, 0.1),
            JournalEntry("complete", "actor", {"prompt": "ab"}, result, is_done=False),
            JournalEntry("call", "actor", {"tool": "f"}, {"result": [1, None], "failed": False}),
        )
    )
    files = SampleFiles(path, "worker-1", {"gen": family}, {"gen": {8: journal, 9: Journal()}})
    assert [written.name for written in files.write()] == ["worker-1.json", "worker-1.safetensors"]
    return path


def test_streams_that_derive_are_read_with_their_root(tmp_path: Path) -> None:
    reader = SampleFilesReader(filled(tmp_path), "worker-1")
    found = reader.samples(["gen", "view"], [3])
    assert [(name, stored.shapes) for name, stored in found.items()] == [
        ("gen", {3: (2, 1)}),
        ("view", {3: (1, 1)}),
    ]
    assert reader.samples(["gen", "view"], [5])["view"].shapes == {}


def test_a_journal_is_read_bit_for_bit(tmp_path: Path) -> None:
    reader = SampleFilesReader(filled(tmp_path), "worker-1")
    journal = reader.journal("gen", 8)
    assert journal is not None
    assert [(entry.kind, entry.is_done) for entry in journal.entries] == [
        ("time", True),
        ("complete", False),
        ("call", True),
    ]
    assert journal.entries[0].outcome == 0.1
    assert journal.entries[1].outcome == GenerationResult((1, 2), (-0.1, -math.pi), (0, 0), "abort")
    assert journal.entries[2].outcome == {"result": [1, None], "failed": False}
    assert reader.journal("gen", 9) is None
    assert reader.journal("another", 8) is None


@pytest.mark.parametrize("value", [{1, 2}, {1: "a"}, float("nan"), object(), np.ones(2)])
def test_a_value_that_is_not_json_leaves_its_sample_out(tmp_path: Path, value: Any) -> None:
    """No stream has anything of the sample then, and of an episode there is no journal."""
    store = SampleStore()
    for sample in (0, 1):
        store.put_trajectory(
            "gen", sample, 0, trajectory([1], [0.0]), {"row": (Unit.JSON, value if sample else 1)}
        )
        store.put_trajectory("view", sample, 0, trajectory([1], [0.0]), {})
    family = {stream: store.stored(stream, (0, 1)) for stream in ("gen", "view")}
    call = JournalEntry("call", "actor", {}, {"result": value, "failed": False})
    started = JournalEntry("complete", "actor", {}, GenerationResult((7,), (0.0,), (0,), "stop"))
    journals = {2: Journal((started, call)), 3: Journal((started,))}
    files = SampleFiles(tmp_path, "worker-0", {"gen": family}, {"gen": journals})
    files.write()
    ((refused,), (stopped,)) = files.not_saved, files.without_journal
    assert (refused.source, refused.sample, stopped.sample) == ("gen", 1, 2)
    assert refused.reason.startswith("gen/row: ")
    assert refused.reason.endswith("is not JSON")
    reader = SampleFilesReader(tmp_path, "worker-0")
    assert [list(stored.shapes) for stored in reader.samples(["gen", "view"], [0]).values()] == [[0], [0]]
    with pytest.raises(RunError, match=r"worker-0.json cannot be read: .*it lacks sample 1 of gen"):
        reader.samples(["gen", "view"], [1])
    assert reader.journal("gen", 2) is None
    journal = reader.journal("gen", 3)
    assert journal is not None
    assert journal.entries[0].outcome.ids == (7,)


def test_nothing_is_written_where_there_is_nothing(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, "worker-0", {"gen": {"gen": SampleStore().stored("gen", (1,))}}, {})
    assert files.write() == []
    assert not list(tmp_path.iterdir())


def change_json(path: Path, change: Any) -> None:
    content = json.loads((path / "worker-1.json").read_text())
    change(content)
    (path / "worker-1.json").write_text(json.dumps(content))


def change_tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "worker-1.safetensors")
    change(tensors)
    save_file(tensors, path / "worker-1.safetensors")


def truncate(path: Path, name: str) -> None:
    (path / name).write_bytes((path / name).read_bytes()[:-9])


DAMAGES = {
    "no file": (lambda p: (p / "worker-1.json").unlink(), "worker-1.json"),
    "no tensors": (lambda p: (p / "worker-1.safetensors").unlink(), "worker-1.safetensors"),
    "cut": (lambda p: truncate(p, "worker-1.json"), "worker-1.json"),
    "cut tensors": (lambda p: truncate(p, "worker-1.safetensors"), "worker-1.safetensors"),
    "deep": (lambda p: (p / "worker-1.json").write_text("[" * 100_000), "worker-1.json"),
    "bytes": (lambda p: (p / "worker-1.json").write_bytes(b"\xff\xfe"), "worker-1.json"),
    "a list": (lambda p: (p / "worker-1.json").write_text("[]"), "worker-1.json"),
    "format": (lambda p: change_json(p, lambda c: c.update(format=2)), "it has format 2"),
    "no streams": (lambda p: change_json(p, lambda c: c.pop("streams")), "'streams'"),
    "streams": (lambda p: change_json(p, lambda c: c.update(streams=[1])), "worker-1.json"),
    "lengths": (lambda p: change_json(p, lambda c: c["streams"]["gen"].update(lengths=[2])), "worker-1.json"),
    "a text": (
        lambda p: change_json(p, lambda c: c["streams"]["gen"].update(lengths=["2", 2])),
        "an integer",
    ),
    "unit": (lambda p: change_json(p, lambda c: c["streams"]["gen"]["fields"][0].update(unit="x")), "'x'"),
    "rows": (
        lambda p: change_json(p, lambda c: c["streams"]["gen"]["fields"][0].update(lengths=[4])),
        "json",
    ),
    "entry": (lambda p: change_json(p, lambda c: c["journals"]["gen"]["8"][0].pop("kind")), "'kind'"),
    "a tensor": (lambda p: change_tensors(p, lambda t: t.pop("0.0")), "worker-1.safetensors"),
    "its length": (
        lambda p: change_tensors(p, lambda t: t.update({"0.0": t["0.0"][:-1]})),
        "tensor 0.0 has 3 entries, not 4",
    ),
    "tokens": (
        lambda p: change_tensors(p, lambda t: t.update({"journals.ids": np.zeros(1, np.int64)})),
        "tensor journals.ids has 1 entries, not 2",
    ),
}


def read_all(path: Path) -> None:
    reader = SampleFilesReader(path, "worker-1")
    reader.samples(["gen", "view"], [3, 5])
    reader.journal("gen", 8)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_in_one_line(tmp_path: Path, damage: str) -> None:
    break_it, message = DAMAGES[damage]
    break_it(filled(tmp_path))
    with pytest.raises(RunError) as caught:
        read_all(tmp_path)
    text = str(caught.value)
    assert message in text
    assert str(tmp_path / "worker-1.") in text
    assert text.endswith("; resume from an intact checkpoint")
    assert "\n" not in text
