class FP8GlobalStateManager:
    """A name that megatron imports; there is no FP8 here."""


def fp8_autocast() -> None:
    raise NotImplementedError("there is no FP8 here")
