"""Examples in the documentation run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["agents", "rewards"])
def test_the_examples_of_a_page_run_one_after_the_other(name: str) -> None:
    path = DOCS / f"{name}.md"
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    names: dict[str, object] = {"__name__": f"docs_{name}"}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
