"""`find_run`: the directory of a run that a user names."""

from __future__ import annotations

from pathlib import Path

from hflow.config import RunConfig
from hflow.errors import ConfigError, nearest
from hflow.runtime.execution.run_directory import RunDirectory

WHAT = {"ledger.sqlite": "a ledger", "plan.json": "a plan"}
"""Files of a run -> what messages call them."""


def find_run(run: str, file: str) -> RunDirectory:
    """Return the directory of a run.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.
        file: the file of `WHAT` that the run must have.

    Raises:
        ConfigError: if there is no such run, or it has no such file.
    """
    out = Path(RunConfig.out)
    for path in (Path(run), Path(run) / "latest", out / run, out / run / "latest"):
        if (path / file).is_file():
            return RunDirectory(path)
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    raise ConfigError(
        f"there is no run {run!r} with {WHAT[file]}; give a run's directory, such as {out}/NAME/latest, or "
        f"NAME for the latest run in {out}/NAME{nearest(run, names)}"
    )
