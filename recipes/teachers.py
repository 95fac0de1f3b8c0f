"""On-policy distillation from two teachers, of which each prompt has one.

    hflow run recipes/teachers.py models.low.path=runs/grpo/latest/checkpoints/latest/actor \
        models.high.path=runs/rloo/latest/checkpoints/latest/actor

As `recipes/distill.py`, but sums that begin with 0 to 4 have the teacher `low`, others `high`. With `mask`, a
teacher computes its own samples only, and returns NaN for others: so the wrong teacher's numbers would end
the run, rather than teach something. In rows of your own, a column may name the teacher:

    def assigned(teacher: str) -> tuple[bool, bool]:
        return teacher == "low", teacher == "high"
"""

from hflow import (
    Dataset,
    Metrics,
    Model,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    algo,
    compute,
    nodes,
    rewards,
    use,
)

data = Dataset("train", prompt=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
low = Model("low")
high = Model("high")


@compute(per="sample", returns=("is_low", "is_high"))
def assigned(prompt: str) -> tuple[bool, bool]:
    return prompt < "5", prompt >= "5"


@compute(returns="advantages")
def nearer_to_teacher(
    behav_logprobs: PerToken,
    low_logprobs: PerToken,
    high_logprobs: PerToken,
    is_low: PerSequence,
    seqs: Sequences,
) -> tuple[PerToken, Metrics]:
    teacher_logprobs = low_logprobs.where(seqs.widen(is_low), high_logprobs)
    reverse_kl = algo.kl_k1(behav_logprobs, teacher_logprobs)
    return -reverse_kl, {"reverse_kl": reverse_kl}


recipe = Recipe(
    "teachers",
    data,
    [
        use(nodes.actor_gen, actor),
        assigned,
        use(nodes.ref_inf, low, name="low_inf", returns="low_logprobs", mask="is_low"),
        use(nodes.ref_inf, high, name="high_inf", returns="high_logprobs", mask="is_high"),
        nearer_to_teacher,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
