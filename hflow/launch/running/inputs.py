"""The files that a run reads, and which of them a resume finds changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hflow.base.errors import ConfigError
from hflow.base.files import resolved
from hflow.base.recipe_files import imported_files
from hflow.config import ModelConfig, RunConfig
from hflow.graph.model import Model
from hflow.graph.queries import saved_models
from hflow.launch.checkpoints.fingerprints import (
    FORMAT,
    WEIGHT_SUFFIXES,
    RunInput,
    RunInputs,
    describe_change,
    fingerprint,
)
from hflow.launch.checkpoints.merged import weight_directories
from hflow.launch.planning.compile import Compiled
from hflow.launch.planning.models import source_model

TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""How the names of a checkpoint's files end that have its tokenizer and its configuration."""
RECIPE = "recipe"
"""Key of the input with the recipe's file and the modules beside it."""


@dataclass(frozen=True)
class InputChange:
    """An input that is not what it was when the run began."""

    key: str
    change: str
    """What changed, such as `rows.jsonl has other content`."""
    fix: str
    """What to do; empty for one that may change, of which the run warns."""

    @property
    def is_refused(self) -> bool:
        """Whether the run cannot continue with it."""
        return bool(self.fix)


def run_inputs(
    compiled: Compiled, row_files: Mapping[str, Sequence[Path]], known: RunInputs | None = None
) -> RunInputs:
    """Return the fingerprints of the files that a run reads, of the same blocks as `known` for comparison."""
    paths = {f"data.{name}": list(files) for name, files in row_files.items()}
    paths |= {f"models.{spec.name}": list(_model_files(compiled, spec)) for spec in compiled.graph.models}
    paths[RECIPE] = imported_files(resolved(compiled.recipe).parent)
    if compiled.recipe.is_file():
        paths[RECIPE].insert(0, compiled.recipe)
    inputs = {}
    for key, files in paths.items():
        before = None if known is None else known.inputs.get(key)
        inputs[key] = fingerprint(files, None if before is None else before.num_blocks)
    return RunInputs(FORMAT, inputs)


def changed_inputs(
    before: RunInputs, after: RunInputs, earlier: RunConfig, compiled: Compiled
) -> Iterator[InputChange]:
    """Yield the inputs whose files have changed since the run last ran, with the configuration `earlier`."""
    trained = {stream.dataset for stream in compiled.graph.streams if stream.trained}
    for key, old in before.inputs.items():
        section, _, name = key.partition(".")
        new = after.inputs.get(key)
        if new is None:  # the model or dataset is not in the recipe any more
            continue
        if key == RECIPE:
            old, new = _common(old, new), _common(new, old)
        change = describe_change(old, new)
        if change is None:
            continue
        fix = ""
        if section == "models" and not _is_chosen(compiled.graph.model(name), earlier, compiled):
            fix = _model_fix(name, old, compiled)
        if section == "data" and name in trained:
            fix = (
                "Put the files back as they were, or begin another run with models.NAME.path=CHECKPOINT/NAME "
                "models.NAME.resume=true"
            )
        yield InputChange(key, change, fix)


def _model_files(compiled: Compiled, spec: Model) -> Iterator[Path]:
    """Yield the files that say what a model computes with, wherever it continues.

    Trained weights come from the run's checkpoint, unless adapters are trained beside them.
    """
    models = compiled.config.models
    own, source = (models.get(m.name, ModelConfig()) for m in (spec, source_model(compiled.config, spec)))
    is_saved = spec.name in saved_models(compiled.graph) and own.lora is None
    for place in [] if source.path is None else weight_directories(source.path):
        for path in sorted(place.iterdir()):
            is_weight = str(path).endswith(WEIGHT_SUFFIXES)
            is_read = not is_saved if is_weight else path.name.endswith(TEXT_SUFFIXES)
            if is_read and path.is_file():
                yield path


def _common(side: RunInput, other: RunInput) -> RunInput:
    """Return the files that both have: a module may be imported late, or not."""
    names = other.by_name()
    return replace(side, files=tuple(file for name, file in side.by_name().items() if name in names))


def _is_chosen(spec: Model, earlier: RunConfig, compiled: Compiled) -> bool:
    """Return whether a model is frozen, and an override names another path for it than before."""
    before, now = (
        config.models.get(source_model(config, spec).name, ModelConfig()).path
        for config in (earlier, compiled.config)
    )
    return before != now and spec.name not in saved_models(compiled.graph)


def _model_fix(name: str, before: RunInput, compiled: Compiled) -> str:
    if not before.files:
        return "Remove the new files"
    directory = Path(before.files[0].path).parent
    if not _still_exists(before):
        return f"Put the files of {directory} back as they were, or begin another run"
    if name in saved_models(compiled.graph):
        return f"Let the configured path lead to {directory} again"
    return f"To continue with the model that the run began with, set models.{name}.path={directory}"


def _still_exists(before: RunInput) -> bool:
    """Return whether the files are where they were, with the same content."""
    try:
        return fingerprint((Path(file.path) for file in before.files), before.num_blocks) == before
    except ConfigError:
        return False
