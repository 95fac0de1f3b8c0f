# expect: 'look' sets writes_weights to ('actor',), but it runs like infer, for which that is (). Remove
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, infer, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Look(infer):
    writes_weights = ("actor",)


@Look(actor)
def look(out: Output) -> PerToken:
    return out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), look])
