# expect: actor_gen(prompt): 'prompt' is read as Text, but the dataset has Messages. Use nodes.chat_gen, which
from hflow import Dataset, Messages, Model, Recipe, nodes, use

data = Dataset(prompt=Messages)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
