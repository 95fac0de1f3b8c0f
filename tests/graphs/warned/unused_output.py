# expect: ref_inf: no node reads 'ref_logprobs'
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


recipe = Recipe("warned", data, [use(nodes.actor_gen, actor), use(nodes.ref_inf, ref)])
