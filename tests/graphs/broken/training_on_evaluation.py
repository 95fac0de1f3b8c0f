# expect: sft_train: it trains on stream 'eval_gen', which the recipe's dataset 'train' does not feed, so
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
heldout = Dataset("heldout", prompt=Text)


recipe = Recipe(
    "broken",
    data,
    [
        use(nodes.actor_gen, actor),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout),
        use(nodes.sft_train, actor, on="eval_gen"),
    ],
)
