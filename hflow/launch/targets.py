"""`resolve`: what commands name, which is a run, a checkpoint of one, or a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hflow.base.errors import ConfigError, nearest
from hflow.base.files import resolved
from hflow.base.shipped import CHECKPOINT_PREFIX, SMOLLM2, find_checkpoint
from hflow.config import RunConfig
from hflow.launch.checkpoints.saved import is_language_model, is_saved_model
from hflow.models.hub import fetch_model, is_fetched
from hflow.runtime.saving.run_directory import RunDirectory


@dataclass(frozen=True)
class ResolvedTarget:
    """A run, a checkpoint of one, or a model, as a user names it."""

    name: str
    """What the user writes."""
    kind: Literal["run", "checkpoint", "model"] | None
    """None: there is no such thing."""
    run: RunDirectory | None = None
    """The run that is named, or that has the checkpoint or the model; None: none has it."""
    checkpoint: Path | None = None
    """The directory of the run's checkpoint: the one named, the one with the model, or the run's latest."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Name -> directory of each model in it, as Hugging Face writes it, or of an adapter (`model_directory`
    merges it)."""

    @property
    def steps(self) -> int | None:
        """Completed steps of the checkpoint."""
        number = "" if self.checkpoint is None else self.checkpoint.name.removeprefix("step-")
        return int(number) if number.isdigit() else None

    def require_run(self, *, or_checkpoint: bool = False) -> RunDirectory:
        """Return the run that is named, or that of a checkpoint that is, if `or_checkpoint`.

        Raises:
            ConfigError: if something else is named.
        """
        if self.run is not None:
            if self.kind == "run" or (or_checkpoint and self.kind == "checkpoint"):
                return self.run
            raise ConfigError(f"{self.name} is a {self.kind} of a run; name the run, {self.run.path}")
        if Path(self.name).is_dir():
            raise ConfigError(
                f"{self.name} has no plan.json, so it is not a run's directory; begin a run with "
                "hflow run RECIPE"
            )
        raise ConfigError(f"there is no run {self.name!r}; give {self._alternatives}")

    def require_models(self) -> Mapping[str, Path]:
        """Return the models, of which there is at least one.

        Raises:
            ConfigError: if there is none.
        """
        if self.kind == "run" and not self.models:
            raise ConfigError(
                f"the run {self.name!r} has saved no checkpoint; let it finish, or run it with save_every=N"
            )
        if not self.models:
            raise ConfigError(
                f"there is no checkpoint or run {self.name!r}; give a directory with config.json, "
                f"{self._alternatives}"
            )
        return self.models

    def choose_model(self, model: str | None, *, generates: bool = False) -> Path:
        """Return the directory of one model; None: the only one.

        `generates` chooses a language model. A model that is named by its directory is taken for one.

        Raises:
            ConfigError: if there is no such model, or there are several.
        """
        models = self.require_models()
        suitable = models
        if generates and self.kind != "model":
            suitable = {name: path for name, path in models.items() if is_language_model(path)}
        if model is None and len(suitable) != 1:
            names = ", ".join(suitable) or "no language model"
            raise ConfigError(f"{self.name!r} has {names}; choose one with --model NAME")
        name = model or next(iter(suitable))
        if name not in models:
            raise ConfigError(f"--model: {self.name!r} has no model {name!r}{nearest(name, models)}")
        if name not in suitable:
            raise ConfigError(f"--model: {name!r} has no language-model head, so it cannot generate")
        return suitable[name]

    def name_of(self, directory: Path) -> str:
        """Return the name of the model with this directory."""
        return next(name for name, path in self.models.items() if path == directory)

    @property
    def _alternatives(self) -> str:
        out = Path(RunConfig.out)
        names = [path.name for path in out.iterdir()] if out.is_dir() else []
        return (
            f"a run's directory, such as {out}/NAME/latest, or NAME for the latest run in {out}/NAME"
            f"{nearest(self.name, names)}"
        )


def resolve(target: str, *, fetches_models: bool = False) -> ResolvedTarget:
    """Resolve the name of a run, a checkpoint or a model.

    Args:
        target: a run's directory, NAME for the latest run in `runs/NAME`, the directory of a checkpoint, or
            that of a model: one with config.json, or an adapter; or the name of a shipped checkpoint.
        fetches_models: whether it may also be a model of the Hub, which is fetched then.

    Raises:
        ConfigError: if a run does not have the checkpoint, there is no such shipped one, none of the runs in
            `runs/NAME` is the latest, or a model cannot be fetched.
    """
    path = Path(target)
    if target.startswith(CHECKPOINT_PREFIX) and target != SMOLLM2:
        path = find_checkpoint(target, "the model")
    if is_saved_model(path):
        model = resolved(path)
        run = _run_of(model.parent)
        return ResolvedTarget(target, "model", run, model.parent if run else None, {model.name: model})
    checkpoint = resolved(path)
    run = _run_of(checkpoint)
    if run is not None and not path.is_dir():
        names = sorted(other.name for other in run.checkpoints.glob("step-*"))
        raise ConfigError(f"there is no checkpoint {path}; there are {', '.join(names) or 'none'}")
    models = _models_in(path)
    if run is not None or models:
        return ResolvedTarget(target, "checkpoint", run, checkpoint if run else None, models)
    out = Path(RunConfig.out)
    candidates = [path, path / "latest", out / target, out / target / "latest"]
    for run in map(RunDirectory, candidates):
        if run.plan.is_file():
            latest = run.checkpoints / "latest"
            models = _models_in(latest)
            return ResolvedTarget(target, "run", run, resolved(latest) if models else None, models)
    for candidate in candidates:
        if begun := sorted(candidate.glob("[!.]*/plan.json")):
            raise ConfigError(
                f"{candidate} has no latest run, as no workers were ready there; name a run, such as "
                f"{begun[-1].parent}"
            )
    if fetches_models and is_fetched(target):
        return ResolvedTarget(target, "model", models={target: fetch_model(target, "the model")})
    return ResolvedTarget(target, None)


def _run_of(checkpoint: Path) -> RunDirectory | None:
    run = RunDirectory(checkpoint.parent.parent)
    return run if checkpoint.parent == run.checkpoints and run.plan.is_file() else None


def _models_in(directory: Path) -> dict[str, Path]:
    saved = sorted(resolved(model) for model in directory.glob("*") if is_saved_model(model))
    return {model.name: model for model in saved}
