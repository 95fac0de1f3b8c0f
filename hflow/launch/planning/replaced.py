"""Warnings where overrides replace a model, the cluster or rows, but not the settings made for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hflow.base.errors import ConfigError
from hflow.config import ConfigLoader, DataConfig, RunConfig, flatten
from hflow.config.schema import ONE_PROCESS, OPEN_SETTINGS
from hflow.graph.ir import Graph
from hflow.launch.planning.models import model_shape
from hflow.launch.planning.this_machine import HERE

_DATA_KEY = re.compile(r"[+~]*data[.@]")
_ROWS_KEY = re.compile(r"[+~]*data(@|\.\w+(=|$|\.(path|generator|sources)\b))")
_PROMPT_KEY = re.compile(r"[+~]*workload(\.prompt)?=")
"""How overrides of a dataset, of its rows, and of the length of prompts begin."""
_OF_CLUSTER = re.compile(r"placement|groups\..*")
_OF_MODELS = re.compile(r"workload\..*|" + "|".join(key.replace("NAME", r"\w+") for key in OPEN_SETTINGS))
_OF_MODELS_ON_CPUS = re.compile(rf"cluster|{_OF_MODELS.pattern}")
_OF_LENGTHS = re.compile(r"workload\.response_.*")
"""Settings that fit a cluster, models, and the most tokens of a response."""

_LEARNING = (
    " After a first run, workload.prompt=null workload.response_mean=null workload.response_cv=null "
    "calibrate=RUN takes its lengths."
)
"""Advice where `calibrate` can learn: runs of one process are not measured by workers."""


def replaced_warnings(
    config: RunConfig, graph: Graph, configs: ConfigLoader, overrides: Sequence[str]
) -> Iterator[str]:
    """Yield a warning for each thing that overrides replace while settings made for it stay."""
    if not overrides:
        return
    yield from _data_warnings(config, graph, configs, overrides)
    try:
        before, own_keys = configs.load()
    except ConfigError:  # the recipe was left open for the overrides
        return
    now = dict(flatten(config))
    kept = [
        key
        for key, value in flatten(before)
        if key in own_keys and now.get(key) == value and not _names(overrides, key)
    ]
    for reason, pattern in _replaced_parts(config, before, graph, overrides):
        keys = [key for key in kept if pattern.fullmatch(key)]
        kept = [key for key in kept if key not in keys]
        if keys:
            nulls = " ".join(f"{key}={HERE if key == 'cluster' else 'null'}" for key in keys)
            yield (
                f"the recipe sets {' and '.join(keys) if len(keys) < 3 else ', '.join(keys)} for {reason}, "
                f"which you replaced. Set what fits yours, or leave it to the plan: {nulls}"
            )


def _replaced_parts(
    config: RunConfig, before: RunConfig, graph: Graph, overrides: Sequence[str]
) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the parts of the recipe's own configuration that are replaced, and the settings made for each."""
    if _names(overrides, "cluster") and before.cluster not in (HERE, config.cluster):
        yield f"cluster={before.cluster}", _OF_CLUSTER
    for model in graph.models:
        key = f"models.{model.name}"
        is_named = any(
            _names(overrides, name) for name in (f"{key}.path", f"{key}.architecture", f"model@{key}")
        )
        if is_named and model_shape(before, graph, model) != model_shape(config, graph, model):
            on_cpus = before.cluster.startswith("cpu-")
            yield f"its own {key}", _OF_MODELS_ON_CPUS if on_cpus else _OF_MODELS
    for node, values in before.nodes.items():
        most = values.get("max_tokens")
        if most is not None and config.nodes.get(node, {}).get("max_tokens") != most:
            yield f"nodes.{node}.max_tokens={most}", _OF_LENGTHS


def _names(overrides: Sequence[str], key: str) -> bool:
    """Return whether an override sets a key."""
    return any(text.lstrip("+~").partition("=")[0] == key for text in overrides)


def _data_warnings(
    config: RunConfig, graph: Graph, configs: ConfigLoader, overrides: Sequence[str]
) -> Iterator[str]:
    """Yield a warning if overrides replace the trained rows, but not the lengths that were set for them."""
    is_given = any(_PROMPT_KEY.match(text) for text in overrides)
    if config.workload.prompt is None or is_given or not any(map(_ROWS_KEY.match, overrides)):
        return
    try:
        before, _ = configs.load([text for text in overrides if not _DATA_KEY.match(text)])
    except ConfigError:  # its data was left open for the overrides
        return
    trained = {stream.dataset for stream in graph.streams if stream.trained}
    learning = "" if config.workers in ONE_PROCESS else _LEARNING
    for name in (dataset.name for dataset in graph.datasets if dataset.name in trained):
        old, new = before.data.get(name, DataConfig()), config.data.get(name, DataConfig())
        if (old.path or old.generator or old.sources) and _rows(old) != _rows(new):
            yield (
                f"the plan assumes prompts of {config.workload.prompt} tokens, as workload.prompt says for "
                f"data.{name}.{_rows(old)}, but the rows are now those of {_rows(new)}. If their "
                f"prompts have another length, set workload.prompt.{learning}"
            )


def _rows(config: DataConfig) -> str:
    """Return the key that says which rows a dataset has."""
    if config.sources:
        return f"sources={{{','.join(config.sources)}}}"
    if config.generator is not None:
        return f"generator={config.generator}"
    return f"path={config.path if isinstance(config.path, str) else list(config.path or ())}"
