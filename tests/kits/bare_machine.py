"""A folder with the packages of a bare GPU machine, for Python without its own (`python -S`).

python -S bare_machine.py FOLDER    collect the tests marked gpu, and run a recipe in FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIVEN = ("torch", "transformers")
"""What the machine has, with what they depend on."""


def pinned(file: str) -> dict[str, str]:
    """Name -> version, of the requirements of a file in `requirements/`."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    return {_normal(name): version for name, version in pairs}


def link_packages(folder: Path) -> None:
    """Link what this environment has of the machine's packages into a folder."""
    for name in {*pinned("gpu.txt"), *_closure(GIVEN)}:
        one = metadata.distribution(name)
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(Path(str(one.locate_file(top))).resolve())


def _closure(names: tuple[str, ...]) -> set[str]:
    """Return distributions and what they depend on without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _normal(waiting.pop())
        if name not in found:
            found.add(name)
            waiting += _needs(name)
    return found


def _needs(name: str) -> Iterator[str]:
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(folder: str) -> None:
    """Do in this process what `make bare` does in several, as far as it takes seconds."""
    from importlib.util import find_spec

    import pytest

    from hflow.cli import main as run_command

    assert find_spec("ray") is None
    assert find_spec("pyarrow") is None
    chosen = ["-m", "gpu", "--collect-only", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    assert pytest.main([*chosen, "--rootdir", str(ROOT), str(ROOT / "tests")]) == 0
    for workers in ("ray", "inproc"):
        size = ["steps=1", "batch=2", "nodes.eval_gen.after=1000", "cluster=cpu-1x1", f"out={folder}/runs"]
        sys.argv = ["hflow", "run", str(ROOT / "recipes/grpo.py"), "--plain", f"workers={workers}", *size]
        try:
            run_command()
        except SystemExit as end:
            print(f"workers={workers}: exit code {end.code or 0}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
