# expect: sft_view: concurrency has no effect, as encode bodies run one after another on a thread
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.sft_view, actor, concurrency=3), use(nodes.sft_train, actor)])
