"""What authors of node types need besides what recipes import: `docs/nodes.md` shows how to write one."""

from hflow.dsl import Context, Level, NodeType, Option, Shapes, typed_options

__all__ = ["Context", "Level", "NodeType", "Option", "Shapes", "typed_options"]
