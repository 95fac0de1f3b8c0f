"""Models of real size on many ranks, without their memory: what a rank keeps and sends, beside the planner's.

python -m benchmarks.memory.fake_ranks [--only TEXT]

Each case is one rank, alone in its process (`tests/kits/fake_rank_kit.py`): collectives return at once, and
tensors have no storage. It builds a model of `configs/model` and makes one training step with one
micro-batch, by the code of real runs. Values have no meaning. Exits with 1 where the planner differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

import fake_rank_kit as kit  # noqa: E402

from benchmarks.lib import harness  # noqa: E402

SHARED = {"sequence_parallel": True}
RECOMPUTED = {"activation_checkpointing": True}
CASES = [
    ("torch", "d64", 0, "qwen2.5-7b", {}),
    ("torch", "d256", 0, "qwen2.5-32b", {}),
    ("torch", "d64", 0, "qwen3-30b-a3b", {}),
    ("megatron", "d32t2", 0, "qwen2.5-7b", {}),
    ("megatron", "d32t2", 0, "qwen2.5-7b", SHARED),
    ("megatron", "d32t2", 0, "qwen2.5-7b", SHARED | RECOMPUTED),
    ("megatron", "d8t2p2c2", 63, "qwen2.5-7b", {}),
    ("megatron", "d8t4p2", 0, "qwen2.5-3b", SHARED),
    ("megatron", "d16p2", 31, "qwen2.5-3b", {}),
    ("megatron", "d8t8p4", 0, "qwen2.5-72b", {}),
    ("megatron", "d32t8p4", 1023, "qwen2.5-72b", SHARED),
    ("megatron", "d8t8p8c2", 512, "qwen2.5-72b", {}),
    ("megatron", "d64e8", 0, "qwen3-30b-a3b", {}),
    ("megatron", "d32t2e8", 0, "qwen3-30b-a3b", {}),
    ("megatron", "d16t2p2c2e8", 127, "qwen3-30b-a3b", RECOMPUTED),
    ("megatron", "d64p4e64", 64, "qwen3-235b-a22b", {}),
    ("torch", "d1024", 0, "qwen2.5-72b", {}),
]
"""Backend, layout, rank, model, settings."""


def case_of(backend: str, layout: str, rank: int, model: str, settings: dict[str, Any]) -> kit.Case:
    """Return a rank with the architecture of its model."""
    file = ROOT / "configs" / "model" / f"{model}.yaml"
    return kit.Case(backend, layout, rank, dict(yaml.safe_load(file.read_text())["architecture"]), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose text contains this")
    args = parser.parse_args()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    rows, wrong = [], []
    for backend, layout, rank, model, settings in CASES:
        text = " ".join([model, backend, layout, f"rank {rank}", *settings])
        if args.only not in text:
            continue
        case = case_of(backend, layout, rank, model, settings)
        command = [sys.executable, kit.__file__, kit.as_json(case)]
        found = harness.run_once(command, env={"PYTHONPATH": paths})
        planned, differences = kit.planned(case), kit.differences(case, found)
        rows.append({"case": text, "planned": planned, "found": found, "differences": differences})
        wrong += [f"{text}: {difference}" for difference in differences]
        print(text, *beside(planned, found), sep="\n  ", flush=True)
        if not args.only:
            harness.write("fake-ranks", {"rows": rows})
    sys.exit("\n".join(wrong) or 0)


def beside(planned: kit.Figures, found: kit.Figures) -> list[str]:
    """Return a line for each figure of a rank, with the planner's."""
    lines = [f"{key}: {found[key]:,} (planned {planned[key]:,})" for key in found if key != "collectives"]
    for kind in sorted({*found["collectives"], *planned["collectives"]} - {kit.OTHERS}):
        (number, size), (times, total) = (
            figures["collectives"].get(kind, [0, 0]) for figures in (found, planned)
        )
        lines.append(f"{kind}: {number}, {size:,} bytes (planned {times}, {total:,})")
    return lines


if __name__ == "__main__":
    main()
