"""The cost model against published measurements, with the shipped calibrations.

python -m benchmarks.planner.cost_model.validate [--rows SOURCE] [--save]

Each source is a CSV file in `data/`, with its citation in front. Rows are `fitted` (the shipped calibrations,
or a figure of the measured program, were chosen with them) or `held out` (nothing was), as their file says or
by a hash (`comparison.is_held_out`). An error is |predicted / measured - 1|. A gain has the right sign if it
is predicted on the side of 1 on which it was measured.

The planner is as `hflow plan` ships. Beside its errors are those with figures that were fitted to the
measured programs (`OF_PEERS`). `--save` writes both to `benchmarks/results`, and what plans print to
`configs/hardware/accuracy.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.planner.cost_model.comparison import (
    AS_SHIPPED,
    FAMILIES,
    HERE,
    OF_PEERS,
    Comparison,
    PeerFigures,
    Source,
)
from benchmarks.planner.cost_model.decoding import qwen3_speed, tensorrt_llm
from benchmarks.planner.cost_model.ppo import deepspeed_chat, openrlhf
from benchmarks.planner.cost_model.reinforcement import areal, nemo_rl, verl_async, verl_deepseek
from benchmarks.planner.cost_model.training import (
    automodel,
    llm_foundry,
    megatron_bridge,
    nemo_framework,
    prime_rl,
)
from benchmarks.planner.cost_model.weights import weight_sync

TARGETS = {
    "training pass": 0.15,
    "decode": 0.10,
    "RL step": 0.20,
    "RL step, experts": 0.25,
    "memory": 0.05,
    "memory, experts": 0.10,
    "weight update": 0.30,
    "gain by staleness": 0.15,
}
"""Targets of the planner as it ships, by kind of figure."""
KINDS = {
    "training": "training pass",
    "MoE training": "training pass, experts",
    "decode": "decode",
    "MoE decode": "decode, experts",
    "RL step": "RL step",
    "PPO": "RL step",
    "MoE RL step": "RL step, experts",
    "MoE RL step, divided engines": "RL step, experts, engines on several machines",
    "memory": "memory",
    "MoE memory": "memory, experts",
    "weight sync": "weight update",
    "weight sync, other roads": "weight update, other roads",
    "gain by staleness": "gain by staleness",
    "MoE gain by staleness": "gain by staleness, experts",
    "phase": "phase of a step in turns",
    "MoE phase": "phase of a step in turns, experts",
}
"""Topic of a source -> the kind of figure."""
NOT_PRINTED = (
    "RL step, experts, engines on several machines",
    "weight update, other roads",
    "phase of a step in turns",
    "phase of a step in turns, experts",
)
"""Kinds that no plan of hflow has, and parts of steps, which are there to explain the errors of these."""

SOURCES: tuple[Source, ...] = (
    llm_foundry,
    megatron_bridge,
    nemo_framework,
    prime_rl,
    automodel,
    tensorrt_llm,
    qwen3_speed,
    nemo_rl,
    deepspeed_chat,
    openrlhf,
    verl_async,
    verl_deepseek,
    areal,
    weight_sync,
)


def rank_correlation(pairs: list[Comparison]) -> float:
    """Return Spearman's rank correlation of measured and predicted figures."""

    def ranks(values: list[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return sorted(range(len(values)), key=order.__getitem__)

    measured, predicted = [one.measured for one in pairs], [one.predicted for one in pairs]
    return statistics.correlation(ranks(measured), ranks(predicted))


def num_right_signs(pairs: list[Comparison]) -> int:
    """Return how many gains are predicted on the side of 1 that they are measured on."""
    return sum((one.measured > 1) == (one.predicted > 1) for one in pairs)


def comparisons(figures: PeerFigures) -> list[Comparison]:
    """Return the comparisons of all sources."""
    return [one for source in SOURCES for one in source(figures)]


def accuracy(shipped: list[Comparison]) -> dict[str, Any]:
    """Return what plans print: family -> its devices, and for each kind of figure errors on held-out rows.

    `ratio` is the median of predicted over measured, so that less than 1 means too fast.
    """
    found: dict[str, Any] = {}
    for family, devices in FAMILIES.items():
        kinds = {}
        for kind in dict.fromkeys(KINDS.values()):
            if kind not in NOT_PRINTED and (pairs := _held_out(shipped, family, kind)):
                kinds[kind] = {"rows": len(pairs), "error": _mean_error(pairs), "ratio": _median_ratio(pairs)}
                if "gain" in kind:
                    kinds[kind]["right_signs"] = num_right_signs(pairs)
        found[family] = {"devices": list(devices), "kinds": kinds}
    return found


def error_table(shipped: list[Comparison], with_peers: list[Comparison]) -> list[dict[str, object]]:
    """Return the errors on held-out rows by kind: of each family of devices, each source, and all."""
    table: list[dict[str, object]] = []
    sources = dict.fromkeys(one.source for one in shipped)
    for kind in dict.fromkeys(KINDS.values()):
        for group in (*FAMILIES, *sources, "all"):
            one, other = (_held_out(found, group, kind) for found in (shipped, with_peers))
            if not one:
                continue
            signs = f"{num_right_signs(one)} of {len(one)}, {num_right_signs(other)}"
            table.append(
                {
                    "kind": kind,
                    "of": group,
                    "held out": len(one),
                    "as shipped": _mean_error(one),
                    "median": round(statistics.median(pair.error for pair in one), 3),
                    "worst": round(max(pair.error for pair in one), 3),
                    "median ratio": _median_ratio(one),
                    "rank correlation": round(rank_correlation(one), 3) if len(one) > 2 else None,
                    "with peers' figures": _mean_error(other),
                    "right signs": signs if "gain" in kind else None,
                    "target": TARGETS.get(kind) if group == "all" else None,
                }
            )
    return table


def _held_out(found: list[Comparison], group: str, kind: str) -> list[Comparison]:
    of_kind = (one for one in found if one.is_held_out and KINDS[one.topic] == kind)
    return [one for one in of_kind if group in ("all", one.family, one.source)]


def _mean_error(pairs: list[Comparison]) -> float:
    return round(statistics.mean(pair.error for pair in pairs), 3)


def _median_ratio(pairs: list[Comparison]) -> float:
    return round(statistics.median(pair.predicted / pair.measured for pair in pairs), 2)


def main() -> None:
    """Print the errors of each kind of figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rows", help="print every row of the sources whose name contains this")
    args = parser.parse_args()
    shipped, with_peers = comparisons(AS_SHIPPED), comparisons(OF_PEERS)
    for one, other in zip(shipped, with_peers, strict=True):
        if args.rows is not None and args.rows.lower() in one.source.lower():
            split = "held out" if one.is_held_out else "fitted"
            ratios = f"{one.predicted / one.measured:6.2f} {other.predicted / one.measured:6.2f}"
            print(f"{one.topic:21} {one.name:72} {one.measured:10.4g} {one.predicted:10.4g} {ratios} {split}")
    table = error_table(shipped, with_peers)
    _print(table)
    if args.save:
        day, root = datetime.date.today().isoformat(), HERE.parents[2]
        rows = [
            {**vars(one), "with peers' figures": other.predicted}
            for one, other in zip(shipped, with_peers, strict=True)
        ]
        _write(root / "benchmarks" / "results" / f"{day}-cost-model.json", {"table": table, "rows": rows})
        _write(root / "configs" / "hardware" / "accuracy.json", accuracy(shipped))


def _print(table: list[dict[str, object]]) -> None:
    widths = {name: max(len(name), *(len(str(row[name])) for row in table)) for name in table[0]}
    print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in table:
        print("  ".join(f"{row[name]!s:>{width}}" for name, width in widths.items()))


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
