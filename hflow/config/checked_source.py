"""Lets Hydra read files only after `check_yaml` has found that they are bounded, and marks their paths."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from hflow.config.file_paths import mark_paths
from hflow.config.yaml_files import check_yaml

SCHEME = "bounded-file"


class BoundedFileSource(FileConfigSource):
    """YAML files of a directory."""

    @staticmethod
    def scheme() -> str:
        """Return the first part of the URLs of such directories."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Check a file, parse it, and mark its paths with its directory."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        check_yaml(file)
        result = super().load_config(config_path)
        if isinstance(result.config, DictConfig):
            values = OmegaConf.to_container(result.config, resolve=False)
            result.config = OmegaConf.create(mark_paths(values, str(file.parent)))
        return result


class BoundedSearchPath(SearchPathPlugin):
    """Has the directory of the primary file read by `BoundedFileSource`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Give the directory the scheme of `BoundedFileSource`."""
        for element in search_path.get_path():
            if element.provider == "main" and "://" not in element.path:
                element.path = f"{SCHEME}://{element.path}"


def register() -> None:
    """Make both known to Hydra."""
    Plugins.instance().register(BoundedFileSource)
    Plugins.instance().register(BoundedSearchPath)
