"""An episode that returns any number of trajectories, with a field of its own and credit per token."""

from typing import Any

from hflow import Dataset, Engine, Metrics, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@generate(actor, group=4, returns="num_tries")
async def agent(engine: Engine, prompt: str) -> tuple[list[Trajectory], int, Metrics]:
    async with engine.endpoint() as endpoint:
        pass
    return list(endpoint.trajectories), 1, {"depth": 1}


@compute(per="sample", returns="token_reward")
def credit(trajectories: list[dict[str, Any]], trajectory: list[int], answer: str) -> list[float]:
    return [float(trajectories[number]["completion"] == answer) for number in trajectory]


recipe = Recipe(
    "any_number_of_trajectories",
    data,
    [
        agent,
        credit,
        nodes.turn_advantage,
        use(nodes.ref_inf, ref),
        use(nodes.actor_train, actor),
    ],
)
