"""Reads YAML files with bounds: a few lines of YAML can expand to more values than memory holds."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import ConfigError
from hflow.base.files import read_at_most

if TYPE_CHECKING:
    from yaml import Node, YAMLError

MAX_BYTES = 1 << 20
"""The largest YAML file that is read."""
MAX_CHARACTERS_IN_C = 4096
"""The longest text for PyYAML's parser in C, many times as fast; deep nesting overflows its stack."""
MAX_VALUES = 200_000
"""Values of a file, those of aliases counted as often as they are named."""


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: for a file that cannot be read, or holds anything else; names it.
    """
    values = read_yaml_value(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of keys to values, but it is {values!r:.40}")
    return {str(key): value for key, value in values.items()}


def read_yaml_value(file: Path) -> Any:
    """Return the value of a YAML file.

    Raises:
        ConfigError: for a file that cannot be read; names it.
    """
    import yaml

    try:
        return deepcopy(_load(check_yaml(file), str(file)))
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply, or an alias in it contains itself") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(file)!r}: {error.strerror or error}; name another file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: {error}; convert it") from error
    except yaml.YAMLError as error:
        raise ConfigError(yaml_error(error, str(file))) from error


def yaml_error(error: YAMLError, file: str) -> str:
    """Return one line about text that is not YAML, with the place where it ends to be."""
    mark = getattr(error, "problem_mark", None)
    where = file if mark is None else f"{mark.name}:{mark.line + 1}"
    return f"{where}: invalid YAML: {getattr(error, 'problem', None) or ' '.join(str(error).split())}"


def parse_yaml(text: str) -> Any:
    """Return the value of a short YAML text, such as that of an override.

    Raises:
        ValueError: for text that is not YAML, with the reason.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error


def check_yaml(file: Path) -> str:
    """Return the text of a YAML file that can be parsed in bounded time and memory.

    Raises:
        ConfigError: for a file that is too large, or whose aliases expand to too much; names it.
        RecursionError: for a file that is nested too deeply, or an alias that contains itself.
        yaml.YAMLError: for a file that is not YAML.
        OSError: for a file that cannot be read.
        UnicodeDecodeError: for a file that is not UTF-8.
    """
    import yaml

    content = read_at_most(file, MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES:,} bytes; hflow reads smaller YAML files")
    text = content.decode("utf-8")
    if "&" in text:  # no values are repeated without an anchor
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and _num_values(root, {}) > MAX_VALUES:
            raise ConfigError(
                f"{file} expands to more than {MAX_VALUES:,} values; remove aliases, which repeat what they "
                "name"
            )
    return text


@lru_cache(maxsize=256)  # a plan reads the figures of all devices, links and calibrations twice
def _load(text: str, name: str) -> Any:
    """Return the value of a YAML text, which must not be changed; errors have the name of its file."""
    import yaml

    if len(text) <= MAX_CHARACTERS_IN_C and yaml.__with_libyaml__:
        with suppress(yaml.YAMLError):  # the other parser says what is wrong, and where
            return yaml.load(text, yaml.CSafeLoader)
    loader = yaml.SafeLoader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _num_values(node: Node, counted: dict[int, int]) -> int:
    """Return the number of values that a node expands to; an alias of a node is the node itself.

    `counted` has the values of nodes, by id, that were counted already.
    """
    if id(node) not in counted:
        parts = node.value if isinstance(node.value, list) else []
        inner = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
        counted[id(node)] = 1 + sum(_num_values(part, counted) for part in inner)
    return counted[id(node)]
