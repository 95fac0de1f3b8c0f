"""Translation of the configurations of other libraries: their keys, and what hflow has in their place."""

from hflow.translate.given import Entry, Given
from hflow.translate.peers import Peer, peers
from hflow.translate.recipe import RecipeDraft
from hflow.translate.table import Row

__all__ = ["Entry", "Given", "Peer", "RecipeDraft", "Row", "peers"]
