# expect: chat_gen(prompt): 'prompt' is read as Messages, but the dataset has Json. Declare the column
from hflow import Dataset, Json, Model, Recipe, nodes, use

data = Dataset(prompt=Json)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.chat_gen, actor)])
