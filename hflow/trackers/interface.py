"""What a tracker is: the observer that logs a run, and its descriptor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hflow.base.durable_files import replace_text
from hflow.observer import Observer

STATE_FILE = "trackers.json"
"""File in a run's directory: tracker -> its id of the run, with which a resumed run continues."""


class Tracker(Observer):
    """An observer that `report` asks for."""

    key: str
    """The configuration key that asks for it."""


@dataclass(frozen=True)
class TrackerKind:
    """Everything that hflow must know about a tracker outside its own file."""

    name: str
    open: Callable[[str], Tracker]
    """The value of the key that asks for it -> a new tracker."""
    packages: tuple[str, ...] = ()
    """Importable packages of hflow's extra with the tracker's name."""
    unneeded: Callable[[str], tuple[str, ...]] = lambda target: ()
    """The value of the key -> those of the packages that are not needed for it."""


def read_ids(directory: Path) -> dict[str, str]:
    """Return tracker -> its id of the run in a directory."""
    file = directory / STATE_FILE
    ids: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return ids


def write_id(directory: Path, tracker: str, run_id: str) -> None:
    """Store a tracker's id of the run in a directory."""
    ids = {**read_ids(directory), tracker: run_id}
    replace_text(directory / STATE_FILE, json.dumps(ids, indent=2) + "\n")
