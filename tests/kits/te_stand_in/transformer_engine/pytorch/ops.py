from torch import Tensor, nn
from torch.nn.functional import silu


class FusibleOperation(nn.Module):
    """A name in megatron's annotations."""


class Sequential(nn.Sequential):
    """A name in megatron's annotations."""


class SwiGLU(FusibleOperation):
    """The activation: its input is the gate, then the linear unit."""

    def forward(self, x: Tensor) -> Tensor:
        gate, unit = x.contiguous().chunk(2, dim=-1)
        return silu(gate) * unit
