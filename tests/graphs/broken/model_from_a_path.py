# expect: Model('actor'): init_from must be a Model; set a checkpoint's path with models.actor.path in the
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", init_from="Qwen/Qwen3-0.6B")


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
