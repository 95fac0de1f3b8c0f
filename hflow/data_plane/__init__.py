"""Where the samples of a run are, and how a batch is cut and moved.

The run and the forecast call the same functions.
"""
