"""The dialects of the endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.episodes.endpoint.dialects.anthropic import MessagesDialect
from hflow.episodes.endpoint.dialects.interface import Dialect
from hflow.episodes.endpoint.dialects.openai import ChatDialect, TextDialect
from hflow.episodes.endpoint.dialects.responses import ResponsesDialect
from hflow.episodes.endpoint.dialects.tokens import TokensDialect

DEFAULT_DIALECT: Dialect = ChatDialect()
"""The dialect of errors where no dialect has the path."""
DIALECTS: Mapping[str, Dialect] = {
    dialect.path: dialect
    for dialect in (DEFAULT_DIALECT, TextDialect(), ResponsesDialect(), MessagesDialect(), TokensDialect())
}
"""Path -> dialect."""
