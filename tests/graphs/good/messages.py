"""Messages, of a dataset and of episodes, are read as such and as JSON; a text is one message."""

from typing import Any

from hflow import Dataset, Messages, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Messages, question=Text)
asked = Dataset("asked", prompt=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def turns(messages: Messages, prompt: list[dict[str, Any]], question: Messages) -> float:
    return float(len(messages) - len(prompt) + len(question))


@compute(per="group")
def longest(messages: list[Messages]) -> float:
    return float(max(map(len, messages)))


recipe = Recipe(
    "messages",
    data,
    [use(nodes.chat_gen, actor, group=2), turns, longest, use(nodes.chat_gen, actor, name="ask", data=asked)],
)
