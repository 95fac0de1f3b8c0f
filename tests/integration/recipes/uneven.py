"""Answers that are long or short by their prompt: engines soon have unlike amounts left to do."""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=2)
async def actor_gen(engine: Engine, prompt: str, answer: str, *, most: int = 200) -> Trajectory:
    return await engine.complete(prompt, max_tokens=most if int(answer) % 4 == 0 else 1)


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    return float(len(completion))


recipe = Recipe(
    "uneven",
    data,
    [actor_gen, score, nodes.group_advantage, use(nodes.actor_train, actor, prox="recompute")],
)
