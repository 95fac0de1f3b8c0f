"""What `hflow doctor --gpus N` checks before it starts anything, and the runs that it tries."""

import pytest

from hflow.doctor.gpus import check_gpus, check_listed_gpus, check_shared_memory, parse_gpus
from hflow.doctor.trial_runs import TRIAL_RUNS, command, try_runs
from hflow.launch.compile import compile_recipe
from hflow.planner.hardware import GIB
from hflow.shipped import find_recipe

H100 = "NVIDIA H100 80GB HBM3, 570.86.15, 81559, 4"


def failures(table: str, wanted: int) -> list[str]:
    return [f"{f.detail}; {f.fix}" for f in check_listed_gpus(parse_gpus(table), wanted) if not f.ok]


@pytest.mark.parametrize(
    ("table", "wanted", "line"),
    [
        ("", 8, "0 of 8 GPUs; install NVIDIA's driver"),
        (f"{H100}\n" * 4, 8, "4 of 8 GPUs; hflow doctor --gpus 4"),
        (f"{H100}\n{H100}\nNVIDIA L4, 570.86.15, 23034, 1", 3, "22.5 GiB: 2; set CUDA_VISIBLE_DEVICES"),
        (H100.replace(", 4", ", 40000"), 1, "39.1 of 79.6 GiB in use; end the processes"),
    ],
)
def test_gpus_that_a_run_cannot_use_are_named(table, wanted, line):
    (found,) = failures(table, wanted)
    assert line in found


def test_equal_free_gpus_are_accepted():
    assert not failures(f"{H100}\n" * 8, 8)
    assert not failures(f"{H100}\nNVIDIA L4, 570.86.15, 23034, 1", 1)  # the second is not used


def test_small_shared_memory_names_the_option():
    assert "--shm-size" in check_shared_memory(64 << 20).fix
    assert check_shared_memory(16 * GIB).ok


def test_a_machine_without_gpus_gets_a_line_for_each_check():
    found = {finding.name: finding for finding in check_gpus([], 8)}
    assert found.keys() >= {"torch", "count", "/dev/shm", "memory"}
    assert not found["count"].ok
    assert all(finding.fix for finding in found.values() if not finding.ok)


def test_a_run_that_cannot_be_tried_says_why(monkeypatch):
    monkeypatch.setattr("hflow.doctor.trial_runs._try", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr("hflow.doctor.trial_runs.TRIAL_RUNS", [run for run in TRIAL_RUNS if not run.on_cpu])
    (ipc,) = try_runs(0, None)
    assert (ipc.ok, ipc.required) == (False, False)
    assert "not checked, it needs a GPU" in ipc.detail


@pytest.mark.long
@pytest.mark.parametrize("num_gpus", [0, 2, 8])
@pytest.mark.parametrize("run", [run for run in TRIAL_RUNS if run.on_cpu], ids=lambda run: run.name)
def test_the_settings_of_every_run_make_a_plan(run, num_gpus, tmp_path):
    arguments = command(run, num_gpus, 79.6, str(tmp_path))
    overrides = arguments[arguments.index("--plain") + 1 :]
    plan = compile_recipe(find_recipe("grpo"), overrides).plan
    assert not plan.unrunnable
    assert plan.cluster.num_devices == (run.num_devices or num_gpus or 2)
