"""Checks of remote services (`services.NAME`), and their settings for a run."""

from __future__ import annotations

import os

from hflow.base.errors import ConfigError, nearest
from hflow.config import RunConfig
from hflow.graph.ir import Graph
from hflow.services.limits import ServiceSettings

SERVICE_KNOB = "service"
"""The knob of a body that names the service that it calls."""


def check_services(config: RunConfig, graph: Graph) -> None:
    """Check the services of a configuration, and that those exist which knobs name.

    Raises:
        ConfigError: for the first problem.
    """
    for name, service in config.services.items():
        key = f"services.{name}"
        if service.url is None:
            raise ConfigError(f"{key} has no url; set {key}.url, as in https://api.openai.com/v1")
        if not service.url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url is {service.url!r}; it must begin with http:// or https://")
        if service.budget is not None and not (
            service.request_price or service.input_price or service.output_price
        ):
            raise ConfigError(
                f"{key}.budget is {service.budget:g}, but requests cost nothing; set {key}.input_price and "
                f"{key}.output_price, per million tokens, or {key}.request_price"
            )
    for node in graph.nodes:
        called = node.spec.knob_values.get(SERVICE_KNOB)
        if isinstance(called, str) and called not in config.services:
            raise ConfigError(
                f"{node.name} ({node.spec.where}) calls the service {called!r}, which is not configured"
                f"{nearest(called, config.services)}; set services.{called}.url, or "
                f"nodes.{node.name}.{SERVICE_KNOB}"
            )


def check_service_keys(config: RunConfig) -> None:
    """Check that the environment variables are set that hold keys of services.

    Raises:
        ConfigError: for the first one that is not.
    """
    for name, service in config.services.items():
        if service.key_variable is not None and not os.environ.get(service.key_variable):
            raise ConfigError(
                f"services.{name}.key_variable is {service.key_variable}, but this environment variable is "
                "not set; export it before the run starts"
            )


def service_settings(config: RunConfig) -> list[ServiceSettings]:
    """Return the settings of all services."""
    return [ServiceSettings(name=name, **vars(service)) for name, service in config.services.items()]
