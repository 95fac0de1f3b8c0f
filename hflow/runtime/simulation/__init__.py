"""A run on a virtual clock: the same state machine, with given durations in the place of workers."""
