"""What `own_kinds.py`, beside it, imports when it runs."""

OFFSET = 1.0
