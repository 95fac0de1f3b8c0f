"""Workers bound to processor cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked_python
import pytest

from hflow.base.errors import ConfigError, HflowError
from hflow.launch.planning.compile import plan
from hflow.planner.plan.cluster import ClusterSpec
from hflow.processes import cores as process_cores
from hflow.processes.cores import allowed_cores, socket_cores
from hflow.report.text.plan.header import cluster_line
from hflow.workers.worker import _cores

RECIPE = "recipes/grpo.py"
ARGS = ["models.actor.path=null", "cluster=cpu-2x2"]


def test_devices_of_a_machine_share_its_cores() -> None:
    cluster = ClusterSpec("cpu-2x2", "cpu", 2, 2, 1 << 30, cores=(3, 1))
    assert [list(cluster.cores_of(device)) for device in range(4)] == [[0, 1, 2], [3], [0, 1, 2], [3]]
    assert list(ClusterSpec("cpu-1x2", "cpu", 1, 2, 1 << 30).cores_of(1)) == []


@pytest.mark.parametrize(("cores", "said"), [("[3,1]", "0-2 | 3"), ("[2]", "0-1 | 2-3")])
def test_the_plan_names_the_cores(cores: str, said: str) -> None:
    made = plan(RECIPE, [*ARGS, f"cores={cores}"])
    assert f", bound to cores {said};" in cluster_line(made)
    assert made.digest != plan(RECIPE, ARGS).digest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ["cores=[1,2,3]"],
            r"cores is \[1, 2, 3\]; give the number of cores of each of a machine's 2",
        ),
        (["cores=[0]"], r"cores is \[0\]; give"),
        (["cores=[1]", "workers=inproc"], r"each of 2 devices cores .* set cluster=cpu-1x1, or workers=ray"),
    ],
)
def test_cores_that_cannot_be_bound_are_refused(change: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        plan(RECIPE, [*ARGS, *change])
    assert isinstance(refused.value, HflowError)


CHILD = """
import os, threading, torch
from hflow.processes.cores import bind_cores
begun, bound, seen = threading.Event(), threading.Event(), []
def look():
    begun.set()
    bound.wait()
    seen.append(os.sched_getaffinity(0))
early = threading.Thread(target=look, daemon=True)
before = torch.get_num_threads()
early.start()
begun.wait()
undo = bind_cores(range({first}, {last}))
bound.set()
late = threading.Thread(target=look)
late.start()
early.join()
late.join()
print([sorted(cores) for cores in seen], torch.get_num_threads())
undo()
print(sorted(os.sched_getaffinity(0)), torch.get_num_threads() == before)
"""


def child(first: int, last: int) -> subprocess.CompletedProcess[str]:
    code = CHILD.format(first=first, last=last)
    return forked_python.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_process_keeps_to_its_cores() -> None:
    lent = sorted(os.sched_getaffinity(0))
    assert child(0, 1).stdout == f"[[{lent[0]}], [{lent[0]}]] 1\n{lent} True\n"
    assert child(0, 0).stdout.startswith(f"[{lent}, {lent}]")


RANK = """
import os, torch
from vllm.v1.worker.gpu_worker import Worker
from hflow.engines.vllm.rank import _beside_its_gpu
from hflow.processes import cores
lent = sorted(os.sched_getaffinity(0))
torch.cuda.get_device_properties = lambda device: f"GPU {device}"
cores.socket_cores = lambda properties: {"GPU 0": (lent[0],), "GPU 1": (lent[-1],)}[properties]
rank = object.__new__(Worker)
rank.local_rank = 1
_beside_its_gpu(lambda self: print(os.sched_getaffinity(0) == {lent[-1]}, self is rank))(rank)
"""


def test_a_rank_of_an_engine_keeps_to_the_cores_beside_its_gpu() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def test_ranks_of_engines_may_use_the_cores_of_other_sockets_than_their_worker() -> None:
    assert _cores(ClusterSpec("h100-1x8", "cuda", 1, 8, 80 << 30), 5, 4) == allowed_cores()


def test_more_cores_than_there_are() -> None:
    lent = len(os.sched_getaffinity(0))
    said = f"to cores {lent} to {lent}, but this process may use only {lent} cores"
    assert said in child(lent, lent + 1).stderr


def test_the_cores_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up machine with two sockets, of whose cores a container has some."""
    for bus, cores in (("0000:17:00.0", "0-3,8-11"), ("0001:ca:00.0", "4-7,12"), ("0000:00:01.0", "")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(process_cores, "_ALLOWED_CORES", [1, 2, 5, 6, 9, 12])

    def of(domain: int, bus: int, device: int = 0) -> tuple[int, ...]:
        place = {"pci_domain_id": domain, "pci_bus_id": bus, "pci_device_id": device}
        return socket_cores(SimpleNamespace(**place), tmp_path)

    assert of(0, 0x17) == (1, 2, 9)
    assert of(1, 0xCA) == (5, 6, 12)
    assert of(0, 0, 1) == of(0, 0x18) == ()
    assert socket_cores(SimpleNamespace(name="without a place"), tmp_path) == ()
