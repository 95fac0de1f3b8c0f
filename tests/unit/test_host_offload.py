"""Models whose weights and optimizer states are in host memory between their nodes."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import memory_kit
import pytest
import torch
import torch_kit as kit

from hflow.models import host_offload
from hflow.models.host_offload import CHUNK_BYTES, HostOffload
from hflow.models.settings import RankPosition
from hflow.planner.forecast.memory import activations
from hflow.planner.models.descriptors import factories
from hflow.training.interface import ModelBackend

BATCH = kit.make_batch(kit.LENGTHS)


def build(name: str, **changes: Any) -> ModelBackend:
    return factories()[name](dataclasses.replace(kit.SETTINGS, **changes), RankPosition())


def run(backend: ModelBackend, directory: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Infer and train, twice; save and load in between. Returns all results, and the weights."""
    results: list[Any] = []
    for step in range(2):
        (inferred,) = backend.infer(kit.LOGPROBS, [BATCH])
        results.append(inferred.columns["result"].values.tolist())
        results.append(backend.train(kit.CALLS["token-mean"], kit.whole(BATCH), step))
        backend.save(str(directory))()
        backend.save_shards(str(directory / "shards"))()
        backend.load_shards(str(directory / "shards"))
    return results, {name: tensor.clone() for name, tensor in backend.weights()}


def bytes_on_device(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(("name", "dtype"), [("torch", "fp32"), ("megatron", "bf16")])
def test_results_are_equal_bit_by_bit(tmp_path, name, dtype):
    wanted, weights = run(build(name, dtype=dtype), tmp_path)
    for offload in ("optimizer", "all"):
        backend = build(name, dtype=dtype, offload=offload)
        got, others = run(backend, tmp_path)
        assert got == wanted
        assert all(torch.equal(others[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_what_recomputed_layers_save_is_on_the_host(monkeypatch, name):
    """Results are equal bit by bit. The bytes are those of the plan."""
    saved: list[torch.Tensor] = []
    to_host = host_offload._SavedTensors.to_host

    def record(self, tensor):
        saved.append(tensor)
        return to_host(self, tensor)

    monkeypatch.setattr(host_offload._SavedTensors, "to_host", record)
    wanted, got = (
        build(name, activation_checkpointing=True, offload_activations=flag).train(
            kit.CALLS["token-mean"], kit.whole(BATCH), 0
        )
        for flag in (False, True)
    )
    assert got == wanted
    tokens = sum(x.numel() for x in saved if x.dtype == torch.int64)  # those that the embedding looks up
    num_bytes = sum(x.nbytes for x in saved if x.is_floating_point() and x.dim() > 1)
    asked = {"activation_checkpointing": True, "offload_activations": True, "dtype": "fp32"}
    rank = memory_kit.rank(memory_kit.shape_of(kit.ARCHITECTURE), "d1", name, on_cpu=False, **asked)
    planned = activations.inputs_in_host_memory(rank, memory_kit.microbatch(tokens))
    assert num_bytes == pytest.approx(planned, rel=0.03)


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_only_the_host_has_what_is_offloaded(name):
    for offload in ("optimizer", "all"):
        backend: Any = build(name, dtype="bf16", offload=offload)
        num_states = len(backend._optimizer.states())
        backend.train(kit.CALLS["token-mean"], kit.whole(BATCH), 0)
        module, optimizer = (
            backend._runner.module if name == "torch" else backend._stage.module,
            backend._optimizer,
        )
        assert (bytes_on_device(module.parameters()) == 0) is (offload == "all")
        assert len(optimizer.states()) == num_states > 0  # no step allocates any
        assert bytes_on_device(optimizer.states()) == 0
        if name == "megatron":
            assert bytes_on_device(optimizer.gradients()) == 0
        with backend.on_device():
            assert bytes_on_device(module.parameters()) > 0
            assert bytes_on_device(optimizer.states()) == 0
        if offload == "all":
            with pytest.raises(AssertionError, match="views of weights on the device"):
                list(backend.blocks())


def test_changes_of_views_are_kept():
    """What is written into blocks by update nodes, while nested contexts are open."""
    backend = build("torch", offload="all", trainable=False)
    before = kit.weights(backend)
    with backend.on_device(changes=True):
        for block in backend.blocks():
            block.values.add_(1)
        for _ in backend.weights():  # opens and closes a context of its own
            pass
        assert all(torch.isfinite(block.values).all() for block in backend.blocks())
    assert all(torch.equal(after, before[name] + 1) for name, after in kit.weights(backend).items())


def test_tensors_are_larger_than_a_chunk():
    """A storage may be in several chunks, and views of it come back with it."""
    large = torch.arange(CHUNK_BYTES // 4 + 5, dtype=torch.float32)
    small = torch.arange(7, dtype=torch.bfloat16)
    view, wanted = large[-9:], large[-9:].clone()
    offload = HostOffload("all", lambda: [small, large, view])
    offload.start()
    assert bytes_on_device([large, view, small]) == 0
    with offload.on_device():
        assert torch.equal(view, wanted)
        assert torch.equal(small, torch.arange(7, dtype=torch.bfloat16))
        assert large[CHUNK_BYTES // 8] == CHUNK_BYTES // 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_memory_of_the_device_falls(name):
    """By the fp32 weights and moments, 12 bytes a parameter, of a model of 20 million parameters."""
    if name == "megatron":
        pytest.importorskip("megatron.core", reason="needs megatron-core")
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}
    architecture = kit.ARCHITECTURE | sizes

    def held(offload: str) -> tuple[int, int]:
        gc.collect()
        before = torch.cuda.memory_allocated()
        backend: Any = build(name, device="cuda", architecture=architecture, offload=offload)
        backend.train(kit.CALLS["token-mean"], kit.whole(BATCH), 0)
        num = sum(tensor.numel() for _, tensor in backend.weights())
        return torch.cuda.memory_allocated() - before, num

    (none, num), (optimizer, _), (everything, _) = held("none"), held("optimizer"), held("all")
    assert none >= 12 * num
    assert optimizer <= 4.2 * num
    assert everything <= 0.2 * num
