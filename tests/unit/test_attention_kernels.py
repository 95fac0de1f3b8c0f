"""All attention goes through one dispatcher, whose choice of kernel the plan states."""

import ast
from pathlib import Path

import pytest
import torch
import torch_kit as kit
from torch.utils._python_dispatch import TorchDispatchMode

import hflow
from hflow.backends import attention_kernels
from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.backends.interface import ModelSettings, SamplingParams
from hflow.launch.compile import compile_recipe
from hflow.report.plan_text.header import attention_line
from hflow.types.attention_kernel import AttentionKernel, packed_kernel

KERNELS = ("scaled_dot_product_attention", "varlen_attn", "flash_attn_varlen_func", "flex_attention")
PACKAGE = Path(hflow.__file__).parent
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"


def test_no_other_module_names_a_kernel():
    paths = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path, text in paths.items()
        if any(name in text for name in KERNELS) and _uses_a_kernel(ast.parse(text))
    }
    assert users == {"backends/attention_kernels.py"}


def _uses_a_kernel(tree):
    return any(
        getattr(node, "attr", None) in KERNELS
        or any(alias.name in KERNELS for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias))
        for node in ast.walk(tree)
    )


class CountedKernels(TorchDispatchMode):
    """Counts the calls of torch's attention kernels, from every module."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.num += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **kwargs or {})


@pytest.fixture
def counted(monkeypatch):
    attention_kernels.num_calls.clear()
    with CountedKernels() as kernels:
        yield kernels


def test_every_call_of_a_training_step_is_counted(counted):
    batch, backend = kit.make_batch(kit.LENGTHS), kit.model(tokens_per_microbatch=13)
    backend.infer(kit.LOGPROBS, [batch])
    backend.train(kit.CALLS["token-mean"], kit.whole(batch), 0)
    assert attention_kernels.num_calls == {AttentionKernel.SDPA: counted.num}
    assert counted.num > 0


def test_every_call_of_the_engine_is_counted(counted):
    num_layers = kit.ARCHITECTURE["num_hidden_layers"]
    for dtype, decoding in (("fp32", AttentionKernel.PRODUCTS), ("bf16", AttentionKernel.SDPA)):
        engine = EmbeddedEngine(ModelSettings("actor", architecture=kit.ARCHITECTURE, dtype=dtype))
        attention_kernels.num_calls.clear()
        counted.num = 0
        engine.add(0, [1, 5, 6], SamplingParams(max_tokens=4, temperature=0.0))
        while engine.num_unfinished:
            engine.step()
        calls = attention_kernels.num_calls
        assert calls[AttentionKernel.SDPA] == counted.num
        assert calls.total() == 4 * num_layers  # one prefill, then three tokens
        assert calls[decoding] >= 3 * num_layers


@pytest.mark.parametrize(
    ("device", "dtype", "flash_attn", "kernel"),
    [
        ("cpu", "bf16", True, AttentionKernel.SDPA),
        ("cuda", "fp32", True, AttentionKernel.SDPA),
        ("cuda", "bf16", False, AttentionKernel.VARLEN),
        ("cuda", "bf16", True, AttentionKernel.FLASH_ATTN),
    ],
)
def test_half_precision_on_cuda_needs_no_padding(device, dtype, flash_attn, kernel):
    assert packed_kernel(device, dtype, has_flash_attn=flash_attn) is kernel


@pytest.mark.parametrize(
    ("version", "cluster", "lines"),
    [
        ("2.8.3", "h100-1x2", ["flash-attn 2.8.3: installed, bf16"]),
        (None, "cpu-1x2", ["actor@train torch sdpa: the cluster is cpu", "actor@gen that of vllm"]),
    ],
)
def test_the_plan_states_the_kernel(monkeypatch, version, cluster, lines):
    monkeypatch.setattr("hflow.launch.plan_request.flash_attn_version", lambda: version)
    engine = ["models.actor.gen.engine=vllm"] if len(lines) > 1 else []
    text = attention_line(compile_recipe(RECIPE, [f"cluster={cluster}", *engine]).plan)
    assert all(line in text for line in lines), text


@pytest.mark.parametrize("num_heads", [2, 4])
def test_keys_are_repeated_only_where_no_kernel_shares_them(num_heads):
    """The result of grouped queries is that of repeated keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, num_heads, num_heads))
    wanted = attention_kernels.padded_attention(
        q, *(x.repeat_interleave(4 // num_heads, 1) for x in (k, v)), None
    )
    torch.testing.assert_close(attention_kernels.padded_attention(q, k, v, None), wanted)
