"""Supervised fine-tuning."""

from hflow import Dataset, Model, Output, PerToken, Recipe, Text, Tokenizer, Trajectory, algo, encode, train

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def sft_view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    return tokenizer.join(prompt, answer)


@train(actor, reduce="token-mean")
def sft_train(out: Output) -> PerToken:
    return algo.cross_entropy(out.logprobs)


recipe = Recipe("sft", data, [sft_view, sft_train])
