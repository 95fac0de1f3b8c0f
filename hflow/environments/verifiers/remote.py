"""Runs in the interpreter that has verifiers: loads the code for the installed generation of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(env: str, args: dict[str, Any]) -> Any:
    """Load an environment.

    Raises:
        ValueError: for a version between the generations, or wrong arguments.
    """
    import verifiers
    from hflow_host import load_file

    version = tuple(int(number) for number in verifiers.__version__.split(".")[:2])
    if (0, 3) <= version < (0, 4):
        raise ValueError(
            f"verifiers {verifiers.__version__} is not supported; install 'verifiers<0.3' or 'verifiers>=0.4'"
        )
    is_old = version < (0, 3)
    name, kind = ("generation_v0", "Environment") if is_old else ("generation_v1", "TasksetEnvironment")
    module = load_file(str(Path(__file__).with_name(f"{name}.py")))
    return getattr(module, kind)(env, args)
