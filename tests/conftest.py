"""Settings of all tests, and which tests run where."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("hflow", deadline=None)  # a busy machine is not a failure
settings.load_profile("hflow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked gpu to `make gpu-check`, and say so."""
    asked = "gpu" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("gpu") and not asked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run `make gpu-check`"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test that was asked for and cannot run is a failure, not a skip."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.fail("this machine has no CUDA device that torch can use", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _without_installed_engines() -> Iterator[None]:
    """Plans for GPUs must not depend on what this machine has: vLLM counts as not installed."""
    problems = {"vllm": "vllm is not installed; pip install 'hflow[vllm]'"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hflow.launch.plan_request.engine_problems", lambda device: problems)
        yield
