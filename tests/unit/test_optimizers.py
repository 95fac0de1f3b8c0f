"""Optimizers: their steps are those of known implementations, and the same in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import megatron_twins as twins
import memory_kit
import pytest
import ranks
import shard_cases as cases
import torch
import torch_kit as kit

from hflow.base.errors import BackendError, ConfigError
from hflow.config.schema import OptimConfig, WeightGroupConfig
from hflow.launch.planning.read_recipe import RecipeReader
from hflow.planner.forecast.memory import offload
from hflow.planner.forecast.memory.transfer import saved_state_bytes
from hflow.planner.plan.optimizers import CHUNK, CPU_CHUNK, check_groups, check_options, is_layer_matrix
from hflow.training.fsdp.memory import model_state
from hflow.training.optimizers import base
from hflow.training.optimizers.adamw_8bit.optimizer import GroupAdamW8Bit, dequantize, dynamic_map, quantize
from hflow.training.optimizers.adamw_bf16.optimizer import GroupAdamWBf16, Noise, round_stochastically
from hflow.training.optimizers.adamw_cpu.optimizer import NUM_BUFFERS
from hflow.training.optimizers.muon.optimizer import GroupMuon, orthogonalize
from hflow.training.optimizers.sgd.optimizer import GroupSGD
from hflow.training.optimizers.whole_matrices import WholeMatrices
from hflow.training.sharded_checkpoint import check_shards
from hflow.types.tensor_slices import Block, box_slices, whole_box


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizers")
    twins.save_checkpoint(path / "checkpoint")
    ranks.start(cases.exchange_optimizers, (str(path),), 4)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [(name, *pair) for name, (_, pairs) in cases.OF_OPTIMIZERS.items() for pair in pairs],
)
def test_every_layout_trains_and_resumes_as_one_process(directory, name, writer, reader):
    """A step in one layout and one in another are two steps of one process."""
    sides, _ = cases.OF_OPTIMIZERS[name]
    node, optim = sides[reader].twin.node, sides[reader].twin.settings["optim"]
    if name in cases.ROUNDED:
        metrics, wanted = rounded_in_blocks(directory, node, optim, [sides[writer], sides[reader]])
    else:
        whole = twins.expected(node, "fp32", directory / "checkpoint", optim)
        metrics, wanted = whole.metrics[cases.NUM_WRITTEN], whole.weights
    files = cases.read(sides[writer], sides[reader])
    found = torch.load(directory / f"{files}.metrics.pt", weights_only=False)
    assert twins.comparable(found) == pytest.approx(metrics, rel=2e-5, abs=1e-6)
    weights = torch.load(directory / f"{files}.weights.pt")
    assert weights.keys() == wanted.keys()
    off = torch.cat([(weights[tensor] - values).abs().flatten() for tensor, values in wanted.items()])
    if name in cases.ROUNDED:  # few moments are so near to a limit that layouts round them to other sides
        assert off.mean() < 1e-6
        off = off.sort().values[: -len(off) // 1000]
    assert off.max() < 1e-5


def rounded_in_blocks(directory, node, optim, sides):
    """Return metrics of the last step, and weights, of one process that rounds moments as two layouts do.

    It keeps them in fp32, and rounds them after each update in the blocks of the first side's ranks, in the
    last step in those of the second side's.
    """
    files = [directory.glob(f"{cases.division(side)}.*.pt") for side in sides]
    written, read = ([x for file in of for x in torch.load(file, weights_only=False)] for of in files)
    assert written
    assert read
    path, exact = str(directory / "checkpoint"), replace(optim, name="adamw")
    backend = kit.model(path=path, architecture=None, optim=exact)
    optimizer = backend._optimizer
    update = optimizer.step
    moments = {
        name: optimizer.states_of(weight, 2)
        for name, weight in backend._model.named_parameters()
        if is_layer_matrix(name, weight.dim())
    }
    for step in twins.STEPS:
        parts = written if step < twins.STEPS[cases.NUM_WRITTEN] else read
        round_moments(moments, parts)  # as they are read; before the first step they are 0

        def update_and_round(norm, parts=parts):
            update(norm)
            round_moments(moments, parts)

        optimizer.step = update_and_round
        metrics = backend.train(twins.NODES[node][0], twins.shards(1, 0), step)
    return twins.comparable(metrics), kit.weights(backend)


def round_moments(moments, parts):
    """Round both moments of matrices in the blocks of flat parts, which consist of boxes of the matrices."""
    for boxes in parts:
        boxes = [box for box in boxes if box.tensor in moments]
        for index, is_signed in enumerate((True, False)):
            flat = torch.zeros(-(-sum(box.values.numel() for box in boxes) // 256), 256)
            views = [moments[box.tensor][index][box_slices(box.box)] for box in boxes]
            for box, view in zip(boxes, views, strict=True):
                flat.view(-1)[box.values] = view
            _, _, rounded = quantized(flat, is_signed=is_signed)
            for box, view in zip(boxes, views, strict=True):
                view.copy_(rounded.view(-1)[box.values])


def stepped(make, torch_make, start, num_steps=4, **group):
    """Return weights after some steps of hflow's optimizer and of another one with the same gradients."""
    torch.manual_seed(1)
    mine, wanted = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    ours, other = make([{"params": mine, **group}]), torch_make(wanted)
    for _ in range(num_steps):
        for one, two in zip(mine, wanted, strict=True):
            two.grad = torch.randn_like(two)
            one.grad = two.grad.clone()
        if isinstance(ours, GroupMuon):
            ours.begin_step()
            blocks = {x: partial(whole_blocks, "model.layers.0.mlp.up_proj.weight") for x in mine}
            for weight, blocks_of in blocks.items():
                WholeMatrices({weight: blocks_of}, None).update(ours.whole_update, ours.scale, torch.bfloat16)
        ours.step()
        other.step()
    return mine, wanted


def whole_blocks(name, values):
    shape = tuple(values.shape)
    return [Block(name, shape, whole_box(shape), values)]


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs_sgd(momentum, nesterov):
    start = [torch.randn(3, 4), torch.randn(5)]
    mine, wanted = stepped(
        lambda groups: GroupSGD(groups, lr=0.1, momentum=momentum, nesterov=nesterov),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=momentum, nesterov=nesterov),
        start,
        weight_decay=0.0,
    )
    for one, two in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)


def test_sgds_weight_decay_is_decoupled():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = GroupSGD([{"params": [weight], "weight_decay": 0.5}], lr=0.1, momentum=0.9, nesterov=False)
    for gradient, wanted in ((3.0, 2 * 0.95 - 0.1 * 3), (1.0, 1.6 * 0.95 - 0.1 * (0.9 * 3 + 1))):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        assert weight.item() == pytest.approx(wanted)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_is_torchs_muon(shape, nesterov):
    """In bf16, in which torch computes. One addition of a product is rounded otherwise."""
    mine, wanted = stepped(
        lambda groups: GroupMuon(
            groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, momentum=0.95, nesterov=nesterov
        ),
        lambda weights: torch.optim.Muon(
            weights,
            lr=0.1,
            momentum=0.95,
            nesterov=nesterov,
            weight_decay=0.3,
            adjust_lr_fn="match_rms_adamw",
        ),
        [torch.randn(shape)],
        weight_decay=0.3,
        in_layers=True,
    )
    torch.testing.assert_close(mine[0], wanted[0], atol=5e-3, rtol=0)
    assert (mine[0] - wanted[0]).abs().mean() < 1e-3


def test_singular_values_become_ones():
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(30, 30))
    v, _ = torch.linalg.qr(torch.randn(50, 50))
    values = torch.logspace(-1.5, 0, 30)
    given = u @ torch.diag(values) @ v[:, :30].T
    result = orthogonalize(given[None].clone())[0]
    assert ((torch.linalg.svdvals(result) - 0.9).abs() < 0.25).all()
    inner = u.T @ result @ v[:, :30]
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-4
    torch.testing.assert_close(orthogonalize(given.T[None].clone())[0], result.T)
    torch.testing.assert_close(orthogonalize(torch.stack([given.T, -given.T]))[1], -result.T)


REFUSALS = [
    (
        {"name": "sgd", "betas": (0.8, 0.9)},
        r"x.betas is set, but the optimizer 'sgd' has no such option; .*'adamw'",
    ),
    (
        {"momentum": 0.9},
        r"x.momentum is set, but the optimizer 'adamw' has no such option; .*'muon' or 'sgd'",
    ),
    ({"name": "sgd", "nesterov": True}, "x.nesterov is true, but sgd has no momentum"),
    ({"name": "muon", "nesterov": True, "momentum": 0.0}, "x.nesterov is true, but momentum is 0"),
    ({"groups": (WeightGroupConfig("*"),)}, r"x.groups\[0\] matches '\*', but changes nothing"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_options_that_change_nothing_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_options("x", OptimConfig(**settings))


def test_groups_that_match_nothing_are_refused():
    names = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    entry = WeightGroupConfig("*norm.weight", lr=0.1)
    check_groups("x", OptimConfig(groups=(entry,)), names)
    with pytest.raises(
        ConfigError, match=r"x.groups\[0\].match is '\*.bias', which matches no tensor .*layers"
    ):
        check_groups("x", OptimConfig(groups=(WeightGroupConfig("*.bias", lr=0.1), entry)), names)
    with pytest.raises(ConfigError, match=r"x.groups\[1\].match .* matches only tensors of earlier entries"):
        check_groups("x", OptimConfig(groups=(entry, WeightGroupConfig("model.norm.*", lr=0.2))), names)


def test_which_weights_are_matrices_of_layers():
    names = [
        name for name, weight in kit.model()._model.named_parameters() if is_layer_matrix(name, weight.dim())
    ]
    assert {name.rsplit(".", 2)[1] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert not any(
        is_layer_matrix(name, 2) for name in ("lm_head.weight", "score.weight", "value_head.weight")
    )
    assert is_layer_matrix("model.layers.0.mlp.experts.up_proj.weight", 3)


def test_groups_have_their_own_rate_and_decay():
    """By default matrices decay, and vectors do not."""
    groups = (
        WeightGroupConfig("*.q_proj.bias", weight_decay=0.2),
        WeightGroupConfig("model.embed_tokens.*", lr=0.5, weight_decay=0.0),
    )
    backend = kit.model(optim=OptimConfig(lr=0.1, weight_decay=0.3, warmup_steps=100, groups=groups))
    backend.train(kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS)), 0)
    optimizer = backend._optimizer
    names = {optimizer._shard_of[weight]: name for name, weight in backend._model.named_parameters()}
    for group in optimizer._param_groups():
        for name in (names[weight] for weight in group["params"]):
            is_embedding, is_bias = name == "model.embed_tokens.weight", name.endswith("q_proj.bias")
            is_vector = "norm" in name or name.endswith(".bias")
            decay = 0.2 if is_bias else 0.0 if is_embedding or is_vector else 0.3
            lr = optimizer.num_steps * (0.005 if is_embedding else 0.001)  # it rises
            assert (group["weight_decay"], group["lr"]) == (decay, pytest.approx(lr)), name


def test_an_optimizer_of_the_command_line_leaves_options_of_files_that_it_has_not():
    reader = RecipeReader("sft")  # its file sets betas for AdamW
    name = "models.actor.optim.name"
    assert reader.read([f"{name}=sgd"]).config.models["actor"].optim.betas == OptimConfig().betas
    assert reader.read([f"{name}=muon"]).config.models["actor"].optim.betas == (0.9, 0.95)
    with pytest.raises(ConfigError, match=r"optim.betas is set, but the optimizer 'sgd' has no such option"):
        reader.read([f"{name}=sgd", "models.actor.optim.betas=[0.9,0.95]"])


def test_a_checkpoint_of_other_states_is_refused(tmp_path):
    sgd = OptimConfig(name="sgd", momentum=0.9)
    writer = kit.model(optim=sgd)
    writer.train(kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS)), 0)
    writer.save_shards(str(tmp_path / "shards"))()
    check_shards(tmp_path / "shards")
    kit.model(optim=replace(sgd, momentum=0.5, nesterov=True)).load_shards(str(tmp_path / "shards"))
    with pytest.raises(
        BackendError, match=r"has weight and momentum of \S+, but sgd keeps weight with .*; set"
    ):
        kit.model(optim=OptimConfig(name="sgd")).load_shards(str(tmp_path / "shards"))
    with pytest.raises(
        BackendError, match=r"state of the optimizer sgd, but the model's optim.name is adamw"
    ):
        kit.model().load_shards(str(tmp_path / "shards"))


def test_moments_in_bf16_are_right_on_average():
    noise = Noise(200_003, 0, torch.device("cpu"))
    x = torch.cat([torch.full((100_000,), 1 + 2**-9), torch.full((100_000,), -3 - 2**-8), torch.zeros(3)])
    rounded = x.clone()
    round_stochastically(rounded, noise.take(len(x)))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7, -3.0, -3 - 2**-6, 0.0}
    for part in (slice(100_000), slice(100_000, 200_000)):  # a quarter of the numbers is the larger one
        assert rounded[part].mean().item() == pytest.approx(x[part][0].item(), rel=1e-4)
    for odd in (torch.inf, -torch.inf):
        values = torch.full((100,), odd)
        round_stochastically(values, noise.take(100))
        assert (values == odd).all()


def test_any_two_random_numbers_are_independent():
    """Also those of different uses: over seeds, each bit is uniform, and no two of them agree more often."""
    device = torch.device("cpu")
    noises = [Noise(2, seed, device) for seed in range(4000)]
    numbers = torch.stack([torch.cat([noise.take(2).clone() for _ in range(2)]) for noise in noises])
    assert (numbers.min() >= 0) & (numbers.max() < 1 << 16)
    for bit in (0, 7, 15):
        signs = 2.0 * (numbers >> bit & 1) - 1
        assert signs.mean(0).abs().max() < 0.06
        assert (signs.T @ signs / len(signs) - torch.eye(4)).abs().max() < 0.06


def test_bf16_moments_follow_adamw():
    """Over many steps, the moving averages do, which rounding to the nearest would leave behind."""
    start = [torch.randn(64, 64)]
    mine, wanted = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    ours = GroupAdamWBf16([{"params": mine, "weight_decay": 0.1}], **options)
    other = torch.optim.AdamW(wanted, weight_decay=0.1, **options)
    torch.manual_seed(0)
    for _ in range(300):
        wanted[0].grad = torch.randn(64, 64) + 1
        mine[0].grad = wanted[0].grad.clone()
        ours.step()
        other.step()
    square = ours.states_of(mine[0])[1].float()
    assert ours.states_of(mine[0])[1].dtype == torch.bfloat16
    ratio = square / other.state[wanted[0]]["exp_avg_sq"]
    assert ratio.mean().item() == pytest.approx(1, abs=0.01)
    moved = (wanted[0] - start[0]).abs().mean()
    assert (mine[0] - wanted[0]).abs().mean() < 0.02 * moved


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bf16"])
def test_a_resumed_model_with_small_moments_continues_bit_for_bit(name, tmp_path):
    settings, call = {"optim": replace(kit.SETTINGS.optim, name=name)}, kit.CALLS["token-mean"]
    shards = kit.whole(kit.make_batch(kit.LENGTHS))
    whole, resumed = kit.model(**settings), kit.model(**settings)
    whole.train(call, shards, 0)
    whole.save_shards(str(tmp_path / "shards"))()
    whole.train(call, shards, 1)
    resumed.load_shards(str(tmp_path / "shards"))
    resumed.train(call, shards, 1)
    wanted = kit.weights(whole)
    for name, tensor in kit.weights(resumed).items():
        assert torch.equal(tensor, wanted[name]), name


def quantized(x, *, is_signed):
    """Return codes, scales and numbers of blocks."""
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(len(x))
    quantize(x.clone(), codes, scales, is_signed=is_signed)
    return codes, scales, dequantize(codes, scales, is_signed=is_signed)


@pytest.mark.parametrize(
    ("is_signed", "last", "around_0"),
    [
        (True, [0.9789, 0.9930, 1.0], [-5.5e-7, 0.0, 5.5e-7]),
        (False, [0.9895, 0.9965, 1.0], [0.0, 3.25e-7, 7.75e-7]),
    ],
)
def test_the_dynamic_map_is_that_of_bitsandbytes(is_signed, last, around_0):
    """Its numbers there (0.50); with signs, the smallest is -0.9930 there."""
    numbers = dynamic_map(is_signed=is_signed)
    zero = numbers.tolist().index(0)
    first = max(0, zero - 1)
    assert len(numbers.unique()) == 256
    assert numbers[-3:].tolist() == pytest.approx(last, abs=5e-5)
    assert numbers[first : first + 3].tolist() == pytest.approx(around_0, rel=1e-5)
    if is_signed:
        assert numbers[0] == -1
        assert torch.equal(numbers[1:zero], -numbers[zero + 1 : -1].flip(0)[1:])


def test_moments_become_the_nearest_numbers_of_the_map():
    torch.manual_seed(0)
    for is_signed in (True, False):
        x = torch.randn(64, 256) * torch.randn(64, 256).exp()
        x = x if is_signed else x.square()
        x[0], x[1, :3] = 0, 0
        x[2] = -x[2].abs() if is_signed else x[2]
        _, scales, found = quantized(x, is_signed=is_signed)
        torch.testing.assert_close(scales, x.abs().amax(1), atol=1e-37, rtol=0)
        distances = (x[..., None] / scales[:, None, None] - dynamic_map(is_signed=is_signed)).abs()
        off = (found - x).abs() / scales[:, None] - distances.min(-1).values
        assert off.max() < (1e-6 if is_signed else 4e-7)
        assert ((found == 0) == (x == 0)).all() or is_signed
        again = quantized(found, is_signed=is_signed)
        assert all(map(torch.equal, again, quantized(x, is_signed=is_signed)))


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_place_of_a_number_is_that_of_a_search(is_signed):
    """At every limit between two numbers of the map, beside it, and at all sizes that fp32 has."""
    numbers = dynamic_map(is_signed=is_signed)
    limits = (numbers[1:] + numbers[:-1]) / 2
    if not is_signed:
        limits[0] = 0
    ends = torch.tensor([torch.inf])
    bits = torch.arange(0, 0x3F80_0000, 997, dtype=torch.int32).view(torch.float32)
    x = torch.cat([limits, limits.nextafter(ends), limits.nextafter(-ends), numbers, bits, -bits])
    x = torch.cat([x if is_signed else x[x >= 0], torch.ones(256)])  # ones: the scale is 1
    x = x[len(x) % 256 :].view(-1, 256)
    x[:, 0] = 1
    codes, _, _ = quantized(x, is_signed=is_signed)
    assert torch.equal(codes.int(), torch.bucketize(x, limits, out_int32=True))


@pytest.mark.parametrize(("spread", "most"), [(0.0, 0.01), (1.5, 0.2)])
def test_8bit_moments_follow_adamw(spread, most):
    """Also where entries of a block have gradients of very different sizes: updates do not explode."""
    torch.manual_seed(0)
    start, sizes = torch.randn(50, 63), (spread * torch.randn(50, 63)).exp()
    mine, wanted = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    ours = GroupAdamW8Bit([{"params": [mine], "weight_decay": 0.1, "in_layers": True}], **options)
    other = torch.optim.AdamW([wanted], weight_decay=0.1, **options)
    for _ in range(300):
        wanted.grad = sizes * (torch.randn(50, 63) + 0.3)
        mine.grad = wanted.grad.clone()
        ours.step()
        other.step()
    assert {x.dtype for x in ours.state[mine].values()} == {torch.uint8, torch.float32}
    moved, off = (wanted - start).abs().mean(), (mine - wanted).abs()
    assert off.mean() < most * moved
    assert off.max() < 10 * most * moved


def test_a_weight_is_updated_in_chunks(monkeypatch):
    torch.manual_seed(0)
    start, gradient, results = torch.randn(30, 50), torch.randn(30, 50), []
    for chunk in (CPU_CHUNK, 512):
        monkeypatch.setattr(base, "CPU_CHUNK", chunk)
        weight = torch.nn.Parameter(start.clone())
        optimizer = GroupAdamW8Bit([{"params": [weight], "weight_decay": 0.1, "in_layers": True}], lr=0.1)
        for _ in range(2):
            weight.grad = gradient.clone()
            optimizer.step()
        results.append((weight.detach(), *optimizer.states_of(weight)))
    assert all(map(torch.equal, *results))


# ------------------------------------------------------------------------------------ the plan
PLANNED = {
    "adamw": {},
    "sgd": {"name": "sgd"},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9},
    "muon": {"name": "muon"},
    "adamw_8bit": {"name": "adamw_8bit"},
    "adamw_bf16": {"name": "adamw_bf16"},
    "adamw_cpu": {"name": "adamw_cpu"},
}


@pytest.mark.parametrize(
    "architecture", [memory_kit.ARCHITECTURE, memory_kit.MIXED], ids=["dense", "experts"]
)
@pytest.mark.parametrize("name", PLANNED)
def test_planned_states_are_those_that_are_allocated(name, architecture, tmp_path):
    """To the byte, on the device and in a checkpoint."""
    optim = OptimConfig(**PLANNED[name])
    backend = kit.model(architecture=architecture, optim=optim)
    planned = memory_kit.rank(memory_kit.shape_of(architecture), optim=optim)
    states = sum(tensor.nbytes for tensor in backend._optimizer.states())
    found = memory_kit.named(model_state(planned))
    assert found.get("optimizer", 0) == states
    backend._optimizer.num_steps = 1  # as if it had trained
    saved = sum(
        tensor.nbytes for block in backend._trained_model().saved_states() for tensor in block.values.values()
    )
    assert saved_state_bytes(planned.config, planned.shape) == saved
    assert sum(backend._trained_model().saved_sizes()) == saved


def test_states_on_the_host_are_planned_there():
    asked = {"optim": OptimConfig(name="adamw_cpu"), "on_cpu": False}
    one, usual = memory_kit.rank(**asked), memory_kit.rank(on_cpu=False)
    state = model_state(one)
    num = 160_832
    for use in ("nothing", "weights", "everything"):
        assert memory_kit.named(offload.on_device(one, state, use)) == {"weights": 4 * num}
    buffers = 2 * NUM_BUFFERS * CHUNK * 4
    assert offload.in_host_memory(one).total() == 8 * num + buffers
    assert offload.moved_bytes(one, "everything", changes=True) == 0
    assert "optimizer" in memory_kit.named(offload.on_device(usual, state, "everything"))
    assert not offload.in_host_memory(usual)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bf16"])
def test_planned_buffers_of_small_moments_are_those_that_are_allocated(name):
    optim = OptimConfig(name=name)
    backend = kit.model(architecture=memory_kit.ARCHITECTURE, optim=optim)
    for shard in backend._optimizer._shards:
        shard.grad = torch.randn_like(shard)
    backend._optimizer._optimizer.step()  # makes tables of the map
    measured = memory_kit.peak(backend._optimizer._optimizer.step)
    planned = memory_kit.rank(memory_kit.shape_of(memory_kit.ARCHITECTURE), optim=optim)
    assert planned.update_buffers == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", [memory_kit.WIDE, memory_kit.MIXED], ids=["wide", "experts"])
def test_planned_buffers_of_muon_are_those_that_are_allocated(architecture, dtype):
    optim = OptimConfig(name="muon")
    backend = kit.model(architecture=architecture, dtype=dtype, optim=optim)
    for shard in backend._optimizer._shards:
        shard.grad = torch.randn_like(shard)
    measured = memory_kit.peak(lambda: backend._optimizer._update_matrices([backend._optimizer._optimizer]))
    planned = memory_kit.rank(memory_kit.shape_of(architecture), optim=optim, dtype=dtype)
    assert planned.update_buffers == pytest.approx(measured, rel=0.05)
