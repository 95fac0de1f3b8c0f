"""Sandboxes of E2B, Daytona and Modal by their own packages, which pip installs: minutes, a package index.

Their services are not tested: a server of this machine answers the requests, and runs the commands here. The
packages, the program of a call and its confinement are real.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sandboxed_tools as tools
from sandbox_services import Service, serve

from hflow.base.errors import EpisodeError, RunError
from hflow.sandboxes.providers import Sandboxes
from hflow.types.sandbox import Sandbox, ToolFailed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PACKAGES = ["e2b==2.63.0", "daytona==0.226.1", "modal==1.6.4"]
PROVIDERS = ["e2b", "daytona"]


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the packages beside those of the tests, which go first."""
    directory = tmp_path_factory.mktemp("packages")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory), *PACKAGES]
    subprocess.run(install, check=True)
    sys.path.append(str(directory))
    yield
    sys.path.remove(str(directory))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with serve() as service:
        for name, value in {
            **{"E2B_API_KEY": "e2b_" + "0" * 40, "E2B_API_URL": service.url, "E2B_SANDBOX_URL": service.url},
            **{
                "E2B_HTTP_VERSION": "1.1",
                "DAYTONA_API_KEY": "dtn_0123456789",
                "DAYTONA_API_URL": service.url,
            },
        }.items():
            monkeypatch.setenv(name, value)
        yield service


def call(provider: str, tool: Callable[..., Any], arguments: dict[str, Any], **limits: Any) -> Any:
    given = Sandbox(**{"timeout": 20.0, "memory_mb": 256, "provider": provider, **limits})
    return asyncio.run(Sandboxes(2).run(tool, given, arguments))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_returns_its_result_and_ends_its_machine(provider: str, service: Service):
    assert call(provider, tools.calculator, {"expression": "6 * 7"}) == "42"
    with pytest.raises(ToolFailed, match="ZeroDivisionError"):
        call(provider, tools.calculator, {"expression": "1 / 0"}, image="mine:1")
    with pytest.raises(ToolFailed, match=r"its timeout of 0.3 s"):
        call(provider, tools.endless, {}, timeout=0.3)
    assert service.ended == ["m1", "m2", "m3"]
    first, second, _ = service.made
    if provider == "e2b":
        assert (first["templateID"], second["templateID"]) == ("base", "mine:1")
        assert (first["allow_internet_access"], first["timeout"]) == (False, 320)
    else:
        assert (first["networkBlockAll"], first["autoDeleteInterval"], first["ttlMinutes"]) == (True, 0, 6)
        assert "FROM mine:1" in second["buildInfo"]["dockerfileContent"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("status", [401, 403])
def test_failures_of_a_service_refuse_the_sample(provider: str, status: int, service: Service):
    service.fail_with = status
    with pytest.raises(EpisodeError, match=rf"calculator \({provider}\) failed: .*refused by the stub"):
        call(provider, tools.calculator, {"expression": "1"})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_missing_key_is_refused(provider: str, service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(f"{provider.upper()}_API_KEY")
    with pytest.raises(RunError, match=rf"environment variable {provider.upper()}_API_KEY"):
        call(provider, tools.calculator, {"expression": "1"})


def test_modal_runs_a_call_and_ends_its_sandbox(monkeypatch: pytest.MonkeyPatch):
    from modal_service import serve_modal

    with serve_modal() as service:
        monkeypatch.setenv("MODAL_SERVER_URL", service.url)
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-1")
        with pytest.raises(RunError, match="environment variable MODAL_TOKEN_SECRET"):
            call("modal", tools.calculator, {"expression": "1"})
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-1")
        assert call("modal", tools.calculator, {"expression": "6 * 7"}) == "42"
        with pytest.raises(ToolFailed, match="ZeroDivisionError"):
            call("modal", tools.calculator, {"expression": "1 / 0"}, image="mine:1")
        with pytest.raises(ToolFailed, match=r"its timeout of 0.3 s"):
            call("modal", tools.endless, {}, timeout=0.3)
        assert service.ended == ["sb-1", "sb-2", "sb-3"]
        assert service.images[1] == ["FROM mine:1"]
        first = service.made[0]
        assert first.timeout_secs == 320
        assert first.network_access.network_access_type == first.network_access.BLOCKED
        service.refused = "refused by the stub"
        with pytest.raises(EpisodeError, match=r"calculator \(modal\) failed: .*refused by the stub"):
            call("modal", tools.calculator, {"expression": "1"})
