"""Checkpoints of a run.

Invariant: a directory `step-N` is complete. Models are saved to a hidden directory, which is renamed when
the last one is written.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from pathlib import Path


class Checkpoints:
    """The `checkpoints/` directory of a run: `step-N/MODEL/`, and `latest` -> the newest step.

    Args:
        directory: the directory.
        models: names of the models in every checkpoint.
    """

    def __init__(self, directory: Path, models: tuple[str, ...]) -> None:
        self._directory = directory
        self._models = frozenset(models)
        self._saved: dict[int, set[str]] = defaultdict(set)
        self.last: int | None = None
        """Completed steps of the newest checkpoint."""

    def begin(self, step: int, model: str) -> Path:
        """Return the empty directory to which a model of a checkpoint is to be saved."""
        path = self._partial(step) / model
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def done(self, step: int, model: str) -> Path | None:
        """Note that a model is saved. The last model completes the checkpoint, whose path is returned."""
        self._saved[step].add(model)
        if not self._saved[step] >= self._models:
            return None
        final = self._directory / f"step-{step}"
        shutil.rmtree(final, ignore_errors=True)
        self._partial(step).rename(final)
        replace_link(self._directory / "latest", final.name)
        del self._saved[step]
        self.last = step
        return final

    def drop(self, step: int) -> None:
        """Remove what was saved of a checkpoint that cannot be completed."""
        self._saved.pop(step, None)
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self._directory / f".step-{step}"


def replace_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, atomically replacing an older link."""
    new_link = link.with_name(f".{link.name}-{os.getpid()}")
    new_link.symlink_to(target)
    new_link.replace(link)
