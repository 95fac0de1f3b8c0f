"""Weights on their way from training replicas to engines.

`outgoing` reads slices from the sender's shards, `buckets` packs them into bytes, `channels` carry these
between processes, and `incoming` assembles tensors for the receiver. `publisher` connects all of this by the
plan's routes. `loading` checks that an engine holds what was sent, by the checksums of `checksum`.
"""
