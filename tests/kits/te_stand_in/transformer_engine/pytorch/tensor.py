class QuantizedTensor:
    """A name that megatron imports; no tensor here is of this class."""
