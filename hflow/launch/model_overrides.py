"""What overrides on the command line say about a model's weights takes precedence over the recipe's files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hflow.config import RunConfig
from hflow.errors import ConfigError
from hflow.launch.model_metadata import check_is_whole, differing_size, has_config, missing_text

_PATH_KEY = re.compile(r"\+*models\.(\w+)\.path=")
_ARCHITECTURE_KEY = re.compile(r"[+~]*(?:model@models\.(\w+)|models\.(\w+)\.architecture)\b")
"""How overrides of a checkpoint, and of an architecture, begin."""


def with_overridden_models(config: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration without what overrides replace, and warnings.

    A path on the command line replaces the recipe's architecture, so there must be a checkpoint. An
    architecture on the command line replaces the recipe's checkpoint, unless they have the same sizes.

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
        check_is_whole(name, model)
        if not has_config(model):
            if name not in named:
                raise ConfigError(
                    f"{missing_text(name, model)}, and its architecture is the recipe's. Correct the path, "
                    "or name the sizes of a model that only other machines have, as "
                    f"model@models.{name}=qwen2.5-0.5b."
                )
            if name in paths:
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
    return replace(config, models=models), tuple(warnings)
