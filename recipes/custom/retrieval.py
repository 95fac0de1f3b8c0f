"""GRPO with retrieval before generation, by a custom node type that holds an index.

    hflow run recipes/custom/retrieval.py

`@Retrieve(...)` is `@generate(...)` with an index. Every worker that generates builds the index once, in
`setup`; `run` finds texts for a prompt and puts them in front of it. The module with the index and the file
with the texts are beside this recipe. For the question `17+25=` the model reads `10+20=03017+25=`. It starts
from random weights; the reward is the share of right digits.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from text_index import TextIndex

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use
from hflow.extend import Context, Option, Shapes

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Retrieve(generate):
    """Generate with the most similar texts of a file in front of the prompt.

    Options: `texts`, a file beside the recipe with a text a line, whose part before `=` is compared with
    the prompt; `top`, how many are put in front.
    """

    options: ClassVar = generate.options | {
        "texts": Option("str", "sums.txt"),
        "top": Option("int", 1, minimum=0),
    }
    index: TextIndex

    def setup(self, context: Context) -> None:
        """Build the index, once on each worker that generates."""
        file = context.directory / context.options["texts"]
        texts = file.read_text(encoding="utf-8").splitlines()
        self.index = TextIndex(texts, [text.partition("=")[0] for text in texts])

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        """Call the body with the found texts in front of its prompt."""
        found = self.index.search(inputs["prompt"], context.options["top"])
        prompt = "".join(found) + inputs["prompt"]
        return await context.body(**{**inputs, "prompt": prompt}, **context.knobs)

    def memory(self) -> int:
        """Return the bytes of an index of some hundred short texts."""
        return 2**20

    def cost(self, shapes: Shapes) -> float:
        """Return the seconds of one search."""
        return 1e-4 * shapes.sequences


@Retrieve(actor, group=8)
async def answer_gen(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion.strip(), answer, strict=False)) / len(answer)


eval_gen = use(answer_gen, name="eval_gen", group=1, data=heldout, every=20, temperature=0.0)
right_digits = use(score, name="right_digits", on="eval_gen", returns="right_digits")

recipe = Recipe(
    "retrieval",
    data,
    [
        answer_gen,
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        eval_gen,
        right_digits,
    ],
)
