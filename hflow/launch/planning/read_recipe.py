"""Reads a recipe and its configuration: what there is before it is planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, nearest
from hflow.base.files import resolved
from hflow.base.recipe_files import use_directory
from hflow.base.shipped import find_recipe, session_recipe
from hflow.config import ConfigLoader, RunConfig, validate_names
from hflow.dsl import Recipe, apply_overrides, load_recipe, overridable_keys
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph, NodeSpec, RecipeSpec
from hflow.launch.planning.data_settings import check_data, with_pinned_rows
from hflow.launch.planning.models import (
    check_model_fit,
    differing_size,
    has_config,
    missing_text,
    with_bases,
)
from hflow.launch.planning.services import check_services
from hflow.launch.planning.this_machine import HERE, with_this_machine
from hflow.launch.running.shown_metrics import check_metric_names
from hflow.launch.running.trackers import check_trackers
from hflow.models.hub import pinned_path
from hflow.planner.plan.channels import transports
from hflow.planner.plan.optimizers import OPTIMIZERS, check_options, with_own_options
from hflow.planner.plan.traits import BACKENDS, ENGINES


@dataclass(frozen=True)
class ReadRecipe:
    """A recipe with its configuration and its checked graph, before it is planned."""

    path: Path
    """The recipe's Python file, or `session_recipe`."""
    overrides: tuple[str, ...]
    config: RunConfig
    set_keys: frozenset[str]
    """Keys of the configuration that the recipe's files and overrides set."""
    graph: Graph
    recipe: Recipe
    configs: ConfigLoader
    """Composes the recipe's configuration with other overrides."""
    is_decided: bool
    """Whether the configuration was given as a whole, so that nothing is left to choose."""
    warnings: tuple[str, ...] = ()
    """What overrides replace besides the keys that they name."""
    is_here: bool = False
    """Whether the cluster was configured as this machine."""


def check(recipe: str | Path | Recipe, overrides: Sequence[str] = ()) -> Graph:
    """Read a recipe and its configuration, and return its checked graph.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    return RecipeReader(recipe).read(overrides).graph


class RecipeReader:
    """Reads a recipe once, and its configuration with any overrides."""

    def __init__(self, recipe: str | Path | Recipe) -> None:
        """Import a recipe's Python file, or a shipped recipe by its name, unless it is an object.

        Raises:
            RecipeError: for an error in the recipe.
        """
        if isinstance(recipe, Recipe):
            self._path = recipe.file or session_recipe(recipe.name)
            self._recipe = recipe
            use_directory(resolved(self._path).parent)
        else:
            self._path = find_recipe(str(recipe))
            self._recipe = load_recipe(self._path)
        self._configs = ConfigLoader(self._path)

    def read(self, overrides: Sequence[str] = (), config: RunConfig | None = None) -> ReadRecipe:
        """Return the recipe with its configuration and graph.

        `config` is a whole configuration, used instead of the recipe's YAML file and overrides.

        Raises:
            RecipeError: for an error in the recipe.
            ConfigError: for an unknown key, or a value that does not fit.
        """
        if isinstance(overrides, str):
            raise ConfigError(f"overrides are a list of texts; write [{overrides!r}]")
        is_decided, set_keys, warnings = config is not None, frozenset[str](), tuple[str, ...]()
        if config is None:
            config, set_keys = self._configs.load(overrides)
        is_here = config.cluster == HERE
        if is_decided:
            config, unreached = with_pinned_models(config)
        else:
            config, unreached = with_resolved_names(config, self._path)
            config, warnings = with_overridden_models(config, overrides, unreached)
        warnings = (*warnings, *(f"{problem}. {_SIZES_KNOWN}" for problem in unreached.values()))
        spec = self._recipe.spec()
        check_names(config, spec)
        spec = with_bases(spec, config)
        graph = self._recipe.check_bodies(build_graph(apply_overrides(spec, config.nodes)))
        check_model_fit(config, graph)
        check_data(config, graph, self._recipe.row_functions, self._recipe.samplers)
        check_metric_names(config, graph)
        check_services(config, graph)
        check_trackers(config.report)
        return ReadRecipe(
            self._path,
            tuple(overrides),
            config,
            set_keys,
            graph,
            self._recipe,
            self._configs,
            is_decided,
            warnings,
            is_here,
        )


def read_recipe(
    recipe: str | Path, overrides: Sequence[str] = (), config: RunConfig | None = None
) -> tuple[RunConfig, Graph, Mapping[str, Callable[..., Any]]]:
    """Return a recipe's configuration, graph, and node bodies by name; arguments as of `RecipeReader.read`.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    read = RecipeReader(recipe).read(overrides, config)
    return read.config, read.graph, read.recipe.bodies(options_of(read.graph))


def read_nodes(recipe: str | Path) -> tuple[Recipe, dict[str, NodeSpec]]:
    """Return a recipe, and its nodes by name with the values of its configuration.

    Raises:
        RecipeError: for an error in the recipe.
        ConfigError: for an unknown key, or a value that does not fit.
    """
    read = RecipeReader(recipe).read()
    nodes = apply_overrides(read.recipe.spec(), read.config.nodes).nodes
    return read.recipe, {node.name: node for node in nodes}


def options_of(graph: Graph) -> dict[str, dict[str, Any]]:
    """Return node -> its options, as the configuration set them."""
    return {node.name: dict(node.spec.options) for node in graph.nodes}


def check_names(config: RunConfig, spec: RecipeSpec) -> None:
    """Check that a configuration names only what the recipe has, and backends that exist.

    Raises:
        ConfigError: for the first other name, with the nearest one.
    """
    validate_names(
        config,
        models=[model.name for model in spec.models],
        data=[dataset.name for dataset in spec.datasets],
        nodes={node.name: overridable_keys(node) for node in spec.nodes},
    )
    _check_backends(config)


def _check_backends(config: RunConfig) -> None:
    """Check that the names of backends, engines, optimizers and transports are registered, and their options.

    Raises:
        ConfigError: naming the key, the nearest name and all names.
    """
    for name, model in config.models.items():
        settings = (
            ("backend", model.backend, BACKENDS.__iter__),
            ("gen.engine", model.gen.engine, ENGINES.__iter__),
            ("optim.name", model.optim.name, OPTIMIZERS.__iter__),
            ("gen.transport", model.gen.transport, transports),
        )
        for key, value, names in settings:  # which are found one by one, hflow's own first
            if value is not None and value not in names():
                known = list(names())
                choices = " or ".join(filter(None, (", ".join(map(repr, known[:-1])), repr(known[-1]))))
                raise ConfigError(
                    f"models.{name}.{key} is {value!r}; it must be {choices}{nearest(value, known)}"
                )
        check_options(f"models.{name}.optim", model.optim)


_SIZES_KNOWN = "Its sizes are those of the architecture; a run needs the model."
_PATH_KEY = re.compile(r"\+*models\.(\w+)\.path=")
_ARCHITECTURE_KEY = re.compile(r"[+~]*(?:model@models\.(\w+)|models\.(\w+)\.architecture)\b")
"""How overrides of a checkpoint, and of an architecture, begin."""
_OPTIM_KEY = re.compile(r"\+*models\.(\w+)\.optim\.(\w+)=")


def with_resolved_names(config: RunConfig, recipe: Path) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration with the present meaning of names: commits of the Hub, this machine's devices.

    Models that cannot be fetched are beside it, as of `with_pinned_models`.

    Raises:
        ConfigError: for a name without a meaning.
        DataError: for a path that names no dataset.
    """
    return with_pinned_models(with_this_machine(with_pinned_rows(config), recipe))


def with_pinned_models(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration with the commits of its models of the Hub, whose descriptions are fetched.

    Returns:
        The configuration, and model -> why it cannot be fetched, where an architecture says how large it is.

    Raises:
        ConfigError: for any other model that cannot be fetched.
    """
    models, unreached = dict(config.models), {}
    for name, model in config.models.items():
        if model.path is None:
            continue
        try:
            models[name] = replace(model, path=pinned_path(model.path, f"models.{name}.path"))
        except ConfigError as error:
            if model.architecture is None:
                raise
            unreached[name] = str(error)
    return replace(config, models=models), unreached


def with_overridden_models(
    config: RunConfig, overrides: Sequence[str], unreached: Mapping[str, str]
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration without what overrides replace, and warnings.

    A path on the command line replaces the recipe's architecture, so there must be a checkpoint. An
    architecture on the command line replaces the recipe's checkpoint, unless they have the same sizes. An
    optimizer on the command line replaces that of files, and with it the options that it has not.

    Of models that are `unreached`, which is the reason by name, is warned already.

    Raises:
        ConfigError: for a path on the command line without a checkpoint, if its sizes are not given as well.
    """
    models, warnings = dict(config.models), []
    paths = {match[1] for text in overrides if (match := _PATH_KEY.match(text))}
    named = {match[1] or match[2] for text in overrides if (match := _ARCHITECTURE_KEY.match(text))}
    for name in sorted((paths | named) & models.keys()):
        model = models[name]
        if model.path is None or model.architecture is None:
            continue
        if not has_config(model):
            if name not in named:
                if name in unreached:
                    raise ConfigError(
                        f"{unreached[name]}. A plan needs only its sizes, as "
                        f"model@models.{name}=qwen2.5-0.5b."
                    )
                raise ConfigError(
                    f"{missing_text(name, model)}, and its architecture is the recipe's. Correct the path, "
                    "or name the sizes of a model that only other machines have, as "
                    f"model@models.{name}=qwen2.5-0.5b."
                )
            if name in paths and name not in unreached:
                warnings.append(
                    f"{missing_text(name, model)}. Its sizes are those of the architecture; a run needs a "
                    "checkpoint there."
                )
        elif name not in paths and (size := differing_size(model)) is not None:
            key, saved, configured = size
            models[name] = replace(model, path=None)
            warnings.append(
                f"models.{name}: the recipe's checkpoint {model.path} ({key} {saved}) is not used, as the "
                f"command line has another architecture ({key} {configured}). A run starts from random "
                f"weights. To silence this, set models.{name}.path to a checkpoint, or to null."
            )
    optims = {match.groups() for text in overrides if (match := _OPTIM_KEY.match(text))}
    for name, model in models.items():
        if (name, "name") in optims and model.optim.name in OPTIMIZERS:
            given = {key for owner, key in optims if owner == name}
            models[name] = replace(model, optim=with_own_options(model.optim, given))
    return replace(config, models=models), tuple(warnings)
