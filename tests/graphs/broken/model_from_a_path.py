# expect: init_from takes a Model; a checkpoint's path is models.actor.path in the configuration
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", init_from="Qwen/Qwen3-0.6B")


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
