"""`find_saved_models`: the models of the checkpoint that a user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hflow.base.errors import ConfigError, nearest
from hflow.base.files import resolved
from hflow.config import RunConfig
from hflow.launch.checkpoints.merged import is_saved_model
from hflow.launch.results.runs import run_candidates
from hflow.runtime.saving.run_directory import RunDirectory


@dataclass(frozen=True)
class SavedModels:
    """Models that were saved together, or one directory with config and weights."""

    models: Mapping[str, Path]
    """Name -> directory, as Hugging Face writes it, or of an adapter (`model_directory` merges it)."""
    checkpoint: Path | None
    """The directory `step-N` of a run that they are in."""

    @property
    def run(self) -> RunDirectory | None:
        """The run that saved them."""
        return None if self.checkpoint is None else RunDirectory(self.checkpoint.parent.parent)

    @property
    def steps(self) -> int | None:
        """Completed steps of that run."""
        return None if self.checkpoint is None else int(self.checkpoint.name.removeprefix("step-"))


def find_saved_models(target: str) -> SavedModels:
    """Return the models that a user names.

    Args:
        target: a directory with config.json, a checkpoint of a run, a run's directory, or NAME for the latest
            run in `runs/NAME`, of which the latest checkpoint is taken.

    Raises:
        ConfigError: if there is no checkpoint.
    """
    path = Path(target)
    if is_saved_model(path):
        directory = resolved(path)
        return SavedModels({directory.name: directory}, _checkpoint(directory.parent))
    runs = run_candidates(target)
    for directory in (path, *(run.checkpoints / "latest" for run in runs)):
        saved = sorted(resolved(model) for model in directory.glob("*") if is_saved_model(model))
        if saved:
            return SavedModels({model.name: model for model in saved}, _checkpoint(resolved(directory)))
    if any(run.config.is_file() for run in runs):
        raise ConfigError(
            f"the run {target!r} has saved no checkpoint; let it finish, or run it with save_every=N"
        )
    out = Path(RunConfig.out)
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    raise ConfigError(
        f"there is no checkpoint or run {target!r}; give a directory with config.json, a run's directory "
        f"such as {out}/NAME/latest, or NAME for the latest run in {out}/NAME{nearest(target, names)}"
    )


def _checkpoint(directory: Path) -> Path | None:
    """Return a directory if it is a checkpoint in a run's directory."""
    is_in_run = directory.parent.name == "checkpoints" and (directory.parent.parent / "plan.json").is_file()
    has_name = directory.name.removeprefix("step-").isdigit()
    return directory if is_in_run and has_name else None
