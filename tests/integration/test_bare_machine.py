"""What runs on a GPU machine that has torch, transformers and the wheels of `make gpu-wheels`, but no net."""

import os
import subprocess
import sys
from pathlib import Path

import bare_machine
import pytest
from bare_machine import ROOT, pinned
from command_line import CommandLine

from hflow.doctor import check_machine


def test_the_wheels_are_of_the_locked_versions():
    locked = pinned("lock.txt")
    assert {name: locked.get(name) for name in pinned("gpu.txt")} == pinned("gpu.txt")


def test_without_ray_it_is_a_line_and_an_optional_part(monkeypatch, hflow: CommandLine):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = hflow.refused("run", "recipes/grpo.py")
    assert "workers=ray needs the package ray, which is not installed. Run pip install ray, or" in refused
    found = next(finding for finding in check_machine() if finding.topic == "ray")
    assert (found.ok, found.required) == (False, False)


@pytest.mark.timeout(900)
def test_gpu_tests_are_collected_and_a_run_needs_no_other_package(tmp_path: Path):
    """Beside the packages of the machine, this Python has none, and hflow is not installed."""
    packages = tmp_path / "packages"
    packages.mkdir()
    bare_machine.link_packages(packages)
    paths = {"PYTHONPATH": f"{ROOT}:{packages}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-S", bare_machine.__file__, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **paths}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_torch_model_gpu.py::test_a_step_equals_the_cpu" in done.stdout
    assert "workers=ray needs the package ray, which is not installed. Run pip install ray" in done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("workers=")] == [
        "workers=ray: exit code 2",
        "workers=inproc: exit code 0",
    ]
