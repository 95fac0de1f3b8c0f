"""GRPO with the tool of a public MCP server, unchanged: a tiny model adds two numbers with a calculator.

    pip install mcp-server-calculator==0.2.1 'mcp[cli]<2'       # in an environment of its own
    mcp run SITE_PACKAGES/mcp_server_calculator/calculator.py:mcp --transport streamable-http
    pip install 'hflow-rl[mcp]'
    hflow run environments/calculator

The model writes `[17+25]`, the server replies `42`, and the answer is `042`. The start is the checkpoint of
`recipes/tool_sft.py`, whose calculator added `=` to its digits: now the model may write it.
"""

import random
from collections.abc import Iterator

from hflow import Dataset, Model, Recipe, Text, compute, nodes, rows, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ANSWER = use(nodes.mcp, actor, tool_format="[]?", timeout=600.0, concurrency=64)


@rows
def sums(split: str) -> Iterator[dict[str, str]]:
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(0).shuffle(pairs)
    for first, second in pairs[:50] if split == "heldout" else pairs[50:]:
        yield {"prompt": f"{first}+{second}=", "answer": f"{first + second:03}"}


@compute(per="sample", on="mcp", returns="reward")
def exact(completion: str, answer: str) -> float:
    """Return 1 for the right answer. The model may write `=` between the tool's digits and its own."""
    return float(completion.removeprefix("=") == answer)


recipe = Recipe(
    "calculator",
    data,
    [
        use(ANSWER, group=8),
        exact,
        use(nodes.group_advantage, on="mcp"),
        use(nodes.actor_train, actor, on="mcp", prox="none"),
        use(ANSWER, name="eval_mcp", data=heldout, every=20, temperature=0.0),
        use(exact, name="accuracy", on="eval_mcp", returns="accuracy"),
    ],
)
