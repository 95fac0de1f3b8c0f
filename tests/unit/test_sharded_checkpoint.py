"""Sharded checkpoints: training continues in any other layout and backend as if nothing had been between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import megatron_twins as twins
import numpy as np
import pytest
import ranks
import shard_cases as cases
import torch
import torch_kit as kit
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hflow.base.errors import BackendError
from hflow.models.settings import SHARDS_INDEX
from hflow.training.megatron.hf_ranges import boxes_of_range
from hflow.training.sharded_checkpoint import entry_name
from hflow.types.tensor_slices import slices_within, whole_box


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    twins.save_checkpoint(path / "checkpoint")
    twins.save_families(path / "checkpoint")
    ranks.start(cases.exchange, (str(path),), 4)
    return path


@pytest.mark.parametrize(
    ("sides", "writer", "reader"),
    [(sides, *pair) for sides, pairs in cases.EXCHANGES[:-1] for pair in pairs],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.values())).twin.node,
)
def test_training_continues_exactly(directory, sides, writer, reader):
    """Loss, gradient norm, learning rate and weights of the next step are those of an uninterrupted run."""
    name = cases.read(sides[writer], sides[reader])
    wanted = twins.expected(sides[reader].twin.node, "fp32", directory / "checkpoint")
    metrics = torch.load(directory / f"{name}.metrics.pt", weights_only=False)
    assert twins.comparable(metrics) == pytest.approx(wanted.metrics[cases.NUM_WRITTEN], rel=2e-5, abs=1e-6)
    weights = torch.load(directory / f"{name}.weights.pt")
    assert weights.keys() == wanted.weights.keys()
    for tensor, values in wanted.weights.items():
        torch.testing.assert_close(weights[tensor], values, atol=1e-5, rtol=0)


def saved_weights(path):
    """Return the fp32 weights of a sharded checkpoint, whole."""
    index = json.loads((path / SHARDS_INDEX).read_text())
    files = {file: load_file(path / file) for row in index["tensors"].values() for _, file in row["boxes"]}
    whole = {name: torch.full(row["shape"], torch.nan) for name, row in index["tensors"].items()}
    for name, row in index["tensors"].items():
        for box, file in row["boxes"]:
            values = files[file][entry_name(name, box, "weight")]
            whole[name][slices_within(box, [(0, size) for size in row["shape"]])] = values
    return whole


@pytest.mark.parametrize(("writer", "reader"), cases.HALF_PAIRS)
def test_weights_that_are_stepped_in_fp32_go_through_bf16_unchanged(directory, writer, reader):
    name = f"{cases.read(cases.HALF[writer], cases.HALF[reader])} again"
    before, after = (
        saved_weights(directory / cases.written(cases.HALF[writer])),
        saved_weights(directory / name),
    )
    assert after.keys() == before.keys()
    assert all(torch.equal(after[tensor], values) for tensor, values in before.items())
    assert any(not torch.equal(values, values.bfloat16().float()) for values in before.values())


WRITERS = [
    sides[writer]
    for sides, pairs in ((cases.PPO, cases.PAIRS), (cases.EXPERTS, cases.EXPERT_PAIRS))
    for writer in dict.fromkeys(writer for writer, _ in pairs)
]


@pytest.mark.parametrize("side", WRITERS, ids=lambda side: side.name)
def test_every_entry_is_written_once_and_by_all_ranks(directory, side):
    path = directory / cases.written(side)
    index = json.loads((path / SHARDS_INDEX).read_text())
    files = {}
    for tensor, row in index["tensors"].items():
        count = np.zeros(row["shape"], int)
        for box, file in row["boxes"]:
            count[slices_within(box, [(0, size) for size in row["shape"]])] += 1
            files.setdefault(file, []).extend(
                entry_name(tensor, box, kind) for kind in ("weight", "mean", "square")
            )
        assert (count == 1).all()
    assert sorted(path.iterdir()) == sorted(path / found for found in (SHARDS_INDEX, *files))
    for file, keys in files.items():
        with safe_open(path / file, framework="pt") as opened:
            assert sorted(opened.keys()) == sorted(keys)
    assert len(files) == len(side.ranks)
    assert not list(directory.glob(".*"))
    norms = {file for tensor, row in index["tensors"].items() if "norm" in tensor for _, file in row["boxes"]}
    assert len(norms) > len(side.ranks) // 2  # tensor ranks that hold the same take turns


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_range_is_split_into_boxes(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(boxes_of_range(whole.shape, start, stop))
    parts = [whole[slices_within(box, whole_box(whole.shape))].reshape(-1) for box in boxes]
    assert len(boxes) <= 2 * len(shape) - 1
    assert np.array_equal(np.concatenate([*parts, np.arange(0)]), np.arange(start, stop))


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_training_does_not_change_what_is_being_saved(backend, directory, tmp_path):
    """Files that are written after a further step are those of the step before."""
    import megatron_twin_ranks as twin_ranks

    twin = twins.Twin("ppo")
    model = kit.model() if backend == "torch" else twin_ranks.model(twin, directory, None)
    call, _ = (kit.CALLS["token-mean"], None) if backend == "torch" else twins.NODES["ppo"]
    shards = kit.whole(kit.make_batch(kit.LENGTHS)) if backend == "torch" else twins.shards(1, 0)
    model.train(call, shards, 0)
    for name in ("before", "during"):
        (tmp_path / name).mkdir()
    writes = {
        name: [model.save(str(tmp_path / name)), model.save_shards(str(tmp_path / name / "shards"))]
        for name in ("before", "during")
    }
    files = {path.relative_to(tmp_path / "before") for write in writes["before"] for path in write()}
    model.train(call, shards, 1)
    assert {path.relative_to(tmp_path / "during") for write in writes["during"] for path in write()} == files
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "shards.json"}
    for file in files:
        assert (tmp_path / "during" / file).read_bytes() == (tmp_path / "before" / file).read_bytes(), file
    (tmp_path / "after").mkdir()
    model.save(str(tmp_path / "after"))()
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("before", "after")]
    assert any(not torch.equal(saved[0][tensor], saved[1][tensor]) for tensor in saved[0])


# ------------------------------------------------------------------------------------ bad input
@pytest.fixture
def written(tmp_path: Path) -> Path:
    backend = kit.model()
    backend.train(kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS)), 0)
    backend.save_shards(str(tmp_path / "shards"))()
    return tmp_path / "shards"


def assert_rejected(path: Path, message: str, **changes) -> None:
    with pytest.raises(BackendError, match=message) as error:
        kit.model(**changes).load_shards(str(path))
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_model_is_rejected(written, tmp_path):
    assert_rejected(tmp_path, r"holds no sharded checkpoint: .*shards\.json")
    wide = kit.ARCHITECTURE | {"num_attention_heads": 2}
    assert_rejected(
        written, "is of another model: num_attention_heads is 4 there and 2 here", architecture=wide
    )
    assert_rejected(written, "is of another model: head is 'lm' there and 'value' here", head="value")


def rewrite(path: Path, change) -> None:
    index = json.loads((path / SHARDS_INDEX).read_text())
    change(index)
    (path / SHARDS_INDEX).write_text(json.dumps(index))


def test_wrong_tensors_are_named(written):
    norm = "model.norm.weight"
    rewrite(written, lambda index: index["tensors"][norm].update(shape=[31]))
    assert_rejected(written, f"has tensors of other shapes than its config says: {norm}")
    rewrite(written, lambda index: index["tensors"].update({norm: {"shape": [32], "boxes": []}}))
    assert_rejected(written, rf"has 0 of the 32 entries of {norm}")
    rewrite(written, lambda index: index["tensors"].pop(norm))
    assert_rejected(written, f"lacks {norm}")
    rewrite(
        written,
        lambda index: index["tensors"].update({norm: {"shape": [32], "boxes": []}, "extra": {"shape": [1]}}),
    )
    assert_rejected(written, "has tensors that the model does not know: extra")
    rewrite(written, lambda index: index.update(format=2))
    assert_rejected(written, "has format 2, but this version of hflow reads format 1")


def test_a_file_that_is_not_there_is_named(written):
    next(written.glob("*.safetensors")).unlink()
    assert_rejected(written, "rank-00000-000.safetensors cannot be read")


def test_entries_that_a_file_lacks_are_named(written):
    (path,) = written.glob("*.safetensors")
    save_file({"nothing": torch.zeros(1)}, path)
    assert_rejected(written, "rank-00000-000.safetensors cannot be read: .*weight")


def test_a_frozen_model_takes_the_weights(written):
    backend = kit.model(trainable=False)
    backend.load_shards(str(written))
    trained = kit.model()
    trained.load_shards(str(written))
    for (_, mine), (_, theirs) in zip(backend.weights(), trained.weights(), strict=True):
        assert torch.equal(mine, theirs)


def test_before_the_first_step_there_are_weights_only(tmp_path):
    kit.model(seed=8).save_shards(str(tmp_path / "shards"))()
    backend = kit.model()
    backend.load_shards(str(tmp_path / "shards"))
    call, shards = kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS))
    assert backend.train(call, shards, 0) == kit.model(seed=8).train(call, shards, 0)


def test_a_later_checkpoint_replaces_the_earlier(written):
    kit.model(seed=8).save_shards(str(written))()
    assert json.loads((written / SHARDS_INDEX).read_text())["num_steps"] == 0
