"""The cost model against published measurements, with the shipped calibrations.

python -m benchmarks.planner.cost_model.validate [--save] [--rows SOURCE]

Each source is a CSV file in `data/`, with its citation in front. Rows are marked `fitted` (the shipped
calibrations, or a figure of the measured program, were chosen with them) or `held out` (nothing was). An
error is |predicted / measured - 1|. A gain has the right sign if it is predicted on the side of 1 on which it
was measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Iterator

from benchmarks.planner.cost_model.comparison import HERE, Comparison
from benchmarks.planner.cost_model.decoding import qwen3_speed, tensorrt_llm
from benchmarks.planner.cost_model.ppo import deepspeed_chat, openrlhf
from benchmarks.planner.cost_model.reinforcement import areal, nemo_rl, verl_async
from benchmarks.planner.cost_model.training import llm_foundry, megatron_bridge, nemo_framework
from benchmarks.planner.cost_model.weights import weight_sync

TARGETS = {
    "training": 0.10,
    "decode": 0.12,
    "RL step": 0.20,
    "MoE RL step": 0.20,
    "PPO": 0.20,
    "gain by staleness": 0.10,
    "weight sync": 0.40,
}

SOURCES: tuple[Callable[[], Iterator[Comparison]], ...] = (
    llm_foundry,
    megatron_bridge,
    nemo_framework,
    tensorrt_llm,
    qwen3_speed,
    nemo_rl,
    deepspeed_chat,
    openrlhf,
    verl_async,
    areal,
    weight_sync,
)


def rank_correlation(pairs: list[Comparison]) -> float:
    """Return Spearman's rank correlation of measured and predicted figures."""
    order = [sorted(range(len(pairs)), key=lambda i: key(pairs[i])) for key in (_measured, _predicted)]
    ranks = [{index: rank for rank, index in enumerate(one)} for one in order]
    return statistics.correlation(
        [ranks[0][i] for i in range(len(pairs))], [ranks[1][i] for i in range(len(pairs))]
    )


def _measured(pair: Comparison) -> float:
    return pair.measured


def _predicted(pair: Comparison) -> float:
    return pair.predicted


def right_signs(pairs: list[Comparison]) -> str:
    """Return how many gains are predicted on the side of 1 that they are measured on."""
    return f"{sum((one.measured > 1) == (one.predicted > 1) for one in pairs)} of {len(pairs)}"


def summary(found: list[Comparison]) -> list[dict[str, object]]:
    """Return the errors of each source and topic, apart for fitted and held-out rows, and of each topic."""
    groups: dict[tuple[str, str, bool], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.topic, one.source, one.is_held_out), []).append(one)
        if one.is_held_out:
            groups.setdefault((one.topic, "all held out", True), []).append(one)
    table = []
    for (topic, source, is_held_out), pairs in sorted(groups.items()):
        table.append(
            {
                "topic": topic,
                "source": source,
                "rows": "held out" if is_held_out else "fitted",
                "number": len(pairs),
                "mean error": round(statistics.mean(pair.error for pair in pairs), 3),
                "median error": round(statistics.median(pair.error for pair in pairs), 3),
                "worst": round(max(pair.error for pair in pairs), 3),
                "mean ratio": round(statistics.mean(p.predicted / p.measured for p in pairs), 3),
                "rank correlation": round(rank_correlation(pairs), 3) if len(pairs) > 2 else None,
                "right signs": right_signs(pairs) if "gain" in topic else None,
                "target": TARGETS.get(topic) if is_held_out else None,
            }
        )
    return table


def main() -> None:
    """Print the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rows", help="print every row of the sources whose name contains this")
    args = parser.parse_args()
    found = [one for source in SOURCES for one in source()]
    for one in found:
        if args.rows is not None and args.rows.lower() in one.source.lower():
            split = "held out" if one.is_held_out else "fitted"
            print(
                f"{one.topic:21} {one.name:72} {one.measured:12.4g} {one.predicted:12.4g} "
                f"{one.predicted / one.measured:6.2f} {split}"
            )
    table = summary(found)
    print("  ".join(f"{name:>15}" for name in table[0]))
    for row in table:
        print("  ".join(f"{value!s:>15}" for value in row.values()))
    if args.save:
        day = datetime.date.today().isoformat()
        file = HERE.parents[1] / "results" / f"{day}-cost-model.json"
        file.write_text(json.dumps({"summary": table, "rows": [vars(one) for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
