"""Ends machines of a Ray cluster while a run uses them.

    python tests/fault/cluster_chaos.py

The machines are raylets on this one, each with one CPU. A run of two workers on two machines loses one of
three: it must continue on the two that are left. Then it loses another: it must end with one line that says
what is missing and how to continue, and `hflow run --resume` must complete it with a cluster of one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import RECIPES, STEPS
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster
from run_checks import STEP, metrics_of, problems_of
from run_processes import adopt_orphans, descendants, left_behind

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
"""Longest time for what the run must do."""


def main() -> None:
    """Run, end machines, and say what happened."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        problems = end_machines(Path(name))
    print("\n".join(problems) or "no problem")
    sys.exit(bool(problems))


def end_machines(out: Path) -> list[str]:
    """End two of three machines of a run, and return what is wrong then."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    recipe = RECIPES["ppo"]
    arguments = [one for one in recipe.arguments if not one.startswith("cluster=")]
    arguments += ["cluster=cpu-2x1", f"out={out}"]
    try:
        problems = _lose_two(cluster, machines, arguments, out, environment)
    finally:
        cluster.shutdown()
    return [*problems, *(f"left behind: {text}" for text in left_behind())]


def _lose_two(
    cluster: Cluster, machines: list[Any], arguments: list[str], out: Path, environment: dict[str, str]
) -> list[str]:
    log = out / "log.txt"
    run = start(arguments, log, environment)
    wait_for(run, log, lambda: num_steps(out) >= 3)
    used = [node for node in machines if has_workers(node)]
    begin, num_before = time.monotonic(), num_steps(out)
    cluster.remove_node(used[0], allow_graceful=False)
    wait_for(run, log, lambda: "(restart 1 of" in log.read_text() and num_steps(out) > num_before)
    print(f"continued on the other machines after {time.monotonic() - begin:.1f} s", flush=True)
    machines.remove(used[0])
    begin = time.monotonic()
    cluster.remove_node(machines[-1], allow_graceful=False)
    code = run.wait(SECONDS)
    lines = log.read_text().splitlines()
    print(f"ended after {time.monotonic() - begin:.1f} s with exit code {code}:", *lines[-3:], sep="\n  ")
    problems = []
    if code != 2 or not any("needs 2 machines with 1 CPU each" in line for line in lines[-3:]):
        problems.append(f"exit code {code}: {lines[-3:]}")
    if not (hint := re.search(r"hflow run --resume (\S+)", "\n".join(lines[-3:]))):
        return [*problems, "no line says how to continue"]
    run = start(["--resume", hint[1], "cluster=cpu-1x1"], log, environment)
    if run.wait(SECONDS) != 0:
        return [*problems, f"it does not continue on one machine: {log.read_text()[-1500:]}"]
    return problems + problems_of(
        Path(hint[1]),
        STEPS,
        RECIPES["ppo"].num_trained,
        exactly=True,
        models=("actor", "critic"),
        same_as=None,
    )


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `hflow run`."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "hflow", "run", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(run: subprocess.Popen[bytes], log: Path, is_so: Callable[[], bool]) -> None:
    """Wait until something is so while the run runs.

    Raises:
        RuntimeError: when the run ends, or it takes too long.
    """
    deadline = time.monotonic() + SECONDS
    while not is_so():
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise RuntimeError(f"exit code {run.poll()}: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def num_steps(out: Path) -> int:
    """Return the number of steps that a run has completed."""
    directory = next(out.glob("*/2*"), None)
    if directory is None or not (directory / "metrics.jsonl").is_file():
        return 0
    return sum(STEP in row for row in metrics_of(directory).values())


def has_workers(node: Any) -> bool:
    """Return whether workers run on a machine."""
    raylet = node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid
    return any("WorkerProcess" in " ".join(process.cmdline()) for process in descendants(raylet))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
