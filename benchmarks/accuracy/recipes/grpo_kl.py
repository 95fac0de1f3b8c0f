"""`recipes/grpo.py` with the KL to the start in the loss, by k3 on the sampled tokens, as TRL has it."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "grpo_kl",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        nodes.group_advantage,
        use(nodes.ref_inf, ref),
        use(nodes.actor_train, actor, minibatches=2, prox="none", kl_coef=0.01),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
