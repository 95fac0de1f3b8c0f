"""Where the rows of a recipe's datasets are: settings from the configuration, and checks while planning.

What reads rows imports pyarrow. It is imported only where there is a file to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hflow.base.errors import ConfigError, nearest
from hflow.base.files import resolved
from hflow.base.hub import DATASET_PREFIX
from hflow.config import DataConfig, RunConfig
from hflow.config.schema import SourceConfig, WeightedSourceConfig
from hflow.data.rows.hf_datasets import pinned_path
from hflow.graph.ir import DatasetSpec, Graph
from hflow.graph.queries import is_library_node

if TYPE_CHECKING:
    from hflow.data.rows.datasets import DataSettings
    from hflow.data.rows.row_schema import Check

AnySource = TypeVar("AnySource", bound=SourceConfig)


def data_settings(
    config: RunConfig, dataset: DatasetSpec, functions: Mapping[str, Callable[..., Any]] | None = None
) -> DataSettings:
    """Return the settings of a dataset; `functions` are the recipe's that make rows (`@rows`), by name.

    Raises:
        ConfigError: if the configuration names no rows, too many, or an unknown generator.
    """
    from hflow.data.rows.datasets import GENERATORS, DataSettings

    known = functions or {}
    for name in known:
        if name in GENERATORS:
            raise ConfigError(f"hflow has a generator {name!r} of its own; rename the function with @rows")

    def function(generator: str | None, key: str) -> Callable[..., Any] | None:
        name = (generator or "").partition(":")[0]
        if generator is None or generator in known or name in GENERATORS:
            return known.get(generator or "")
        own = f"the recipe's @rows: {', '.join(known) or 'none'}"
        raise ConfigError(
            f"{key}.generator: there is no generator {name!r} (known: {', '.join(GENERATORS)}; {own})"
            f"{nearest(name, [*GENERATORS, *known])}"
        )

    own, key = config.data.get(dataset.name, DataConfig()), f"data.{dataset.name}"
    sources = tuple(
        DataSettings(
            **{name: value for name, value in vars(source).items() if not name.startswith("sampler")}
            | {"path": _absolute(source.path), "shuffle": own.shuffle, "sources": ()},
            key=source_key,
            function=function(source.generator, source_key),
        )
        for source_key, source in _sources(own, key, dataset)
    )
    return DataSettings(shuffle=own.shuffle, sources=sources, key=key) if own.sources else sources[0]


def check_data(
    config: RunConfig,
    graph: Graph,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    samplers: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Refuse settings of datasets that contradict each other, and rows without the declared columns.

    A plan needs no data. So a dataset without settings, and files that are not on this machine, are left to
    the run. Of a file, the first row is read. Of a generator, the name, arguments and columns are checked.

    `functions` make rows (`@rows`) and `samplers` choose them (`@sampler`), by name.

    Raises:
        ConfigError: for settings that contradict each other, an unknown generator, and weights of sources
            that no training reads.
        DataError: for a file or a generator that does not have the columns that the recipe declares, and for
            a task or arguments that a generator does not have.
    """
    trained = {stream.dataset for stream in graph.streams if stream.trained}
    for dataset in graph.datasets:
        own, key = config.data.get(dataset.name, DataConfig()), f"data.{dataset.name}"
        if own.sampler is not None and dataset.name not in trained:
            raise ConfigError(f"{key}.sampler has no effect, as evaluations read every row once; remove it")
        find_row_sampler(config, dataset.name, samplers)
        if not (own.sources or own.path or own.generator):
            continue
        sources = list(_sources(own, key, dataset))
        if dataset.name not in trained:
            _refuse_weights(sources)
        is_local = any(
            not path.startswith(DATASET_PREFIX) for _, source in sources for path in _paths(source)
        )
        if is_local or any(source.generator is not None for _, source in sources):
            from hflow.data.rows.datasets import check_columns

            checks = conversation_checks(graph, dataset.name)
            check_columns(data_settings(config, dataset, functions), dict(dataset.columns), checks)


def find_row_sampler(
    config: RunConfig, dataset: str, samplers: Mapping[str, Callable[..., Any]] | None
) -> Callable[..., Any] | None:
    """Return the function that chooses a dataset's rows, with its arguments; None if there is none.

    Raises:
        ConfigError: for an unknown sampler, and arguments that do not fit.
    """
    own, key = config.data.get(dataset, DataConfig()), f"data.{dataset}"
    if own.sampler is None:
        if own.sampler_arguments:
            raise ConfigError(
                f"{key}.sampler_arguments has no effect without {key}.sampler; set or remove one"
            )
        return None
    from hflow.data.rows.samplers import find_sampler

    function = find_sampler(own.sampler, own.sampler_arguments, samplers or {}, key)
    return partial(function, **own.sampler_arguments)


def conversation_checks(graph: Graph, dataset: str) -> dict[str, Check]:
    """Return the checks of a dataset's conversations that nodes of the library need, by column.

    The body of any other node may change a conversation first, so it is checked when it is encoded.
    """
    from hflow.data.text.messages import check_learned, check_prompt

    checks: dict[str, Check] = {}
    for stream in graph.streams:
        node = graph.node(stream.source)
        if stream.dataset == dataset:
            for name, check in (("chat_gen", check_prompt), ("chat_view", check_learned)):
                if is_library_node(node.spec, name):
                    checks.update({read.field: check for read in node.reads})
    return checks


def _sources(
    config: DataConfig, key: str, dataset: DatasetSpec
) -> Iterator[tuple[str, SourceConfig | WeightedSourceConfig]]:
    """Yield each source of a dataset with its key: the dataset itself if it has one only."""
    if not config.sources:
        _check_source(config, key, dataset)
        yield key, config
        return
    default = SourceConfig()
    for field in fields(SourceConfig):
        if getattr(config, field.name) != getattr(default, field.name):
            name, unset = field.name, _text(default, field.name)
            raise ConfigError(
                f"{key} has both {name} and sources; set {key}.{name}={unset}, and that of each source as "
                f"{key}.sources.SOURCE.{name}"
            )
    for name, source in config.sources.items():
        source_key = f"{key}.sources.{name}"
        _check_source(source, source_key, dataset)
        yield source_key, source


def _check_source(config: SourceConfig, key: str, dataset: DatasetSpec) -> None:
    if config.path is None and config.generator is None:
        raise ConfigError(
            f"{key} has no rows; set {key}.path to a .jsonl or .parquet file with the columns "
            f"{', '.join(name for name, _ in dataset.columns)}, or to a dataset such as hf:openai/gsm8k/main"
        )
    if config.path is not None and config.generator is not None:
        raise ConfigError(f"{key} has both path and generator; set {key}.generator=null to read the file")


def _refuse_weights(sources: list[tuple[str, SourceConfig | WeightedSourceConfig]]) -> None:
    for key, source in sources:
        if isinstance(source, WeightedSourceConfig) and source.weight != 1:
            raise ConfigError(f"{key}.weight has no effect, as evaluations read every row once; remove it")


def _text(config: SourceConfig, name: str) -> str:
    """Return the value of a key as an override has it."""
    value = getattr(config, name)
    return "null" if value is None else str(value)


def with_pinned_rows(config: RunConfig) -> RunConfig:
    """Return the configuration with the commits of its datasets of the Hub, as far as the Hub gives them.

    Raises:
        DataError: for a path that names no dataset.
    """
    data = {
        name: replace(
            _pinned(dataset),
            sources={source: _pinned(mixed) for source, mixed in dataset.sources.items()},
        )
        for name, dataset in config.data.items()
    }
    return replace(config, data=data)


def _pinned(source: AnySource) -> AnySource:
    path = source.path
    if path is None:
        return source
    return replace(source, path=pinned_path(path) if isinstance(path, str) else tuple(map(pinned_path, path)))


def _paths(source: SourceConfig) -> tuple[str, ...]:
    return (source.path,) if isinstance(source.path, str) else source.path or ()


def _absolute(path: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Return paths that mean the same in every worker, whenever it starts: of a pattern, its files.

    A dataset of the Hub stays as it is, and so does a pattern without files, for the error.
    """
    if isinstance(path, tuple):
        return tuple(file for item in path for file in _files(item))
    if path is None:
        return None
    files = _files(path)
    return files[0] if len(files) == 1 else files


def _files(path: str) -> tuple[str, ...]:
    if path.startswith(DATASET_PREFIX):
        return (path,)
    absolute = str(resolved(path))
    is_pattern = has_magic(absolute) and not Path(absolute).exists()
    return tuple(sorted(glob(absolute, recursive=True))) * is_pattern or (absolute,)
