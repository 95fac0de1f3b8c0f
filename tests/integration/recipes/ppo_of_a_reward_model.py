"""PPO whose reward is a model's score of the tokens that the actor drew."""

from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset("train", prompt=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True, init_from=actor)
ref = Model("ref", init_from=actor)
rm = Model("rm", head="score")

recipe = Recipe(
    "ppo_of_a_reward_model",
    data,
    [
        use(nodes.actor_gen, actor, max_tokens=3),
        use(nodes.rew_inf, rm),
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        nodes.kl_reward,
        nodes.gae,
        use(nodes.critic_train, critic, minibatches=2, epochs=2),
        use(nodes.actor_train, actor, minibatches=2, epochs=2, prox="recompute"),
    ],
)
