"""An engine and a trainer share a pretend accelerator, within the memory that the plan predicts."""

import dataclasses
from functools import partial
from pathlib import Path

import pretend_device
import pytest
import torch
from phase_memory import phase_memory

from hflow.base.errors import HflowError
from hflow.engines.embedded.cache import KVCache
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.module import FreedParameters
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.planning.request import plan_request
from hflow.launch.running.resume import find_resumed
from hflow.launch.running.run_recipe import RunEnvironment, _run, run_compiled
from hflow.planner.forecast.memory.phases import engine_caches, memory_phases
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.serialise import plan_digest
from hflow.weights.checksum import MAX_ENTRIES

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_async.py"
OVERRIDES = (
    *("cluster=cpu-1x1", "placement=null", "workers=inproc", "schedule.max_staleness=0"),
    *("batch=4", "save_every=1", "data.train.limit=16", "data.heldout.limit=4", "nodes.eval_gen.every=1"),
    *("nodes.actor_gen.max_tokens=4", "schedule.max_concurrent=32"),
    *("models.actor.path=null", "models.actor.dtype=bf16", "models.actor.gen.max_running=32"),
    *("models.actor.architecture.hidden_size=128", "models.actor.architecture.vocab_size=8192"),
)
CACHE_BYTES = 2 << 20
"""Bytes of a cache that wakes too early."""
ALLOWANCE = 3 * 8 * MAX_ENTRIES + (64 << 10)
"""Bytes beyond the plan: three int64 of each entry that a checksum counts, and positions, masks and norms."""


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend_device.installed() as name:
        yield name


def compiled_for(device, out, *overrides):
    """Return a compiled recipe, and the bytes of each phase in its plan without those of the runtime."""
    return on_device(device, compile_recipe(RECIPE, [*OVERRIDES, f"out={out}", *overrides]))


def on_device(device, compiled):
    """Return the same for a recipe that is compiled for a CPU."""
    cluster = dataclasses.replace(compiled.plan.cluster, device=device)
    plan = dataclasses.replace(compiled.plan, cluster=cluster)
    request = plan_request(compiled.config, compiled.graph, RECIPE)
    caches = {name: cache for name, (cache, _) in engine_caches(plan, request).items()}
    engines = [dataclasses.replace(engine, cache_bytes=caches[engine.replica]) for engine in plan.engines]
    plan = dataclasses.replace(plan, engines=tuple(engines))
    plan = dataclasses.replace(plan, digest=plan_digest(plan))
    predicted = {
        phase.phase: sum(
            item.num_bytes
            for item in (*phase.resident, *phase.transient)
            if item.category is not MemoryCategory.RUNTIME
        )
        for phase in memory_phases(plan, request)
    }
    return dataclasses.replace(compiled, plan=plan), predicted


def run_within(predicted, start):
    """Start a run whose phases have the memory that was predicted for them; return the peaks."""
    limits = {phase: num_bytes + ALLOWANCE for phase, num_bytes in predicted.items()}
    with phase_memory(limits) as account:
        assert start(RunEnvironment(is_quiet=True)).reason == "done"
    return account.peaks


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_each_phase_of_a_run_fits(device, offload, tmp_path):
    """Generation, evaluation, log-probs, training, checkpoints and new weights, as close as planned."""
    compiled, predicted = compiled_for(device, tmp_path, f"models.actor.offload={offload}", "steps=2")
    peaks = run_within(predicted, partial(run_compiled, compiled, False))
    assert peaks.keys() == predicted.keys()
    for phase in ("actor_inf", "actor_train"):
        assert peaks[phase] > 0.95 * predicted[phase], phase
    assert (
        peaks["generate"] > 0.7 * predicted["generate"]
    )  # prompts are not as long as a full cache makes them


def test_each_phase_of_a_resumed_run_fits(device, tmp_path):
    """Its weights and optimizer are loaded within what the fullest phase takes."""
    compiled, predicted = compiled_for(device, tmp_path, "models.actor.offload=all", "steps=2")
    run_within(predicted, partial(run_compiled, compiled, False))
    (run,) = tmp_path.glob("*/latest")
    found = find_resumed(str(run), ["steps=4"])
    assert found.point is not None
    longer, predicted = on_device(device, found.compiled)
    resumed = dataclasses.replace(found, compiled=longer)
    peaks = run_within(predicted, partial(_run, longer, False, resumed=resumed))
    assert peaks.keys() == predicted.keys()
    assert peaks["actor_train"] > 0.95 * predicted["actor_train"]


def keep_cache(monkeypatch):
    kept = []
    drop = KVCache.drop

    def drop_but_keep(cache):
        kept.append(cache._layers)
        drop(cache)

    monkeypatch.setattr(KVCache, "drop", drop_but_keep)


def keep_weights(monkeypatch):
    monkeypatch.setattr(FreedParameters, "__init__", lambda *_: None)
    monkeypatch.setattr(FreedParameters, "restore", lambda _: None)


def allocate_cache_with_weights(monkeypatch):
    def wake_both(engine, wake=EmbeddedEngine.wake_weights):
        wake(engine)
        engine.early = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=engine._device)

    monkeypatch.setattr(EmbeddedEngine, "wake_weights", wake_both)


@pytest.mark.parametrize("leak", [keep_cache, keep_weights, allocate_cache_with_weights])
def test_memory_that_does_not_sleep_exceeds_the_limit(device, leak, monkeypatch, tmp_path):
    compiled, predicted = compiled_for(device, tmp_path, "steps=2")
    leak(monkeypatch)
    with pytest.raises((HflowError, torch.OutOfMemoryError), match="are allocated, which leaves no"):
        run_within(predicted, partial(run_compiled, compiled, False))
