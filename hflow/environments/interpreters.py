"""The interpreter of an environment: a given one, or that of a virtual environment that is made once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hflow.base.cache import CACHE_VARIABLE, cache_directory
from hflow.base.errors import ConfigError, shorten

_COMPLETE = "complete"
"""A file in a virtual environment in which everything is installed."""
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def find_interpreter(python: str | None, requirements: str | None) -> str:
    """Return the path of an interpreter. The first call on a machine installs the requirements.

    Args:
        python: path of an interpreter; with requirements, the one that makes the virtual environment. None:
            this process's.
        requirements: a file in pip's format; None: nothing is installed.

    Raises:
        ConfigError: if there is no such interpreter or file, or pip fails.
    """
    base = sys.executable if python is None else _checked_python(python)
    return base if requirements is None else str(_virtual_environment(base, requirements))


def _checked_python(python: str) -> str:
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"python is {python!r}, but no such program can be run; set it to an interpreter's path"
        )
    return os.path.abspath(found)


def _virtual_environment(base: str, requirements: str) -> Path:
    """Return the interpreter of the virtual environment whose name is a digest of its requirements."""
    try:
        text = Path(requirements).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"requirements is {requirements!r}, which cannot be read: {error.strerror}"
        ) from None
    name = hashlib.sha256(f"{os.path.realpath(base)}\n".encode() + text).hexdigest()[:16]
    directory = cache_directory() / "environments" / name
    python = directory / "bin" / "python"
    if (directory / _COMPLETE).exists():
        return python
    from filelock import FileLock

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(f".{name}.lock")):
            if not (directory / _COMPLETE).exists():
                shutil.rmtree(directory, ignore_errors=True)  # an earlier attempt did not finish
                _run([base, "-m", "venv", str(directory)], requirements)
                _run([str(python), *_PIP, "install", "-r", requirements], requirements)
                (directory / _COMPLETE).touch()
    except OSError as error:
        raise ConfigError(
            f"requirements {requirements} cannot be installed in {directory}: {error.strerror or error}; set "
            f"{CACHE_VARIABLE} to another directory"
        ) from error
    return python


def _run(command: list[str], requirements: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(
            f"requirements {requirements} cannot be installed: {shorten(reason, 300)}; correct them"
        )
