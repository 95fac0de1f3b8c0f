"""The meaning of each key of the configuration, from the docstrings of its fields."""

from __future__ import annotations

import ast
import inspect


def field_meanings(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class, its base classes' included, on one line."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    meanings[key] = " ".join(meaning.split())
    return meanings
