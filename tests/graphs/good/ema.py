"""A KL in the loss to a reference that follows the actor as a moving average."""

from hflow import Dataset, Model, Recipe, Tensor, Text, compute, nodes, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", trainable=True, init_from=actor)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


@update(ref, source=actor)
def ema(ref: Tensor, actor: Tensor, *, decay: float = 0.99) -> Tensor:
    return ref.lerp(actor, 1 - decay)


recipe = Recipe(
    "ema",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        nodes.group_advantage,
        use(nodes.ref_inf, ref),
        use(nodes.actor_train, actor, prox="loglinear", kl_coef=0.01),
        ema,
    ],
)
