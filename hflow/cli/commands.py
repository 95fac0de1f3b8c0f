"""The commands, with their examples."""

from __future__ import annotations

import typer

from hflow import launch
from hflow.cli import doctor_command as machine
from hflow.cli import ledger_commands as ledger
from hflow.cli import plan_commands as plans
from hflow.cli import run_commands as runs


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *(f"[bold]hflow {command}[/bold]" for command in commands)])


app = typer.Typer(
    name="hflow",
    help="Reinforcement learning of language models as a typed dataflow graph: recipe, plan, run.",
    epilog=_examples("check recipes/grpo.py", "plan recipes/grpo.py cluster=h100-8x8", "run recipes/sft.py"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command(epilog=_examples("check recipes/grpo.py", "check recipes/grpo.py nodes.actor_train.prox=none"))(
    plans.check
)

app.command(
    epilog=_examples(
        "plan recipes/grpo.py cluster=h100-2x8 models.actor.layout=d4t2p2",
        "plan recipes/grpo.py --html plan.html",
        "plan recipes/grpo.py --dot | dot -Tsvg > plan.svg",
        "plan recipes/grpo.py steps=20 --json > lock.json",
        "plan --diff runs/grpo/latest recipes/grpo.py steps=20",
    )
)(plans.plan)

app.command(
    epilog=_examples(
        "run recipes/sft.py",
        "run recipes/grpo.py steps=20 workers=inproc",
        "run recipes/grpo.py models.actor.optim.lr=2e-4 --cfg",
        "run --plan lock.json out=elsewhere",
    )
)(runs.run)

app.command(
    epilog=_examples(
        "simulate recipes/grpo_async.py schedule.max_staleness=4 workload.response_cv=1.2",
        "simulate recipes/grpo.py --steps 200 --json",
    )
)(plans.simulate)

app.command(
    epilog=_examples(
        "twin recipes/ppo.py batch=32",
        "twin recipes/grpo.py batch=8 --layout d2t2p2",
        "twin recipes/grpo.py batch=8 --as-configured placement='actor=0:d1 actor.gen=1:d1'",
    )
)(runs.twin)

app.command(
    epilog=_examples("why runs/grpo/latest 17", "why grpo eval_gen/3 --json"),
)(ledger.why)


app.command(
    epilog="\n\n".join(
        [
            _examples(
                "samples grpo --where \"reason = 'stale' and lag > 2\"",
                "samples grpo --where 'reward > 0.5' --csv",
                'samples runs/grpo/latest --where "\\"end\\" = \'refused\'" --count',
            ),
            "Columns:",
            *(f"[bold]{name}[/bold]: {says}" for name, says in launch.SAMPLE_COLUMNS.items()),
        ]
    ),
)(ledger.samples)


app.command(epilog=_examples("doctor"))(machine.doctor)
