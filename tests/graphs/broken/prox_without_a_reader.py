# expect: sft_train: prox='recompute' has no effect: its body does not read prox_logprobs. Remove prox=
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)

recipe = Recipe("broken", data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor, prox="recompute")])
