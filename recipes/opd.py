"""On-policy distillation from a larger teacher, by the forward KL on its likeliest tokens.

    hflow run recipes/sft.py out=runs/teacher steps=1000 models.actor.architecture.num_hidden_layers=3 \
        models.actor.architecture.hidden_size=192
    hflow run recipes/opd.py

The student generates; the teacher, on a device of its own, returns its 8 likeliest tokens at each position;
and the student learns their probabilities. `recipes/distill.py` rewards the one token that was sampled; here
a position teaches 8 probabilities at once, without variance from sampling. There is no reward. The student
starts from a checkpoint that comes with hflow.

Source: Agarwal et al. 2023, "On-policy distillation of language models": the student's own samples, with the
forward KL as divergence.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
teacher = Model("teacher")


recipe = Recipe(
    "opd",
    data,
    [
        use(nodes.actor_gen, actor),
        use(nodes.topk_inf, teacher, k=8),
        use(nodes.distill_train, actor, minibatches=2),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
