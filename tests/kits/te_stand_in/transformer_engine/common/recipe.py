class DelayedScaling:
    """A name that megatron derives from; there is no FP8 here."""
