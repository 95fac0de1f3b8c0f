"""Written examples of an agent that calls a calculator, for `recipes/tool_agent.py` to start from.

    hflow run recipes/tool_sft.py

A conversation reads `17+25=[17+25]42=042`: the question, the call between marks, the calculator's
answer, and the agent's in three digits. The agent learns all but the question; the calculator's
digits are part of what it writes here, and masked when it acts.
"""

from hflow import Dataset, Model, Recipe, Text, Tokenizer, Trajectory, encode, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def demonstration(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt, f"[{prompt.rstrip('=')}]{int(answer)}={answer}")


recipe = Recipe("tool_sft", data, [demonstration, use(nodes.sft_train, actor)])
