# expect: sft_view(anwser): no node or dataset column produces 'anwser'; did you mean 'answer'?
from hflow import Dataset, Model, Recipe, Text, Tokenizer, Trajectory, encode

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def sft_view(tokenizer: Tokenizer, prompt: str, anwser: str) -> Trajectory:
    return tokenizer.join(prompt, anwser)


recipe = Recipe("broken", data, [sft_view])
