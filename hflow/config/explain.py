"""One line for each way in which Hydra, OmegaConf or YAML refuses a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from hflow.errors import nearest


def explain(error: Exception, file: str) -> str:
    """Say in one line what to change.

    Args:
        error: what was raised while composing.
        file: name of the recipe's YAML, for errors that carry no place of their own.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing(error.missing_cfg_file, error.options or ())
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}:{mark.line + 1}: this is not YAML: {error.problem}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    return f"{file}: {_one_line(error)}"


def _missing(wanted: str, options: Sequence[str]) -> str:
    group, _, name = wanted.rpartition("/")
    known = f" (known: {', '.join(options)})" if options else ""
    return f"there is no {group or 'config'} {name!r}{nearest(name, options)}{known}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
