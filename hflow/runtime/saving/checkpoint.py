"""Checkpoints of a run.

Invariant: a directory `step-N` is complete. A checkpoint is written to a hidden directory; when all of it is
on disk, its manifest is written, and the directory is renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.base.durable_files import FileChecksum, file_checksum, sync
from hflow.base.errors import RunError
from hflow.base.json_text import parse_json

FORMAT = 1
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
SET_ASIDE = "before-rewind-"
"""Prefix of the names of checkpoints after the one from which their run was continued."""


class Checkpoints:
    """The `checkpoints/` directory of a run: `step-N/`, `latest` -> the newest, `best` -> the best.

    Args:
        keep: number of the newest checkpoints to keep; None: all.
        best: metric whose highest value chooses a checkpoint that is kept too; `-NAME`: the lowest.
    """

    def __init__(self, directory: Path, keep: int | None = None, best: str | None = None) -> None:
        self._directory = directory
        self._keep = keep
        self._metric = None if best is None else best.removeprefix("-")
        self._sign = -1.0 if best is not None and best.startswith("-") else 1.0
        self._values: dict[int, float] = {}
        """Completed steps -> value of the metric."""

    @property
    def steps(self) -> list[int]:
        """Completed steps of all checkpoints, ascending."""
        names = (path.name.removeprefix("step-") for path in self._directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def last(self) -> int | None:
        """Completed steps of the newest checkpoint."""
        return max(self.steps, default=None)

    def describe(self) -> str:
        """Return the directory of the newest checkpoint, or `none`."""
        return "none" if self.last is None else str(self.path(self.last))

    def begin(self, step: int, part: str) -> Path:
        """Return the empty directory to which a part of a checkpoint is to be saved."""
        path = self.unfinished(step) / part
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def unfinished(self, step: int) -> Path:
        """Return the directory of a checkpoint that is being written."""
        return self._directory / f".step-{step}"

    def path(self, step: int) -> Path:
        """Return the directory of a complete checkpoint."""
        return self._directory / f"step-{step}"

    def finish(self, step: int, files: Mapping[str, FileChecksum], plan_digest: str) -> Path:
        """Complete a checkpoint whose parts are on disk, and remove those that need not be kept.

        `files` has size and checksum of files that workers wrote, by path in the directory. Others are read
        again.
        """
        directory, final = self.unfinished(step), self.path(step)
        paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
        names = {path.relative_to(directory).as_posix(): path for path in paths}
        checksums = {name: files.get(name) or file_checksum(path) for name, path in names.items()}
        manifest = {"format": FORMAT, "step": step, "plan": plan_digest, "files": checksums}
        manifest["checksum"] = _manifest_checksum(manifest)
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for path in {*paths, directory / MANIFEST}:
            if path.relative_to(directory).as_posix() not in files:
                sync(path)
        for path in {path.parent for path in paths} | {directory}:
            sync(path)
        old = self._directory / f".old-step-{step}"
        if final.exists():
            final.rename(old)
        directory.rename(final)
        sync(self._directory)
        replace_link(self._directory / LATEST, final.name)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        return final

    def drop(self, step: int) -> None:
        """Remove what was saved of a checkpoint that cannot be completed."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def drop_unfinished(self) -> None:
        """Remove what a run that was killed left behind."""
        for path in (*self._directory.glob(".step-*"), *self._directory.glob(".old-step-*")):
            shutil.rmtree(path, ignore_errors=True)
        for path in (*self._directory.glob(f".{LATEST}-*"), *self._directory.glob(f".{BEST}-*")):
            path.unlink(missing_ok=True)

    def link_latest(self) -> None:
        """Link `latest` to the newest checkpoint, as a run may be killed when it has completed one."""
        link = self._directory / LATEST
        if self.last is not None and not (link.is_symlink() and link.readlink() == Path(f"step-{self.last}")):
            replace_link(link, f"step-{self.last}")

    def rewind(self, step: int) -> list[str]:
        """Rename the checkpoints of later steps, which the run takes again, and return their new names.

        They are no longer checkpoints of the run, which would otherwise continue from the newest of them.
        """
        renamed = []
        for later in (number for number in self.steps if number > step):
            aside = self._directory / f"{SET_ASIDE}step-{later}"
            shutil.rmtree(aside, ignore_errors=True)
            self.path(later).rename(aside)
            renamed.append(aside.name)
        self.link_latest()
        best = self._directory / BEST
        if best.is_symlink() and not best.exists():
            best.unlink()
        return renamed

    def restore_values(self, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Note the curves of a run that continues, so that its best checkpoint so far is kept."""
        for step, value in curves.get(self._metric or "", ()):
            self._values[step] = self._sign * value
        self._prune()

    def add_values(self, step: int, values: Mapping[str, float]) -> None:
        """Note the metrics of a number of completed steps, one of which may choose the best checkpoint."""
        value = values.get(self._metric or "")
        if value is not None and math.isfinite(value):
            self._values[step] = self._sign * value
            self._prune()

    def _prune(self) -> None:
        """Remove checkpoints that are neither among the newest nor the best."""
        steps = self.steps
        best = max((step for step in steps if step in self._values), key=self._best_key, default=None)
        if best is not None:
            replace_link(self._directory / BEST, self.path(best).name)
        if self._keep is not None:
            for step in steps[: -self._keep]:
                if step != best:
                    shutil.rmtree(self.path(step), ignore_errors=True)

    def _best_key(self, step: int) -> tuple[float, int]:
        return self._values[step], step


def verify_checkpoint(directory: Path, concerns: Callable[[str], bool] = lambda name: True) -> int:
    """Check the files of a checkpoint against its manifest, and return the completed steps.

    `concerns` says whether a file, by its path in the directory, is checked; default: all are.

    Raises:
        RunError: when a file is missing or damaged; names it.
    """
    try:
        manifest = parse_json((directory / MANIFEST).read_bytes())
        number, step, files = manifest["format"], int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{directory} is not a complete checkpoint: {MANIFEST}: {error}; use another"
        ) from None
    if number != FORMAT:
        raise RunError(
            f"{directory} has format {number!r}, but this version of hflow reads format {FORMAT}; "
            f"{other_version_fix(directory)}"
        )
    checksum = manifest.pop("checksum", None)  # None: an earlier version wrote it
    if checksum is not None and checksum != _manifest_checksum(manifest):
        raise RunError(
            f"the checkpoint {directory} is damaged: {MANIFEST} does not have the content that was written; "
            "use another"
        )
    for name, expected in files.items():
        if not concerns(name):
            continue
        path = directory / name
        if not path.is_file():
            raise RunError(f"the checkpoint {directory} is damaged: {name} is missing; use another")
        if list(file_checksum(path)) != list(expected):
            raise RunError(
                f"the checkpoint {directory} is damaged: {name} does not have the content that was written; "
                "use another"
            )
    return step


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest without its own, by which an entry that is removed is noticed."""
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


def other_version_fix(directory: Path) -> str:
    """Return the advice for a checkpoint that another version of hflow wrote."""
    return (
        "use the version of hflow that wrote it, or begin another run with "
        f"models.NAME.path={directory}/NAME models.NAME.resume=true"
    )


def replace_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, atomically replacing an older link."""
    new_link = link.with_name(f".{link.name}-{os.getpid()}")
    new_link.unlink(missing_ok=True)  # of a process that ended here and had the same id
    new_link.symlink_to(target)
    new_link.replace(link)
