"""Packed batches, and how bodies receive and return their values."""
