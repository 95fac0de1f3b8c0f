"""Self-play: two policies add the same numbers, and the one that is closer gets the reward.

    hflow run recipes/self_play.py

An episode has two engines, which answer at the same time. It returns one trajectory per policy, in two
streams, and each policy trains on its own stream. One policy's reward is minus the other's; a tie gives 0.
Both start from the checkpoint of `recipes/sft.py`. Expect the accuracies of greedy answers to held-out
prompts (`alice_eval/accuracy`, `bob_eval/accuracy`) to rise from 0.52 to about 0.80 in 140 steps.

Both can be adapters of the same weights, which are then in memory once:

    hflow run recipes/self_play.py models.alice.lora.r=16 models.bob.lora.r=16 models.bob.base_of=alice
"""

import asyncio

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
alice = Model("alice", trainable=True)
bob = Model("bob", trainable=True)


def distance(completion: str, answer: str) -> float:
    """Return the distance of a completion from the right number; very large if it is not a number."""
    return abs(int(completion) - int(answer)) if completion.isdigit() else 10.0**6


@generate(alice, bob, group=8, returns=("alice_play", "bob_play", "outcome"))
async def duel(alice: Engine, bob: Engine, prompt: str, answer: str) -> tuple[Trajectory, Trajectory, float]:
    first, second = await asyncio.gather(alice.complete(prompt), bob.complete(prompt))
    one, other = distance(first.completion, answer), distance(second.completion, answer)
    return first, second, float(one < other) - float(one > other)


@compute(per="sample", on="alice_play", returns="reward")
def alice_reward(outcome: float) -> float:
    return outcome


@compute(per="sample", on="bob_play", returns="reward")
def bob_reward(outcome: float) -> float:
    return -outcome


@compute(per="sample", on="alice_eval", returns="accuracy")
def accuracy(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "self_play",
    data,
    [
        duel,
        alice_reward,
        bob_reward,
        use(nodes.group_advantage, name="alice_advantage", on="alice_play"),
        use(nodes.group_advantage, name="bob_advantage", on="bob_play"),
        use(nodes.actor_train, alice, name="alice_train", on="alice_play", minibatches=2, prox="none"),
        use(nodes.actor_train, bob, name="bob_train", on="bob_play", minibatches=2, prox="none"),
        use(nodes.actor_gen, alice, name="alice_eval", data=heldout, every=20, temperature=0.0),
        use(nodes.actor_gen, bob, name="bob_eval", data=heldout, every=20, temperature=0.0),
        accuracy,
        use(accuracy, name="bob_accuracy", on="bob_eval", returns="accuracy"),
    ],
)
