"""A tiny HF model, hand-made batches and bodies for tests of the torch backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from hflow import algo, nodes
from hflow.config.schema import OptimConfig
from hflow.data.batches.batch import Batch, Column
from hflow.dsl import read_first_pass
from hflow.graph.ir import Read
from hflow.launch.running.worker_setup import with_first_pass
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.layout import Layout
from hflow.training.fsdp.backend import TorchModel
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit
from hflow.workers.interface import NodeProgram

VOCAB = 37
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MIXED = {
    **ARCHITECTURE,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
"""Two layers with experts after a dense one."""
SETTINGS = ModelSettings(
    name="actor",
    trainable=True,
    architecture=ARCHITECTURE,
    seed=3,
    # A large eps: gradients that are zero but for rounding (key biases) must not become steps.
    optim=OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=2, clip_grad=0.5),
)


def model(data: int = 1, group: Any = None, *, replicate: int = 1, **changes: Any) -> TorchModel:
    layout = Layout(data, replicate=replicate)
    return TorchModel(dataclasses.replace(SETTINGS, **changes), RankPosition(group, layout))


def with_biases(backend: TorchModel) -> TorchModel:
    """Draw the biases of a model, which are 0 at first, and return it."""
    generator = torch.Generator().manual_seed(0)
    for block in backend.blocks():
        if block.tensor.endswith(".bias"):
            block.values.normal_(std=0.3, generator=generator)
    return backend


def weights(backend: TorchModel) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in backend.weights()}
    assert found
    return found


def make_batch(lengths: list[int], seed: int = 0, group: int = 2) -> Batch:
    """Return sequences whose first third is prompt, with every field that the bodies below read."""
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int64)
    total, count = int(sizes.sum()), len(sizes)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.arange(total) - starts >= np.repeat(np.maximum(sizes // 3, 1), sizes)
    groups = np.arange(count) // group
    token = {
        "input_ids": rng.integers(0, VOCAB, total),
        "loss_mask": mask,
        "behav_logprobs": np.where(mask, rng.normal(-3.6, 0.2, total), 0).astype(np.float32),
        "prox_logprobs": np.where(mask, rng.normal(-3.6, 0.2, total), 0).astype(np.float32),
        "versions": np.where(mask, rng.integers(3, 6, total), -1),
        "returns": rng.normal(0, 1, total).astype(np.float32),
        "is_observed": np.arange(total) % 4 != 1,
    }
    sequence = {
        "advantages": rng.normal(0, 1, count).astype(np.float32),
        "keep": np.arange(count) % 3 != 1,
        "draws": np.arange(count) % 3,
    }
    return Batch(
        np.arange(count),
        groups,
        sizes,
        {name: Column(Unit.TOKEN, values) for name, values in token.items()}
        | {name: Column(Unit.SEQUENCE, values) for name, values in sequence.items()},
    )


def with_experts(batch: Batch, rows: np.ndarray | None = None) -> Batch:
    """Return the batch with experts of `MIXED` to replay: of each token and layer, by default random ones."""
    if rows is None:
        order = np.random.default_rng(1).permuted(np.tile(np.arange(6), (2 * batch.num_tokens, 1)), axis=1)
        rows = order[:, :2].reshape(batch.num_tokens, 4).astype(np.uint8)
    return batch.with_columns({"routed_experts": Column(Unit.TOKEN, rows)})


def read(parameter: str, unit: Unit, field: str | None = None) -> Read:
    return Read(parameter, field or parameter, "gen", "gen", unit, unit, "tensor")


def call(body: Any, unit: str, reads: list[Read], *, metrics: bool = False, **options: Any) -> NodeCall:
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    kinds = {"out": "output", "seqs": "sequences", "entries": "tensordict"}
    provided = tuple((name, kinds[name]) for name in names if name in kinds)
    temperature = options.pop("temperature", 1.0)
    return NodeCall(
        "node", body, tuple(reads), provided, (("result", unit),), metrics, {}, options, temperature
    )


def two_pass_call(
    node: Any, reads: list[Read], knobs: dict[str, Any], unit: str = "token", **options: Any
) -> NodeCall:
    """Return a train call of a node of the library that has a first pass."""
    signature = node.__hflow__.signature
    program = NodeProgram(
        name="node",
        verb="train",
        level="batch",
        stream="gen",
        root="gen",
        body=node,
        reads=tuple(reads),
        provided=signature.provided,
        returns=(("loss", unit),),
        metrics=True,
        models=("actor",),
        knobs={knob.name: knob.value for knob in signature.knobs} | knobs,
        options=options,
    )
    whole = with_first_pass(program, read_first_pass(node.__hflow_first_pass__))
    return dataclasses.replace(_node_call(whole), first_pass=_node_call(whole.first_pass), seed=7)


def _node_call(program: NodeProgram) -> NodeCall:
    names = ("body", "reads", "provided", "returns", "metrics", "knobs", "options")
    return NodeCall(program.name, **{name: getattr(program, name) for name in names})


# ---------------------------------------------------------------------------------- bodies
def ppo(out, behav_logprobs, advantages):
    loss = algo.clipped_surrogate(out.logprobs, behav_logprobs, advantages, 0.2)
    ratio = (out.logprobs - behav_logprobs).exp()
    return loss, {"ratio": ratio, "ratio.max": ratio, "entropy": out.entropy, "tokens.sum": ratio * 0 + 1}


def gspo(out, behav_logprobs, advantages, seqs):
    log_ratio = seqs.mean(out.logprobs - behav_logprobs)
    return algo.clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, 0.2)


def dpo(out, behav_logprobs, seqs):
    chosen, rejected = seqs.members(seqs.sum(out.logprobs - behav_logprobs))
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))


def echo(out, behav_logprobs, advantages):
    return -advantages * out.logprobs - 0.5 * out.observed_logprobs, {"entropy": out.entropy}


def value(out, returns):
    return (out.values - returns).square()


def logprobs(out):
    return out.logprobs


ENGINE_READS = [read("behav_logprobs", Unit.TOKEN), read("@versions", Unit.TOKEN, "versions")]
REPLAY = read("@routed_experts", Unit.TOKEN, "routed_experts")
TOKEN_READS = [*ENGINE_READS, read("advantages", Unit.TOKEN)]
TWO_PASS_READS = [*TOKEN_READS, read("prox_logprobs", Unit.TOKEN)]
TWO_PASS = {
    "clip-cov": two_pass_call(
        nodes.clip_cov_train,
        TWO_PASS_READS,
        {"share": 0.2, "lower": 0.0},
        reduce="token-mean",
        epochs=2,
    ),
    "kl-cov": two_pass_call(
        nodes.kl_cov_train, TWO_PASS_READS, {"share": 0.2}, reduce="token-mean", mask="keep", epochs=2
    ),
    "high-entropy": two_pass_call(
        nodes.high_entropy_train,
        TWO_PASS_READS,
        {"share": 0.4, "off_policy_limit": 0.01},
        reduce="token-mean",
        epochs=2,
    ),
    "kto": two_pass_call(
        nodes.kto,
        [read("ref_logprobs", Unit.TOKEN, "behav_logprobs"), read("desirable", Unit.SEQUENCE, "advantages")],
        {},
        "group",
        reduce="group-mean",
        epochs=2,
    ),
}
"""Calls whose losses need statistics of whole minibatches."""
CALLS = {
    **{
        reduce: call(ppo, "token", TOKEN_READS, metrics=True, reduce=reduce, epochs=2)
        for reduce in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum/50")
    },
    "mask": call(ppo, "token", TOKEN_READS, metrics=True, reduce="token-mean", mask="keep"),
    "observed": call(
        echo,
        "token",
        TOKEN_READS,
        metrics=True,
        reduce="seq-mean-token-mean",
        observed="is_observed",
        epochs=2,
    ),
    "draws": call(ppo, "token", TOKEN_READS, metrics=True, reduce="token-mean", mask="draws"),
    "seq-mean": call(
        gspo,
        "sequence",
        [*ENGINE_READS, read("advantages", Unit.SEQUENCE)],
        reduce="seq-mean",
        epochs=2,
    ),
    "group-mean": call(dpo, "group", ENGINE_READS, reduce="group-mean", epochs=2),
    **TWO_PASS,
}
"""One train call for each reduction, with masks and observed tokens, and those with a first pass."""
VALUE = call(value, "token", [read("returns", Unit.TOKEN)], reduce="token-mean")
LOGPROBS = call(logprobs, "token", [])

REPLAYED = call(ppo, "token", [*TOKEN_READS, REPLAY], metrics=True, reduce="token-mean", epochs=2)
LENGTHS = [5, 9, 3, 3, 12, 4, 7, 2, 6, 6, 11, 3]
MINIBATCHES = [[0, 1, 4, 5, 6, 7], [2, 3], [8, 9, 10, 11]]
"""Rows of each minibatch: whole groups, of unequal sizes."""


def whole(batch: Batch) -> list[TrainShard]:
    return [TrainShard(tuple(batch.take(rows) for rows in MINIBATCHES))]


def halves(batch: Batch) -> list[TrainShard]:
    """Split minibatches over two ranks; one rank has no samples of the second minibatch."""
    split = (([0, 1], [4, 5, 6, 7]), ([], [2, 3]), ([8, 9], [10, 11]))
    return [TrainShard(tuple(batch.take(pair[rank]) for pair in split)) for rank in (0, 1)]
