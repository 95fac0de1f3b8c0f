"""A run of which processes are ended or stopped at random moments, and which is resumed until it is done."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
from run_checks import STEP, problems_of
from run_processes import descendants, left_behind, shared_files, with_role

ROOT = Path(__file__).parents[2]
STUCK_SECONDS = 240.0
"""A run that completes no step for so long is stuck."""
MAX_PROCESSES = 40
"""Most processes with which a run is continued."""
VICTIM_SECONDS = 30.0
"""Longest wait for a process that a fault may hit."""
POLL_SECONDS = 0.02
PAUSE_SECONDS = (0.2, 6.0)
"""Shortest and longest time for which a process is paused."""

ACTIONS = {
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "hang": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
}
"""Action on a process -> its signal. A paused process continues, a hanging one does not."""
MOMENTS = ("step", "save", "soon")
"""After a further step; while a checkpoint is written; a short time after the last fault or the start of the
process, so that it starts or restarts."""
WAYS = {"restart": "restart", "replace": "replace", "start": "resume"}
"""What happens after a fault -> what the table calls it."""
CODES = {
    "kill": {-signal.SIGKILL},
    "term": {75, -signal.SIGTERM, 128 + signal.SIGTERM},
    "int": {75, -signal.SIGINT, 128 + signal.SIGINT},
}
"""Action on the controller -> the exit codes that it may lead to, also before hflow handles signals."""
_RESTART = re.compile(r"continues after step (\d+) \(restart (\d+) of (\d+)\)")
_REPLACED = "is started again while the run continues"
_RAW_ERROR = re.compile(r"Traceback \(most recent call last\)|\*\*\* SIG\w+ received|Check failed:")


@dataclass(frozen=True)
class Fault:
    """What is done to which process of a run, and when."""

    role: str
    """`controller`, or one of `run_processes.ROLES`."""
    action: str
    moment: str = "step"
    delay: float = 0.0
    """Seconds after the moment."""

    @property
    def name(self) -> str:
        """Return what the table calls it."""
        return f"{self.action} {self.role}"


@dataclass
class Strike:
    """A fault that was done, and what became of it."""

    fault: str
    moment: str
    step: int
    """Completed steps before it."""
    survived_by: str = "nothing to do"
    """`restart` of all workers, `replace` of one, `resume` in a new process, or nothing."""
    seconds: float | None = None
    """Until the next step was completed; None: a further fault or the end of the run came first."""


@dataclass(frozen=True)
class Recipe:
    """A run to disturb, and what a completed run of it must have."""

    name: str
    arguments: Sequence[str]
    steps: int
    num_trained: int
    """Samples."""
    exactly: bool = True
    models: Sequence[str] = ("actor",)
    is_synchronous: bool = False


@dataclass
class Result:
    """A run that was disturbed."""

    run: str
    seed: int
    strikes: list[Strike] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    restarts: int = 0
    replacements: int = 0
    """Workers that were started again while the run continued."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)


@dataclass(frozen=True)
class _Event:
    """Something that happened: `start`, `exit`, `strike`, `restart`, `replace` or `step`, with its number."""

    at: float
    kind: str
    number: int


class DisturbedRun:
    """Runs a recipe, does the faults one after another, continues the run to its end, and checks it.

    Args:
        recipe: the run.
        seed: names the run in results.
        faults: what to do.
        out: directory for results and logs.
        same_as: directory of the undisturbed run, for a synchronous run.
        on_strike: called after every fault, with what is known so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        faults: Sequence[Fault],
        out: Path,
        same_as: Path | None = None,
        on_strike: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self.result = Result(recipe.name, seed)
        self._recipe = recipe
        self._faults = faults
        self._out = out
        self._same_as = same_as
        self._on_strike = on_strike
        self._random = Random(seed)
        self._events: list[_Event] = []
        self._pids: set[int] = set()
        """Processes of the run that were seen."""
        self._expected: set[int] = {0}
        """Exit codes that the present process may end with."""
        self._rows: set[bytes] = set()
        """Rows of metrics that were seen; a run that continues rewrites their file."""
        self._num_log_characters = 0
        self._is_over = False
        self._process: subprocess.Popen[bytes]

    # The run
    def run(self) -> Result:
        """Run, disturb, continue and check."""
        start = time.monotonic()
        self._out.mkdir(parents=True)
        self._start()
        for fault in self._faults:
            if not self._wait_for(fault):
                break
            self._strike(fault)
            self._on_strike(self.result)
        while not self._is_over:
            self._wait(lambda: False)
        self._survivals()
        self.result.seconds = round(time.monotonic() - start, 1)
        self._check()
        return self.result

    @property
    def directory(self) -> Path | None:
        """The run's directory, in which it has begun; None: the run has made none."""
        return next((path.parent for path in self._out.glob("*/2*/plan.json")), None)

    def _start(self) -> None:
        number = len(self.result.exit_codes)
        directory = self.directory
        arguments = ["--resume", str(directory)] if directory else self._recipe.arguments
        if directory is None:
            arguments = [*arguments, f"out={self._out}"]
        with (self._out / f"log-{number}.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hflow", "run", *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._expected, self._num_log_characters = {0}, 0
        self._note("start", number)

    def _note(self, kind: str, number: int) -> None:
        self._events.append(_Event(time.monotonic(), kind, number))

    # What happens
    def _wait_for(self, fault: Fault) -> bool:
        """Wait for the moment of a fault. Returns False if the run is over before."""
        if fault.moment != "soon":
            first = self._last("strike")
            self._wait(lambda: self._last("step") > first)
        if fault.moment == "save":
            self._wait(lambda: self.directory is not None and any(self.directory.glob("checkpoints/.step-*")))
        self._wait_seconds(fault.delay)
        return not self._is_over

    def _wait(self, is_time: Callable[[], bool]) -> None:
        """Wait until something is so, or the run is over; resume it whenever its process ends."""
        while not self._is_over and not is_time():
            self._look()
            time.sleep(POLL_SECONDS)

    def _wait_seconds(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= until)

    def _look(self) -> None:
        """Note what has happened."""
        code = self._process.poll()
        self._read_metrics()
        self._read_log()
        if code is not None:
            self._on_exit(code)
        elif time.monotonic() - max(self._last("step"), self._last("start"), self._last("strike")) > (
            STUCK_SECONDS
        ):
            self.result.problems.append(f"no step for {STUCK_SECONDS:g} s: {self._tail()}")
            self._expected = {-signal.SIGKILL}
            self._process.kill()
            self._process.wait()

    def _read_metrics(self) -> None:
        if self.directory is None or not (path := self.directory / "metrics.jsonl").is_file():
            return
        text = path.read_bytes()
        for line in text[: text.rfind(b"\n") + 1].splitlines():
            if line not in self._rows:
                self._rows.add(line)
                row = json.loads(line)
                if STEP in row:
                    self._note("step", row["step"])

    def _read_log(self) -> None:
        text = self._log()
        end = text.rfind("\n") + 1
        for line in text[self._num_log_characters : end].splitlines():
            if found := _RESTART.search(line):
                self.result.restarts += 1
                self._check_restart(*map(int, found.groups()))
                self._note("restart", int(found[1]))
            if _REPLACED in line:
                self.result.replacements += 1
                self._note("replace", self.result.replacements)
            if _RAW_ERROR.search(line):
                self.result.problems.append(f"a raw error is shown: {line[:300]}")
        self._num_log_characters = max(end, self._num_log_characters)

    def _check_restart(self, step: int, number: int, most: int) -> None:
        """Check how a restart is counted: from 1 again after a new checkpoint."""
        before = [event for event in self._events if event.kind in ("start", "restart")][-1]
        if number > most:
            self.result.problems.append(f"restart {number} of {most}")
        if before.kind == "restart" and (number == 1) != (step > before.number):
            self.result.problems.append(
                f"restart {number} from step {step} follows one from step {before.number}"
            )
        if number == most:
            self._expected.add(2)

    def _on_exit(self, code: int) -> None:
        self._note("exit", code)
        text = self._log()
        is_complete = "has completed its" in text
        if code not in self._expected and not is_complete:
            self.result.problems.append(f"exit code {code}: {self._tail()}")
        self.result.exit_codes.append(code)
        self._is_over = code == 0 or is_complete or len(self.result.exit_codes) >= MAX_PROCESSES
        if not self._is_over:
            self._start()

    def _last(self, kind: str) -> float:
        """Return when something last happened; 0.0 if it has not."""
        return next((event.at for event in reversed(self._events) if event.kind == kind), 0.0)

    def _log(self) -> str:
        path = self._out / f"log-{len(self.result.exit_codes)}.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def _tail(self) -> str:
        return self._log()[-1500:]

    # Faults
    def _victims(self, fault: Fault) -> list[psutil.Process]:
        """Return the processes that a fault may hit; a run that starts has them a little later."""
        if fault.role == "controller":
            return [psutil.Process(self._process.pid)]
        until = time.monotonic() + VICTIM_SECONDS
        while not (victims := with_role(self._process.pid, fault.role)) and time.monotonic() < until:
            self._wait_seconds(0.2)
            if self._is_over:
                return []
        return victims

    def _strike(self, fault: Fault) -> None:
        """Do a fault, if there is a process for it."""
        victims = self._victims(fault)
        if not victims:
            return
        self._pids |= {process.pid for process in descendants(self._process.pid)} | {self._process.pid}
        steps = [event.number for event in self._events if event.kind == "step"]
        victim = self._random.choice(victims)
        self.result.strikes.append(Strike(fault.name, fault.moment, steps[-1] if steps else 0))
        self._note("strike", len(self.result.strikes) - 1)
        if fault.role == "controller":
            self._expected |= CODES.get(fault.action, set())
        try:
            victim.send_signal(ACTIONS[fault.action])
        except psutil.NoSuchProcess:
            return
        if fault.action == "pause":
            until = time.monotonic() + self._random.uniform(*PAUSE_SECONDS)
            while time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            try:
                victim.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                return

    def _survivals(self) -> None:
        """Note how the run survived each fault, and how long that took."""
        at = {event.number: event.at for event in self._events if event.kind == "strike"}
        for number, strike in enumerate(self.result.strikes):
            window = [e for e in self._events if at[number] < e.at < at.get(number + 1, float("inf"))]
            turns = [event for event in window if event.kind in WAYS]
            if turns:
                strike.survived_by = WAYS[turns[-1].kind]
            first = turns[-1].at if turns else at[number]
            steps = [event.at for event in window if event.kind == "step" and event.at > first]
            strike.seconds = round(steps[0] - at[number], 2) if steps else None

    # The end
    def _check(self) -> None:
        problems, recipe = self.result.problems, self._recipe
        problems += [f"left behind: {text}" for text in left_behind()]
        problems += [f"left in /dev/shm: {name}" for name in shared_files(self._pids)]
        if self.directory is None or len(self.result.exit_codes) >= MAX_PROCESSES:
            problems.append(f"it does not end: {self._tail()}")
            return
        problems += problems_of(
            self.directory,
            recipe.steps,
            recipe.num_trained,
            exactly=recipe.exactly,
            models=recipe.models,
            same_as=self._same_as,
        )


def run_undisturbed(recipe: Recipe, out: Path) -> Path:
    """Run a recipe without faults, and return its directory. A run with one worker needs no Ray for it.

    Raises:
        RuntimeError: when the run is not right.
    """
    one_process = ["workers=inproc"] if "cluster=cpu-1x1" in recipe.arguments else []
    run = DisturbedRun(replace(recipe, arguments=[*recipe.arguments, *one_process]), 0, (), out)
    result = run.run()
    if result.problems or run.directory is None:
        raise RuntimeError(f"{recipe.name} is not right without faults: {result.problems}")
    return run.directory
