"""Environment variables of worker processes and engines, and the options of their actors."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace

import plan_graphs as graphs
import pytest
from model_configs import model_config
from torch._C._distributed_c10d import TCPStore

from hflow.config.schema import LoraConfig
from hflow.engines.interface import EngineSetup
from hflow.engines.process.engine import reads_checkpoint
from hflow.engines.vllm.launch_options import environment
from hflow.models.settings import ModelSettings
from hflow.planner.compile import compile_plan
from hflow.workers.process_groups import ProcessGroups
from hflow.workers.process_setup import device_environment
from hflow.workers.ray.ray_actors import Reservation
from hflow.workers.worker import has_ranks_beside_trainers, lends_memory

ALLOCATING = """
import resource
import numpy as np
from hflow.workers.process_setup import keep_freed_memory
def page_faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        arrays = [np.ones(1 << 20), np.ones(1 << 20)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
page_faults()
before = page_faults()
keep_freed_memory()
page_faults()
print(before, page_faults())
"""
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def environments(cluster: str, layout: str, **asked: str) -> list[dict[str, str]]:
    """Of the workers of a plan with this actor, and a reference model on the same devices."""
    models = {"actor": model_config(layout=layout, **asked), "ref": model_config(layout="d1")}
    plan = compile_plan(graphs.grpo(), graphs.request(cluster, models=models))
    return [device_environment(plan, worker) for worker in range(plan.cluster.num_devices)]


def test_tensor_ranks_of_megatron_have_one_queue() -> None:
    assert environments("h100-1x4", "t2", backend="megatron") == [ONE_QUEUE, ONE_QUEUE, {}, {}]


@pytest.mark.parametrize(
    ("cluster", "layout", "backend"),
    [
        ("cpu-1x4", "d2t2", "megatron"),
        ("h100-1x4", "d2p2", "megatron"),
        ("h100-1x4", "d4", "torch"),
    ],
)
def test_other_workers_have_the_default_number_of_queues(cluster: str, layout: str, backend: str) -> None:
    assert environments(cluster, layout, backend=backend) == [{}] * 4


@pytest.mark.parametrize(
    ("cluster", "engine", "placement", "lending"),
    [
        ("h100-1x2", "vllm", None, [True, True]),
        ("h100-1x2", "vllm", "actor=0 actor.gen=1", [False, True]),
        ("h100-1x2", "embedded", None, [False, False]),
        ("cpu-1x2", "vllm", None, [False, False]),
    ],
)
def test_workers_lend_memory_to_engines_in_other_processes(
    cluster: str, engine: str, placement: str | None, lending: list[bool]
) -> None:
    models = {"actor": model_config(engine=engine)}
    plan = compile_plan(graphs.grpo(), graphs.request(cluster, models=models, placement=placement))
    assert [lends_memory(plan, [worker]) for worker in range(2)] == lending


@pytest.mark.parametrize(
    ("engine", "gen_layout", "placement", "waits"),
    [
        ("vllm", "t2", None, True),
        ("vllm", "d2", None, False),
        ("embedded", "d2", None, False),
        ("vllm", "t2", "actor=0-1 actor.gen=2-3:t2", False),
    ],
)
def test_workers_wait_for_each_other_before_an_engine_starts_on_all_of_them(
    engine: str, gen_layout: str, placement: str | None, waits: bool
) -> None:
    models = {"actor": model_config(engine=engine, gen_layout=None if placement else gen_layout)}
    cluster = "h100-1x4" if placement else "h100-1x2"
    plan = compile_plan(graphs.grpo(), graphs.request(cluster, models=models, placement=placement))
    assert has_ranks_beside_trainers(plan) == waits


def test_members_wait_until_all_have_come() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    came: list[int] = []

    def member(number: int) -> None:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(milliseconds=50))
        groups = SimpleNamespace(_store=client, _num_members=3)
        ProcessGroups.wait_for_all(groups)  # type: ignore[arg-type]
        came.append(number)

    members = [Thread(target=member, args=(number,)) for number in range(3)]
    for first in members[:2]:
        first.start()
    members[0].join(0.3)
    assert came == []
    members[2].start()
    for each in members:
        each.join(30)
    assert sorted(came) == [0, 1, 2]


def test_the_environment_is_in_the_actors_options() -> None:
    bundles = SimpleNamespace(id=None)
    reservation = Reservation(bundles, num_cpus=1, num_gpus=1, owns_ray=False)  # type: ignore[arg-type]
    assert reservation.options(0, ONE_QUEUE)["runtime_env"] == {"env_vars": ONE_QUEUE}
    assert "runtime_env" not in reservation.options(0, {})


def test_freed_memory_is_used_again_without_page_faults() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    child = subprocess.run([sys.executable, "-c", ALLOCATING], env=env, stdout=subprocess.PIPE, check=True)
    before, after = map(int, child.stdout.split())
    assert before > 1000
    assert after < 100


def test_vllm_has_the_default_number_of_queues_beside_megatron() -> None:
    setup = EngineSetup(ModelSettings(name="actor", device="cuda"), devices=("2", "3"))
    on_gpus = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert on_gpus.items() <= environment(setup).items()
    assert not on_gpus.keys() & environment(EngineSetup(ModelSettings(name="actor"))).keys()


def test_vllm_draws_all_tokens_at_once_with_its_second_runner_on_gpus() -> None:
    for device, runner in (("cuda", "1"), ("cpu", "0")):
        setup = EngineSetup(ModelSettings(name="actor", device=device))
        assert environment(setup)["VLLM_USE_V2_MODEL_RUNNER"] == runner


@pytest.mark.parametrize(
    ("path", "receives", "lora", "reads"),
    [
        ("model", False, None, True),
        ("model", True, None, False),
        ("model", True, LoraConfig(), True),
        (None, True, None, False),
    ],
)
def test_vllm_reads_only_the_weights_that_it_draws_with(
    path: str | None, receives: bool, lora: LoraConfig | None, reads: bool
) -> None:
    setup = EngineSetup(ModelSettings(name="actor", path=path, lora=lora), receives_weights=receives)
    assert reads_checkpoint(setup) == reads
