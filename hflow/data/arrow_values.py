"""Values of Arrow as the JSON values that were written into them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def json_value(value: Any, kind: pa.DataType) -> Any:
    """Return a value that pyarrow or `datasets` made of Arrow data, without the padding of structs.

    A struct of Arrow has the keys of all rows, and null for those that a row lacks. They are left out, at
    any depth, so that a row of Parquet is the row of JSON from which it was written. A map has only keys of
    its own, and becomes an object.

    Args:
        value: the value in Python.
        kind: its Arrow type.
    """
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: json_value(item, kind.item_type) for key, item in dict(value).items()}
    if pa.types.is_struct(kind) and isinstance(value, dict):
        present = [field for field in kind if value.get(field.name) is not None]
        return {field.name: json_value(value[field.name], field.type) for field in present}
    if _is_list(kind) and isinstance(value, list):
        return [json_value(item, kind.value_type) for item in value]
    return value


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in tests) or pa.types.is_large_list_view(kind)
