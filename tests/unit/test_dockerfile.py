"""The image for GPU machines, which is not built here: its files, its extras, and versions that fit."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
(EXTRAS,) = re.findall(r"RUN pip install '\.\[([\w,-]+)\]'", DOCKERFILE)


def test_it_copies_what_the_package_is_made_of_and_names_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for name in line.split()[:-1]}
    assert copied >= {
        "pyproject.toml",
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"],
    }
    assert all((ROOT / name).exists() for name in copied)
    assert set(EXTRAS.split(",")) <= set(project["project"]["optional-dependencies"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_its_packages_have_versions_that_fit_together() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, f"{ROOT}[{EXTRAS}]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
