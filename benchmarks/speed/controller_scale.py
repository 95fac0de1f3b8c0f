"""The controller of 1,024 workers and eight models: 20,000 samples a second, each of 20 turns.

    python -m benchmarks.speed.controller_scale --devices 1024 4096

`recipes/eight_models.py` with the real executor, state machine, data plane, ledger and metrics over virtual
workers. All seconds of the plan are stretched alike, so that its devices make `--rate` samples a second. As
in `async_virtual.py`, only CPU seconds of the controller pass. Bytes are those of pickled messages; the calls
of Ray are not included (`ray_calls.py`).

`--profile FILE` writes a profile for `pstats` or `snakeviz`, in which the workers' part is included.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.virtual_workers import ControllerTime
from benchmarks.speed.async_virtual import durations_of, execute
from hflow import launch
from hflow.planner.plan.rows import Plan

RECIPE = Path(__file__).parent / "recipes" / "eight_models.py"
GROUP = 8
TURNS = 20
SHARES = {"actor": 18, "critic": 15, "ref": 4} | {
    f"{kind}_{i}": 4 for kind, n in (("teacher", 2), ("judge", 3)) for i in range(n)
}
"""Parts of 128 of the devices; engines have the rest."""


def make_plan(num_devices: int, batch: int, num_steps: int) -> Plan:
    """Return the plan of a number of devices, each model on its own."""
    first, rows = 0, []
    for model, share in SHARES.items():
        size = share * num_devices // 128
        rows.append(f"{model}={first}-{first + size - 1}:d{size}")
        first += size
    rows.append(f"actor.gen={first}-{num_devices - 1}:d{num_devices - first}")
    return launch.plan(
        RECIPE,
        [
            f"cluster=h100-{num_devices // 8}x8",
            f"placement='{' '.join(rows)}'",
            f"batch={batch}",
            f"steps={num_steps}",
            "schedule.max_staleness=2",
            f"schedule.max_concurrent={2 * GROUP * batch}",
            "models.actor.gen.engine=vllm",
            "models.actor.gen.max_running=64",
        ],
    )


def measure(num_devices: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a plan on virtual workers, and return the seconds and bytes of its controller."""
    start = time.process_time()
    plan = make_plan(num_devices, args.batch, args.steps)
    planning = time.process_time() - start
    assert plan.forecast.period is not None
    stretch = GROUP * args.batch / args.rate / plan.forecast.period.seconds
    durations, token, slots = durations_of(plan, stretch)
    with asyncio.Runner(loop_factory=ControllerTime) as runner:
        found = runner.run(execute(plan, durations, token, slots, TURNS))
    samples = found["samples"]
    return {
        "devices": num_devices,
        "planning_cpu": planning,
        **found,
        "samples_per_second": GROUP * args.batch / found["step_seconds"],
        "cpu_us_per_sample": 1e6 * found["controller_cpu"] / samples,
        "loop_us_per_sample": 1e6 * found["loop_cpu"] / samples,
        "messages_per_second": found["messages"] / found["seconds"],
        "sent_bytes_per_sample": found["sent_bytes"] / samples,
        "received_bytes_per_sample": found["received_bytes"] / samples,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=4096, help="groups of 8")
    parser.add_argument("--rate", type=int, default=20_000, help="samples a second that the devices make")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", help="file to write a profile to")
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    if profile is not None:
        profile.enable()
    rows = []
    for num_devices in args.devices:
        rows.append(measure(num_devices, args))
        print(json.dumps(rows[-1]), flush=True)
    if profile is not None:
        profile.disable()
        profile.dump_stats(args.profile)
    elif not args.dry:
        content = {"arguments": harness.numbers(args), "load": os.getloadavg(), "rows": rows}
        print(harness.write("controller-scale", content))


if __name__ == "__main__":
    main()
