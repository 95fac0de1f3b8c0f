"""Kills runs that have all workers in one process, at random moments, and continues them until they are done.

    python tests/fault/inproc_chaos.py --kills 200 --seed 0 --out results.json

Every attempt is forked from a process that has imported everything, so that it costs seconds less than to
start one. It is killed (SIGKILL), in turn

- at a random file operation below the run's directory (Python's audit events: open, rename, mkdir, symlink,
  remove), just before it or up to 3 ms later; most of these operations belong to checkpoints;
- or at a random time.

The whole run ends with it, so this covers what is on the disk: checkpoints, ledger, metrics, and the lock. It
does not cover workers that end by themselves, collectives, or Ray: `chaos.py` does. A completed run must pass
the same checks, and PPO must equal the undisturbed run bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from run_checks import problems_of
from run_processes import adopt_orphans, left_behind

ROOT = Path(__file__).parents[2]
STEPS, BATCH = 6, 4
KILLS_PER_RUN = 8
ATTEMPT_SECONDS = 600.0
"""Longest time of one attempt."""
FILE_EVENTS = frozenset(
    {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "sqlite3.connect"}
)
"""Audit events of operations on files, with the path first."""
KILLED = (-signal.SIGKILL, -signal.SIGALRM)
"""Exit codes of attempts that were killed; the alarm's signal is not handled either."""
LONGEST_DELAY = 0.003
"""Most seconds after the operation at which a process is killed."""
COMMON = [
    *("models.actor.path=null", f"steps={STEPS}", f"batch={BATCH}", "save_every=1", "save_minutes=0"),
    *("workers=inproc", "models.actor.optim.lr=1e-3", "--plain"),
]
RUNS = {
    "ppo": [
        *("tests/integration/recipes/resumed.py", *COMMON, "cluster=cpu-1x1", "deterministic=true"),
        *("+model@models.actor=tiny-qwen2", "+data@data.train=addition", "+data@data.heldout=addition"),
        *("nodes.actor_gen.max_tokens=4", "nodes.eval_gen.max_tokens=4", "data.heldout.limit=6"),
        "models.critic.optim.lr=1e-3",
    ],
    "grpo_async": ["recipes/grpo_async.py", *COMMON, "cluster=cpu-1x2", "nodes.eval_gen.after=1000"],
}
"""Name -> the arguments of `hflow run`."""
NUM_TRAINED = {"ppo": STEPS * BATCH, "grpo_async": STEPS * BATCH * 8}


@dataclass
class Attempt:
    """A process of a run: when it was to be killed, and how it ended."""

    kill_at: str
    """`operation 17`, the same `+ 0.0012 s`, `+ 1.2 s` after the start, or empty."""
    exit_code: int
    seconds: float
    last_operation: str = ""
    """The file operation before which it was killed."""


@dataclass
class InprocResult:
    """A run that was killed several times."""

    run: str
    seed: int
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        """Number of attempts that were killed."""
        return sum(attempt.exit_code in KILLED for attempt in self.attempts)


@dataclass(frozen=True)
class Kill:
    """When an attempt kills itself; None: not then."""

    operation: int | None = None
    seconds: float | None = None
    """After the operation; without one, after the start."""

    def __str__(self) -> str:
        at = "" if self.operation is None else f"operation {self.operation}"
        return at if self.seconds is None else f"{at} + {self.seconds:.4f} s"


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    directory: Path
    seconds: float
    num_operations: int


def main() -> None:
    """Run until enough processes were killed, and print what was found."""
    parser = argparse.ArgumentParser(description="Kill runs in one process.")
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", choices=RUNS, action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    adopt_orphans()
    results: list[InprocResult] = []
    with tempfile.TemporaryDirectory(prefix="inproc-chaos-") as name:
        references: dict[str, Reference] = {}
        names, seed = arguments.run or sorted(RUNS, reverse=True), arguments.seed
        while (missing := arguments.kills - sum(result.num_kills for result in results)) > 0:
            run = names[seed % len(names)]
            if run not in references:
                references[run] = run_undisturbed(run, Path(name) / f"undisturbed-{run}")
            number = min(KILLS_PER_RUN, missing)
            results.append(disturb(run, seed, number, Path(name) / str(seed), references[run]))
            print(json.dumps(asdict(results[-1])), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
            seed += 1
    sys.exit(any(result.problems for result in results))


def run_undisturbed(run: str, out: Path) -> Reference:
    """Run to the end, import here what the run imported, and count its file operations.

    Raises:
        RuntimeError: when the run is not right.
    """
    out.mkdir()
    start = time.monotonic()
    code = _attempt([*RUNS[run], f"out={out}"], out, Kill())
    if code != 0:
        raise RuntimeError(f"{run} does not run: {_log(out)}")
    report = json.loads((out / "report.json").read_text())
    for name in report["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert threading.active_count() == 1, "only a process without threads can be forked"
    return Reference(_directory(out), time.monotonic() - start, report["num_operations"])


def disturb(run: str, seed: int, num_kills: int, out: Path, reference: Reference) -> InprocResult:
    """Kill a run several times, continue it to its end, and check it."""
    random, result = Random(seed), InprocResult(run, seed)
    out.mkdir()
    while not result.problems:
        kill = _choose(random, reference) if result.num_kills < num_kills else Kill()
        is_begun = any(out.glob("*/2*/plan.json"))
        arguments = ["--resume", str(_directory(out))] if is_begun else [*RUNS[run], f"out={out}"]
        start = time.monotonic()
        code = _attempt(arguments, out, kill)
        operation = (out / "operation.txt").read_text() if (out / "operation.txt").is_file() else ""
        result.attempts.append(Attempt(str(kill), code, round(time.monotonic() - start, 2), operation))
        log = _log(out)
        if code == 0 or "has completed its" in log:
            break
        if code not in KILLED:
            result.problems.append(f"exit code {code}: {log[-1500:]}")
    result.problems += [f"left behind: {text}" for text in left_behind()]
    if not result.problems:
        result.problems += problems_of(
            _directory(out),
            STEPS,
            NUM_TRAINED[run],
            exactly=True,
            models=("actor", "critic") if run == "ppo" else ("actor",),
            same_as=reference.directory if run == "ppo" else None,
        )
    return result


def _choose(random: Random, reference: Reference) -> Kill:
    """Return a random moment in the first half of what an undisturbed run takes, so that runs progress."""
    if random.random() < 0.75:
        delay = random.choice([None, random.uniform(0, LONGEST_DELAY)])
        return Kill(random.randint(1, reference.num_operations // 2), delay)
    return Kill(seconds=random.uniform(0.0, reference.seconds / 2))


def _attempt(arguments: list[str], out: Path, kill: Kill) -> int:
    """Run `hflow run` in a forked process until it ends or is killed, and return its exit code."""
    (out / "operation.txt").unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(arguments, out, kill)
    is_timed = kill.operation is None and kill.seconds is not None
    deadline = time.monotonic() + (kill.seconds if is_timed else ATTEMPT_SECONDS)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL if is_timed else -signal.SIGTERM
        time.sleep(0.005)


def _child(arguments: list[str], out: Path, kill: Kill) -> None:
    """Run `hflow` in this process, which was forked. Does not return."""
    os.setsid()
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    operations = _Operations(out, kill)
    sys.addaudithook(operations.on_event)
    code = 1
    try:
        from hflow.cli import main as hflow

        sys.argv = ["hflow", "run", *arguments]
        hflow()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a process
        traceback.print_exc()
    finally:
        operations.kill = Kill()
        report = {"modules": sorted(sys.modules), "num_operations": operations.number}
        (out / "report.json").write_text(json.dumps(report))
        sys.stdout.flush()
        os._exit(code)


class _Operations:
    """Counts file operations below a directory, and kills the process just before one of them."""

    def __init__(self, out: Path, kill: Kill) -> None:
        self.number = 0
        self.kill = kill
        self._prefix = f"{out}{os.sep}"
        self._note = str(out / "operation.txt")

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event."""
        if event not in FILE_EVENTS or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if not path.startswith(self._prefix) or path == self._note:
            return
        self.number += 1
        if self.number == self.kill.operation:
            with open(self._note, "w", encoding="utf-8") as file:
                file.write(f"{event} {os.path.relpath(path, self._prefix)}")
            if self.kill.seconds:
                signal.setitimer(signal.ITIMER_REAL, self.kill.seconds)
            else:
                os.kill(os.getpid(), signal.SIGKILL)


def _directory(out: Path) -> Path:
    """Return the directory of the run that began; one that was killed before has another."""
    return next(out.glob("*/2*/plan.json")).parent


def _log(out: Path) -> str:
    return (out / "log.txt").read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
