# expect: game: its stream 'score' has the same name as score at
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@generate(actor, returns=("first", "score"))
async def game(engine: Engine, prompt: str) -> tuple[Trajectory, Trajectory]:
    talk = await engine.complete(prompt)
    return talk, await engine.complete(talk.add("user", "again"))


recipe = Recipe("broken", data, [game, use(score, on="first")])
