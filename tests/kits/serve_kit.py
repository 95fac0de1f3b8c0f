"""`hflow serve` as a process."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from runs import ROOT


class Served:
    """A running `hflow serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1], process.communicate()[1]
        self.title, self.example = lines
        self.url = self.title.split()[2]

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=self.url, api_key=key, timeout=60, max_retries=0)

    def run_example(self) -> int:
        """Send the request of the printed curl command; returns how many tokens the reply has.

        The reply is sampled, so its text may be empty: its first token may end it.
        """
        words = shlex.split(self.example)
        assert words[0] == "curl"
        headers = [words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H"]
        body = words[words.index("-d") + 1].encode()
        request = urllib.request.Request(words[1], body, dict(headers))
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(json.load(reply)["usage"]["completion_tokens"])

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; returns the exit code and what was written to stderr."""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, errors


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "hflow", "serve", *map(str, arguments), "--port", "0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            yield Served(process)
        finally:
            process.terminate()
