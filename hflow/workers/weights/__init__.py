"""Weights on their way from training replicas to engines.

`weight_stream` reads slices from the sender's shards and assembles tensors for the receiver, `buckets` packs
slices into bytes, `transports` carries them between processes, `publisher` connects these by the plan's
routes, and `checksum` proves that an engine holds what was sent.
"""
