"""Interleaved measurements of child processes, and dated result files.

Two programs are compared A B A B …, so that a drift of the machine's speed affects both;
medians are reported, and the ratio is taken pair by pair. A child is a script that prints one
JSON object a measurement: either once at its end, or once for every line that it is sent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


class Server:
    """A child process that measures once for every line on its stdin."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self._child.args!r} ended with status {self._child.wait()}")

    def measure(self, what: object = "go") -> dict[str, Any]:
        """One measurement, of what the line says."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{what}\n")
        self._child.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)


def run_once(command: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a child to its end and return the last JSON object that it printed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **(env or {})}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


def interleave(
    measures: Mapping[str, Callable[[], dict[str, Any]]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all measurements in turn, `rounds` times."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            rows[name].append(measure())
    return rows


def compare(rows: Mapping[str, list[dict[str, Any]]], figure: str, base: str) -> dict[str, Any]:
    """Return median, minimum and maximum of a figure, and the pairwise ratio of each to `base`."""
    found: dict[str, Any] = {}
    for name, measured in rows.items():
        values = [row[figure] for row in measured]
        ratios = [row[figure] / other[figure] for row, other in zip(measured, rows[base], strict=True)]
        found[name] = {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            f"ratio_to_{base}": statistics.median(ratios),
        }
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs of a sweep. A last line without its end is removed: the sweep was killed."""
    text = path.read_text() if path.exists() else ""
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a finished run to those of a sweep."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def numbers(args: argparse.Namespace) -> dict[str, int]:
    """Return the arguments that describe the measurement, without paths of this machine."""
    return {name: value for name, value in vars(args).items() if isinstance(value, int)}


def write(name: str, content: Mapping[str, Any], path: Path | None = None) -> Path:
    """Write a result file with the machine it was measured on, by default a dated one among the results."""
    path = path or RESULTS / f"{datetime.date.today().isoformat()}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    path.write_text(json.dumps({"machine": machine, **content}, indent=2) + "\n")
    return path
