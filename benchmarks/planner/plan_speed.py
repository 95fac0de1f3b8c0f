"""Seconds and memory of `hflow plan` on 8 to 16,384 GPUs, start-up of the process included.

python -m benchmarks.planner.plan_speed [--tree DIR] [--devices N ...]

Every measurement is a new process: processor seconds (other programs on the machine hardly change them) and
the peak of resident memory. `--tree` measures another checkout, for a comparison.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness

HERE = Path(__file__).resolve().parents[2]
CASES: dict[str, tuple[str, str, int, str]] = {
    "grpo-7b": ("grpo", "qwen2.5-7b", 1, "actor,actor.gen=0-{last}"),
    "ppo-7b": ("ppo", "qwen2.5-7b", 4, "actor,critic,ref,actor.gen=0-{last}"),
    "grpo-72b": ("grpo", "qwen2.5-72b", 1, "actor=0-{last}:d{half}t8p2 actor.gen=actor:d{whole}t8"),
}
"""Case -> recipe, model, prompts of a batch for each device, and placement, so that nothing is searched."""


def command(case: str, num_devices: int) -> list[str]:
    """Return the command line of a case. In its placement, `{whole}` is the number of machines."""
    recipe, model, prompts, placement = CASES[case]
    models = ("actor", "critic", "ref") if recipe == "ppo" else ("actor",)
    settings = [
        f"model@models.actor={model}",
        "models.actor.path=null",
        *(f"models.{name}.backend=megatron" for name in models),
        f"cluster=h100-{num_devices // 8}x8",
        f"batch={prompts * num_devices}",
        f"schedule.max_concurrent={16 * num_devices}",
        "workload.prompt=512",
        "workload.response_mean=1024",
        "nodes.actor_gen.max_tokens=1536",
        "models.actor.tokens_per_microbatch=4096",
        "placement=" + placement.format(last=num_devices - 1, whole=num_devices // 8, half=num_devices // 16),
    ]
    return [sys.executable, "-m", "hflow", "plan", f"recipes/{recipe}.py", *settings]


def measure(case: str, num_devices: int, tree: Path) -> dict[str, Any]:
    """Plan once in a new process, and return its processor seconds and peak memory."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    child = subprocess.Popen(
        command(case, num_devices), cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    error = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{case} on {num_devices} devices: {error.decode()[-500:]}")
    seconds = usage.ru_utime + usage.ru_stime
    return {"seconds": round(seconds, 2), "mib": usage.ru_maxrss // 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=HERE)
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 64, 1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="plan-speed")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for num_devices in args.devices:
        for case in CASES:
            rows = [measure(case, num_devices, args.tree) for _ in range(args.rounds)]
            best = min(rows, key=lambda row: row["seconds"])
            found.setdefault(case, {})[str(num_devices)] = best
            print(case, num_devices, best, flush=True)
    print(harness.write(args.name, {"rounds": args.rounds, "fastest_round": found}))


if __name__ == "__main__":
    main()
