"""GRPO beside a teacher that follows the actor as a moving average, by an `@update` of one's own.

    hflow run recipes/custom/ema_teacher.py

After every step each of the teacher's weights moves towards the actor's by `1 - decay`. The actor is
held near the teacher by a KL in its loss, and the teacher is evaluated as the actor is. Starts from the
checkpoint of `recipes/sft.py`, as `recipes/grpo.py` does. Expect the actor at about 0.89 held out after 140
steps, and the teacher, which is the steadier of the two, at 0.90.
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
