"""CPU time that the state machine takes for a sample: from its group's opening to the step that trains it.

    python -m benchmarks.speed.state_machine

Simulated runs of a synchronous and an asynchronous recipe. Only `RunState.handle` is timed: not the virtual
clock, the engines and the lengths of responses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from hflow.launch.planning.compile import compile_recipe
from hflow.runtime.simulation.simulate_plan import simulate_plan
from hflow.runtime.state.run_state import RunState

ROOT = Path(__file__).parents[2]
RECIPES = {
    "grpo": ["cluster=h100-1x1", "batch=512"],
    "grpo_async": ["cluster=h100-1x2", "batch=512"],
}
GROUP = 8


def measure(recipe: str, num_steps: int) -> dict[str, float]:
    """Simulate a run; return microseconds of CPU time and events for each sample."""
    plan = compile_recipe(ROOT / "recipes" / f"{recipe}.py", RECIPES[recipe]).plan
    handle, seconds, num_events = RunState.handle, 0.0, 0

    def timed(self: RunState, *args: Any) -> Any:
        nonlocal seconds, num_events
        start = time.thread_time()
        try:
            return handle(self, *args)
        finally:
            seconds += time.thread_time() - start
            num_events += 1

    RunState.handle = timed  # type: ignore[method-assign]
    try:
        simulate_plan(plan, num_steps)
    finally:
        RunState.handle = handle  # type: ignore[method-assign]
    num_samples = num_steps * 512 * GROUP
    return {"us": 1e6 * seconds / num_samples, "events": num_events / num_samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="of 4,096 samples")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = {"configuration": harness.numbers(args)}
    for recipe in RECIPES:
        rounds = [measure(recipe, args.steps) for _ in range(args.rounds)]
        us = statistics.median(row["us"] for row in rounds)
        found[recipe] = {"us_per_sample": us, "samples_per_second": 1e6 / us, "rounds": rounds}
        print(
            recipe, {key: found[recipe][key] for key in ("us_per_sample", "samples_per_second")}, flush=True
        )
    print(harness.write("state-machine", found))


if __name__ == "__main__":
    main()
