"""The directory of a recipe's file: a recipe can import the modules beside it, on every worker.

The directory comes first in `sys.path`, as that of a Python script does. Processes on the machine of the
controller use it as it is. Other machines get a copy (`pack`, `unpack`).

Ray's own way to ship a directory, `working_dir`, can only be set where Ray is started or joined, and moves
every worker to the copy, so that relative paths of the configuration would change their meaning.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hflow.base.errors import RunError

MODULE_PREFIX = "hflow_recipe_"
"""First part of the name of a recipe's module, so that a recipe's file cannot shadow another module.

Other processes cannot import such a module. To send its bodies to them, register the module with
cloudpickle's `register_pickle_by_value`.
"""
MARK = ".hflow-recipe"
"""File in a copy that holds the path of the original."""
MAX_FILE_BYTES = 10 * 2**20
"""Larger files are not sent to other machines."""
MAX_BYTES = 100 * 2**20
MAX_FILES = 5_000
_NOT_SENT = frozenset({"__pycache__", "node_modules", "runs"})
"""Directories that are not sent, besides hidden ones, runs of any name and virtual environments."""
_IN_EVERY_RUN = "ledger.sqlite"
_SECRET = re.compile(
    r"(^|[._-])(secrets?|credentials?|passwords?|tokens?|id_(rsa|dsa|ecdsa|ed25519))([._-]|$)|"
    r"\.(pem|key|p12|pfx|keystore)$",
    re.IGNORECASE,
)
"""Names of files that hold secrets, unless they end in `.py`. Hidden files are not sent either."""

_used: set[str] = set()
"""Directories of the recipes that this process has used."""


def use_directory(directory: str | Path) -> None:
    """Let this process import the modules of a recipe's directory.

    A module that was imported from another recipe's directory is forgotten if this one has a module of the
    same name.
    """
    name = str(directory)
    _used.add(name)
    beside = _module_names(name)
    for module_name, module in sys.modules.copy().items():
        if module_name.partition(".")[0] not in beside:
            continue
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(other) for other in _used - {name}):
            del sys.modules[module_name]
    if name in sys.path:
        sys.path.remove(name)
    sys.path.insert(0, name)
    importlib.invalidate_caches()


def imported_files(directory: Path) -> list[Path]:
    """Return the modules of a recipe's directory that are imported, without recipes and hflow."""
    beside = _module_names(str(directory)) - {__name__.partition(".")[0]}
    modules = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] in beside]
    files = {Path(file).resolve() for module in modules if (file := getattr(module, "__file__", None))}
    return sorted(file for file in files if file.is_relative_to(directory) and file.is_file())


def _module_names(directory: str) -> set[str]:
    """Return the names of the modules and packages in a directory; none if it cannot be read."""
    with suppress(OSError), os.scandir(directory) as entries:
        return {entry.name if entry.is_dir() else entry.name.removesuffix(".py") for entry in entries}
    return set()


def local_directory(original: str) -> Path:
    """Return a recipe's directory; on another machine than the controller's, the copy of it."""
    for entry in sys.path:
        mark = Path(entry, MARK)
        if entry != original and mark.is_file() and mark.read_text(encoding="utf-8") == original:
            return Path(entry)
    return Path(original)


def pack(directory: str | Path) -> bytes:
    """Return the files of a recipe's directory as a zip archive, for other machines.

    Hidden files and directories, caches, run directories, virtual environments, links, secrets and files of
    more than `MAX_FILE_BYTES` are left out.

    Raises:
        RunError: if the rest is too much to be the files of a recipe.
    """
    buffer, num_bytes = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, file in enumerate(files_to_send(Path(directory)), 1):
            num_bytes += file.stat().st_size
            if num_bytes > MAX_BYTES or number > MAX_FILES:
                raise RunError(
                    f"{directory} is sent to the other machines with the recipe, but holds more than "
                    f"{MAX_BYTES // 2**20} MiB or {MAX_FILES} files. Move the recipe, with what it imports, "
                    "to a directory of its own"
                )
            archive.write(file, file.relative_to(directory))
    return buffer.getvalue()


def unpack(packed: bytes, original: str | Path) -> Path:
    """Write a directory packed by `pack` to a new temporary one and return it.

    `original` is the directory on the machine of the controller.
    """
    directory = Path(tempfile.mkdtemp(prefix="hflow-recipe-"))
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(directory)
    (directory / MARK).write_text(str(original), encoding="utf-8")
    return directory


def files_to_send(directory: Path) -> Iterator[Path]:
    """Yield the files of a recipe's directory that other machines get, in a fixed order."""
    for path, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if _is_sent(Path(path, name)))
        for name in sorted(files):
            file = Path(path, name)
            is_secret = _SECRET.search(name) and file.suffix != ".py"
            if name.startswith(".") or is_secret or file.is_symlink() or not file.is_file():
                continue
            if file.stat().st_size <= MAX_FILE_BYTES:
                yield file


def _is_sent(directory: Path) -> bool:
    is_skipped = directory.name.startswith(".") or directory.name in _NOT_SENT or directory.is_symlink()
    if is_skipped or (directory / "pyvenv.cfg").is_file():
        return False
    return not (directory / _IN_EVERY_RUN).is_file()
