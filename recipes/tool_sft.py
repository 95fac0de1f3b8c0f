"""Supervised examples of an agent that calls a calculator, as a start for `recipes/tool_agent.py`.

    hflow run recipes/tool_sft.py

An example is `17+25=[17+25]42=042`: the prompt, a call between brackets, the result of the calculator, and
the answer in three digits. Everything after the prompt is learned, including the calculator's digits; in
`recipes/tool_agent.py` these are masked. Expect a loss of 0.41 after 120 steps.
"""

from hflow import Dataset, Model, Recipe, Text, Tokenizer, Trajectory, encode, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def demonstration(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt, f"[{prompt.rstrip('=')}]{int(answer)}={answer}")


recipe = Recipe("tool_sft", data, [demonstration, use(nodes.sft_train, actor)])
