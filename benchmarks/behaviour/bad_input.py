"""Bad input by generation: every chosen case, and N random changes of every kind of input.

    make bad-input N=50

A case is right if it ends in one line and exit code 2, with nothing written, in bounded time and memory; a
random change may also leave the input valid. Cases run in a child process, so that one that kills its process
is found and the others still run. The result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import Process, SimpleQueue
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kits"))

import bad_input  # noqa: E402
import bad_input_cases  # noqa: E402
from bad_input import Case  # noqa: E402

from hflow.runtime.ledger import query  # noqa: E402

QUERY_SECONDS = 1


def run_from(cases: list[Case], start: int, directory: Path, results: SimpleQueue) -> None:
    """Run cases, the first of them `start`, and report each as (number, what is wrong, seconds)."""
    query.QUERY_SECONDS = QUERY_SECONDS
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number in range(start, len(cases)):
        results.put((number, "killed its process", 0.0))
        outcome = bad_input.run_case(cases[number], directory / str(number))
        results.put((number, bad_input.problem(cases[number], outcome), outcome.seconds))


def run_all(cases: list[Case], directory: Path) -> dict[int, tuple[str | None, float]]:
    """Run every case, and return what is wrong with it and its seconds, by number."""
    found: dict[int, tuple[str | None, float]] = {}
    while len(found) < len(cases):
        results: SimpleQueue = SimpleQueue()
        child = Process(target=run_from, args=(cases, len(found), directory, results))
        child.start()
        while child.is_alive() or not results.empty():
            if results.empty():
                time.sleep(0.01)
                continue
            number, wrong, seconds = results.get()
            found[number] = wrong, seconds
        child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changes", type=int, default=20, help="random changes of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="result; default: benchmarks/results/DATE-bad-input.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        good = bad_input_cases.good_inputs(Path(name) / "good")
        cases = list(bad_input_cases.cases(good, Random(arguments.seed), arguments.changes))
        found = run_all(cases, Path(name) / "cases")
    wrong = [f"{cases[number]}: {what}" for number, (what, _) in found.items() if what is not None]
    slowest = sorted(((seconds, str(cases[n])) for n, (_, seconds) in found.items()), reverse=True)[:5]
    result = {
        "cases": dict(Counter(case.kind for case in cases)),
        "random_changes_of_each_kind": arguments.changes,
        "seed": arguments.seed,
        "wrong": wrong,
        "slowest": [{"seconds": round(seconds, 1), "case": case} for seconds, case in slowest],
    }
    date = datetime.datetime.now(tz=datetime.UTC).date()
    out = arguments.out or ROOT / "benchmarks" / "results" / f"{date}-bad-input.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {len(wrong)} wrong: {out}")
    print("\n".join(wrong))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
