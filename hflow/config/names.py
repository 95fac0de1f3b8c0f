"""Checks the names in a configuration against those that the recipe declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hflow.config.schema import RunConfig
from hflow.errors import ConfigError
from hflow.validation import join, unknown_key


def validate_names(
    config: RunConfig,
    models: Collection[str],
    data: Collection[str],
    nodes: Mapping[str, Collection[str]],
) -> None:
    """Check that every entry of `models`, `data` and `nodes` is in the recipe.

    Args:
        config: the composed configuration.
        models: names of the recipe's models.
        data: names of the recipe's datasets.
        nodes: node name -> names of its knobs and options.

    Raises:
        ConfigError: for the first unknown name, with the nearest known one.
    """
    _validate("models", config.models, models)
    _validate("data", config.data, data)
    _validate("nodes", config.nodes, nodes)
    for node, values in config.nodes.items():
        _validate(join("nodes", node), values, nodes[node])


def _validate(key: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(unknown_key(join(key, name), name, known))
