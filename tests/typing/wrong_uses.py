"""Wrong uses of the public API that mypy finds, each with the codes of the errors that it reports."""

import hflow
from hflow import (
    Dataset,
    Engine,
    Model,
    Output,
    PerToken,
    Recipe,
    Tensor,
    Text,
    Tokenizer,
    Trajectory,
    compute,
    encode,
    generate,
    infer,
    nodes,
    sandbox,
    train,
    update,
    use,
)
from hflow.extend import Option

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)

Model("critic", head="values")  # expect: arg-type
Model("critic", init_from="actor")  # expect: arg-type
Model("critic", True)  # expect: arg-type, call-arg
actor.name = "other"  # expect: misc


@compute(per="token")  # expect: arg-type
def wrong_level(completion: str) -> float:
    return 0.0


@compute(timout=5.0)  # expect: call-arg
def unknown_option(num_tokens: Tensor) -> Tensor:
    return num_tokens


@compute(retries="many")  # expect: arg-type
def wrong_option(num_tokens: Tensor) -> Tensor:
    return num_tokens


@compute(actor)  # expect: arg-type, call-arg
def no_model_here(num_tokens: Tensor) -> Tensor:
    return num_tokens


@compute  # expect: arg-type, call-arg
def no_parentheses(num_tokens: Tensor) -> Tensor:
    return num_tokens


@encode(actor, temperature=0.0)  # expect: call-arg
def no_sampling_here(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt)  # expect: call-arg


@generate(actor, group="eight", data="heldout")  # expect: arg-type, arg-type
async def episode(engine: Engine, prompt: str) -> Trajectory:
    return engine.complete(prompt)  # expect: return-value


@infer("actor")  # expect: arg-type
def by_name(out: Output) -> PerToken:
    return out.logprob  # expect: attr-defined, no-any-return


@train(actor, ref)  # expect: arg-type, call-arg
def two_models(out: Output) -> PerToken:
    return -out.logprobs


@train(actor, reduce="token-mean", prox="always", returns="loss")  # expect: arg-type, call-arg
def wrong_prox(out: Output) -> PerToken:
    return -out.logprobs


@update(ref, target=actor)  # expect: call-arg
def ema(ref: Tensor, actor: Tensor, *, decay: float = 0.99) -> Tensor:
    return ref.lerp(actor, 1 - decay)


@sandbox(timeout="2 s")  # expect: arg-type
def calculator(expression: str) -> str:
    return expression


@compute(per="sample", returns="reward")
def score(completion: str, answer: str, *, bonus: float = 1.0) -> float:
    return bonus * float(completion == answer)


judged = use(score, name="judged", on="actor_gen", every=2, bonus=2.0)

score(1, "4")  # expect: arg-type
score("4", "4", malus=1.0)  # expect: call-arg
judged("4")  # expect: call-arg
number: str = judged("4", "4")  # expect: assignment
use("score")  # expect: arg-type
use(score, actor, name=3)  # expect: arg-type
use(nodes.actor_gen, "actor", data="heldout")  # expect: arg-type, arg-type
use(nodes.actor_gen, actor, every="second")  # expect: arg-type

Recipe("wrong", data, ["score"])  # expect: list-item
Recipe("wrong", "train", [score])  # expect: arg-type
Option("float", least=0.0)  # expect: call-arg

hflow.plan(["recipes/grpo.py"])  # expect: arg-type
hflow.run("recipes/grpo.py", live="yes")  # expect: arg-type
steps: str = hflow.simulate("recipes/grpo.py", steps=3)  # expect: assignment
nodes_of: str = hflow.check("recipes/grpo.py").nodes  # expect: assignment
