"""`SampleStore`: packing fields in any order, releasing samples, moving them between workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.types import Trajectory, Unit
from hflow.workers.storage import field_column
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_store import SampleStore, pack, unpack

FIELDS = ("gen/input_ids", "gen/behav_logprobs", "gen/loss_mask", "gen/prompt", "gen/num_tokens")


def trajectory(sample: int, length: int) -> Trajectory:
    return Trajectory(
        input_ids=tuple(sample * 100 + t for t in range(length)),
        loss_mask=tuple(t > 0 for t in range(length)),
        behav_logprobs=tuple(-0.5 * t for t in range(length)),
        versions=tuple(4 if t else -1 for t in range(length)),
        completion=f"text {sample}",
        num_turns=1,
    )


def length_of(sample: int) -> int:
    return sample % 4 + 1


def batch_of(samples: list[int], *names: str) -> Batch:
    """Return what another worker sends: the fields of `store_of`, packed."""
    return pack(store_of(samples), samples, names or FIELDS)["gen"]


def store_of(samples: list[int]) -> SampleStore:
    store = SampleStore()
    for sample in samples:
        columns = {"prompt": (Unit.TEXT, f"prompt {sample // 2}")}
        store.put_trajectory("gen", sample, sample // 2, trajectory(sample, length_of(sample)), columns)
    return store


def expected_ids(samples: list[int]) -> list[int]:
    return [sample * 100 + t for sample in samples for t in range(length_of(sample))]


def test_a_generated_sample_is_packed_with_its_dtypes() -> None:
    batch = store_of([3, 5]).gather("gen", [*FIELDS, "gen/versions", "gen/group", "gen/messages"], [5, 3])
    assert batch.samples.tolist() == [5, 3]
    assert batch.groups.tolist() == batch.columns["group"].values.tolist() == [2, 1]
    assert batch.lengths.tolist() == [2, 4]
    assert batch.columns["input_ids"].values.tolist() == [500, 501, 300, 301, 302, 303]
    assert batch.columns["prompt"].values == ["prompt 2", "prompt 1"]
    assert batch.columns["num_tokens"].values.tolist() == [1, 3]
    dtypes = {name: column.values.dtype for name, column in batch.columns.items() if name in DTYPES}
    assert dtypes == DTYPES


DTYPES = {
    "input_ids": np.int64,
    "versions": np.int64,
    "loss_mask": np.bool_,
    "behav_logprobs": np.float32,
    "num_tokens": np.int64,
}


@given(st.data())
def test_loose_and_packed_values_are_gathered_in_any_order(data: st.DataObject) -> None:
    samples = list(range(12))
    sources = data.draw(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    store = store_of([sample for sample in samples if sources[sample] == 0])
    for source in (1, 2, 3):
        held = data.draw(st.permutations([sample for sample in samples if sources[sample] == source]))
        if held:
            store.put("gen", batch_of(held))
    wanted = data.draw(st.lists(st.sampled_from(samples), unique=True))
    long = data.draw(st.sampled_from([1, field_column.LONG]))
    with patch.object(field_column, "LONG", long):  # rows may be copied as a whole
        batch = store.gather("gen", FIELDS, wanted)
    assert batch.columns["input_ids"].values.tolist() == expected_ids(wanted)
    assert batch.columns["prompt"].values == [f"prompt {sample // 2}" for sample in wanted]
    assert batch.groups.tolist() == [sample // 2 for sample in wanted]
    assert batch.columns["num_tokens"].values.tolist() == [length_of(sample) - 1 for sample in wanted]


def test_wide_token_fields_keep_their_columns() -> None:
    store = store_of([0, 1, 2])
    lengths = np.array([3, 1], np.int64)
    values = np.arange(8, dtype=np.int32).reshape(4, 2)
    ids = np.array([2, 0], np.int64)
    store.put("gen", Batch(ids, ids // 2, lengths, {"top": Column(Unit.TOKEN, values)}))
    top = store.gather("gen", ["gen/top"], [0, 2]).columns["top"].values
    assert top.dtype == np.int32
    assert top.tolist() == [[6, 7], [0, 1], [2, 3], [4, 5]]


def test_a_join_keeps_the_full_name_and_the_readers_lengths() -> None:
    store = store_of([4])
    store.put_trajectory("view", 4, 2, trajectory(4, 7), {})
    store.add_value("gen", "reward", Unit.SEQUENCE, [4], 0.25)
    batch = store.gather("view", ["view/input_ids", "gen/reward"], [4])
    assert batch.lengths.tolist() == [7]
    assert batch.columns["gen/reward"].values.tolist() == [0.25]
    assert batch.columns["gen/reward"].values.dtype == np.float64


def test_values_have_the_types_that_bodies_read() -> None:
    store = store_of([2])
    assert store.values("gen", "behav_logprobs", [2]) == [[0.0, -0.5, -1.0]]
    moved = SampleStore()
    moved.put("gen", batch_of([1, 2]))
    assert moved.values("gen", "input_ids", [2, 1]) == [[200, 201, 202], [100, 101]]
    assert moved.values("gen", "num_tokens", [2]) == [2]
    assert type(moved.values("gen", "num_tokens", [2])[0]) is int
    assert moved.values("gen", "prompt", [1]) == ["prompt 0"]


def test_a_gathered_batch_is_a_copy() -> None:
    store = SampleStore()
    sent = batch_of([0, 1, 2])
    for column in sent.columns.values():
        if isinstance(column.values, np.ndarray):
            column.values.flags.writeable = False
    store.put("gen", sent)
    gathered = store.gather("gen", ["gen/input_ids"], [0, 1, 2]).columns["input_ids"].values
    assert isinstance(gathered, np.ndarray)
    gathered[0] = 7
    assert store.values("gen", "input_ids", [0]) == [[0]]


def test_release_frees_a_sample_in_all_streams_and_no_other_sample() -> None:
    store = store_of([0, 1])
    store.put_trajectory("view", 0, 0, trajectory(0, 2), {})
    before = store.num_values()
    store.release([0], ["gen", "view"])
    assert not store.has("gen", "prompt", 0)
    assert not store.has("view", "input_ids", 0)
    assert store.has("gen", "prompt", 1)
    store.release([1], ["gen", "view"])
    assert store.num_values() == 0 < before


def test_release_of_one_field() -> None:
    store = store_of([0, 1])
    store.release_fields([0], ["gen/behav_logprobs"])
    store.release_fields([0], ["gen/never_here", "elsewhere/input_ids"])
    assert not store.has("gen", "behav_logprobs", 0)
    assert store.has("gen", "behav_logprobs", 1)
    assert store.lengths("gen", [0]) == [1]


def test_summaries_are_of_numeric_sequence_fields() -> None:
    store = store_of([1, 2])
    store.add_value("gen", "reward", Unit.SEQUENCE, [1], 0.5)
    store.add_value("gen", "reward", Unit.SEQUENCE, [2], 1.5)
    store.add_value("gen", "correct", Unit.SEQUENCE, [1], True)
    cut = dataclasses.replace(trajectory(3, 1), stop_reason="length")
    store.put_trajectory("gen", 3, 0, cut, {})
    assert store.summarize(["gen"], [1, 2, 3])["gen/truncated"] == (1.0, 3)
    sums = store.summarize(["gen"], [1, 2])
    assert sums["gen/truncated"] == (0.0, 2)
    assert sums["gen/reward"] == (2.0, 2)
    assert sums["gen/correct"] == (1.0, 1)
    assert sums["gen/num_tokens"] == (3.0, 2)
    assert "gen/stop_reason" not in sums
    assert "gen/input_ids" not in sums


def test_a_parcel_carries_every_stream() -> None:
    source, target = store_of([0, 1]), SampleStore()
    source.put_trajectory("view", 1, 0, trajectory(1, 3), {})
    num_bytes = unpack(target, pack(source, [1], ["gen/prompt", "gen/input_ids", "view/input_ids"]))
    assert num_bytes == len("prompt 0") + 2 * 8 + 3 * 8
    assert target.values("gen", "prompt", [1]) == ["prompt 0"]
    assert target.values("view", "input_ids", [1]) == [[100, 101, 102]]
    assert target.lengths("view", [1]) == [3]


def test_a_unit_does_not_change() -> None:
    store = store_of([0])
    with pytest.raises(AssertionError, match="gen/prompt"):
        store.add_value("gen", "prompt", Unit.SEQUENCE, [0], 1.0)


def test_values_after_the_release_are_dropped() -> None:
    store = store_of([0])
    late = store.gather("gen", ["gen/num_tokens"], [0])
    store.release([0], ["gen"])
    store.add("gen", late)
    store.add_value("gen", "reward", Unit.SEQUENCE, [0], 1.0)
    assert store.num_values() == 0


def test_late_values_of_samples_that_were_not_released_are_kept() -> None:
    samples = [0, 1, 2]
    store = store_of(samples)
    late = store.gather("gen", ["gen/num_tokens"], samples)
    rewards = Column(Unit.SEQUENCE, np.array([1.0, 2.0, 3.0], np.float32))
    store.release([1], ["gen"])
    store.add("gen", late.select(()).with_columns({"reward": rewards}))
    assert store.values("gen", "reward", [0, 2]) == [1.0, 3.0]
    assert not store.has("gen", "reward", 1)


NUMBERS = [0.7, 12345678901234, 2**53 + 1, True, 1e-300]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_exact_on_its_way_between_bodies(number: float, tmp_path: Path) -> None:
    """Loose, packed, moved to another worker, and read from a checkpoint."""
    store, moved, resumed = store_of([0, 1]), SampleStore(), SampleStore()
    store.add_value("gen", "value", Unit.SEQUENCE, [0, 1], number)
    store.add_value("gen", "tokens", Unit.TOKEN, [1], [number, number])
    store.add("gen", store.gather("gen", ["gen/value"], [1]))  # packed from now on
    unpack(moved, pack(store, [1, 0], ["gen/value"]))
    unpack(moved, pack(store, [1], ["gen/tokens"]))
    SampleFiles(tmp_path, "worker-0", {"gen": {"gen": store.stored("gen", [0, 1])}}, {}).write()
    for name, stored in SampleFilesReader(tmp_path, "worker-0").all_samples().items():
        resumed.put_stored(name, stored)
    for held in (store, moved, resumed):
        assert held.values("gen", "value", [0, 1]) == [number, number]
        assert held.values("gen", "tokens", [1]) == [[number, number]]
        column = held.gather("gen", ["gen/value"], [1, 0]).columns["value"].values
        assert column.tolist() == [number, number]
        assert type(column.tolist()[0]) is type(number)


def test_numbers_of_old_checkpoints_and_new_ones_make_one_column() -> None:
    """A checkpoint of an older version has float32."""
    store = store_of([0, 1])
    one = np.ones(1, np.int64)
    store.add("gen", Batch(0 * one, one, one, {"reward": Column(Unit.SEQUENCE, np.array([0.5], np.float32))}))
    store.add_value("gen", "reward", Unit.SEQUENCE, [1], 0.7)
    assert store.gather("gen", ["gen/reward"], [1, 0]).columns["reward"].values.tolist() == [0.7, 0.5]


def test_an_integer_that_floats_would_change_is_refused() -> None:
    store = store_of([0, 1, 2])
    for sample, number in ((0, 2**53 + 1), (1, 0.5)):
        store.add_value("gen", "id", Unit.SEQUENCE, [sample], number)
    with pytest.raises(RunError, match="'id' has integers, such as 9007199254740993, and floats"):
        store.gather("gen", ["gen/id"], [0, 1])
    store.add("gen", store.gather("gen", ["gen/id"], [0]))
    with pytest.raises(RunError, match="'id' has integers, such as 9007199254740993, and floats"):
        store.gather("gen", ["gen/id"], [0, 1])
    store.add_value("gen", "id", Unit.SEQUENCE, [2], 12345678901234)
    assert store.gather("gen", ["gen/id"], [2, 1]).columns["id"].values.tolist() == [12345678901234, 0.5]


def test_long_rows_are_packed_when_they_come_and_stay_what_they_were() -> None:
    """A log-prob that float32 would round stays, and short rows beside long ones keep their place."""
    lengths = {0: field_column.LONG, 1: 3, 2: 2 * field_column.LONG}
    rows = {sample: [0.5 * t for t in range(length)] for sample, length in lengths.items()}
    rows[3] = [0.1, *rows[0]]
    column = field_column.FieldColumn("behav_logprobs", Unit.TOKEN)
    for sample, row in rows.items():
        column.put_loose(sample, row)
    is_packed = {sample: packed is not None for sample, (packed, _) in column.held_cells(rows).items()}
    assert is_packed == {0: True, 1: False, 2: True, 3: False}, "0.1 is not the same number in float32"
    assert column.values([3, 2, 1, 0]) == [rows[3], rows[2], rows[1], rows[0]]
    merged = column.column([2, 1, 0, 3]).values
    expected = np.array([*rows[2], *rows[1], *rows[0], *rows[3]], np.float32)
    assert merged.dtype == np.float32
    assert np.array_equal(merged, expected)


def test_long_rows_of_a_field_whose_dtype_is_not_known_stay_as_they_are() -> None:
    column = field_column.FieldColumn("weights", Unit.TOKEN)
    column.put_loose(0, [1] * field_column.LONG)
    column.put_loose(1, [0.5])
    assert column.column([0, 1]).values.dtype == np.float64
    assert column.values([0])[0][0] == 1
