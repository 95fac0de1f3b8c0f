"""The ledger of samples: what became of every sample that a run admitted, in one SQLite file."""

from hflow.runtime.ledger.audit import audit
from hflow.runtime.ledger.header import Header, header_of
from hflow.runtime.ledger.ledger import Ledger, rewind
from hflow.runtime.ledger.schema import COLUMNS

__all__ = ["COLUMNS", "Header", "Ledger", "audit", "header_of", "rewind"]
