"""How long the search for a placement takes, and how far its result is from the best of all plans.

    python -m benchmarks.planner.search       # all tables
    python -m benchmarks.planner.search --quick   # clusters up to 64 devices, and the optimum up to 8 devices
    python -m benchmarks.planner.search times      # the first one

Times are processor seconds of one core. The optimum is found by trying every division of the replicas, every
size of their groups, and every combination of layouts (`layouts`); or of layouts, micro-batches,
recomputation and sequences of engines (`all`). On larger clusters the result is compared with the placements
that people write, with the best layouts and settings for them.

`ahead` is about generation that runs ahead, where the state machine decides between candidates: it compares
the best of each division of the replicas, by the analytic period, with the plan of the search, which
simulates alternatives to them as well. `precisely` is the same with seven times as many samples.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kits"))

from search_kit import exhaustive, hand_placements, problem

from hflow.base.errors import PlanError
from hflow.planner.search import Evaluator, SearchProblem, search
from hflow.planner.search.explore import NUM_IMPROVED, explore
from hflow.planner.search.simulated import by_seconds, step_seconds
from hflow.runtime.simulation.simulate_plan import simulated_period

CLUSTERS = (
    ("ppo", "h100-1x8", "qwen2.5-7b"),
    ("ppo", "h100-8x8", "qwen2.5-7b"),
    ("ppo", "h100-8x8", "qwen2.5-32b"),
    ("grpo_async", "h100-8x8", "qwen2.5-7b"),
    ("ppo_async", "h100-8x8", "qwen2.5-7b"),
    ("ppo", "h100-64x8", "llama-3.1-70b"),
    ("ppo", "h100-64x8", "qwen3-30b-a3b"),
    ("ppo", "h100-64x8", "qwen3-235b-a22b"),
    ("ppo", "h100-64x8", "deepseek-v3"),
    ("ppo", "h100-128x8", "qwen2.5-7b"),
    ("ppo", "h100-128x8", "llama-3.1-70b"),
)
NUM_QUICK = 5
SMALL = (
    *(("grpo", f"h100-1x{n}", model) for n in (2, 4, 8) for model in ("qwen2.5-1.5b", "qwen2.5-7b")),
    *(("ppo", f"h100-1x{n}", model) for n in (2, 4, 6, 8) for model in ("qwen2.5-1.5b", "qwen2.5-7b")),
    *(("ppo_async", f"h100-1x{n}", "qwen2.5-1.5b") for n in (4, 6, 8)),
    *(("ppo", f"h100-2x{n}", model) for n in (2, 4) for model in ("qwen2.5-1.5b", "qwen2.5-7b")),
    *(("grpo", f"h100-2x{n}", model) for n in (2, 4, 8) for model in ("qwen2.5-1.5b", "qwen2.5-14b")),
    ("grpo_async", "h100-2x8", "qwen2.5-7b"),
    ("ppo", "h100-2x8", "qwen2.5-1.5b"),
    ("ppo", "h100-2x8", "qwen2.5-7b"),
    ("ppo_async", "h100-2x8", "qwen2.5-1.5b"),
)
"""Recipe, cluster and model of problems of which every plan can be tried."""
HAND = (("h100-8x8", "qwen2.5-7b"), ("h100-8x8", "qwen2.5-32b"), ("h100-64x8", "llama-3.1-70b"))
"""Clusters and models of the comparison with placements by hand."""
MAX_QUICK = 8
AHEAD = (
    ("h100-1x8", "qwen2.5-1.5b"),
    ("h100-1x8", "qwen2.5-7b"),
    ("h100-2x8", "qwen2.5-7b"),
    ("h100-8x8", "qwen2.5-7b"),
    ("h100-8x8", "qwen2.5-32b"),
)
"""Clusters and models of the comparison of searches with and without alternatives."""
NUM_QUICK_AHEAD = 2
PRECISELY = functools.partial(simulated_period, num_steps=72, num_samples=20_000)
"""What searches use, with seven times as many samples."""
MAX_TUNED = {"grpo": 16, "grpo_async": 16, "ppo": 6, "ppo_async": 6}
"""Recipe -> devices up to which settings are tried as well; those of four models on more are too many."""


def times(quick: bool) -> None:
    """Print the seconds of searches."""
    print("| recipe | cluster | model | candidates | seconds |\n|-|-|-|-:|-:|")
    for recipe, cluster, model in CLUSTERS[: NUM_QUICK if quick else None]:
        graph, request = problem(recipe, cluster, model, "batch=512")
        start = time.process_time()
        found = search(graph, request, simulate=simulated_period)
        seconds = time.process_time() - start
        print(f"| {recipe} | {cluster} | {model} | {found.num_tried:,} | {seconds:.1f} |", flush=True)


def by_hand(quick: bool) -> None:
    """Print the steps with placements that people write, and how much shorter that of the search is."""
    print("| cluster | model | placement of PPO | step | found |\n|-|-|-|-:|-:|")
    for cluster, model in HAND[: 1 if quick else None]:
        graph, request = problem("ppo", cluster, model, "batch=512")
        found = search(graph, request)
        for name, placement in hand_placements(request.cluster.num_devices).items():
            try:
                seconds = search(graph, replace(request, placement=placement)).seconds
                step, gain = f"{seconds:.1f} s", f"{found.seconds / seconds - 1:+.0%}"
            except PlanError:
                step, gain = "does not fit", ""
            print(f"| {cluster} | {model} | {name} | {step} | {gain} |", flush=True)


def optimum(quick: bool) -> None:
    """Print the best steps of all plans, and how much longer those of the search are."""
    print("| recipe | cluster | model | tried | best step | found |\n|-|-|-|-|-:|-:|")
    for recipe, cluster, model in SMALL:
        for tunes in (False, True):
            graph, request = problem(recipe, cluster, model, tunes=tunes)
            num = request.cluster.num_devices
            if (quick and num > MAX_QUICK) or (tunes and num > MAX_TUNED[recipe]):
                continue
            is_small = not tunes or recipe.startswith("grpo")
            if not is_small:  # four models have too many combinations otherwise
                free = (key for key in request.free if not key.endswith(".offload"))
                request = replace(request, free=frozenset(free))
            best = exhaustive(graph, request, spreads=is_small)
            try:
                gap = f"{search(graph, request).seconds / best - 1:+.2%}"
            except PlanError:
                gap = "nothing fits"
            shown = "nothing fits" if math.isinf(best) else f"{best:.3f} s"
            tried = "layouts" if not tunes else "all" if is_small else "all but offload and shared sets"
            print(f"| {recipe} | {cluster} | {model} | {tried} | {shown} | {gap} |", flush=True)


def ahead(quick: bool) -> None:
    """Print the steps with the best of each division, and with alternatives."""
    print(
        "| recipe | cluster | model | staleness | spread | best of each | with others | shorter | precisely |"
    )
    print("|-|-|-|-:|-:|-:|-:|-:|-:|")
    for cluster, model in AHEAD[: NUM_QUICK_AHEAD if quick else None]:
        for recipe, staleness, spread in itertools.product(("grpo", "ppo"), (1, 4), (0.5, 1.0)):
            keys = f"schedule.max_staleness={staleness}", f"workload.response_cv={spread}", "batch=128"
            graph, request = problem(recipe, cluster, model, *keys)
            evaluator = Evaluator(SearchProblem(graph, request))
            found = explore(evaluator, keeps_alternatives=True)
            one, others = (
                by_seconds(evaluator, found.ranked(), simulated_period, NUM_IMPROVED, alternatives)[0]
                for alternatives in ({}, found.alternatives)
            )
            exact, exact_others = (step_seconds(evaluator, c, PRECISELY) for c, _ in (one, others))
            gains = f"{1 - others[1] / one[1]:.1%} | {1 - exact_others / exact:.1%}"
            row = f"{recipe} | {cluster} | {model} | {staleness} | {spread}"
            print(f"| {row} | {one[1]:.2f} s | {others[1]:.2f} s | {gains} |", flush=True)


TABLES = {"times": times, "by-hand": by_hand, "optimum": optimum, "ahead": ahead}


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=list(TABLES), metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="only clusters up to 64, and up to 8 devices")
    args = parser.parse_args()
    for name in args.tables:
        TABLES[name](args.quick)
        print()


if __name__ == "__main__":
    main()
