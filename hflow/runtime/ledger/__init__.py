"""The ledger of samples: what happened to every sample that a run admitted, in one SQLite file.

`Ledger` writes it during a run. `query` and `sample_history` read it, `audit` checks it, and `schema`
describes its tables.
"""

from hflow.runtime.ledger.audit import audit
from hflow.runtime.ledger.header import Header, make_header
from hflow.runtime.ledger.ledger import Ledger, rewind
from hflow.runtime.ledger.schema import COLUMNS

__all__ = ["COLUMNS", "Header", "Ledger", "audit", "make_header", "rewind"]
