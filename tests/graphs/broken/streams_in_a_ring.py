# expect: streams derive from each other: first -> second
from hflow import Dataset, Model, Recipe, Text, Tokenizer, Trajectory, encode, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def view(tokenizer: Tokenizer, messages: list[dict]) -> Trajectory:
    return tokenizer.chat(messages)


recipe = Recipe(
    "broken",
    data,
    [use(nodes.actor_gen, actor), use(view, name="first", on="second"), use(view, name="second", on="first")],
)
