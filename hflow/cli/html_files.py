"""Writing the pages of `--html FILE`."""

from __future__ import annotations

from pathlib import Path

from hflow.errors import ConfigError


def write_html(file: Path, page: str) -> None:
    """Write a page.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {file}: {error.strerror or error}") from error
