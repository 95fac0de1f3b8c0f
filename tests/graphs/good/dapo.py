"""DAPO: clip-higher, overlong shaping and filter, groups without spread refused."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns=("reward", "train_mask"))
def score(
    completion: str,
    answer: str,
    num_tokens: int,
    stop_reason: str,
    *,
    limit: int = 16384,
    buffer: int = 4096,
) -> tuple[float, bool]:
    right = 1.0 if completion.strip() == answer else -1.0
    overlong = min(0.0, (limit - buffer - num_tokens) / buffer)
    return right + overlong, stop_reason != "length"


@compute(per="group", returns="keep")
def has_spread(reward: list[float]) -> bool:
    return max(reward) > min(reward)


recipe = Recipe(
    "dapo",
    data,
    [
        use(nodes.actor_gen, actor, group=16, max_tokens=20480),
        score,
        has_spread,
        nodes.group_advantage,
        use(nodes.actor_train, actor, clip=0.2, clip_high=0.28, mask="train_mask", minibatches=16),
    ],
)
