"""GRPO with a teacher that is a moving average of the actor, by a custom `@update` node.

    hflow run recipes/custom/ema_teacher.py

After each step every weight of the teacher moves towards the actor's by a share of `1 - decay`. A KL in the
loss keeps the actor close to the teacher. Both are evaluated. Starts from the checkpoint of
`recipes/sft.py`, like `recipes/grpo.py`. Expect a held-out accuracy of about 0.89 for the actor and 0.90 for
the teacher after 140 steps.
"""

from hflow import Dataset, Model, Recipe, Tensor, Text, compute, nodes, update, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
teacher = Model("teacher", trainable=True, init_from=actor)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


@update(teacher, source=actor)
def follow(teacher: Tensor, actor: Tensor, *, decay: float = 0.95) -> Tensor:
    return teacher.lerp(actor, 1 - decay)


recipe = Recipe(
    "ema_teacher",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        nodes.group_advantage,
        use(nodes.ref_inf, teacher),
        use(nodes.actor_train, actor, minibatches=2, prox="none", kl_coef=0.01),
        follow,
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
        use(nodes.actor_gen, teacher, name="teacher_eval", data=heldout, every=20, temperature=0.0),
        use(score, name="teacher_accuracy", on="teacher_eval", returns="accuracy"),
    ],
)
