"""PPO on GSM8K: a critic, KL to the initial policy in the reward, GAE.

    hflow run recipes/gsm8k/ppo.py setup=qwen2.5-1.5b-1x80g

One answer to each of 1,024 questions is as many samples a step as `grpo.py` has on one GPU. The critic
starts from the actor's weights with a new value head. With `lam=1.0`, advantages are the return minus the
value, so a critic that knows nothing yet adds noise, but no bias.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True, init_from=actor)
ref = Model("ref", init_from=actor)

recipe = Recipe(
    "gsm8k_ppo",
    data,
    [
        use(nodes.chat_gen, actor),
        use(rewards.final_number, returns="reward"),
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        use(nodes.kl_reward, beta=0.001),
        use(nodes.gae, lam=1.0),
        use(nodes.critic_train, critic, minibatches=4),
        use(nodes.actor_train, actor, minibatches=4, prox="recompute", over_cap="truncate"),
        use(nodes.chat_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.final_number, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
