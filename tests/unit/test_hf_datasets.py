"""The library `datasets`: what `save_to_disk` wrote, and datasets of the Hub, read from its cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from hflow.base.errors import DataError
from hflow.data.rows.datasets import DataSettings, open_dataset
from hflow.types import Unit

COLUMNS = {"prompt": Unit.TEXT}
NAMES = {"prompt": "question"}


def rows_of(name: str) -> list[dict[str, str]]:
    return [{"question": f"{name} {i}", "answer": str(i)} for i in range(3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    splits = {name: datasets.Dataset.from_list(rows_of(name)) for name in ("train", "test")}
    splits["test"].save_to_disk(directory / "one")
    datasets.DatasetDict(splits).save_to_disk(directory / "both")
    return directory


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a configuration `main` of `owner/sums` into the library's cache, and take the network away."""
    cache = tmp_path / "owner___sums" / "main" / "0.0.0" / "0123"
    cache.mkdir(parents=True)
    info = json.loads((saved / "both" / "train" / "dataset_info.json").read_text())
    splits = {
        name: {"name": name, "num_examples": 3, "num_bytes": 1, "dataset_name": "sums"}
        for name in ("train", "test")
    }
    info |= {
        "config_name": "main",
        "dataset_name": "sums",
        "splits": splits,
        "version": {"version_str": "0.0.0"},
    }
    (cache / "dataset_info.json").write_text(json.dumps(info))
    for name in splits:
        (arrow,) = (saved / "both" / name).glob("*.arrow")
        (cache / f"sums-{name}.arrow").write_bytes(arrow.read_bytes())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("name", "split", "first"),
    [("one", "train", "test 0"), ("both", "train", "train 0"), ("both", "test", "test 0")],
)
def test_what_save_to_disk_wrote(saved: Path, name: str, split: str, first: str) -> None:
    source = open_dataset(DataSettings(str(saved / name), split=split, map=NAMES), COLUMNS)
    assert [source.row(i) for i in range(len(source))] == [
        {"prompt": first.replace("0", str(i))} for i in range(3)
    ]


@pytest.mark.parametrize(
    ("path", "split", "prompts"),
    [
        ("hf:owner/sums/main", "train", ["train 0", "train 1", "train 2"]),
        ("hf:owner/sums/main", "test[:2]", ["test 0", "test 1"]),
        ("hf:owner/sums", "test", ["test 0", "test 1", "test 2"]),
    ],
)
def test_a_dataset_of_the_hub(hub: None, path: str, split: str, prompts: list[str]) -> None:
    source = open_dataset(DataSettings(path, split=split, map=NAMES), COLUMNS)
    assert [source.row(i)["prompt"] for i in range(len(source))] == prompts


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        (
            "hf:owner/other",
            "train",
            "hf:owner/other cannot be loaded: .*; load it once where there is a netw",
        ),
        (
            "hf:owner/sums/min",
            "train",
            r"cannot be loaded: .*\['main'\]; name a configuration, as in hf:owner/sums/",
        ),
        ("hf:owner/sums/main", "tset", r"cannot be loaded: .*'train', 'test'.*; set data.train.split to one"),
    ],
)
def test_a_dataset_of_the_hub_that_cannot_be_loaded(hub: None, path: str, split: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as refusal:
        open_dataset(DataSettings(path, split=split, key="data.train"), COLUMNS)
    assert "\n" not in str(refusal.value)


def test_what_is_wrong_with_a_saved_dataset(saved: Path, tmp_path: Path) -> None:
    def message(path: Path, split: str = "train") -> str:
        with pytest.raises(DataError) as refusal:
            open_dataset(DataSettings(str(path), split=split, key="data.train"), COLUMNS)
        return str(refusal.value)

    assert "no split 'tset'; set data.train.split to one of train, test" in message(saved / "both", "tset")
    assert "both (train): no column 'prompt' (it has 'question', 'answer')" in message(saved / "both")
    assert "a directory that save_to_disk did not write; set data.train.path to its files" in message(
        tmp_path
    )
    (tmp_path / "state.json").write_text("{")
    assert "cannot be read: " in message(tmp_path)


def test_the_library_is_an_extra(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path in (str(saved / "one"), "hf:owner/sums"):
        with pytest.raises(DataError, match=r"needs the library datasets.*; pip install 'hflow-rl\[data\]'"):
            open_dataset(DataSettings(path), COLUMNS)
