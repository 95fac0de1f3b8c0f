# expect: sft_train(mask=): no node or dataset column produces 'train_mask'; did you mean 'loss_mask'?
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.sft_train, actor, mask="train_mask")])
