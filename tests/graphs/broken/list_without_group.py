# expect: both: group=n and '-> list[Trajectory]' belong together: the list is one group of n. Use both or
from hflow import Dataset, Model, Recipe, Text, Tokenizer, Trajectory, encode

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def both(tokenizer: Tokenizer, prompt: str, answer: str) -> list[Trajectory]:
    return [tokenizer.join(prompt, answer), tokenizer.join(prompt, "")]


recipe = Recipe("broken", data, [both])
