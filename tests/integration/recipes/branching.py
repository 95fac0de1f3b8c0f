"""Episodes of one to three trajectories: a conversation, another end of its first turn, and a new one."""

from typing import Any

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

train = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@generate(actor, group=4, returns="num_branches")
async def agent(engine: Engine, prompt: str) -> tuple[list[Trajectory], int]:
    first = await engine.complete(prompt)
    found = [await engine.complete(first.add("user", "+"))]
    num_branches = int(3 * engine.random())
    if num_branches > 0:
        found.append(await engine.complete(first.add("user", "=")))
    if num_branches > 1:
        found.append(await engine.complete("1+1="))
    return found, num_branches


@compute(per="sample", returns="reward")
def score(trajectories: list[dict[str, Any]], num_tokens: int, num_branches: int) -> float:
    assert len(trajectories) == 1 + num_branches
    assert sum(each["num_tokens"] for each in trajectories) == num_tokens
    return float(sum(len(each["completion"]) for each in trajectories))


recipe = Recipe(
    "branching",
    train,
    [
        agent,
        use(score, on="agent"),
        use(nodes.group_advantage, on="agent"),
        use(nodes.ref_inf, ref, on="agent"),
        use(nodes.actor_train, actor, on="agent", minibatches=2, kl_coef=0.01, reduce="seq-mean-token-mean"),
        use(agent, actor, name="eval_agent", data=heldout, every=2, temperature=0.0, group=1),
    ],
)
