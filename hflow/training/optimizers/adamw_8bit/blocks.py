"""The blocks of quantised moments."""

BLOCK = 256
"""Entries that share a scale in fp32."""
