"""The recipe language: decorators, `use`, `Recipe`, and the functions that read a recipe file."""

from hflow.dsl.bodies import checked_by, missing_extra, warned_by
from hflow.dsl.dataset import Dataset
from hflow.dsl.first_pass import FirstPass, first_pass, first_pass_of, read_first_pass
from hflow.dsl.nodetype import Context, NodeType, Shapes, typed_options
from hflow.dsl.options import Option
from hflow.dsl.overrides import apply_overrides, overridable_keys, override_values
from hflow.dsl.recipe import Recipe, load_recipe
from hflow.dsl.rows import rows, sampler
from hflow.dsl.sandbox import sandbox
from hflow.dsl.use import use
from hflow.dsl.verbs import compute, encode, generate, infer, train, update
from hflow.graph.errors import caller_location
from hflow.graph.ir import Level
from hflow.graph.model import Model

__all__ = [
    "Context",
    "Dataset",
    "FirstPass",
    "Level",
    "Model",
    "NodeType",
    "Option",
    "Recipe",
    "Shapes",
    "apply_overrides",
    "caller_location",
    "checked_by",
    "compute",
    "encode",
    "first_pass",
    "first_pass_of",
    "generate",
    "infer",
    "load_recipe",
    "missing_extra",
    "overridable_keys",
    "override_values",
    "read_first_pass",
    "rows",
    "sampler",
    "sandbox",
    "train",
    "typed_options",
    "update",
    "use",
    "warned_by",
]
