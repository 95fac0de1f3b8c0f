"""`find_run`: the directory of a run that a user names."""

from __future__ import annotations

from pathlib import Path

from hflow.config import RunConfig
from hflow.errors import ConfigError, nearest
from hflow.runtime.execution.run_directory import RunDirectory

WHAT = {"ledger.sqlite": "a ledger", "plan.json": "a plan"}
"""Files of a run -> what messages call them."""


def run_candidates(run: str) -> tuple[RunDirectory, ...]:
    """Return the directories that a user may mean: the one named, or the latest run of a name."""
    out = Path(RunConfig.out)
    return tuple(map(RunDirectory, (Path(run), Path(run) / "latest", out / run, out / run / "latest")))


def find_run(run: str, file: str) -> RunDirectory:
    """Return the directory of a run.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.
        file: the file of `WHAT` that the run must have.

    Raises:
        ConfigError: if there is no such run, or it has no such file.
    """
    for candidate in run_candidates(run):
        if (candidate.path / file).is_file():
            return candidate
    for candidate in run_candidates(run):
        if begun := sorted(candidate.path.glob(f"[!.]*/{file}")):
            raise ConfigError(
                f"{candidate.path} has no latest run, as no workers were ready there; name a run, such as "
                f"{begun[-1].parent}"
            )
    if Path(run).is_dir():
        raise ConfigError(
            f"{run} has no {file}, so it is not a run's directory; begin a run with hflow run RECIPE"
        )
    out = Path(RunConfig.out)
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    raise ConfigError(
        f"there is no run {run!r} with {WHAT[file]}; give a run's directory, such as {out}/NAME/latest, or "
        f"NAME for the latest run in {out}/NAME{nearest(run, names)}"
    )
