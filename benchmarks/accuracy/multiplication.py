"""Two-digit multiplication with a scratchpad: a task whose answers have 41 tokens.

    python -m benchmarks.accuracy.multiplication DIRECTORY

`47*86=` is answered by the two partial products and their sum:
`24+042=2820;065+0023=0673;2820+0673=2404`. All numbers behind the first `=` are written with the ones first,
so that carries move in the direction of generation (Lee et al. 2023, "Teaching arithmetic to small
transformers"). A completion is right if the number behind its last `=` is the product.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ALPHABET = "0123456789+*=;"
NUM_HELDOUT = 200
MAX_TOKENS = 42


def backwards(number: int, digits: int) -> str:
    """Return a number with the ones first, filled up by zeros."""
    return f"{number:0{digits}d}"[::-1]


def scratchpad(a: int, b: int) -> str:
    """Return the written answer to `a*b=`; it ends with the product, ones first."""
    tens, ones = divmod(a, 10)
    low, high = b % 10, b // 10 * 10
    sums = [
        (ones * low, 2, 10 * tens * low, 3),
        (ones * high, 3, 10 * tens * high, 4),
        (a * low, 4, a * high, 4),
    ]
    return ";".join(
        f"{backwards(x, x_digits)}+{backwards(y, y_digits)}={backwards(x + y, 4)}"
        for x, x_digits, y, y_digits in sums
    )


def write(directory: Path) -> None:
    """Write `sft.jsonl`, `train.jsonl`, and of held-out pairs `sft-heldout.jsonl` and `heldout.jsonl`.

    Answers are scratchpads in the files for supervised learning, and products in the others.
    """
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, part in (("", pairs[NUM_HELDOUT:]), ("heldout", pairs[:NUM_HELDOUT])):
        for prefix, answer in (("sft", scratchpad), ("", lambda a, b: backwards(a * b, 4))):
            name = "-".join(filter(None, (prefix, suffix))) or "train"
            rows = ({"prompt": f"{a:02d}*{b:02d}=", "answer": answer(a, b)} for a, b in part)
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
