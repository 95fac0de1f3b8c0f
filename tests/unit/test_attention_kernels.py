"""All attention goes through one dispatcher, whose choice of kernel the plan states."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_kit as kit
from torch.utils._python_dispatch import TorchDispatchMode

import hflow
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.launch.planning.compile import compile_recipe
from hflow.models import attention_kernels
from hflow.models.attention_kernels import Reach
from hflow.models.packed_attention import PackedLayout, attend
from hflow.models.settings import ModelSettings
from hflow.report.content import attention_line
from hflow.types.kernels import FLASH_MODULES, AttentionKernel, head_size_problem, packed_kernel
from hflow.workers.torch_determinism import use_deterministic_algorithms

KERNELS = ("scaled_dot_product_attention", "varlen_attn", "flash_attn_varlen_func", "flex_attention")
TE_PACKAGE = Path(hflow.__file__).parent
RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"


@pytest.mark.parametrize("length", [16, 64])
def test_no_scores_are_kept_of_values_smaller_than_keys(length: int) -> None:
    """Latent attention has such. Of 4 heads, results equal those of the formula."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 4, length, 24, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 4, length, 8, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = attention_kernels.padded_attention(q, k, v, None)
    assert max(kept) == q.numel()
    scores = (q @ k.mT * 24**-0.5).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


def test_no_other_module_names_a_kernel():
    paths = {path: path.read_text() for path in TE_PACKAGE.rglob("*.py")}
    users = {
        path.relative_to(TE_PACKAGE).as_posix()
        for path, text in paths.items()
        if any(name in text for name in KERNELS) and _uses_a_kernel(ast.parse(text))
    }
    assert users == {"models/attention_kernels.py"}


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
        engine = EmbeddedEngine(ModelSettings(name="actor", architecture=kit.ARCHITECTURE, dtype=dtype))
        attention_kernels.num_calls.clear()
        counted.num = 0
        engine.add(0, [1, 5, 6], SamplingParams(max_tokens=4, temperature=0.0))
        while engine.num_unfinished:
            engine.step()
        calls = attention_kernels.num_calls
        assert calls[AttentionKernel.SDPA] == counted.num
        assert calls.total() == 4 * num_layers  # one prefill, then three tokens
        assert calls[decoding] >= 3 * num_layers


TWO = {AttentionKernel.FLASH_ATTN: "2.8.3"}
THREE = {AttentionKernel.FLASH_ATTN_3: "3.0.0+cu130"}
BETA = {AttentionKernel.FLASH_ATTN_3: "3.0.0b1"}


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "kernel"),
    [
        ("cpu", "bf16", TWO | THREE, AttentionKernel.SDPA),
        ("cuda", "fp32", TWO | THREE, AttentionKernel.SDPA),
        ("cuda", "bf16", {}, AttentionKernel.VARLEN),
        ("cuda", "bf16", TWO, AttentionKernel.FLASH_ATTN),
        ("cuda", "bf16", THREE, AttentionKernel.FLASH_ATTN_3),
        ("cuda", "bf16", TWO | THREE, AttentionKernel.FLASH_ATTN_3),
    ],
)
def test_half_precision_on_cuda_needs_no_padding(device, dtype, installed, kernel):
    chosen = packed_kernel(device, dtype, (9, 0), installed, deterministic=False)
    assert chosen.kernel is kernel
    assert chosen.version == installed.get(kernel)


@pytest.mark.parametrize("others", [{}, TWO])
@pytest.mark.parametrize(
    ("installed", "capability", "deterministic", "problem"),
    [
        (THREE, (8, 0), False, "needs compute capability 9.0, not 8.0"),
        (THREE, (10, 0), False, "needs compute capability 9.0, not 10.0"),
        (THREE, None, False, "needs compute capability 9.0, not an unknown one"),
        (THREE, (9, 0), True, "does not keep deterministic=true"),
        (BETA, (9, 0), False, "3.0.0b1 is older than 3.0.0"),
    ],
)
def test_what_flash_attn_3_cannot_do_is_said(others, installed, capability, deterministic, problem):
    chosen = packed_kernel("cuda", "bf16", capability, installed | others, deterministic=deterministic)
    assert chosen.kernel is (AttentionKernel.FLASH_ATTN if others else AttentionKernel.VARLEN)
    assert chosen.why.endswith(f"; flash-attn-3 {problem}")


def test_sinks_are_computed_by_the_kernel_whose_gradient_reads_the_sums(monkeypatch):
    chosen = packed_kernel("cuda", "bf16", (9, 0), TWO | THREE, deterministic=False, has_sinks=True)
    assert chosen.kernel is AttentionKernel.VARLEN
    in_fp32 = packed_kernel("cuda", "fp32", (9, 0), TWO, deterministic=False, has_sinks=True)
    assert in_fp32.kernel is AttentionKernel.SDPA
    monkeypatch.setattr("hflow.launch.planning.request.flash_versions", lambda: TWO)
    settings = ["model@models.actor=gpt-oss-20b", "models.actor.path=null", "models.actor.backend=megatron"]
    text = attention_line(compile_recipe(RECIPE, [*settings, "cluster=h100-8x8"]).plan)
    assert "torch varlen: bf16, computes attention sinks" in text


def test_a_process_takes_the_kernel_of_its_own_gpu(monkeypatch):
    imported, found = [], {"cuda:0": (9, 0), "cuda:1": (8, 0)}
    monkeypatch.setattr(attention_kernels, "flash_versions", lambda: TWO | THREE)
    monkeypatch.setattr(attention_kernels, "_flash_kernel", imported.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[str(device)])
    hopper, ampere = map(torch.device, found)
    assert attention_kernels.kernel_of(hopper, torch.bfloat16) is AttentionKernel.FLASH_ATTN_3
    assert attention_kernels.kernel_of(ampere, torch.bfloat16) is AttentionKernel.FLASH_ATTN
    assert attention_kernels.kernel_of(torch.device("cpu"), torch.bfloat16) is AttentionKernel.SDPA
    restore = use_deterministic_algorithms()
    assert attention_kernels.kernel_of(hopper, torch.bfloat16) is AttentionKernel.FLASH_ATTN
    restore()
    two, three = AttentionKernel.FLASH_ATTN, AttentionKernel.FLASH_ATTN_3
    assert imported == [three, two, two]


@pytest.mark.parametrize(
    ("installed", "settings", "lines"),
    [
        (TWO, ["cluster=h100-1x2"], ["flash-attn 2.8.3: installed, bf16"]),
        (TWO | THREE, ["cluster=h200-1x2"], ["flash-attn-3 3.0.0+cu130: installed, bf16"]),
        (TWO | THREE, ["cluster=a100-80g-1x2"], ["flash-attn 2.8.3: installed, bf16; flash-attn-3 needs "]),
        (THREE, ["cluster=h100-1x2", "deterministic=true"], ["torch varlen: bf16, flash-attn is not inst"]),
        (
            {},
            ["cluster=cpu-1x2", "models.actor.gen.engine=vllm"],
            ["actor@train torch sdpa: the cluster is cpu", "actor@gen that of vllm"],
        ),
    ],
)
def test_the_plan_states_the_kernel(monkeypatch, installed, settings, lines):
    monkeypatch.setattr("hflow.launch.planning.request.flash_versions", lambda: installed)
    text = attention_line(compile_recipe(RECIPE, settings).plan)
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


@pytest.mark.parametrize(
    ("kernel", "size", "is_right"),
    [
        (AttentionKernel.VARLEN, 256, True),
        (AttentionKernel.VARLEN, 264, False),
        (AttentionKernel.FLASH_ATTN, 80, True),
        (AttentionKernel.FLASH_ATTN, 20, False),
        ("flash-attn-3 3.0.0", 256, True),
        ("flash-attn-3 3.0.0", 512, False),
        (AttentionKernel.SDPA, 20, True),
    ],
)
def test_head_sizes_of_the_kernels(kernel, size, is_right):
    assert (head_size_problem(kernel, size) is None) is is_right


def test_a_plan_with_heads_that_no_kernel_computes_cannot_run(monkeypatch):
    monkeypatch.setattr("hflow.launch.planning.request.flash_versions", dict)
    heads = [
        "models.actor.architecture.num_attention_heads=32",
        "models.actor.architecture.num_key_value_heads=8",
    ]
    cluster = ["cluster=h100-1x1", "models.actor.gen.engine=embedded", "models.actor.path=null", *heads]
    (reason,) = compile_recipe(RECIPE, cluster).plan.unrunnable
    assert reason == (
        "actor has heads of size 4, but torch varlen needs a multiple of 8 up to 256. Set "
        "models.actor.dtype=fp32, or use another architecture."
    )
    assert not compile_recipe(RECIPE, [*cluster, "models.actor.dtype=fp32"]).plan.unrunnable


@pytest.mark.parametrize("kernel", [AttentionKernel.VARLEN, *FLASH_MODULES])
@pytest.mark.parametrize("window", [None, 2])
def test_the_kernels_get_windows_and_values_of_smaller_heads_padded(monkeypatch, kernel, window):
    """The kernels, of which these are the shapes and the arithmetic, have one head size."""
    torch.manual_seed(0)
    lengths = [5, 3]
    q, k, v = (torch.randn(8, heads, size) for heads, size in ((4, 24), (2, 24), (2, 16)))

    def compute(q, k, v, starts, *_, **options):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        scaling = options["scale"] if "scale" in options else options["softmax_scale"]
        before, after = options["window_size"]
        reach = Reach(None if before == -1 else before + 1)
        assert after == 0
        rows = zip(*(x.split(starts.diff().tolist()) for x in (q, k, v)), strict=True)
        parts = (
            attention_kernels.reaching_attention(*(x.transpose(0, 1)[None] for x in r), scaling, reach)
            for r in rows
        )
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    monkeypatch.setattr(attention_kernels, "varlen_attn", compute)
    monkeypatch.setattr(attention_kernels, "_flash_kernel", lambda _: compute)
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    got = attention_kernels.varlen_attention(kernel, q, k, v, (starts, starts), (5, 5), 0.3, Reach(window))
    layout = PackedLayout.of(np.array(lengths), "cpu", torch.float32)
    torch.testing.assert_close(got, attend(q, k, v, layout, 0.3, Reach(window)))
