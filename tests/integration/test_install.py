"""hflow installed from a wheel, outside its repository: every command of docs/start.md works."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment with the wheel, which finds the dependencies in that of the tests."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    directory = tmp_path / "environment"
    venv.create(directory, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", f"--python={directory / 'bin' / 'python'}", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", "--ignore-installed", wheel], check=True)
    return directory


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_of_the_first_page_work_in_an_empty_directory(environment: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "start.md").read_text())
    commands = [block for block in blocks if "pip install" not in block]
    assert len(commands) == len(blocks) - 1 >= 5
    empty = tmp_path / "empty"
    empty.mkdir()
    python = f"{environment}/bin/python"
    # `pytest` of the new environment: its command is installed in the other one only.
    pytest_command = f'pytest() {{ {python} -m pytest "$@"; }}\n'
    print_path = f"{python} -c 'import hflow; print(hflow.__file__)'\n"
    script = "".join(["set -e\n", pytest_command, print_path, *commands])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=empty,
        env={"PATH": f"{environment}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith(str(environment))
    assert "grpo: done after 3 steps" in done.stdout
    assert "3 passed" in done.stdout
    assert (empty / "mine" / "runs" / "grpo" / "latest").is_dir()
