"""vLLM's worker and hflow's stepper put tagged memory of the pretend accelerator to sleep."""

from types import SimpleNamespace

import cloudpickle
import memory_kit
import pretend_device
import pytest
import torch
import vllm.device_allocator
from sleep_allocator import SleepAllocator
from vllm.config import set_current_vllm_config
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.worker.gpu_worker import Worker

from hflow.base.errors import BackendError
from hflow.engines.interface import EngineSetup
from hflow.engines.process.engine import process_settings
from hflow.engines.vllm import memory as vllm_memory
from hflow.engines.vllm.engine import vllm_launch
from hflow.engines.vllm.hf_mapping import held_tensors
from hflow.engines.vllm.rank import HflowWeightTransfer
from hflow.engines.vllm.stepper import SeededWeights, VllmStepper, engine_config
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.weights.checksum import MAX_ENTRIES

WEIGHTS, CACHE = 4 * 64 * 64, 4 * 4096
"""Bytes of the model and of its cache."""


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend_device.installed() as name:
        yield name


def toy_model(device):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(64, 64, device=device))
    model.register_buffer("scale", torch.full((1,), 2.0, device=device))
    return model


class Engine:
    """An engine with a model and a cache, whose worker's methods are those of vLLM."""

    def __init__(self, device, monkeypatch, make_model=toy_model, cache_bytes=CACHE):
        self.memory = pretend_device._memory
        assert self.memory is not None
        self.allocator = SleepAllocator()
        monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: self.allocator)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30, 1 << 30))
        with self.allocator.use_memory_pool("weights"):
            self.model = make_model(device)
        with self.allocator.use_memory_pool("kv_cache"):
            self.cache = torch.ones(cache_bytes // 4, device=device)
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


# --------------------------------------------------------------------------- a model of vLLM
LARGE_CACHE = 16 << 20
CHECKING = 3 * 8 * MAX_ENTRIES
"""Three int64 of each entry that a checksum counts."""


@pytest.fixture
def config(monkeypatch, tmp_path):
    """Return vLLM's configuration of a model, as an engine's process makes it, in a group of one rank."""
    settings = ModelSettings(name="actor", architecture=memory_kit.ARCHITECTURE, seed=3)
    setup = EngineSetup(settings, {"max_running": 4, "max_model_len": 64, "cache_bytes": LARGE_CACHE})
    launch = vllm_launch(setup)
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    made = engine_config(process_settings(setup, launch, tmp_path))
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        initialize_model_parallel()
        yield made
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("level", [SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS])
def test_a_model_of_vllm_has_its_weights_when_it_wakes(config, device, monkeypatch, level):
    """Loading them again takes what the plan counts for it beside the weights, and no cache is awake."""

    def make_model(device):
        with torch.device(device):
            model = initialize_model(config)
        process_weights_after_loading(model, config.model_config, torch.device(device))
        return model

    with pretend_device.memory():
        engine = Engine(device, monkeypatch, make_model, LARGE_CACHE)
        transfer = HflowWeightTransfer(
            config.weight_transfer_config, config, torch.device(device), engine.model
        )

        def load(seed):
            settings = ModelSettings(name="actor", architecture=memory_kit.ARCHITECTURE, seed=seed)
            transfer.start_weight_update()
            transfer.update_weights({"incoming": cloudpickle.dumps(SeededWeights(settings).incoming())})
            if transfer.outcome.error is not None:
                raise transfer.outcome.error
            return transfer.outcome.loaded.checksums

        def weights():
            return {name: held.values.cpu() for name, held in held_tensors(engine.model).items()}

        digests = [load(seed) for seed in (3, 4)]
        assert digests[0] != digests[1]
        sent, num_bytes = weights(), engine.memory.num_bytes - LARGE_CACHE
        in_pool = engine.allocator.bytes_of("weights")
        assert num_bytes - in_pool < 64 << 10
        engine.stepper.sleep(level)
        assert engine.memory.num_bytes == num_bytes - in_pool
        rank = memory_kit.rank(memory_kit.shape_of(memory_kit.ARCHITECTURE), backend="vllm", on_cpu=False)
        loading = vllm_memory.layer_being_loaded(rank, 1).total()
        assert loading + CHECKING < LARGE_CACHE  # the limit excludes the cache
        engine.memory.limit = num_bytes + loading + CHECKING
        engine.stepper.wake_weights()
        if level is SleepLevel.DROP_WEIGHTS:
            assert any(not torch.equal(sent[name], found) for name, found in weights().items())
            assert load(4) == digests[1]
        assert all(torch.equal(sent[name], found) for name, found in weights().items())
        engine.memory.limit = num_bytes + LARGE_CACHE
        engine.stepper.wake_cache()
        assert engine.memory.num_bytes == num_bytes + LARGE_CACHE
