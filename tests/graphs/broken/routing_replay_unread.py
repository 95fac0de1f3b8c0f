# expect: eval_gen: routing_replay has no effect, as no node trains 'actor' or infers with it on its samples
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
eval_gen = use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=10, routing_replay=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), eval_gen])
