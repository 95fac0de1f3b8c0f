"""Checkpoints appear whole: models are saved beside, and the step is published when all are there."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from pathlib import Path


class Checkpoints:
    """The `checkpoints/` directory of a run: `step-N/MODEL/`, and `latest` -> the newest step."""

    def __init__(self, directory: Path, models: tuple[str, ...]) -> None:
        self._directory = directory
        self._models = frozenset(models)
        self._saved: dict[int, set[str]] = defaultdict(set)
        self.last: int | None = None
        """Completed steps of the newest checkpoint."""

    def begin(self, step: int, model: str) -> Path:
        """Where a model goes until its checkpoint is complete."""
        path = self._partial(step) / model
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def done(self, step: int, model: str) -> Path | None:
        """Note that a model is written; the last one publishes the checkpoint and returns its path."""
        self._saved[step].add(model)
        if not self._saved[step] >= self._models:
            return None
        final = self._directory / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        self._partial(step).rename(final)
        point(self._directory / "latest", final.name)
        del self._saved[step]
        self.last = step
        return final

    def _partial(self, step: int) -> Path:
        return self._directory / f".step-{step}"


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, replacing an older one at once."""
    fresh = link.with_name(f".{link.name}-{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)
