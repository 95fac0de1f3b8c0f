"""Compiled schedules run to their end on the state machine, in the order that the graph asks for."""

from collections import deque

import pytest
from model_configs import model_config
from plan_graphs import agent, ema, grpo, ppo, request, sft, without

from hflow.planner.compile import compile_plan
from hflow.runtime import events as ev
from hflow.runtime.state.run_state import RunState

ROWS = 3
"""Rows of an evaluation."""


def run(plan, limit=20_000):
    """Perform every instruction at once and in order; return those that were given."""
    state = RunState(plan.schedule)
    version = plan.schedule.num_steps
    endless = {stream.name for stream in plan.schedule.streams if stream.batch is not None}
    opened = dict.fromkeys((stream.name for stream in plan.schedule.streams), 0)
    events, given = deque([ev.Started()]), []
    while events and len(given) < limit:
        for instruction in state.handle(events.popleft()):
            given.append(instruction)
            match instruction:
                case ev.OpenGroup(stream, group, samples):
                    opened[stream] += 1
                    if stream in endless or opened[stream] % (ROWS + 1):
                        events.extend(ev.SampleDone(stream, sample, version) for sample in samples)
                    else:
                        events.append(ev.Exhausted(stream, group))
                case ev.RunSample(node, key) | ev.RunGroup(node, key, _) | ev.RunBatch(node, key):
                    events.append(ev.NodeDone(node, key))
                case ev.RunStreamingInference(node, _, keys):
                    events.extend(ev.NodeDone(node, key) for key in keys)
                case ev.Publish(replica, at):
                    events.append(ev.Published(replica, at))
                case ev.Wake(replica, at):
                    events.append(ev.Awake(replica, at))
                case ev.Sleep(replica, _):
                    events.append(ev.Asleep(replica))
    return given


APART = {"actor": model_config(layout="d1", group="train", gen_group="gen")}


@pytest.mark.parametrize("models", [{}, APART], ids=["colocated", "apart"])
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize(
    "graph", [grpo(), ppo(), agent(), without(agent(), "has_spread"), sft(), ema()], ids=lambda g: g.name
)
def test_a_compiled_schedule_runs_to_its_end(graph, max_staleness, models):
    plan = compile_plan(graph, request("cpu-1x2", models=models, max_staleness=max_staleness, num_steps=4))
    given = run(plan)
    assert given[-1] == ev.Finish("done")
    fired = [(i.node, i.step) for i in given if isinstance(i, ev.RunBatch)]
    every_step = [n.name for n in plan.schedule.nodes if n.level == "batch" and n.every == 1]
    assert {(name, step) for name in every_step for step in range(4)} <= set(fired)
    assert [step for name, step in fired if name == "save.actor"] == [3]
    for edge in plan.graph.edges:
        if edge.lag == 0 and edge.src in every_step and edge.dst in every_step:
            assert all(fired.index((edge.src, k)) < fired.index((edge.dst, k)) for k in range(4))
