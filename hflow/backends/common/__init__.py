"""What every training backend does alike: inputs, cuts, losses, metrics, and the order of a step.

Nothing here knows how a model is sharded. Denominators, cuts and metrics are therefore the same whatever
computes the forward and backward passes.
"""
