# expect: group_advantage: reads=: there is no parameter 'rewards'; did you mean 'reward'?
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "broken", data, [use(nodes.actor_gen, actor), use(nodes.group_advantage, reads={"rewards": "score"})]
)
