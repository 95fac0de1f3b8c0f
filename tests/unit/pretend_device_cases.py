"""The backends, the engine and a whole run on a pretend accelerator, where mistakes with devices fail."""

import dataclasses
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import memory_kit
import pretend_attention
import pretend_device
import pytest
import torch
import torch.distributed as dist
import torch_kit as kit
from pretend_device import HostSync, host_syncs
from torch.distributed import PrefixStore

from hflow.base.errors import BackendError, RunError, WorkerFailureError
from hflow.config.schema import LoraConfig
from hflow.data.batches.device_copy import to_device
from hflow.doctor.attention_check import CASES, attention_error
from hflow.doctor.gpus import MAX_ATTENTION_ERROR
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.embedded.module import changing_tensors
from hflow.engines.interface import SamplingParams
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.models import attention_kernels, host_offload, packed_attention
from hflow.models.host_copy import HostCopies
from hflow.models.host_offload import HostOffload, activations_in_host_memory
from hflow.models.settings import ModelSettings
from hflow.planner.forecast.memory import transfer
from hflow.planner.forecast.memory.parts import engine_weights
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.shapes.architectures import read_shape
from hflow.training.interface import TrainShard
from hflow.training.loop.inputs import pack_batch, prepare_batch
from hflow.training.loop.metrics import MetricAccumulator
from hflow.training.optimizers.adamw_cpu import optimizer as cpu_steps
from hflow.types import Unit
from hflow.types.engine import SleepLevel
from hflow.types.kernels import FLASH_MODULES, AttentionKernel
from hflow.weights import incoming
from hflow.weights.buckets import pack_buckets
from hflow.weights.channels import make_channel
from hflow.weights.channels.collective import channel as collective
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.incoming import IncomingWeights

ROOT = Path(__file__).parents[2]
BATCH = kit.make_batch([5, 9, 3, 3])
ONE_LAYER = kit.ARCHITECTURE | {"num_hidden_layers": 1}
PROMPTS = [[1, 5, 6], list(range(3, 31)) * 2, [7]]


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretend_device.installed() as name:
        yield name


# ------------------------------------------------------------------------------- the device itself
def test_tensors_of_two_devices_do_not_mix(device):
    there, here = torch.ones(3, device=device), torch.ones(3)
    for mix in (lambda: there + here, lambda: torch.cat((there, here)), lambda: there[torch.tensor([0])]):
        with pytest.raises(RuntimeError, match="device"):
            mix()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    torch.testing.assert_close((there + torch.tensor(1.0)).cpu(), here + 1)  # a scalar is no mistake


def test_gradients_and_views_are_those_of_the_cpu(device):
    weight = torch.randn(4, 3)
    gradients = []
    for where in ("cpu", device):
        x = weight.to(where).detach().requires_grad_()
        torch.nn.functional.softmax(x[1:].t() @ x[1:], dim=0).square().sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients)
    x = weight.to(device)
    x[1:, 0] = 0
    assert (x.cpu()[1:, 0] == 0).all()


def test_what_the_host_waits_for_is_recorded(device):
    x = torch.arange(3.0, device=device)
    with host_syncs() as syncs:
        x.sum().item()
        x.tolist()
        x[x > 1]
        x.repeat_interleave(torch.tensor([1, 2, 3]).pin_memory().to(device, non_blocking=True))
        torch.tensor([1.0], device=device)
    kinds = [sync.kind for sync in syncs]
    expected = ["item", "copy to the host", "a boolean index", "repeat_interleave", "not pinned"]
    assert all(any(kind.startswith(name) or name in kind for kind in kinds) for name in expected), kinds
    with host_syncs() as syncs:
        (x + torch.ones(3).pin_memory().to(device, non_blocking=True)).cumsum(0)
    assert not syncs


def test_freed_memory_cannot_be_read(device):
    x = torch.ones(3, device=device)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="free"):
        x + 1
    x.untyped_storage().resize_(12)
    assert x.isnan().all()


# --------------------------------------------------------------------------------------- streams
def doubled_on_a_side_stream(device, waits, is_kept):
    """Double on a side stream what the default stream has made."""
    accelerator = torch.get_device_module(device)
    side, default = accelerator.Stream(device), accelerator.current_stream(device)
    x = torch.ones(4).pin_memory().to(device, non_blocking=True) + 2
    if "begin" in waits:
        side.wait_stream(default)
    with accelerator.stream(side):
        doubled = x * 2
    if not is_kept:
        del x
    if "end" in waits:
        default.wait_stream(side)
    return doubled.tolist()


def test_streams_that_do_not_wait_compute_with_wrong_values(device):
    right = [6.0] * 4
    assert doubled_on_a_side_stream(device, (), is_kept=False) == right, "nothing is deferred"
    with pretend_device.deferred():
        assert doubled_on_a_side_stream(device, ("begin", "end"), is_kept=True) == right
        assert doubled_on_a_side_stream(device, ("end",), is_kept=True) != right
        assert doubled_on_a_side_stream(device, ("begin",), is_kept=True) != right
        assert doubled_on_a_side_stream(device, ("begin", "end"), is_kept=False) != right
        x = torch.zeros(2, device=device)
        host = torch.zeros(2).pin_memory()
        host.copy_(x + 1, non_blocking=True)
        assert host.tolist() == [0, 0], "the host has not waited"
        torch.get_device_module(device).synchronize()
        assert host.tolist() == [1, 1]


def test_copies_for_a_checkpoint_are_complete_when_they_are_written(device, monkeypatch):
    values = torch.arange(4.0)
    copies = HostCopies()

    def copied():
        x = values.pin_memory().to(device, non_blocking=True) + 1
        with copies.copying():
            kept = copies.copy(x)
        x.zero_()  # training continues
        return kept.tolist()

    with pretend_device.deferred():
        assert copied() == [1, 2, 3, 4]
        with monkeypatch.context() as patch:
            patch.setattr(pretend_device._Stream, "synchronize", lambda stream: None)
            values += 10
            assert copied() != [11, 12, 13, 14]


def broadcast(device, monkeypatch):
    """Send two buckets from a device that trains on meanwhile to a receiver on the CPU."""
    groups = {"cpu": dist.ProcessGroupGloo, device: pretend_device.PretendGroup}

    def join(store, name, rank, size, where, timeout):
        return groups[where](PrefixStore(name, store), rank, size, timeout)

    monkeypatch.setattr(collective, "_join", join)
    settings = ChannelSettings("collective", "a-0", "", host="127.0.0.1", timeout=1.0)
    sender, receiver = make_channel(settings), make_channel(settings)
    piece = WeightSlice("w", (8,), ((0, 8),), 0)
    weight = torch.arange(8.0).pin_memory().to(device, non_blocking=True)
    handles, taken = [], []
    try:
        for _ in range(2):
            (bucket,) = pack_buckets([(piece, weight)])  # complete: its checksums were copied to the host
            handles.append(sender.send((1,), bucket.header.with_payload(bucket.payload.clone())))
            weight.add_(10)  # the next step of training
        for handle in handles:
            bucket = receiver.receive(handle._replace(device="cpu"), 1)
            taken.append(bucket.payload.view(torch.float32).tolist())
    except WorkerFailureError as error:
        return str(error)
    finally:
        sender.close()
        receiver.close()
    return taken


def test_buckets_are_broadcast_beside_training(device, monkeypatch):
    """Its stream waits until a bucket is packed, and the bucket is kept until it is sent."""
    right = [[float(i + step) for i in range(8)] for step in (0, 10)]
    with pretend_device.deferred():
        assert broadcast(device, monkeypatch) == right
        assert "hflow-broadcast" not in [thread.name for thread in threading.enumerate()]
        with monkeypatch.context() as patch:
            patch.setattr(pretend_device._Event, "wait", lambda event, stream=None: None)
            assert broadcast(device, patch) != right
        with monkeypatch.context() as patch:
            patch.setattr(pretend_device._Event, "query", lambda event: True)
            assert broadcast(device, patch) != right


def test_a_broadcast_to_a_worker_that_has_ended_is_aborted(device, monkeypatch):
    """Where NCCL would wait for it, until torch ends the process that trains."""
    aborted, waits = threading.Event(), threading.Event()

    class Lost(pretend_device.PretendGroup):
        def abort(self):
            aborted.set()

    def join(store, name, rank, size, where, timeout):
        return Lost(PrefixStore(name, store), 0, 1, timeout)

    def query(event):
        waits.set()
        return False

    monkeypatch.setattr(collective._Stream, "_all_wait", lambda *_: True)
    monkeypatch.setattr(collective, "_join", join)
    sender = make_channel(ChannelSettings("collective", "a-0", "", host="127.0.0.1", timeout=1.0))
    (bucket,) = pack_buckets([(WeightSlice("w", (8,), ((0, 8),), 0), torch.arange(8.0, device=device))])
    with pretend_device.deferred(), monkeypatch.context() as patch:
        patch.setattr(pretend_device._Event, "query", query)
        sender.send((1,), bucket)
        assert waits.wait(30)
        assert not aborted.is_set()
        threads = [thread for thread in threading.enumerate() if thread.name == "hflow-broadcast"]
        sender.forget_receivers()
        assert aborted.wait(30)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    sender.close()


def test_buckets_in_shared_memory_are_complete_when_they_are_sent(device, monkeypatch):
    def copy_without_waiting(to, source, non_blocking=False, copy=torch.Tensor.copy_):
        return copy(to, source, non_blocking=True)

    with pretend_device.deferred():
        assert sent_in_shared_memory(device, "cpu")[0] == list(range(12))
        monkeypatch.setattr(torch.Tensor, "copy_", copy_without_waiting)
        with pytest.raises(RunError, match="checksum"):
            sent_in_shared_memory(device, "cpu")


def test_an_engine_draws_the_same_tokens_with_deferred_work(device, monkeypatch):
    """What it copies to the device is kept until it has arrived."""

    def copy_and_reuse(x, device):
        pinned = x.pin_memory()
        copied = pinned.to(device, non_blocking=True)
        pinned.zero_()
        return copied

    settings = ModelSettings(name="actor", architecture=ONE_LAYER, seed=3)
    wanted, _ = generate(EmbeddedEngine(settings))
    with pretend_device.deferred():
        engine = EmbeddedEngine(dataclasses.replace(settings, device=device))
        assert generate(engine)[0] == wanted
        engine.sleep(SleepLevel.KEEP_WEIGHTS)
        engine.wake_weights()
        engine.wake_cache()
        assert generate(engine)[0] == wanted
        monkeypatch.setattr("hflow.engines.embedded.packing.to_device", copy_and_reuse)
        with pytest.raises((AssertionError, BackendError)):  # other tokens, or NaN
            assert generate(engine)[0] == wanted


@pytest.mark.parametrize("missing", ["wait_stream", "wait_event"])
def test_training_is_right_with_deferred_work(device, missing, monkeypatch):
    """Activations leave and return on a stream that waits for the computation, which waits for it."""
    changes = {"offload_activations": True, "activation_checkpointing": True, "offload": "all"}
    _, wanted, _ = trained("cpu", "mask")
    with pretend_device.deferred():
        test_offloaded_state_is_copied_in_the_background_and_leaves_nothing_cached(device)
        assert trained(device, "mask", **changes)[1] == pytest.approx(wanted, abs=1e-4)
        monkeypatch.setattr(pretend_device._Stream, missing, lambda stream, other: None)
        with pytest.raises((AssertionError, RunError)):  # a gradient that is not finite, or another
            assert trained(device, "mask", **changes)[1] == pytest.approx(wanted, abs=1e-4)


# ---------------------------------------------------------------------------------------- training
def trained(device, name, **changes):
    """Train on two micro-batches, which is a step of one update, or two if the call has two epochs."""
    model = kit.model(device=device, tokens_per_microbatch=20, architecture=ONE_LAYER, **changes)
    call = kit.VALUE if name == "value" else kit.CALLS[name]
    with host_syncs() as syncs:
        metrics = model.train(call, [TrainShard((BATCH,))], 5)
    return model, metrics, Counter(sync.kind for sync in syncs)


@pytest.mark.parametrize("name", ["mask", "seq-mean", "group-mean"])
def test_a_train_step_is_that_of_the_cpu_and_waits_once_per_update(device, name):
    here, wanted, _ = trained("cpu", name)
    there, got, syncs = trained(device, name)
    assert got == pytest.approx(wanted, abs=1e-4)
    weights = kit.weights(there)
    for key, tensor in here.weights():
        torch.testing.assert_close(weights[key].cpu(), tensor, atol=1e-5, rtol=0)
    num_updates = kit.CALLS[name].options.get("epochs", 1)
    assert syncs == {"item": num_updates, "copy to the host": 1}  # norms of gradients; metrics


@pytest.mark.parametrize("name", ["adamw_8bit", "muon", "sgd"])
def test_optimizers_step_as_on_the_cpu_and_wait_for_nothing(device, name):
    optim = dataclasses.replace(kit.SETTINGS.optim, name=name, eps=1e-3 if name != "sgd" else 1e-8)
    here, wanted, _ = trained("cpu", "mask", optim=optim)
    there, got, syncs = trained(device, "mask", optim=optim)
    assert got == pytest.approx(wanted, abs=1e-4)
    weights = kit.weights(there)
    for key, tensor in here.weights():
        torch.testing.assert_close(weights[key].cpu(), tensor, atol=1e-5, rtol=0)
    assert syncs == {"item": kit.CALLS["mask"].options.get("epochs", 1), "copy to the host": 1}


def test_adamw_steps_on_the_host_beside_the_copies(device, monkeypatch):
    """With copies as late as they may be, in chunks; states are pinned, and saved."""
    monkeypatch.setattr(cpu_steps, "CHUNK", 100)
    here, wanted, _ = trained("cpu", "mask")
    optim = dataclasses.replace(kit.SETTINGS.optim, name="adamw_cpu")
    with pretend_device.deferred():
        there, got, _ = trained(device, "mask", optim=optim)
    assert got == pytest.approx(wanted, abs=1e-4)
    weights = kit.weights(there)
    for key, tensor in here.weights():
        torch.testing.assert_close(weights[key].cpu(), tensor, atol=1e-5, rtol=0)
    states = [x for state in there._optimizer._optimizer.state.values() for x in state.values()]
    assert states
    assert all(x.device.type == "cpu" and pretend_device._is_pinned(x) for x in states)
    assert there._optimizer.states() == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("token-mean", {"lora": LoraConfig(r=4, alpha=8)}),
        ("value", {"head": "value", "dtype": "bf16", "activation_checkpointing": True}),
    ],
)
def test_a_trained_model_is_saved_and_infers(device, name, changes, tmp_path):
    _, wanted, _ = trained("cpu", name, **changes)
    model, got, _ = trained(device, name, **changes)
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-2 if "dtype" in changes else 1e-4)
    model.save_shards(str(tmp_path))()
    other = kit.model(architecture=ONE_LAYER, **changes)
    other.load_shards(str(tmp_path))
    for key, tensor in model.weights():
        torch.testing.assert_close(tensor.cpu(), kit.weights(other)[key])
    if name != "value":
        results = [m.infer(kit.LOGPROBS, [BATCH])[0].columns["result"].values for m in (model, other)]
        torch.testing.assert_close(*map(torch.from_numpy, results), atol=1e-5, rtol=0)


def test_grouped_queries_in_fp32_have_repeated_keys(device):
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    wanted = attention_kernels.padded_attention(q, k, v, None)
    got = attention_kernels.padded_attention(*(x.to(device) for x in (q, k, v)), None)
    torch.testing.assert_close(got.cpu(), wanted)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_packed_attention_in_bf16_is_the_flash_kernel(device, is_grouped, monkeypatch):
    """Also where the last sequence has more keys than queries, and query heads share key heads.

    Before torch 2.12 it saves these repeated, as plans count.
    """
    monkeypatch.setattr(attention_kernels, "_VARLEN_GROUPS_QUERIES", is_grouped)
    saved = {}

    def note(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    lengths, num_keys = (5, 1, 4), (5, 1, 9)
    starts = [torch.tensor(x).cumsum(0).int() for x in ((0, *lengths), (0, *num_keys))]
    q, k, v = (torch.randn(n, heads, 8).bfloat16() for n, heads in ((10, 4), (15, 2), (15, 2)))
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = []
    for i, (num, most) in enumerate(zip(lengths, num_keys, strict=True)):
        queries, keys = slice(starts[0][i], starts[0][i] + num), slice(starts[1][i], starts[1][i] + most)
        one = [x[part].transpose(0, 1)[None] for x, part in zip(wanted, (queries, keys, keys), strict=True)]
        mask = torch.zeros(num, most).masked_fill(torch.ones(num, most).triu(most - num + 1) > 0, -torch.inf)
        rows.append(attention_kernels.padded_attention(*one, None, mask.bfloat16())[0].transpose(0, 1))
    torch.cat(rows).square().sum().backward()
    there = [x.to(device).requires_grad_() for x in (q, k, v)]
    kernel = attention_kernels.kernel_of(torch.device(device), torch.bfloat16)
    places = tuple(x.to(device) for x in starts)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        got = attention_kernels.varlen_attention(kernel, *there, places, (5, 9), None)
    in_bf16 = sum(tensor.numel() for tensor in saved.values() if tensor.dtype is torch.bfloat16)
    assert in_bf16 == 2 * q.numel() + 2 * k.numel() * (1 if is_grouped else 2)
    got.square().sum().backward()
    torch.testing.assert_close(got.detach().cpu(), torch.cat(rows).detach(), atol=2e-2, rtol=2e-2)
    for x, expected in zip(there, wanted, strict=True):
        torch.testing.assert_close(x.grad.cpu(), expected.grad, atol=5e-2, rtol=5e-2)
    assert kernel is AttentionKernel.VARLEN


@pytest.mark.parametrize("case", ["", " of shared prompts"])
@pytest.mark.parametrize("kernel", FLASH_MODULES)
def test_packages_are_called_with_their_parameters(device, kernel, case, monkeypatch):
    """Forward and backward, as `hflow doctor` compares them with float64."""
    monkeypatch.setattr(attention_kernels, "_flash_kernel", pretend_attention.stand_in)
    monkeypatch.setattr(packed_attention, "kernel_of", lambda *_: kernel)
    error = attention_error(device, torch.bfloat16, CASES[case])
    assert error.kernel is kernel
    assert max(error.output, error.gradient) <= MAX_ATTENTION_ERROR["bf16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.reach.sinks is not None])
def test_attention_with_sinks_is_that_in_float64(device, dtype, case, monkeypatch):
    """By torch's kernels, also where flash-attn is installed, which is not imported."""
    if dtype is torch.bfloat16:
        monkeypatch.setattr(packed_attention, "kernel_of", lambda *_: AttentionKernel.FLASH_ATTN)
    error = attention_error(device, dtype, CASES[case])
    limit = MAX_ATTENTION_ERROR["bf16" if dtype is torch.bfloat16 else "fp32"]
    assert max(error.output, error.gradient) <= limit


# ----------------------------------------------------------------------------------------- copies
def test_columns_of_a_table_are_copied_without_waiting(device):
    columns = torch.arange(12).view(3, 4)[:, :2]
    with host_syncs() as syncs:
        copied = to_device(columns, device)
    assert [sync.kind for sync in syncs] == []
    torch.testing.assert_close(copied.cpu(), columns)
    with host_syncs() as syncs:
        columns.pin_memory().to(device, non_blocking=True)
    assert len(syncs) == 1


def test_copies_for_a_checkpoint_are_pinned_and_waited_for_once(device):
    before = pretend_device.pinned_by_address()
    copies, values = HostCopies(), [torch.randn(n, device=device) for n in (3, 1000)]
    with host_syncs() as syncs, copies.copying():
        copied = [copies.copy(x) for x in values]
    assert [sync.kind for sync in syncs] == ["synchronize"]
    torch.testing.assert_close(copied, [x.cpu() for x in values])
    assert len(pretend_device.pinned_by_address() - before) == 2
    del copies
    assert pretend_device.pinned_by_address() == before


def test_offloaded_state_is_copied_in_the_background_and_leaves_nothing_cached(device):
    weight = torch.randn(50, device=device)
    wanted, num_emptied = weight.cpu(), torch.get_device_module(device).num_emptied
    offload = HostOffload("all", lambda: [weight])
    with host_syncs() as syncs:
        offload.start()
        assert torch.get_device_module(device).num_emptied == num_emptied + 1
        with offload.on_device():
            torch.testing.assert_close(weight.cpu(), wanted)
    assert [sync.kind for sync in syncs if sync.place] == []
    with pytest.raises(RuntimeError, match="free"):
        weight.sum()


def test_saved_activations_come_back_from_memory_that_is_pinned_once(device):
    """Beside the computation: the host waits for nothing. Shapes, dtypes and strides differ."""

    def run(x):
        with activations_in_host_memory(x.device.type != "cpu"):
            y = x
            for _ in range(5):
                y = (y.t() * y.t().exp().to(torch.float64)).float() / 3
            loss = (y * y[:0].sum()).sum() + y.square().sum()
        loss.backward()
        return x.grad

    def pinned():
        copies = host_offload._copies_of(torch.empty(0, device=device).device)
        return sum(map(len, copies._free.values()))

    host = torch.randn(6, 6)
    wanted = run(host.clone().requires_grad_())
    first, second = (host.to(device).requires_grad_() for _ in range(2))
    with host_syncs() as syncs:
        grads, num_buffers = [run(first)], pinned()
        grads.append(run(second))
    assert syncs == []
    for grad in grads:
        torch.testing.assert_close(grad.cpu(), wanted)
    assert pinned() == num_buffers > 0


def sent_in_shared_memory(device, target):
    """Send 0 to 11 to an engine on a target; return the arrived numbers, and the number of pinned places."""
    before = pretend_device.pinned_by_address()
    values = torch.arange(12.0, device=device)
    settings = ChannelSettings("shared", "a-0", "")
    channel = make_channel(settings)
    try:
        piece = WeightSlice("w", (12,), ((0, 12),), 0)
        sent = [channel.send((1,), bucket) for bucket in pack_buckets([(piece, values)])]
        (arrived,) = IncomingWeights(settings, 1, target, [sent])
        assert arrived.tensor.device.type == target
        return arrived.tensor.tolist(), len(pretend_device.pinned_by_address() - before)
    finally:
        channel.close()


def test_weights_in_shared_memory_are_pinned_at_both_ends(device):
    assert sent_in_shared_memory(device, device) == (list(range(12)), 2)


# -------------------------------------------------------------------------------------- generation
def generate(engine):
    for i, prompt in enumerate(PROMPTS):
        engine.add(i, prompt, SamplingParams(max_tokens=4 + i, seed=i, top_p=0.9 if i else 1.0))
    results, num_steps = {}, 0
    while engine.num_unfinished:
        results.update(engine.step())
        num_steps += 1
    return {i: result.ids for i, result in results.items()}, num_steps


@pytest.mark.parametrize("model_type", ["qwen2", "olmo2"])
def test_the_engine_draws_the_same_tokens_and_waits_once_per_step(device, model_type):
    settings = ModelSettings(name="actor", architecture=ONE_LAYER | {"model_type": model_type}, seed=3)
    wanted, _ = generate(EmbeddedEngine(settings))
    engine = EmbeddedEngine(dataclasses.replace(settings, device=device))
    with host_syncs() as syncs:
        got, num_steps = generate(engine)
    assert got == wanted
    assert len(syncs) == num_steps, syncs


def test_an_engine_without_free_pages_waits_no_more(device):
    options = {"max_running": 3, "max_model_len": 64}

    def drawn(**more):
        settings = ModelSettings(name="actor", architecture=ONE_LAYER, seed=3, device=device)
        engine = EmbeddedEngine(settings, options | more)
        for i in range(6):
            engine.add(i, [1, 5, 6 + i], SamplingParams(max_tokens=30 + 5 * i, seed=i))
        results, num_steps = {}, 0
        with host_syncs() as syncs:
            while engine.num_unfinished:
                results.update(engine.step())
                num_steps += 1
        assert len(syncs) == num_steps, syncs
        return {i: result.ids for i, result in results.items()}, engine

    wanted, engine = drawn()
    assert not engine.num_requeued
    page_bytes = engine.cache_bytes // (1 + 3 * 4)
    got, engine = drawn(cache_bytes=(1 + 4) * page_bytes)
    assert engine.num_requeued
    assert got == wanted


@pytest.mark.parametrize(("num_ranked", "num_waits"), [(36, 1), (1, 2)])
def test_a_step_waits_again_only_if_the_ranked_tokens_lack_a_nucleus(
    device, num_ranked, num_waits, monkeypatch
):
    monkeypatch.setattr("hflow.engines.embedded.sampling.NUM_RANKED", num_ranked)
    settings = ModelSettings(name="actor", architecture=ONE_LAYER, seed=3, device=device)
    engine = EmbeddedEngine(settings)
    engine.add(0, PROMPTS[0], SamplingParams(max_tokens=4, top_p=0.5))
    with host_syncs() as syncs:
        while engine.num_unfinished:
            engine.step()
    assert len(syncs) == 4 * num_waits, syncs


def test_numbers_that_a_body_reports_do_not_wait(device):
    metrics, x = MetricAccumulator(), torch.ones(3, device=device)
    batch = pack_batch(prepare_batch(BATCH, "lm", None), torch.device(device), torch.float32)
    with host_syncs() as syncs:
        metrics.add("train", {"knob": 0.2, "mean": x.mean(), "host": torch.ones(())}, batch, Unit.TOKEN)
    assert not syncs
    assert metrics.finish(None, {})["knob"] == pytest.approx(0.2)


def test_an_engine_sleeps_wakes_and_loads(device):
    settings = ModelSettings(name="actor", architecture=ONE_LAYER, seed=3, device=device)
    engine = EmbeddedEngine(settings)
    wanted, _ = generate(engine)
    engine.sleep(SleepLevel.KEEP_WEIGHTS)
    with pytest.raises(RuntimeError, match="free"):
        next(engine._module.parameters()).sum()
    engine.wake_weights()
    engine.wake_cache()
    assert generate(engine)[0] == wanted
    engine.sleep(SleepLevel.DROP_WEIGHTS)
    engine.wake_weights()
    other = EmbeddedEngine(dataclasses.replace(settings, seed=4))
    engine.load_weights([IncomingWeights.of_tensors(lambda: other._module.named_parameters())], 1)
    engine.wake_cache()
    assert generate(engine)[0] == generate(other)[0]


def test_weights_of_several_engines_are_freed_when_all_of_them_sleep(device):
    lora = LoraConfig(r=2, alpha=4)
    settings = ModelSettings(name="actor", architecture=ONE_LAYER, seed=3, device=device, lora=lora)
    owner = EmbeddedEngine(settings)
    other = EmbeddedEngine(dataclasses.replace(settings, name="other"), base=owner)
    wanted, _ = generate(owner)
    owner.sleep(SleepLevel.DROP_WEIGHTS)  # others are loaded, but the adapters alone
    assert generate(other)[0] == wanted
    other.sleep(SleepLevel.KEEP_WEIGHTS)
    with pytest.raises(RuntimeError, match="free"):
        owner._module.lm_head.weight.sum()
    other.wake_weights()
    other.wake_cache()
    assert generate(other)[0] == wanted
    owner.wake_weights()
    owner.load_weights([IncomingWeights.of_tensors(lambda: changing_tensors(other._module).items())], 1)
    owner.wake_cache()
    assert generate(owner)[0] == wanted


BUCKET_BYTES = 1 << 20
LARGE_VOCABULARY = ONE_LAYER | {"vocab_size": 16384, "hidden_size": 128}
"""The embeddings have 8 MiB, and eight buckets."""


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(transfer, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(incoming, "BUCKET_BYTES", BUCKET_BYTES)
    largest = partial(transfer.largest_bucket, minimum=BUCKET_BYTES)
    monkeypatch.setattr(transfer, "largest_bucket", largest)


def most_bytes_while_loading(device):
    """Load new weights, of which each of two senders has half, into an engine that wakes without weights.

    Allocates no more than the plan says, the weights and what a transfer adds.
    """
    settings = ModelSettings(name="actor", architecture=LARGE_VOCABULARY, seed=3)
    channel_settings = ChannelSettings("shared", "a-0", "")
    channel = make_channel(channel_settings)
    sent = [[], []]
    for position, (name, tensor) in enumerate(EmbeddedEngine(settings)._module.named_parameters()):
        for sender, half in enumerate(tensor.detach().chunk(2)):
            first = sender * (len(tensor) - len(half))
            box = ((first, first + len(half)), *((0, size) for size in tensor.shape[1:]))
            sent[sender].append((WeightSlice(name, tuple(tensor.shape), box, position), half))
    handles = [
        [channel.send((1,), bucket) for bucket in pack_buckets(slices, BUCKET_BYTES)] for slices in sent
    ]
    rank = memory_kit.rank(read_shape(LARGE_VOCABULARY), "d1", "embedded", on_cpu=False, dtype="fp32")
    route = WeightRoute("m", "m@train", "m@gen", "pull", transport="shared")
    added = memory_kit.named(transfer.receive_weights(rank, route, num_senders=2))
    with pretend_device.memory() as memory:
        engine = EmbeddedEngine(dataclasses.replace(settings, seed=4, device=device))
        engine.sleep(SleepLevel.DROP_WEIGHTS)
        assert memory.num_bytes < BUCKET_BYTES // 8, "only buffers are left"
        memory.limit, memory.most = engine_weights(rank) + sum(added.values()), 0
        engine.wake_weights()
        engine.load_weights([IncomingWeights(channel_settings, 1, device, handles)], 1)
        channel.close()
        return memory.most, memory.limit


@pytest.mark.usefixtures("small_buckets")
def test_an_engine_that_wakes_loads_weights_in_the_memory_of_the_plan(device, monkeypatch):
    most, limit = most_bytes_while_loading(device)
    assert limit - 3 * BUCKET_BYTES < most <= limit
    # Where tensors are assembled beside the engine's own, the largest one is in memory twice.
    assemble = incoming.assemble_tensors
    monkeypatch.setattr(incoming, "assemble_tensors", lambda streams, storage: assemble(streams))
    with pytest.raises(torch.OutOfMemoryError):
        most_bytes_while_loading(device)


# ------------------------------------------------------------------------------------- a whole run
OUTSIDE_OF_HOT_LOOPS = {
    "hflow/models/host_copy.py": "saving",
    "hflow/engines/embedded/dense_decoder.py": "building",
    "hflow/engines/embedded/module.py": "building",
    "hflow/training/fsdp/sharding.py": "building",
    "hflow/weights/checksum.py": "checksums of new weights, one transfer for each bucket and each load",
}
"""Files in which the host waits for the device, and when."""


def test_a_run_waits_once_per_decode_step_and_update(device, tmp_path, monkeypatch):
    """GRPO with generation on a device of its own, so that weights are published and loaded."""
    num_steps = 0

    def counted(engine, step=EmbeddedEngine.step):
        nonlocal num_steps
        num_steps += engine.num_unfinished > 0
        return step(engine)

    monkeypatch.setattr(EmbeddedEngine, "step", counted)
    overrides = [
        "steps=2",
        "batch=2",
        "workers=inproc",
        "cluster=cpu-1x2",
        "models.actor.architecture.num_hidden_layers=1",
        "nodes.actor_gen.max_tokens=2",
        "nodes.eval_gen.after=1000",
        "data.train.limit=16",
        "data.heldout.limit=1",
        f"out={tmp_path}",
    ]
    compiled = compile_recipe(ROOT / "recipes" / "grpo_async.py", overrides)
    cluster = dataclasses.replace(compiled.plan.cluster, device=device)
    compiled = dataclasses.replace(compiled, plan=dataclasses.replace(compiled.plan, cluster=cluster))
    with host_syncs() as syncs:
        summary = run_compiled(compiled, False, RunEnvironment(is_quiet=True))
    assert (summary.reason, summary.steps) == ("done", 2)
    in_hot_loops = Counter(
        (file(sync), sync.kind) for sync in syncs if file(sync) not in OUTSIDE_OF_HOT_LOOPS
    )
    num_updates = 2 * 2
    assert in_hot_loops == {
        ("hflow/engines/embedded/sampling.py", "copy to the host"): num_steps,
        ("hflow/training/gradient_norm.py", "item"): num_updates,
        ("hflow/training/loop/metrics.py", "copy to the host"): 2,  # once per step
        ("hflow/data/batches/unpack_returns.py", "copy to the host"): 2,  # log-probs, once per micro-batch
    }


def file(sync: HostSync) -> str:
    return sync.place.partition(":")[0]
