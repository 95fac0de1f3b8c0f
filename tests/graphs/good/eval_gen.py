"""PPO on library nodes, with a held-out evaluation that nothing waits for."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True)
ref = Model("ref", init_from=actor)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


eval_gen = use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=10, temperature=0.0)

recipe = Recipe(
    "eval_gen",
    data,
    [
        use(nodes.actor_gen, actor),
        score,
        use(nodes.actor_inf, actor),
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        nodes.kl_reward,
        nodes.gae,
        use(nodes.critic_train, critic),
        use(nodes.actor_train, actor, prox="metrics"),
        eval_gen,
        use(score, name="eval_score", on="eval_gen", returns="accuracy"),
    ],
)
