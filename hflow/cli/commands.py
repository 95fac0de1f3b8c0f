"""The `hflow` command: its subcommands with their examples, and its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import typer
from rich.text import Text
from typer.exceptions import TyperException

from hflow import launch
from hflow.base.durable_files import file_fix
from hflow.base.errors import HflowError, shorten
from hflow.base.garbage import freeze_imports
from hflow.base.standard_streams import open_closed_streams, outlive_reader
from hflow.base.terminal import SafeConsole
from hflow.cli import machine, plans, recipes, results, runs
from hflow.cli.arguments import INTERRUPTED, RESUMABLE, USER_ERROR, RunStopped, StoppedByUser

MAX_ERROR = 1200
"""Characters of an error: the middle of a longer one is left out."""


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *(f"[bold]hflow {command}[/bold]" for command in commands)])


app = typer.Typer(
    name="hflow",
    help="Reinforcement learning of language models as a typed dataflow graph: recipe, plan, run.",
    epilog=_examples("check grpo", "plan grpo cluster=h100-8x8", "run sft"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _add(function: Callable[..., None], *examples: str, **options: Any) -> None:
    app.command(epilog=_examples(*examples), **options)(function)


_add(recipes.new, "new grpo mine", "new grpo mine --chat", "new custom/replay mine")
_add(recipes.translate, "translate verl.yaml mine", "translate trl.yaml mine --cluster h100-1x8")
_add(recipes.nodes, "nodes", "nodes actor_train", "nodes grpo", "nodes mine/grpo.py score --json")
_add(plans.check, "check grpo", "check grpo nodes.actor_train.prox=none")
_add(
    plans.plan,
    "plan grpo cluster=h100-2x8 models.actor.layout=d4t2p2",
    "plan grpo --html plan.html",
    "plan grpo --dot | dot -Tsvg > plan.svg",
    "plan grpo steps=20 --json > lock.json",
    "plan --diff runs/grpo/latest grpo steps=20",
    "plan grpo cluster=h100-2x8 --what-if network=ib-xdr 'batch=128 schedule.max_staleness=4'",
    cls=plans.PlanCommand,
)
_add(
    runs.run,
    "run sft",
    "run grpo steps=20 workers=inproc",
    "run grpo models.actor.optim.lr=2e-4 --cfg",
    "run --plan lock.json out=elsewhere",
)
_add(
    plans.simulate,
    "simulate grpo_async schedule.max_staleness=4 workload.response_cv=1.2",
    "simulate grpo --steps 200 --json",
)
_add(
    plans.size,
    "size grpo cluster=h100-1x8 --seconds 60",
    "size grpo --on h100 --on h200 --on b200-2x8 --days 3 --cheapest",
    "size grpo cluster=h100-1x8 --samples 100 --most 256 --html sizes.html",
)
_add(
    runs.twin,
    "twin ppo batch=32",
    "twin grpo batch=8 --layout d2t2p2",
    "twin grpo batch=8 --as-configured placement='actor=0:d1 actor.gen=1:d1'",
)
_add(results.why, "why runs/grpo/latest 17", "why grpo eval_gen/3 --json")
_add(
    results.samples,
    "samples grpo --where \"reason = 'stale' and lag > 2\"",
    "samples grpo --where 'reward > 0.5' --csv",
    "samples runs/grpo/latest --where \"end = 'refused'\" --count",
    cls=results.SamplesCommand,
)
_add(results.report, "report grpo", "report runs/grpo/20260131-142500 --html report.html")
_add(results.watch, "watch grpo", "watch runs/grpo/20260131-142500 --port 0")
_add(
    results.compare,
    "compare grpo grpo_async",
    "compare runs/grpo/20260131-142500 runs/grpo/latest --metric 'eval_gen/*' --metric 'time/*'",
    "compare grpo grpo_async --html compare.html",
    "compare runs/seed-*/latest --json",
)
_add(
    results.evaluate,
    "eval grpo",
    "eval grpo data.heldout.path=test.jsonl data.heldout.generator=null --samples 16",
    "eval Qwen/Qwen2.5-0.5B --recipe grpo",
    name="eval",
)
_add(
    results.export,
    "export grpo ./my-model",
    "export runs/grpo/latest/checkpoints/best ./my-model --model actor --dtype bf16",
    "export grpo ./my-model --push me/my-model",
)
_add(
    runs.serve,
    "serve runs/grpo/latest",
    "serve grpo gen.max_model_len=128 --port 9000",
    "serve Qwen/Qwen2.5-0.5B --engine vllm --host 0.0.0.0 --api-key KEY",
)
_add(machine.profile, "profile", "profile --device h100 --out here.yaml")
_add(machine.doctor, "doctor")


def main() -> None:
    """Run the command line. Errors of the user are printed in one line, with exit code 2."""
    try:
        _run_command()
    except SystemExit as end:
        launch.exit_without_ray(end.code)
        raise


@cache
def _command() -> Any:
    """Return the commands as one, which takes Typer a while to make of their functions."""
    return typer.main.get_command(app)


def _run_command() -> NoReturn:
    """Run the command line and exit."""
    open_closed_streams()
    outlive_reader("stderr")
    if not _has_directory():
        _stop("the working directory was deleted; change to another one", USER_ERROR)
    freeze_imports()
    try:
        code = _command()(standalone_mode=False)
        sys.stdout.flush()
    except HflowError as error:
        _stop(str(error), USER_ERROR)
    except RunStopped:
        raise SystemExit(RESUMABLE) from None
    except TyperException as error:
        message = error.format_message()
        if not message:  # without a command, the help was printed
            raise SystemExit(USER_ERROR) from None
        _stop(f"{message.rstrip('.')}; see `{_command_of(error)} --help`", USER_ERROR)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        _stop(_file_problem(error), USER_ERROR)
    except StoppedByUser:
        raise SystemExit(INTERRUPTED) from None
    if code == INTERRUPTED:
        _stop("interrupted", INTERRUPTED)
    raise SystemExit(code or 0)


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _command_of(error: TyperException) -> str:
    """Return the command whose arguments are wrong."""
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "hflow"


def _file_problem(error: OSError) -> str:
    """Return one line about a file that cannot be read or written."""
    name = "" if error.filename is None else f"{shorten(os.fspath(error.filename), 200)}: "
    return f"{name}{error.strerror or error}; {file_fix(error.errno)}"


def _stop(message: str, code: int) -> NoReturn:
    """Print an error in one line, and exit."""
    line = Text.assemble(("error: ", "bold red"), shorten(" ".join(message.split()), MAX_ERROR))
    SafeConsole(stderr=True).print(line, soft_wrap=True)
    raise SystemExit(code)
