"""Two reward models on devices of their own: both work on the same groups at the same time."""

from hflow import (
    Dataset,
    Model,
    Output,
    PerSequence,
    Recipe,
    Text,
    Tokenizer,
    Trajectory,
    compute,
    encode,
    infer,
    nodes,
    use,
)

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score")
other = Model("other", head="score")


@encode(rm)
def rm_view(tokenizer: Tokenizer, prompt: str, completion: str) -> Trajectory:
    return tokenizer.join(prompt, completion)


@infer(rm, on="rm_view", per="group", returns="rm_score")
def rew_inf(out: Output) -> PerSequence:
    return out.scores


@compute(per="sample", on="actor_gen", returns="reward")
def total(rm_score: float, other_score: float) -> float:
    return rm_score + other_score


@compute(per="group", on="actor_gen", returns="keep")
def has_spread(reward: list[float], *, least: float = 0.0) -> bool:
    return max(reward) - min(reward) > least


recipe = Recipe(
    "twice_rewarded",
    data,
    [
        use(nodes.actor_gen, actor, group=4),
        rm_view,
        rew_inf,
        use(rm_view, other, name="other_view"),
        use(rew_inf, other, name="other_inf", on="other_view", returns="other_score"),
        total,
        has_spread,
        use(nodes.group_advantage, on="actor_gen"),
        use(nodes.actor_train, actor, on="actor_gen", prox="none"),
    ],
)
