"""Writes a configuration as YAML, as a mapping, and as flat rows.

Bounds what interpolations such as `${models.actor.path}` expand to: ten levels of ten are 10 GB.

Lets Hydra read files only after `check_yaml` has found that they are bounded, and marks their paths.

Composes a `RunConfig` from a recipe's YAML file and overrides, with Hydra, and checks its names.

The primary file is the YAML file beside the recipe with the recipe's name, if there is one. Its defaults list
takes groups from `configs/` (`model`, `optim`, `data`) and from the recipe's own directory. Overrides are
written as in Hydra: `steps=10`, `models.actor.optim.lr=3e-4`, `setup=NAME`. A group with a place, as in
`model@models.ref=NAME`, needs no `+`, whether a defaults list has it or not.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from hflow.base.errors import ConfigError, nearest, shorten
from hflow.base.json_text import LONG_NUMBER, is_of_long_number
from hflow.base.secrets import secret_in
from hflow.base.shipped import shipped_directory
from hflow.base.validation import from_mapping, join, unknown_key
from hflow.config.files import mark_paths, resolve_paths
from hflow.config.schema import OPEN_SETTINGS, RunConfig
from hflow.config.yaml_files import check_yaml, yaml_error

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration, defaults included. The YAML composes to the same configuration."""
    import yaml

    text: str = yaml.safe_dump(_plain(config), sort_keys=False)
    return text


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Return the whole configuration as mappings, lists and scalars, defaults included."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of a configuration, or of a part of it, in key order."""
    plain = _plain(value)
    if isinstance(plain, dict):
        for name in sorted(plain):
            yield from flatten(plain[name], join(key, name))
    else:
        yield key, plain


def _plain(value: Any) -> Any:
    """Return the value as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


MAX_CHARACTERS = 4 << 20
"""Characters that the values of one key may expand to."""
_REFERENCE = re.compile(r"\$\{\s*([^${}\s]+)\s*\}")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def check_interpolations(values: Mapping[Any, Any]) -> None:
    """Check that no value of a configuration, with interpolations as text, expands to more than memory holds.

    Raises:
        ConfigError: for the first key that does; names it.
    """
    sizes: dict[str, int] = {}

    def size(key: str, value: Any) -> int:
        """Return the characters of a value; 0 for one that contains itself, which OmegaConf refuses."""
        if key not in sizes:
            sizes[key] = 0
            if isinstance(value, Mapping | list):
                named = value.items() if isinstance(value, Mapping) else enumerate(value)
                sizes[key] = sum(size(f"{key}.{name}" if key else str(name), item) for name, item in named)
            else:
                text = str(value)
                found = (_absolute(reference, key) for reference in _REFERENCE.findall(text))
                sizes[key] = len(text) + sum(size(other, _value(values, other)) for other in found)
            if sizes[key] > MAX_CHARACTERS and key:
                raise ConfigError(
                    f"{shorten(key, 80)} expands to more than {MAX_CHARACTERS:,} characters; remove "
                    "interpolations, which repeat what they name"
                )
        return sizes[key]

    size("", values)


def _absolute(reference: str, key: str) -> str:
    """Return the dotted key of what an interpolation names. Leading dots are relative to its own key."""
    name = reference.lstrip(".")
    num_dots = len(reference) - len(name)
    parents = key.split(".")[:-num_dots] if num_dots else []
    return ".".join([*parents, *_BRACKET.sub(r".\1", name).strip(".").split(".")])


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        if isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
        elif isinstance(values, Mapping):
            values = values.get(name)
        else:
            return None
    return values


class ParsedFileSource(FileConfigSource):
    """YAML files of a directory. One that has not changed is parsed once."""

    @staticmethod
    def scheme() -> str:
        """Return the first part of the URLs of such directories."""
        return "parsed-file"

    def load_config(self, config_path: str) -> ConfigResult:
        """Check a file and parse it."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        text = check_yaml(file)
        return ConfigResult(
            config=OmegaConf.create(self._values(file, text)),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(text[:512]),  # as Hydra
        )

    def _values(self, file: Path, text: str) -> Any:
        return _parsed_values(text, str(file))


class BoundedFileSource(ParsedFileSource):
    """YAML files of the directory of the primary file."""

    @staticmethod
    def scheme() -> str:
        """Return the first part of the URLs of such directories."""
        return "bounded-file"

    def _values(self, file: Path, text: str) -> Any:
        """Return the values of a file, its paths marked with its directory."""
        return mark_paths(super()._values(file, text), str(file.parent))


@lru_cache(maxsize=256)
def _parsed_values(text: str, name: str) -> Any:
    """Return the values in the text of the file of this name; they must not be changed."""
    stream = StringIO(text)
    stream.name = name  # for errors
    return OmegaConf.to_container(OmegaConf.load(stream), resolve=False)


class ConfigFiles(ConfigRepository):
    """The files of one composition: those beside the primary file, then the shipped ones.

    A file is loaded once. The composition changes what is loaded.
    """

    def __init__(self, directory: Path, configs: Path) -> None:
        """Take the directory of the primary file and that of the shipped files."""
        self.sources = [
            BoundedFileSource("main", str(directory)),
            ParsedFileSource("configs", str(configs)),
            StructuredConfigSource("schema", "structured://"),  # Hydra needs one, which has nothing
        ]
        self._loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the content of a file with its defaults list; None: there is no such file."""
        if config_path not in self._loaded:
            self._loaded[config_path] = super().load_config(config_path)
        return self._loaded[config_path]


class Composer(ConfigLoaderImpl):
    """Composes files and overrides as Hydra does, without the settings of Hydra's own command line.

    With these, a composition takes three times as long.

    Attributes:
        directory: where files are looked for first
    """

    def __init__(self, primary: Path | None, configs: Path) -> None:
        """Take the primary file, if there is one, and the directory of the shipped files."""
        setup_globals()  # resolvers such as ${now:%Y}
        self.directory = configs if primary is None else primary.parent
        self._primary = primary
        self._configs = configs
        self._composed: dict[tuple[bool, tuple[str, ...]], tuple[DictConfig, Collection[str]]] = {}

    def compose(
        self, overrides: Sequence[str], *, with_primary: bool = True
    ) -> tuple[DictConfig, Collection[str]]:
        """Return the composed configuration, and the groups of its defaults lists, as `group@package`.

        Files are read once for all overrides that choose the same ones.

        Raises:
            ConfigError: if the primary file is not a mapping.
            HydraException: for an override, or a name in a defaults list, that does not fit.
            OmegaConfBaseException: for values that do not fit.
        """
        files = ConfigFiles(self.directory, self._configs)
        choices: list[str] = []
        values: list[str] = []
        for text in overrides:
            (choices if files.group_exists(_parsed(text).key_or_group) else values).append(text)
        key = (with_primary, tuple(choices))
        if key not in self._composed:
            self._composed[key] = self._compose_files(files, choices, with_primary)
        own, groups = self._composed[key]
        composed = deepcopy(own)
        self._apply_overrides_to_config(list(map(_parsed, values)), composed)
        return composed, groups

    def _compose_files(
        self, files: ConfigFiles, choices: Sequence[str], with_primary: bool
    ) -> tuple[DictConfig, Collection[str]]:
        """Return the result of `compose` for overrides that choose files."""
        name = self._primary.stem if self._primary is not None and with_primary else None
        loaded = None if name is None else files.load_config(name)
        if loaded is not None and not isinstance(loaded.config, DictConfig):
            raise ConfigError(f"{name}.yaml: it must be a mapping of keys to values")
        defaults = create_defaults_list(
            files, name, list(map(_parsed, choices)), prepend_hydra=False, skip_missing=False
        )
        composed = self._compose_config_from_defaults_list(defaults.defaults, files)
        OmegaConf.set_struct(composed, True)
        self._apply_overrides_to_config(defaults.config_overrides, composed)
        return composed, defaults.overrides.known_choices


_BARE_PLACEMENT = re.compile(r"(\+{0,2}placement)=(?!null$)([^'\"].*)", re.DOTALL)

_ITEM = re.compile(r"""(?:[^,'"]|'[^']*'|"[^"]*"|['"])+""")
"""An item of a list, with the commas between its quotes."""

MAX_OVERRIDE = 20_000
"""Characters of the longest override. A chat template may have thousands."""
GROUPS = {"model": "models.NAME", "optim": "models.NAME.optim", "data": "data.NAME"}
"""Group of configuration files -> the keys that its files set."""
_KEYS = frozenset(f.name for f in fields(RunConfig)) - GROUPS.keys()
"""Keys that are no group, although a directory beside the recipe may have such a name, as `out` may."""
MAX_EXAMPLE = 200
"""Characters of the longest override that an error repeats as it is to be typed."""


def load_config(
    recipe: str | Path, overrides: Sequence[str] = (), directory: Path | None = None
) -> RunConfig:
    """Compose the configuration of a recipe.

    Args:
        recipe: path of the recipe's Python file.
        overrides: `key=value` as on the command line. They take precedence over files.
        directory: what paths of data in files are relative to; None: each file's own directory.

    Raises:
        ConfigError: for an unknown key, group or override, or a value that does not fit.
    """
    return ConfigLoader(recipe).load(overrides, directory)[0]


class ConfigLoader:
    """Composes the configuration of a recipe with any overrides. It reads the recipe's files once."""

    def __init__(self, recipe: str | Path) -> None:
        """Take the path of the recipe's Python file."""
        self._recipe = Path(recipe).absolute()
        self._composer: Composer | None = None

    def load(
        self, overrides: Sequence[str] = (), directory: Path | None = None
    ) -> tuple[RunConfig, frozenset[str]]:
        """Return the configuration, and the dotted keys that the recipe's files and the overrides set.

        All other keys have their defaults. A key that is set to null counts as not set. Arguments and errors
        are those of `load_config`.
        """
        values = resolve_paths(self._compose(overrides), directory)
        _refuse_secrets(values)
        keys = frozenset(key for key, value in flatten(values) if value is not None)
        for key in OPEN_SETTINGS:
            _remove_null(values, key.split("."))
        return from_mapping(RunConfig, {"name": self._recipe.stem, **values}), keys

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        configs = shipped_directory("configs")
        primary = self._recipe.with_suffix(".yaml")
        if os.path.lexists(primary) and not primary.is_file():
            raise ConfigError(f"{primary.name} beside the recipe is not a file that can be read; replace it")
        if self._composer is None:
            self._composer = Composer(primary if primary.is_file() else None, configs)
        composer = self._composer
        groups = _group_names(composer.directory, configs)
        hydra_overrides: list[str] = []
        shadowed: list[Override] = []
        for text in overrides:
            override = _hydra_override(text, groups - _KEYS)
            if (parsed := _parsed(override)).key_or_group in groups & _KEYS:
                shadowed.append(parsed)
            else:
                hydra_overrides.append(override)
        try:
            composed, _ = composer.compose(self._with_new_groups(composer, hydra_overrides))
            for parsed in shadowed:  # Hydra would look for a file in the directory of that name
                OmegaConf.update(composed, parsed.key_or_group, parsed.value(), force_add=True)
            written = OmegaConf.to_container(composed, resolve=False)
            assert isinstance(written, dict), "a configuration has keys"
            check_interpolations(written)
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            _check_keys(values)
        except ConfigError:
            raise
        except RecursionError as error:
            raise ConfigError(
                f"{primary.name}: a value is nested too deeply, or defaults name each other"
            ) from error
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
            raise ConfigError(error_text(error, primary.name)) from error
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def _with_new_groups(self, composer: Composer, overrides: list[str]) -> list[str]:
        """Return overrides in which every group that no defaults list has is marked as new, with a `+`.

        The values of a new group take precedence over those of files. An architecture is replaced as a whole:
        no key of the recipe's own remains in that of the group.
        """
        parsed = [_parsed(override) for override in overrides]
        if not any(override.package and not override.is_delete() for override in parsed):
            return overrides
        base, choices = composer.compose(())
        marked, removed = [], []
        for text, override in zip(overrides, parsed, strict=True):
            if not override.package or override.is_delete():
                marked.append(text)
            elif override.get_key_element().lstrip("+") in choices:
                marked.append(text.lstrip("+"))
            else:
                marked.append(f"+{text.lstrip('+')}")
                key = f"{override.package}.architecture"
                if old := OmegaConf.select(base, key):
                    new = OmegaConf.select(composer.compose(marked[-1:], with_primary=False)[0], key) or {}
                    removed += [f"~{key}.{left}" for left in old if new and left not in new]
        return [*removed, *marked]


def validate_names(
    config: RunConfig,
    models: Collection[str],
    data: Collection[str],
    nodes: Mapping[str, Collection[str]],
) -> None:
    """Check that every entry of `models`, `data` and `nodes` is in the recipe.

    Args:
        nodes: node name -> names of its knobs and options.

    Raises:
        ConfigError: for the first unknown name, with the nearest known one.
    """
    _validate_keys("models", config.models, models)
    _validate_keys("data", config.data, data)
    _validate_keys("nodes", config.nodes, nodes)
    for node, values in config.nodes.items():
        _validate_keys(join("nodes", node), values, nodes[node])


def _check_keys(values: Any, path: str = "") -> None:
    """Check that every key is text, as YAML and Hydra take `1` and `yes` for other values.

    Raises:
        ConfigError: for the first key that is not.
    """
    if not isinstance(values, dict | list):
        return
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(values, dict) and not isinstance(key, str):
            where = f"{path} has the key" if path else "the configuration has the key"
            raise ConfigError(f"{where} {key!r}, which is not text; write it in quotes, or correct it")
        _check_keys(value, join(path, key))


def _remove_null(values: Any, path: Sequence[str]) -> None:
    """Remove a key that is null; `NAME` in its path is any name."""
    if not isinstance(values, dict):
        return
    first, *rest = path
    for name in list(values) if first == "NAME" else [first]:
        if rest:
            _remove_null(values.get(name), rest)
        elif name in values and values[name] is None:
            del values[name]


def _refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuse values that must not be written to plans and run directories.

    Raises:
        ConfigError: for the first one, without its value.
    """
    for key, value in flatten(values):
        reason = secret_in(key, value)
        if reason is not None:
            raise ConfigError(
                f"{key} {reason}, and the configuration is written to the plan and the run directory. Read "
                "the secret where it is used, as os.environ[...] in the body, and pass the variable's name"
            )


def _group_names(*directories: Path) -> frozenset[str]:
    """Return the names of the groups: the directories in these directories."""
    return frozenset(path.name for directory in directories for path in directory.iterdir() if path.is_dir())


def _hydra_override(override: str, groups: Collection[str]) -> str:
    """Return an override that sets a key even if no file has it. The schema refuses unknown keys.

    `GROUP=OPTION` stays as it is: it chooses another file for a group of the defaults list.
    """
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    override = _quote_placement(override)
    if len(override) > MAX_OVERRIDE:
        raise ConfigError(
            f"override {shorten(override, 80)!r} has {len(override):,} characters; overrides have at "
            f"most {MAX_OVERRIDE:,}, so write the value in a file"
        )
    try:
        if "\0" in override:  # which marks paths
            raise ValueError
        parsed = _parsed(override)
    except (HydraException, ValueError, RecursionError) as error:
        problem = f"it has {LONG_NUMBER}" if is_of_long_number(error) else _notation(override)
        raise ConfigError(f"override {shorten(override, 80)!r} cannot be parsed: {problem}") from error
    if parsed.is_sweep_override():
        raise ConfigError(
            f"override {shorten(override, 80)!r} has several values: {_notation(override, has_several=True)}"
        )
    if parsed.key_or_group.partition(".")[0] == "hydra":
        raise ConfigError(unknown_key(parsed.key_or_group, "hydra", [f.name for f in fields(RunConfig)]))
    group, is_name = parsed.key_or_group, isinstance(parsed.value(), str)
    if group in GROUPS and parsed.package is None and is_name:
        raise ConfigError(
            f"{shorten(override, 80)!r} does not say which one is meant; write "
            f"{group}@{GROUPS[group]}={parsed.value()}, with a name of the recipe in place of NAME"
        )
    is_group = parsed.package is not None or (group in groups and is_name)
    is_value = parsed.type is OverrideType.CHANGE and not is_group
    return f"++{override}" if is_value else override


@lru_cache(maxsize=1024)
def _parsed(override: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override)


def _notation(override: str, has_several: bool = False) -> str:
    """Return an override with the quotes that its value needs: itself if it is short, else an example.

    `has_several` says that its value may be meant as a list, although it has no brackets.
    """
    key, is_given, value = override.partition("=")
    if not is_given:
        return "write key=value"
    items = _items(value)
    text = os.path.expanduser(value)  # a shell does not do it between quotes
    ways = [_typed(f"{key}={_quoted(text)}", text, 'key="value"')]
    if items is not None and (has_several or value.startswith("[")):
        as_list = _typed(f"{key}=[{','.join(map(_as_item, items))}]", items, 'key=["a","b"]')
        ways = [*(ways if has_several else []), f"a list as {as_list}"]
    if value.startswith("{"):
        ways = ["a mapping as 'key={name: \"value\"}'"]
    return f"in a shell, write {', or '.join(ways)}; the shell removes the outer quotes"


def _typed(override: str, meant: str | list[str], other: str) -> str:
    """Return an override between a shell's quotes; another one if it is too long or means something else."""
    is_shown = len(override) <= MAX_EXAMPLE and " ".join(override.split()) == override
    shown = override if is_shown and _means(override, meant) else other
    return "'" + shown.replace("'", r"'\''") + "'"


def _items(value: str) -> list[str] | None:
    """Return the items of what may be meant as a list: `[a,b]`, or `a,b`. None: it is one text."""
    is_list = value.startswith("[") and value.endswith("]")
    inner = value[1:-1] if is_list else value
    if not is_list and "," not in value:
        return None
    items = [found.strip() for found in _ITEM.findall(inner)]
    return items if all(items) else None


def _as_item(text: str) -> str:
    """Return an item of a list as it is if Hydra can read it, else quoted."""
    return text if _value_of(f"key={text}") is not None else _quoted(os.path.expanduser(text))


def _quoted(text: str) -> str:
    """Return a value that is text. Backslashes count only before a quote."""
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + (found[2] and '\\"'), text)
    return f'"{escaped}"'


def _means(override: str, meant: str | list[str]) -> bool:
    """Return whether an override can be parsed, and has this value, or a list of so many."""
    value = _value_of(override)
    if isinstance(meant, list):
        return isinstance(value, list) and len(value) == len(meant)
    return bool(value == meant)


def _value_of(override: str) -> Any:
    """Return the one value of an override; None if it cannot be parsed, or has none."""
    from hydra.errors import HydraException

    try:
        parsed = _parsed(override)
        return None if parsed.is_sweep_override() else parsed.value()
    except (HydraException, ValueError, RecursionError):
        return None


def _quote_placement(override: str) -> str:
    """Quote the value of `placement` for the user: its characters are reserved in Hydra."""
    match = _BARE_PLACEMENT.fullmatch(override)
    if match is None:
        return override
    key, value = match.groups()
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def error_text(error: Exception, file: str) -> str:
    """Return one line for an error of Hydra, OmegaConf or YAML; `file` is for those that name no place."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not str(error).strip() and isinstance(error.__cause__, Exception):  # Hydra hides what it composed
        return error_text(error.__cause__, file)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_group(error.missing_cfg_file, error.options or ())
    if isinstance(error, YAMLError):
        return yaml_error(error, file)
    if isinstance(error, OmegaConfBaseException):
        first_line = str(error).strip().partition("\n")[0]
        return f"{error.full_key or file}: {first_line}"
    return f"{file}: " + (
        f"it has {LONG_NUMBER}" if is_of_long_number(error) else " ".join(str(error).split())
    )


def _missing_group(path: str, options: Sequence[str]) -> str:
    group, _, name = path.rpartition("/")
    known = f" (known: {', '.join(options)})" if options else ""
    return f"there is no {group or 'config'} {name!r}{nearest(name, options)}{known}"


def _validate_keys(key: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(unknown_key(join(key, name), name, known))
