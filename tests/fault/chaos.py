"""Ends random processes of runs at random moments, continues the runs, and checks that nothing was lost.

    python tests/fault/chaos.py --trials 20 --seed 0 --out results.json

A trial runs a recipe on Ray with a checkpoint every second, waits for a random step, and kills (SIGKILL) or
stops (SIGTERM) a process that its seed chooses. A run that ends is resumed until it is done. Then:

- the ledger is consistent: each sample has exactly one end, and none was trained twice or too old;
- as many samples were trained as the run has steps for;
- the weights of a synchronous run equal those of the same run without a fault, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import psutil
from safetensors.torch import load_file

from hflow.runtime.ledger import audit
from hflow.runtime.ledger.query import count

ROOT = Path(__file__).parents[2]
STEPS, BATCH = 6, 8
COMMON = [
    *("models.actor.path=null", f"steps={STEPS}", f"batch={BATCH}", "save_minutes=0.01"),
    *("cluster=cpu-1x2", "models.actor.optim.lr=1e-3", "collective_timeout=30.0"),
]
OWN = [
    *("+model@models.actor=tiny-qwen2", "+data@data.train=addition", "+data@data.heldout=addition"),
    *("nodes.actor_gen.max_tokens=4", "nodes.eval_gen.max_tokens=4", "data.heldout.limit=6"),
    "models.critic.optim.lr=1e-3",
]
"""What the configurations of shipped recipes have."""
RUNS = {
    "ppo": ["tests/integration/recipes/resumed.py", *COMMON, *OWN],
    "grpo_async": ["recipes/grpo_async.py", *COMMON, "nodes.eval_gen.after=1000"],
    "agent": ["recipes/tool_agent.py", *COMMON, "nodes.eval_agent.after=1000"],
}
"""Name -> recipe and configuration."""
SYNCHRONOUS = frozenset({"ppo"})
FAULTS = ("worker", "controller", "sigterm", "raylet", "reward")
GROUP_SIZES = {"ppo": 1, "grpo_async": 8, "agent": 8}
MAX_RESUMES = 5
RESUMABLE = 75


@dataclass
class Trial:
    """What was done to a run, and what became of it."""

    seed: int
    run: str
    fault: str
    after_step: int
    exit_codes: list[int] = field(default_factory=list)
    restarts: int = 0
    """Restarts within a process."""
    seconds_to_next_step: float | None = None
    """From the fault to the next line of progress."""
    problems: list[str] = field(default_factory=list)


def main() -> None:
    """Run the trials and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = {name: run_undisturbed(name, Path(directory)) for name in sorted(SYNCHRONOUS)}
        trials = []
        for seed in range(arguments.seed, arguments.seed + arguments.trials):
            trial = run_trial(seed, Path(directory) / str(seed), undisturbed)
            trials.append(trial)
            print(json.dumps(asdict(trial)), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(t) for t in trials], indent=1) + "\n")
    print(f"\n{table(trials)}")
    sys.exit(any(trial.problems for trial in trials))


def table(trials: list[Trial]) -> str:
    """Return the number of trials by run and fault, and how they ended."""
    rows = [
        "| run | fault | trials | restarted | resumed | problems |",
        "|-|-|-:|-:|-:|-:|",
    ]
    for (run, fault), number in sorted(Counter((t.run, t.fault) for t in trials).items()):
        same = [t for t in trials if (t.run, t.fault) == (run, fault)]
        restarted = sum(t.restarts > 0 for t in same)
        resumed = sum(len(t.exit_codes) > 1 for t in same)
        problems = sum(bool(t.problems) for t in same)
        rows.append(f"| {run} | {fault} | {number} | {restarted} | {resumed} | {problems} |")
    return "\n".join(rows)


def run_undisturbed(name: str, out: Path) -> Path:
    """Run a recipe to its end, and return its directory."""
    child = start(["run", *RUNS[name], f"out={out / 'undisturbed'}"])
    output, _ = child.communicate(timeout=600)
    assert child.returncode == 0, output
    return directory_of(out / "undisturbed")


def run_trial(seed: int, out: Path, undisturbed: dict[str, Path]) -> Trial:
    """Disturb one run, continue it, and check it."""
    random = Random(seed)
    name, fault = random.choice(sorted(RUNS)), random.choice(FAULTS)
    trial = Trial(seed, name, fault, random.randint(1, STEPS - 1))
    child = start(["run", *RUNS[name], f"out={out}"])
    output = disturb(child, trial, random)
    trial.exit_codes.append(child.wait(600))
    assert list(out.glob("*/2*")), output
    while trial.exit_codes[-1] != 0 and len(trial.exit_codes) <= MAX_RESUMES:
        child = start(["run", "--resume", str(directory_of(out))])
        more, _ = child.communicate(timeout=600)
        output += more
        is_complete = "has completed its" in more  # it was ended after its last checkpoint
        trial.exit_codes.append(0 if is_complete else child.returncode)
    trial.restarts = len(re.findall(r"\(restart \d+ of", output))
    if "Traceback" in output:
        trial.problems.append(output[output.index("Traceback") :][-2000:])
    if trial.exit_codes[-1] != 0:
        trial.problems.append(f"it does not end: {output[-2000:]}")
    else:
        check(trial, directory_of(out), undisturbed.get(name))
    return trial


def check(trial: Trial, directory: Path, undisturbed: Path | None) -> None:
    """Note what is wrong with a finished run."""
    trial.problems += audit(directory / "ledger.sqlite")
    trained = count(directory / "ledger.sqlite", "\"end\" = 'trained'")
    expected = STEPS * BATCH * GROUP_SIZES[trial.run]
    if trained > expected or (trial.run != "agent" and trained != expected):
        trial.problems.append(f"{trained} samples were trained, not {expected}")
    if undisturbed is not None:
        for model in ("actor", "critic"):
            path = Path("checkpoints/latest") / model / "model.safetensors"
            ours, theirs = load_file(directory / path), load_file(undisturbed / path)
            if any(not ours[key].equal(theirs[key]) for key in theirs):
                trial.problems.append(f"the weights of {model} differ from those without a fault")


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start `hflow` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hflow", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def directory_of(out: Path) -> Path:
    """Return the directory of the only run in `out`."""
    (directory,) = out.glob("*/2*")
    return directory


def disturb(child: subprocess.Popen[str], trial: Trial, random: Random) -> str:
    """Wait for a step, end a process of the run, and return what the run prints."""
    assert child.stdout is not None
    lines: list[str] = []
    struck_at = None
    for line in child.stdout:
        lines.append(line)
        step = re.match(r"step (\d+)/", line)
        if struck_at is not None and step and trial.seconds_to_next_step is None:
            trial.seconds_to_next_step = round(time.monotonic() - struck_at, 2)
        if struck_at is None and step and int(step[1]) >= 1:
            time.sleep(random.uniform(0.0, 1.5))
            strike(child, trial.fault, random)
            struck_at = time.monotonic()
    return "".join(lines)


def strike(child: subprocess.Popen[str], fault: str, random: Random) -> None:
    """End a process of a run, if there is one of the kind."""
    if fault == "controller":
        child.kill()
    elif fault == "sigterm":
        child.terminate()
    else:
        victims = [process for process in descendants(child.pid) if is_victim(process, fault)]
        if victims:
            random.choice(victims).kill()


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes of a run, in the order of their ids."""
    try:
        return sorted(psutil.Process(pid).children(recursive=True), key=lambda process: process.pid)
    except psutil.NoSuchProcess:
        return []


def is_victim(process: psutil.Process, fault: str) -> bool:
    """Return whether a process is of the kind that a fault ends."""
    try:
        name, command = process.name(), " ".join(process.cmdline())
    except psutil.Error:
        return False
    match fault:
        case "worker":
            return "WorkerProcess" in command or "RayWorker" in command
        case "raylet":
            return name == "raylet"
        case _:
            return "pool_child" in command
    return False


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
