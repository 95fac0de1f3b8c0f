"""vLLM's worker and hflow's stepper put tagged memory of the pretend accelerator to sleep."""

from types import SimpleNamespace

import pretend_device
import pytest
import torch
import vllm.device_allocator
from sleep_allocator import SleepAllocator
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.v1.worker.gpu_worker import Worker

from hflow.base.errors import BackendError
from hflow.engines.vllm.stepper import VllmStepper
from hflow.types.engine import SleepLevel

WEIGHTS, CACHE = 4 * 64 * 64, 4 * 4096
"""Bytes of the model and of its cache."""


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend_device.installed() as name:
        yield name


class Engine:
    """An engine with a model and a cache, whose worker's methods are those of vLLM."""

    def __init__(self, device, monkeypatch):
        self.memory = pretend_device._memory
        assert self.memory is not None
        self.allocator = SleepAllocator()
        monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: self.allocator)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30, 1 << 30))
        self.model = torch.nn.Module()
        with self.allocator.use_memory_pool("weights"):
            self.model.weight = torch.nn.Parameter(torch.ones(64, 64, device=device))
            self.model.register_buffer("scale", torch.full((1,), 2.0, device=device))
        with self.allocator.use_memory_pool("kv_cache"):
            self.cache = torch.ones(CACHE // 4, device=device)
        self.worker = worker = object.__new__(Worker)
        worker.model_runner = SimpleNamespace(model=self.model)
        worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=())
        worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
        worker._sleep_mode_backend = CuMemBackend()
        worker._sleep_saved_buffers = worker._sleep_saved_parameters = worker._sleep_saved_draft_buffers = {}
        worker.get_draft_model = worker.synchronize_device = lambda: None
        self.stepper = object.__new__(VllmStepper)
        self.stepper._settings, self.stepper._engine = SimpleNamespace(sleeps=True), worker
        self.stepper._model = SimpleNamespace(name="actor")
        self.stepper._has_weights, self.stepper._adapter_requests = True, {}
        self.stepper._steppers, self.stepper._asleep, self.stepper._without_cache = (
            {"actor": self.stepper},
            set(),
            set(),
        )
        self.stepper._requests, self.stepper._finished = {}, []


@pytest.fixture
def engine(device, monkeypatch):
    with pretend_device.memory():
        yield Engine(device, monkeypatch)


@pytest.mark.parametrize("level", [SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS])
def test_weights_wake_before_the_cache(engine, level):
    """Buffers and, at the level that keeps them, weights have their values; a cache has none."""
    model, stepper, cache = engine.model, engine.stepper, engine.cache
    stepper.sleep(level)
    assert engine.memory.num_bytes == 0
    for tensor in (model.weight, model.scale, cache):
        with pytest.raises(RuntimeError, match="is free"):
            tensor.sum()
    engine.memory.limit = WEIGHTS + 4  # the cache must not be there yet
    stepper.wake_weights()
    assert engine.allocator.bytes_of("weights") == WEIGHTS + 4
    assert model.scale.item() == 2.0
    if level is SleepLevel.KEEP_WEIGHTS:
        assert (model.weight.cpu() == 1).all()
    else:
        assert model.weight.cpu().isnan().all(), "nothing has been loaded"
        with pytest.raises(BackendError, match="no weights"):
            stepper.step()
    with pytest.raises(RuntimeError, match="is free"):
        cache.cpu()
    engine.memory.limit += CACHE
    stepper.wake_cache()
    assert engine.allocator.bytes_of("kv_cache") == CACHE


def test_a_cache_that_wakes_while_weights_are_loaded_exceeds_the_limit(engine, device):
    stepper = engine.stepper
    stepper.sleep(SleepLevel.DROP_WEIGHTS)
    engine.memory.limit = 2 * WEIGHTS + 4  # with what is received
    received = torch.ones(64, 64, device=device)
    stepper.wake_cache()
    with pytest.raises(torch.OutOfMemoryError):
        stepper.wake_weights()
    del received


def test_a_trainer_finds_the_memory_of_a_sleeping_engine(engine, device):
    engine.memory.limit = WEIGHTS + 4 + CACHE
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(CACHE // 4, device=device)
    engine.stepper.sleep(SleepLevel.DROP_WEIGHTS)
    torch.empty((WEIGHTS + CACHE) // 4, device=device)
