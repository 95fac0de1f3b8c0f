"""Two trained policies play each other: two streams from one episode."""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset(prompt=Text)
alice = Model("alice", trainable=True)
bob = Model("bob", trainable=True)


@generate(alice, bob, group=8, returns=("alice_play", "bob_play", "winner"))
async def game(alice: Engine, bob: Engine, prompt: str) -> tuple[Trajectory, Trajectory, float]:
    first = await alice.complete(prompt)
    second = await bob.complete(first.reply)
    return first, second, 1.0 if len(first.reply) > len(second.reply) else -1.0


@compute(per="sample", on="alice_play", returns="reward")
def alice_reward(winner: float) -> float:
    return winner


@compute(per="sample", on="bob_play", returns="reward")
def bob_reward(winner: float) -> float:
    return -winner


recipe = Recipe(
    "game",
    data,
    [
        game,
        alice_reward,
        bob_reward,
        use(nodes.group_advantage, name="alice_advantage", on="alice_play"),
        use(nodes.group_advantage, name="bob_advantage", on="bob_play"),
        use(nodes.actor_train, alice, name="alice_train", on="alice_play"),
        use(nodes.actor_train, bob, name="bob_train", on="bob_play"),
    ],
)
