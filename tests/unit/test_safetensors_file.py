"""safetensors files that are written tensor by tensor."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hflow.backends.megatron.hf_export import write_fp32

TENSORS = {
    "matrix": torch.randn(5, 3).T,  # not contiguous
    "vector": torch.arange(7.0),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(2, 2, 2, dtype=torch.bfloat16),
}
SHAPES = {name: tuple(x.shape) for name, x in TENSORS.items()}


@pytest.mark.parametrize("order", [list(TENSORS), list(reversed(TENSORS))])
def test_a_written_file_can_be_read(tmp_path, order):
    path = tmp_path / "model.safetensors"
    write_fp32(path, SHAPES, ((name, TENSORS[name]) for name in order))
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(x.dtype == torch.float32 and torch.equal(x, TENSORS[n].float()) for n, x in found.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_missing_tensor_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="vector"):
        write_fp32(tmp_path / "x", SHAPES, ((name, x) for name, x in TENSORS.items() if name != "vector"))
