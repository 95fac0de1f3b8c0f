"""Data on the host: datasets, tokenizers, packed batches, and the arguments and results of node bodies."""
