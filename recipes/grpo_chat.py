"""GRPO on conversations: the prompts are messages, which the tokenizer's chat template encodes.

    hflow run recipes/grpo_chat.py

The same task as `recipes/grpo.py`, as a chat: the user says `17+25`, and the assistant answers `042`. The
template in the YAML turns that into the text on which `recipes/sft.py` has trained. Expect the held-out
accuracy (`eval_gen/accuracy`, every 20 steps) to rise from 0.52 to about 0.91 in 280 steps.

For a chat model from the Hugging Face Hub, leave the template out: its tokenizer has one.
`"nodes.chat_gen.system='10+25=035'"` puts a system message in front of every conversation; the YAML gives the
same to `eval_gen`. The shipped tokenizer has no letters, so this message is a worked example; the
checkpoint has never seen one, so its accuracy is then 0. Use one with a model that follows instructions.
"""

from hflow import Dataset, Messages, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Messages, answer=Text)
heldout = Dataset("heldout", prompt=Messages, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "grpo_chat",
    data,
    [
        use(nodes.chat_gen, actor, group=8),
        use(rewards.exact, name="score", returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.chat_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
