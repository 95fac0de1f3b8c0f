"""Copies of tensors in host memory. The memory that is pinned for GPUs is used here without pinning it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch_kit as kit
from safetensors.torch import load_file

from hflow.models import host_copy
from hflow.models.host_copy import HostCopies, PinnableMemory
from hflow.models.settings import RankPosition
from hflow.planner.models.descriptors import factories
from hflow.training.interface import ModelBackend

BATCH = kit.make_batch(kit.LENGTHS)


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies from a CPU as from a GPU; the calls of `pin` and `unpin`."""
    calls: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    accelerator = SimpleNamespace(current_stream=lambda: stream, set_device=lambda device: None)
    monkeypatch.setattr(host_copy, "is_gpu", lambda kind: True)
    monkeypatch.setattr(host_copy, "initialized_accelerator", lambda: accelerator)
    for name in ("pin", "unpin"):
        monkeypatch.setattr(PinnableMemory, name, lambda self, name=name: calls.append(name))
    return calls


def test_a_copy_is_contiguous_and_does_not_change(unpinned: list[str]) -> None:
    values = torch.arange(6.0).view(2, 3).T
    copies = HostCopies()
    with copies.copying():
        copied, half = copies.copy(values), copies.copy(values, torch.bfloat16)
    values.zero_()
    assert copied.is_contiguous()
    assert copied.tolist() == half.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert half.dtype == torch.bfloat16


def test_memory_is_pinned_once_and_kept_for_the_next_copies(unpinned: list[str]) -> None:
    copies = HostCopies()
    addresses = []
    for _ in range(2):
        with copies.copying():
            addresses.append([copies.copy(torch.ones(n)).data_ptr() for n in (5, 0, 7)])
    assert addresses[0] == addresses[1]
    assert unpinned == ["pin", "pin", "pin", "wait", "wait"]


def test_memory_of_another_size_is_unpinned(unpinned: list[str]) -> None:
    copies = HostCopies()
    for n in (5, 6):
        with copies.copying():
            assert copies.copy(torch.ones(n)).tolist() == [1] * n
    del copies
    assert unpinned == ["pin", "wait", "unpin", "pin", "wait", "unpin"]


def test_memory_is_pinned_ahead_for_the_first_copies(unpinned: list[str]) -> None:
    values = [torch.full([n], float(n)) for n in (5, 0, 7)]
    copies = HostCopies()
    copies.pin([x.nbytes for x in values], values[0].device)
    with copies.copying():
        copied = [copies.copy(x) for x in values]
        assert all(torch.equal(one, x) for one, x in zip(copied, values, strict=True))
        assert copies.copy(torch.ones(100)).tolist() == [1] * 100  # more than was announced
    assert unpinned == ["pin", "pin", "wait"]


@pytest.mark.parametrize("changes", [{}, {"head": "value"}, {"dtype": "bf16"}])
def test_the_first_save_pins_only_a_heads_own_file(
    tmp_path: Path, unpinned: list[str], changes: dict[str, str]
) -> None:
    """All else was pinned when the model was built."""
    backend = kit.model(**changes)
    backend.pin_copies()
    backend.train(kit.VALUE if changes.get("head") else kit.CALLS["token-mean"], kit.whole(BATCH), 0)
    save(backend, tmp_path / "saved")
    assert unpinned.count("pin") == 2 + (2 if changes.get("head") else 0)  # a weight and a bias


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_checkpoints_are_equal(tmp_path: Path, unpinned: list[str], name: str) -> None:
    """A save from memory that the one before has used is that of a model that copies as on a CPU."""
    backend = factories()[name](kit.SETTINGS, RankPosition())
    for step in range(2):
        backend.train(kit.CALLS["token-mean"], kit.whole(BATCH), step)
        save(backend, tmp_path / f"kept-{step}")
    assert "pin" in unpinned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "is_gpu", lambda kind: False)
        save(backend, tmp_path / "plain")
    wanted, got, first = (tensors(tmp_path / name) for name in ("plain", "kept-1", "kept-0"))
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[key], got[key]) for key in wanted)
    assert any(not torch.equal(wanted[key], first[key]) for key in wanted)


def save(backend: ModelBackend, directory: Path) -> None:
    directory.mkdir()
    writes = backend.save(str(directory)), backend.save_shards(str(directory / "shards"))
    for write in writes:
        write()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's files."""
    return {
        f"{path.relative_to(directory)} {name}": tensor
        for path in directory.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
