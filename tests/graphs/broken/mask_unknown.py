# expect: sft_train(@mask): nobody produces 'train_mask'
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.sft_train, actor, mask="train_mask")])
