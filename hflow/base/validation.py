"""Keys of other libraries and what they are called here, for the error message of an unknown key.

Checks values from YAML files, the command line and recipes against types, with pydantic.

Nothing is converted silently: neither "3" nor 3.0 nor true is an int. An int is accepted as a float, and a
list as a tuple. nan and inf are refused for every number.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from hflow.base.errors import ConfigError, nearest, shorten


@dataclass(frozen=True)
class Counterpart:
    """The key of hflow that means what a key of another library does."""

    key: str
    """The dotted key; a part in capitals is a name of the recipe."""
    note: str = ""
    """How its values differ; empty: they are the same."""

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition(".")[2]

    def fits(self, path: str) -> bool:
        """Return whether a dotted key of a configuration is this key."""
        parts, wanted = path.split("."), self.key.split(".")
        return len(parts) == len(wanted) and all(
            name in (part, "NAME", "NODE") for part, name in zip(parts, wanted, strict=True)
        )


_EPOCHS = Counterpart("steps", "epochs * rows / batch")
_STEPS = Counterpart("steps")
_BATCH = Counterpart("batch", "counts prompts")
_LORA_RANK = Counterpart("models.NAME.lora.r")
_LORA_ALPHA = Counterpart("models.NAME.lora.alpha")
_CHECKPOINTING = Counterpart("models.NAME.activation_checkpointing")
_COMPILE = Counterpart("models.NAME.compile", "of the decoder layers")
_CLIP_GRAD = Counterpart("models.NAME.optim.clip_grad")
_LR = Counterpart("models.NAME.optim.lr")
_LR_SCHEDULE = Counterpart("models.NAME.optim.schedule")
_TOKENS = Counterpart("models.NAME.tokens_per_microbatch")
_MODEL_LENGTH = Counterpart("models.NAME.gen.max_model_len")
_STALENESS = Counterpart("schedule.max_staleness")
_GROUP = Counterpart("nodes.NODE.group")
_MAX_TOKENS = Counterpart("nodes.NODE.max_tokens")
_KL = Counterpart("nodes.NODE.kl_coef")
_CLIP = Counterpart("nodes.NODE.clip")
_CLIP_HIGH = Counterpart("nodes.NODE.clip_high")

COUNTERPARTS: Mapping[str, Counterpart] = {
    "adam_offload": Counterpart("models.NAME.optim.name", "true is adamw_cpu"),
    "beta": _KL,
    "clip_ratio": _CLIP,
    "clip_ratio_high": _CLIP_HIGH,
    "enable_gradient_checkpointing": _CHECKPOINTING,
    "enable_rollout_routing_replay": Counterpart("nodes.NODE.routing_replay"),
    "entropy_coeff": Counterpart("nodes.NODE.entropy_coef"),
    "epochs": _EPOCHS,
    "eps_clip": _CLIP,
    "eps_clip_higher": _CLIP_HIGH,
    "epsilon": _CLIP,
    "epsilon_high": Counterpart("nodes.NODE.clip_high", "1 less in nodes.cispo_train"),
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_clipping": _CLIP_GRAD,
    "kl_loss_coef": _KL,
    "learning_rate": _LR,
    "lora_alpha": _LORA_ALPHA,
    "lora_r": _LORA_RANK,
    "lora_rank": _LORA_RANK,
    "lr_scheduler_type": _LR_SCHEDULE,
    "lr_warmup_steps": Counterpart("models.NAME.optim.warmup_steps"),
    "max_actor_ckpt_to_keep": Counterpart("keep_checkpoints"),
    "max_completion_length": _MAX_TOKENS,
    "max_grad_norm": _CLIP_GRAD,
    "max_head_offpolicyness": _STALENESS,
    "max_new_tokens": _MAX_TOKENS,
    "max_num_seqs": Counterpart("models.NAME.gen.max_running"),
    "max_response_length": _MAX_TOKENS,
    "max_steps": _STEPS,
    "max_tokens_per_mb": _TOKENS,
    "n_samples": _GROUP,
    "n_samples_per_prompt": _GROUP,
    "num_generations": _GROUP,
    "num_iterations": Counterpart("nodes.NODE.epochs"),
    "num_train_epochs": _EPOCHS,
    "output_dir": Counterpart("out"),
    "optimizer_offload": Counterpart("models.NAME.offload", "true is optimizer"),
    "param_offload": Counterpart("models.NAME.offload", "true is all, with the optimizer"),
    "ppo_epochs": Counterpart("nodes.NODE.epochs"),
    "ppo_max_token_len_per_gpu": _TOKENS,
    "rank": _LORA_RANK,
    "rollout_batch_size": _BATCH,
    "save_freq": Counterpart("save_every"),
    "save_steps": Counterpart("save_every"),
    "save_total_limit": Counterpart("keep_checkpoints"),
    "staleness_threshold": _STALENESS,
    "torch_compile": _COMPILE,
    "total_epochs": _EPOCHS,
    "total_train_epochs": _EPOCHS,
    "total_train_steps": _STEPS,
    "total_training_steps": _STEPS,
    "train_batch_size": _BATCH,
    "use_torch_compile": _COMPILE,
    "vllm_max_model_length": _MODEL_LENGTH,
}
"""Key of TRL, verl, OpenRLHF or AReaL, its last part -> the key of hflow; see `docs/coming-from`."""


K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
"""The pydantic configuration of every dataclass that is built from a user's values."""

MAX_INT = 1_000_000_000
"""The largest whole number in a configuration or recipe: nothing that hflow counts is larger."""
Int = Annotated[StrictInt, Field(le=MAX_INT)]
"""A whole number."""
LATEST = "latest"
"""Name of the link to the newest run, and to the newest checkpoint."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
"""The longest name and path of a file on Linux."""


def _check_path(text: str) -> str:
    """Refuse text that cannot be the path of a file."""
    if not text:
        raise ValueError("is empty; name a file or directory, or remove the key")
    if not text.isprintable():
        raise ValueError(f"is {text!r}, which has a character that cannot be printed; rename the file")
    if text.startswith("~"):
        raise ValueError(f"is {text!r}, which only a shell replaces; write the directory in full")
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > MAX_NAME_BYTES or len(os.fsencode(text)) > MAX_PATH_BYTES:
        raise ValueError(
            f"is {shorten(text, 40)!r}, which is too long for a path; use names of at most "
            f"{MAX_NAME_BYTES} bytes"
        )
    return text


def _check_paths(value: Any) -> str | tuple[str, ...] | None:
    """Refuse what is neither a path nor a list of paths."""
    if value is None or isinstance(value, str):
        return value if value is None else _check_path(value)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(f"is {shorten(repr(value), 80)}; it must be a path, or a list of paths")
    return tuple(map(_check_path, value))


def is_name(value: object) -> bool:
    """Return whether a value can name a part of a recipe: overrides take ASCII letters, digits and _ only."""
    return isinstance(value, str) and value.isascii() and value.isidentifier()


def _check_directory_name(text: str) -> str:
    """Refuse text that cannot be the name of a directory."""
    if text in ("", ".", "..") or "/" in text:
        raise ValueError(f"is {text!r}, which is not the name of a directory; use letters, digits, - and _")
    if text == LATEST:
        raise ValueError(f"is {text!r}, which is the name of the link to a newest run; choose another name")
    return _check_path(text)


FilePath = Annotated[str, AfterValidator(_check_path)]
"""The path of a file or directory, which need not exist."""
FilePaths = Annotated[str | tuple[str, ...] | None, PlainValidator(_check_paths)]
"""One path or several, which need not exist; None: none."""
DirectoryName = Annotated[str, AfterValidator(_check_directory_name)]
"""The name of a directory, without its parent."""


def _refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("a configuration cannot be changed; use dataclasses.replace to make another one")


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed. It can be read, pickled, copied and written as JSON like any dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))


for _name in ["__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"]:
    setattr(FrozenDict, _name, _refuse)


def freeze(value: Any) -> Any:
    """Return the value with every dict in it replaced by a `FrozenDict` and every list by a tuple."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


FrozenMapping = Annotated[Mapping[K, V], AfterValidator(freeze)]
"""A mapping field of a checked dataclass."""


# Dataclasses from mappings


def from_mapping(cls: type[T], values: Mapping[str, Any], key: str = "") -> T:
    """Build a dataclass from a mapping, such as the content of a YAML file.

    Args:
        cls: a pydantic dataclass with the configuration `CHECKED`.
        values: nested mappings, lists and scalars. A field that they leave out has its default.
        key: the dotted key of `values` in the configuration, for messages.

    Raises:
        ConfigError: for an unknown or missing key, or a value that does not fit. One line, with the key.
    """
    try:
        built: T = cls.__pydantic_validator__.validate_python(values)  # type: ignore[attr-defined]
        return built
    except ValidationError as error:
        raise ConfigError(_describe(error, cls, key, values)) from error


def join(key: str, name: object) -> str:
    """Return the dotted key of `name` under `key`."""
    return f"{key}.{name}" if key else str(name)


def unknown_key(path: str, name: object, known: Collection[str], paths: Collection[str] = ()) -> str:
    """Return the message for a key that does not exist, with what may have been meant.

    `known` are the names that exist beside the part `name`, and `paths` the dotted keys elsewhere.
    """
    return f"unknown key {path!r}{_suggestion(path, str(name), known, paths)}"


def _suggestion(path: str, name: str, known: Collection[str], paths: Collection[str]) -> str:
    """Return the whole path of a key of the same meaning or name, or of the nearest; else all names there."""
    counterpart, parent = COUNTERPARTS.get(name), path.removesuffix(name)  # empty, or ending with a dot
    if counterpart is not None and counterpart.name in known and counterpart.fits(parent + counterpart.name):
        return f"; did you mean {parent + counterpart.name!r}{_note(counterpart)}?"
    if counterpart is not None:
        found = [each for each in paths if counterpart.fits(each)] or [counterpart.key]
    else:
        found = [each for each in paths if each.rpartition(".")[2] == name]
    if not found:
        return nearest(name, known, parent) or f"; known here: {', '.join(sorted(known)) or 'nothing'}"
    inside = [each for each in found if each.startswith(parent)]
    shown = sorted(inside or found, key=lambda each: each.count("."))[:_MAX_SUGGESTIONS]
    note = "" if counterpart is None else _note(counterpart)
    placeholder = next((part for part in shown[0].split(".") if part in ("NAME", "NODE")), "")
    meaning = f" with a name of the recipe for {placeholder}" if placeholder else ""
    return f"; did you mean {' or '.join(map(repr, shown))}{note}{meaning}?"


def _note(counterpart: Counterpart) -> str:
    return f" ({counterpart.note})" if counterpart.note else ""


_MAX_SUGGESTIONS = 3
_TUPLE = re.compile(r"tuple\[(\w+), \.\.\.\]")

_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "mapping_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:,.15g}",
    "greater_than_equal": "at least {ge:,.15g}",
    "less_than": "less than {lt:,.15g}",
    "less_than_equal": "at most {le:,.15g}",
    "too_long": "a list of {max_length} values",
}
"""pydantic's type of error -> what the value must be; the fields are those of the error's context."""


def _describe(error: ValidationError, cls: type, key: str, values: Mapping[str, Any]) -> str:
    """Return one line about the first error. Unknown keys come first: a mistyped key may also be missing."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "unexpected_keyword_argument"), errors[0])
    kind, location, value, context = first["type"], first["loc"], first["input"], first.get("ctx", {})
    path = _path(key, location)
    if kind == "unexpected_keyword_argument":
        known = _field_names(cls, location[:-1])
        return unknown_key(path, location[-1], known, list(_paths(cls, values, key)))
    if kind == "missing":
        return f"{path} is missing; it has no default"
    if kind == "value_error":
        problem = str(context["error"])
        return f"{path} {problem}" if problem.startswith("is ") else join(path, problem)
    if kind in _WANTED:
        fix = "; remove the key for its default" if value is None else ""
        if kind == "string_type" and isinstance(value, bool | int | float):
            fix = f"; in a shell, write {_as_text(path, value)}; the shell removes the outer quotes"
        return f"{path} is {value!r}; it must be {_WANTED[kind].format_map(context)}{fix}"
    return f"{path} is {value!r}: {first['msg']}"


def _as_text(path: str, value: bool | float) -> str:
    """Return the override that sets a value as text, between a shell's quotes."""
    key, is_item, _ = path.partition("[")
    text = f'"{json.dumps(value)}"'
    return f"'{key}={f'[{text}]' if is_item else text}'"


def _path(key: str, location: tuple[int | str, ...]) -> str:
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part != "[key]":
            key = join(key, part)
    return key


def _field_names(cls: Any, location: tuple[int | str, ...]) -> list[str]:
    """Return the fields of the dataclass at a location inside `cls`."""
    for part in location:
        # The location names a field of a dataclass, or a key of a mapping of dataclasses.
        cls = get_type_hints(cls)[str(part)] if dataclasses.is_dataclass(cls) else get_args(cls)[-1]
        cls = _not_none(cls)
    return [field.name for field in dataclasses.fields(cls)]


def _paths(cls: Any, values: Any, key: str) -> Iterator[str]:
    """Yield the dotted keys of a dataclass, with the names in `values` as the keys of its mappings."""
    given = values if isinstance(values, Mapping) else {}
    for name, hint in get_type_hints(cls).items():
        path, inner, value = join(key, name), _not_none(hint), given.get(name)
        yield path
        if dataclasses.is_dataclass(inner):
            yield from _paths(inner, value, path)
        elif get_args(inner) and dataclasses.is_dataclass(item := get_args(inner)[-1]):
            for entry, content in value.items() if value and isinstance(value, Mapping) else [("NAME", None)]:
                yield from _paths(item, content, join(path, entry))


def _not_none(hint: Any) -> Any:
    """Return the first type of a union, such as of a dataclass and None, or any other type as it is."""
    return get_args(hint)[0] if get_origin(hint) in (Union, types.UnionType) else hint


# Types written as text

_SCALARS: Mapping[str, Any] = {"int": Int, "float": StrictFloat, "bool": StrictBool, "str": StrictStr}
_TUPLES: Mapping[str, Any] = {
    "tuple[int, ...]": tuple[Int, ...],
    "tuple[float, ...]": tuple[StrictFloat, ...],
    "tuple[bool, ...]": tuple[StrictBool, ...],
    "tuple[str, ...]": tuple[StrictStr, ...],
}


def check_value(
    value: Any, type_text: str, minimum: float | None = None, maximum: float | None = None
) -> Any:
    """Check the value of a knob or option, and return it converted to the type (an int to a float).

    Args:
        value: any value.
        type_text: alternatives joined by ` | `: `int`, `float`, `bool`, `str`, `None`, a choice as Python
            writes it, such as `'none'`, or `tuple[T, ...]` of a scalar type.
        minimum: the smallest number allowed.
        maximum: the largest number allowed.

    Raises:
        ValueError: when the value does not fit; the message reads after "X is".
    """
    try:
        return _text_adapter(type_text, minimum, maximum).validate_python(value)
    except ValidationError as error:
        kinds = {e["type"]: e.get("ctx", {}) for e in error.errors(include_url=False)}
        for kind in ("greater_than_equal", "less_than_equal", "finite_number"):
            if kind in kinds:
                raise ValueError(f"{value!r}; it must be {_WANTED[kind].format_map(kinds[kind])}") from error
        wanted = _TUPLE.sub(r"a list of \1", type_text).replace(" | ", " or ")
        raise ValueError(f"{value!r}; it must be {wanted}") from error


def text_of_type(hint: Any) -> str | None:
    """Return an annotation as `check_value` reads types, or None for a type that knobs cannot have."""
    if hint is type(None):
        return "None"
    if hint in (int, float, bool, str):
        return str(hint.__name__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(repr(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        parts = [text_of_type(argument) for argument in arguments]
        return " | ".join(part for part in parts if part) if all(parts) else None
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"tuple[{inner}, ...]" if (inner := text_of_type(arguments[0])) in _SCALARS else None
    return None


@cache
def _text_adapter(type_text: str, minimum: float | None, maximum: float | None) -> TypeAdapter[Any]:
    texts = type_text.split(" | ")
    alternatives = [_type_of(text) for text in texts if text != "None"]
    if minimum is not None or maximum is not None:
        bounds = Field(ge=minimum, le=maximum)
        alternatives = [Annotated[t, bounds] if t in (Int, StrictFloat) else t for t in alternatives]
    wanted: Any = alternatives[0]
    if len(alternatives) > 1:
        wanted = Annotated[Union[tuple(alternatives)], Field(union_mode="left_to_right")]  # noqa: UP007
    return TypeAdapter(wanted | None if "None" in texts else wanted, config=ConfigDict(allow_inf_nan=False))


def _type_of(text: str) -> Any:
    if text in _TUPLES:
        return Annotated[_TUPLES[text], Strict(), BeforeValidator(_list_as_tuple)]
    if text in _SCALARS:
        return _SCALARS[text]
    choice = ast.literal_eval(text)
    return Annotated[Literal[choice], BeforeValidator(partial(_of_type, type(choice)))]


def _list_as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_type(cls: type, value: Any) -> Any:
    """Refuse values that are merely equal to a choice: pydantic takes True and 1.0 for 1."""
    if type(value) is not cls:
        raise ValueError
    return value
