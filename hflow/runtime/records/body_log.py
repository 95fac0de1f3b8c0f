"""`bodies.log`: what bodies have printed and logged, and their tracebacks.

A line is `2026-01-31 14:25:00.123 worker 0 score sample actor_gen/17: text`. A body of groups has
`group actor_gen/3` in the place of the sample, and a body of batches `step 4`, as in `metrics.jsonl`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path

from hflow.base.durable_files import write_error
from hflow.base.text import pluralize
from hflow.graph.ir import Graph, Level
from hflow.graph.queries import root_stream
from hflow.types.body_line import BodyLine

MAX_SHOWN = 10
"""Most lines that the terminal shows within `SHOWN_SECONDS`."""
SHOWN_SECONDS = 1.0

_LINE = re.compile(r"(\S+ \S+) worker (\d+) (\S+) (sample|group|step) (\S+): (.*)")


@dataclass(frozen=True)
class LoggedLine:
    """A line of the file."""

    time: str
    worker: int
    node: str
    text: str


class BodyLog:
    """Appends every line to a file, made with the first one, and shows the first ones of each second.

    Without `show`, which shows a line to the user, they are in the terminal already.
    """

    def __init__(self, path: Path, graph: Graph, show: Callable[[str], None] | None) -> None:
        self._path = path
        self._show = show
        self._trained = {stream.name for stream in graph.streams if stream.trained}
        self._kinds = {node.name: (node.spec.level, root_stream(graph, node).name) for node in graph.nodes}
        self._file: TextIOWrapper | None = None
        self._window_end = 0.0
        self._num_shown = 0
        self._hidden: Counter[str] = Counter()
        """Node -> lines that were not shown."""

    def write(self, worker: int, lines: Sequence[BodyLine]) -> None:
        """Add what bodies have printed on a worker.

        Raises:
            WriteError: when the file cannot be written.
        """
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
            for line in lines:
                at = datetime.fromtimestamp(line.time).isoformat(" ", "milliseconds")
                # The file has one line for each, whatever the text has.
                text = line.text.replace("\r", "\\r")
                self._file.write(f"{at} worker {worker} {line.node} {self._subject(line)}: {text}\n")
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) or error from error
        for line in lines:
            self._show_some(line)

    def close(self) -> None:
        """Show how many lines were left out, and close the file; safe to call twice."""
        self._show_hidden()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _subject(self, line: BodyLine) -> str:
        """Return the sample, group or step that a body was called for."""
        level, stream = self._kinds[line.node]
        if level is Level.BATCH:
            return f"step {line.key + (stream in self._trained)}"  # an evaluation has that of its weights
        return f"{level.value} {stream}/{line.key}"

    def _show_some(self, line: BodyLine) -> None:
        if self._show is None or line.is_traceback:
            return
        if time.monotonic() >= self._window_end:
            self._show_hidden()
            self._window_end, self._num_shown = time.monotonic() + SHOWN_SECONDS, 0
        if self._num_shown < MAX_SHOWN:
            self._num_shown += 1
            self._show(f"{line.node}, {self._subject(line)}: {line.text}")
        else:
            self._hidden[line.node] += 1

    def _show_hidden(self) -> None:
        if self._show is not None and self._hidden:
            number, nodes = pluralize(self._hidden.total(), "more line"), ", ".join(self._hidden)
            self._show(f"{number} of {nodes} in {self._path}")
            self._hidden.clear()


def read_body_lines(path: Path, stream: str, sample: int, group: int) -> Iterator[LoggedLine]:
    """Yield what bodies have printed for a sample or its group, in the order of the file.

    If there is no file, no body has printed anything.
    """
    wanted = {("sample", f"{stream}/{sample}"), ("group", f"{stream}/{group}")}
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for row in file:
                found = _LINE.fullmatch(row.rstrip("\n"))
                if found is not None and found.group(4, 5) in wanted:
                    at, worker, node, *_, text = found.groups()
                    yield LoggedLine(at, int(worker), node, text)
