"""Configurations of models for tests of the planner."""

from __future__ import annotations

from dataclasses import fields

from hflow.config.schema import GenConfig, ModelConfig

_GEN_KEYS = {field.name for field in fields(GenConfig)}


def model_config(
    layout: str | None = None,
    gen_layout: str | None = None,
    group: str | None = None,
    gen_group: str | None = None,
    **changes: object,
) -> ModelConfig:
    """A model's configuration; keys of `models.NAME.gen` may be given directly."""
    gen = {key: value for key, value in changes.items() if key in _GEN_KEYS}
    own = {key: value for key, value in changes.items() if key not in _GEN_KEYS}
    return ModelConfig(
        layout=layout,
        group=group,
        gen=GenConfig(layout=gen_layout, group=gen_group, **gen),  # type: ignore[arg-type]
        **own,  # type: ignore[arg-type]
    )
