"""The directory in which each machine keeps what it makes once, such as virtual environments."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "HFLOW_CACHE"


def cache_directory() -> Path:
    """Return the directory: that of `HFLOW_CACHE`, or `~/.cache/hflow`. It may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hflow"
