# expect: best(rm_score): 'rm_score' is in several streams (view, twin). Choose one with on=
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

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score")


@encode(actor)
def view(tokenizer: Tokenizer, messages: list[dict]) -> Trajectory:
    return tokenizer.chat(messages)


@infer(rm, returns="rm_score")
def rew_inf(out: Output) -> PerSequence:
    return out.scores


@compute(per="sample")
def best(rm_score: float) -> float:
    return rm_score


recipe = Recipe(
    "broken",
    data,
    [
        use(nodes.actor_gen, actor),
        view,
        use(view, name="twin"),
        use(rew_inf, on="view"),
        use(rew_inf, name="twin_inf", on="twin"),
        best,
    ],
)
