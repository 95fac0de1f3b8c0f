"""How long the search for a placement takes, and how far its result is from the best of all plans.

    python benchmarks/search.py            # both tables
    python benchmarks/search.py --quick    # clusters up to 64 devices

Times are processor seconds of one core. The optimum is found by trying every division of the replicas, every
size of their groups, and every combination of layouts; settings of models are not tuned there, as their
combinations are too many.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kits"))

from search_kit import exhaustive, problem

from hflow.errors import PlanError
from hflow.planner.search import search

CLUSTERS = (
    ("h100-1x8", "qwen2.5-7b"),
    ("h100-8x8", "qwen2.5-7b"),
    ("h100-8x8", "qwen2.5-32b"),
    ("h100-64x8", "llama-3.1-70b"),
    ("h100-128x8", "qwen2.5-7b"),
    ("h100-128x8", "llama-3.1-70b"),
)
SMALL = (
    *(("grpo", f"h100-1x{n}", model) for n in (2, 4, 8) for model in ("qwen2.5-1.5b", "qwen2.5-7b")),
    *(("grpo", f"h100-2x{n}", model) for n in (2, 4, 8) for model in ("qwen2.5-1.5b", "qwen2.5-14b")),
    *(("ppo", f"h100-1x{n}", model) for n in (2, 4, 6) for model in ("qwen2.5-1.5b", "qwen2.5-7b")),
    ("ppo", "h100-2x2", "qwen2.5-1.5b"),
    ("ppo_async", "h100-1x4", "qwen2.5-1.5b"),
    ("ppo_async", "h100-1x6", "qwen2.5-1.5b"),
)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only clusters up to 64 devices")
    quick = parser.parse_args().quick
    print("| recipe | cluster | model | candidates | seconds |\n|-|-|-|-:|-:|")
    for cluster, model in CLUSTERS[: 3 if quick else None]:
        graph, request = problem("ppo", cluster, model, "batch=512")
        start = time.process_time()
        found = search(graph, request)
        print(
            f"| ppo | {cluster} | {model} | {found.num_tried:,} | {time.process_time() - start:.1f} |",
            flush=True,
        )
    print("\n| recipe | cluster | model | best step | found |\n|-|-|-|-:|-:|")
    for recipe, cluster, model in SMALL:
        graph, request = problem(recipe, cluster, model, tunes=False)
        best = exhaustive(graph, request)
        try:
            gap = f"{search(graph, request).seconds / best - 1:+.2%}"
        except PlanError:
            gap = "nothing fits"
        shown = "nothing fits" if math.isinf(best) else f"{best:.3f} s"
        print(f"| {recipe} | {cluster} | {model} | {shown} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
