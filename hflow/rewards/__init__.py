"""Ready-made rewards: compute nodes that score one sample, or the samples of a group.

`use(rewards.exact, returns="reward")` is a reward by itself. `combine` adds several with weights, and
`rubric` asks a judge. A reward that cannot be computed refuses its sample with the reason; it is never 0.
"""

from hflow.rewards.answers import exact, final_number, math, regex
from hflow.rewards.combination import combine
from hflow.rewards.judges import rubric
from hflow.rewards.lengths import brevity, overlong
from hflow.rewards.programs import code
from hflow.rewards.structure import json_schema
from hflow.rewards.task_scores import reasoning_gym

__all__ = [
    "brevity",
    "code",
    "combine",
    "exact",
    "final_number",
    "json_schema",
    "math",
    "overlong",
    "reasoning_gym",
    "regex",
    "rubric",
]


def __dir__() -> list[str]:
    """Return the names of the rewards, without the modules that define them."""
    return __all__
