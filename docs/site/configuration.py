"""Tables of the keys of the configuration, from `hflow.config.schema` and the docstrings of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from hflow.base.validation import MAX_INT
from hflow.config import schema
from hflow.config.field_meanings import field_meanings

JsonSchema = Mapping[str, Any]
SCHEMA: JsonSchema = TypeAdapter(schema.RunConfig).json_schema()
CLASSES: Mapping[str, JsonSchema] = {**SCHEMA["$defs"], "RunConfig": SCHEMA}
"""Name of each class of the configuration -> its JSON schema."""
NAMES = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number"}


SECTIONS = {
    "RunConfig": "the run",
    "ScheduleConfig": "schedule",
    "ModelConfig": "models.NAME",
    "OptimConfig": "models.NAME.optim",
    "WeightGroupConfig": "models.NAME.optim.groups",
    "GenConfig": "models.NAME.gen",
    "ImagesConfig": "models.NAME.images",
    "LoraConfig": "models.NAME.lora",
    "BalanceConfig": "models.NAME.balance",
    "DataConfig": "data.NAME",
    "WeightedSourceConfig": "data.NAME.sources.SOURCE",
    "ReportConfig": "report",
    "FaultsConfig": "faults",
    "ServiceConfig": "services.NAME",
    "WorkloadConfig": "workload",
    "WorkloadImages": "workload.images",
}
"""Name of each class -> where its keys are, in the order of the page."""


def key_tables() -> str:
    """Return a section for each class of the configuration, in Markdown."""
    assert set(SECTIONS) == set(CLASSES), "add the new class to SECTIONS"
    sections = []
    for name, place in SECTIONS.items():
        title = "Keys of the run" if name == "RunConfig" else f"`{place}`"
        sections += [f"## {title}", CLASSES[name]["description"], key_table(name)]
    return "\n\n".join(sections)


def key_table(name: str) -> str:
    """Return the keys of a class as a table in Markdown: type, default and meaning of each."""
    meanings = field_meanings(getattr(schema, name))
    rows = ["| key | type | default | meaning |", "|-|-|-|-|"]
    for key, value in CLASSES[name]["properties"].items():
        default = f"`{yaml_text(value['default'])}`" if "default" in value else ""
        rows.append(
            f"| `{key}` | {type_text(value)} | {default} | {meanings[key].replace('|', chr(92) + '|')} |"
        )
    return "\n".join(rows)


def type_text(value: JsonSchema) -> str:
    """Return the type of a key in words, with its limits."""
    if "anyOf" in value:
        texts = (type_text(choice) for choice in value["anyOf"])
        return " or ".join(text for text in texts if text)
    if "$ref" in value:
        place = SECTIONS[value["$ref"].rpartition("/")[2]]
        return f"[{place}](#{place.replace('.', '').lower()})"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    match value.get("type"):
        case "null":
            return "`null`"
        case "array":
            return f"list of {type_text(value.get('items') or value['prefixItems'][0])}"
        case "object":
            values = value.get("additionalProperties")
            return f"mapping to {type_text(values)}" if isinstance(values, Mapping) else "mapping"
        case None:
            return "text, list of text or `null`"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = (f"{sign} {value[key]:,}" for key, sign in limits.items() if value.get(key, MAX_INT) < MAX_INT)
    return " ".join([NAMES[value["type"]], ", ".join(bounds)]).rstrip()


def yaml_text(default: Any) -> str:
    """Return a default as one writes it in YAML."""
    match default:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[default]
        case list() | tuple():
            return f"[{', '.join(yaml_text(item) for item in default)}]"
    return str(default)
