"""The agent of `recipes/tool_agent.py`, which also learns to predict what the calculator and the exam answer.

    hflow run recipes/echo.py

Beside the policy's loss on the tokens that the agent wrote, there is a cross-entropy on those that it
observed: an episode without any reward teaches something too. Only the loss differs from
`recipes/tool_agent.py`, whose nodes this recipe imports.

Source: Shrivastava et al. 2026, "ECHO: terminal agents learn world models for free".
"""

from tool_agent import accuracy, actor, agent, data, heldout

from hflow import Recipe, nodes, use

recipe = Recipe(
    "echo",
    data,
    [
        agent,
        use(nodes.group_advantage, on="agent"),
        use(nodes.observed_tokens, on="agent"),
        use(
            nodes.actor_train,
            actor,
            on="agent",
            minibatches=2,
            prox="none",
            observed="is_observed",
            observation_coef=0.05,
        ),
        use(agent, actor, name="eval_agent", data=heldout, group=1, every=20, temperature=0.0, max_tries=1),
        accuracy,
    ],
)
