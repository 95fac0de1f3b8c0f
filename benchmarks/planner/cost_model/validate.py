"""The cost model against published measurements, with the shipped calibrations.

python -m benchmarks.planner.cost_model.validate [--as-shipped] [--save] [--rows SOURCE]

Each source is a CSV file in `data/`, with its citation in front. Rows are `fitted` (the shipped calibrations,
or a figure of the measured program, were chosen with them) or `held out` (nothing was), as their file says or
by a hash (`comparison.is_held_out`). An error is |predicted / measured - 1|. A gain has the right sign if it
is predicted on the side of 1 on which it was measured.

Without `--as-shipped`, programs have the figures that were fitted to them (`OF_PEERS`). With it, the planner
is as `hflow plan` ships, by kind of figure and family of devices, with the error of the former beside it.
`--save` writes both to `benchmarks/results`, and what plans print to `configs/hardware/accuracy.json`.
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
    "training": 0.10,
    "decode": 0.12,
    "RL step": 0.20,
    "MoE RL step": 0.20,
    "PPO": 0.20,
    "gain by staleness": 0.10,
    "weight sync": 0.40,
}

SHIPPED_TARGETS = {
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
    order = [sorted(range(len(pairs)), key=lambda i: key(pairs[i])) for key in (_measured, _predicted)]
    ranks = [{index: rank for rank, index in enumerate(one)} for one in order]
    return statistics.correlation(
        [ranks[0][i] for i in range(len(pairs))], [ranks[1][i] for i in range(len(pairs))]
    )


def _measured(pair: Comparison) -> float:
    return pair.measured


def _predicted(pair: Comparison) -> float:
    return pair.predicted


def num_right_signs(pairs: list[Comparison]) -> int:
    """Return how many gains are predicted on the side of 1 that they are measured on."""
    return sum((one.measured > 1) == (one.predicted > 1) for one in pairs)


def right_signs(pairs: list[Comparison]) -> str:
    """Return it beside the number of gains."""
    return f"{num_right_signs(pairs)} of {len(pairs)}"


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


def shipped_table(shipped: list[Comparison], with_peers: list[Comparison]) -> list[dict[str, object]]:
    """Return the errors of the planner as shipped by kind and family, beside those with figures of peers."""
    table: list[dict[str, object]] = []
    for kind in dict.fromkeys(KINDS.values()):
        for family in (*FAMILIES, "all"):
            one, other = (_held_out(found, family, kind) for found in (shipped, with_peers))
            if not one:
                continue
            table.append(
                {
                    "kind": kind,
                    "family": family,
                    "held out": len(one),
                    "as shipped": _mean_error(one),
                    "median": round(statistics.median(pair.error for pair in one), 3),
                    "median ratio": _median_ratio(one),
                    "with peers' figures": _mean_error(other),
                    "right signs": right_signs(one) if "gain" in kind else None,
                    "target": SHIPPED_TARGETS.get(kind) if family == "all" else None,
                }
            )
    return table


def _held_out(found: list[Comparison], family: str, kind: str) -> list[Comparison]:
    of_kind = (one for one in found if one.is_held_out and KINDS[one.topic] == kind)
    return [one for one in of_kind if family in ("all", one.family)]


def _mean_error(pairs: list[Comparison]) -> float:
    return round(statistics.mean(pair.error for pair in pairs), 3)


def _median_ratio(pairs: list[Comparison]) -> float:
    return round(statistics.median(pair.predicted / pair.measured for pair in pairs), 2)


def main() -> None:
    """Print the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as-shipped", action="store_true", help="without figures of measured programs")
    parser.add_argument("--save", action="store_true", help="write the tables to benchmarks/results")
    parser.add_argument("--rows", help="print every row of the sources whose name contains this")
    args = parser.parse_args()
    shipped, with_peers = comparisons(AS_SHIPPED), comparisons(OF_PEERS)
    for one in shipped if args.as_shipped else with_peers:
        if args.rows is not None and args.rows.lower() in one.source.lower():
            split = "held out" if one.is_held_out else "fitted"
            print(
                f"{one.topic:21} {one.name:72} {one.measured:12.4g} {one.predicted:12.4g} "
                f"{one.predicted / one.measured:6.2f} {split}"
            )
    tables = {"as shipped": shipped_table(shipped, with_peers), "summary": summary(with_peers)}
    _print(tables["as shipped" if args.as_shipped else "summary"])
    if args.save:
        day, root = datetime.date.today().isoformat(), HERE.parents[2]
        rows = [
            {**vars(one), "with peers' figures": other.predicted}
            for one, other in zip(shipped, with_peers, strict=True)
        ]
        _write(root / "benchmarks" / "results" / f"{day}-cost-model.json", {**tables, "rows": rows})
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
