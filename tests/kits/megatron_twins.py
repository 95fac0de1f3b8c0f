"""Nodes in layouts of ranks, and the results of `TorchModel` in one process. Imports no megatron."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_kit as kit

from hflow.config.schema import BalanceConfig, LoraConfig, OptimConfig
from hflow.data.batches.batch import Batch, Column
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit
from tests.kits import family_kit

OUTER = ("all-linear", "embed_tokens", "lm_head")
STEPS = range(3, 5)
"""The versions of the tokens, so that each step compares some with the engine's log-probs."""
FIRST, SECOND, ALL = (0, 1), (2, 3), (0, 1, 2, 3)
LENGTHS = [10, 14, 8, 8, 16, 9, 12, 7, 11, 6, 13, 5]
MINIBATCHES = [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]
HALVES = (([0, 1], [4, 5, 6, 7]), ([2, 3, 8, 9, 10, 11], []))
"""Rows of each minibatch on two data ranks, the second of which has nothing of the second."""
QUARTERS = (([0, 1, 4, 5], [], [6], [7]), ([2], [3, 10], [8, 9, 11], []))
"""Rows of each minibatch on four data ranks."""


def sft(out: Any) -> torch.Tensor:
    return -out.logprobs


def pairs(out: Any, seqs: Any) -> torch.Tensor:
    chosen, rejected = seqs.members(out.scores)
    return -torch.nn.functional.logsigmoid(chosen - rejected)


NODES: dict[str, tuple[NodeCall, dict[str, Any]]] = {
    "sft": (kit.call(sft, "token", [], reduce="token-mean"), {}),
    "ppo": (kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean", epochs=2), {}),
    "observed": (kit.CALLS["observed"], {}),
    "clip-cov": (kit.TWO_PASS["clip-cov"], {}),
    "kl-cov": (kit.TWO_PASS["kl-cov"], {}),
    "critic": (kit.VALUE, {"head": "value"}),
    "score": (kit.call(pairs, "group", [], reduce="group-mean"), {"head": "score"}),
    "experts": (kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"), {}),
    "critic with experts": (kit.VALUE, {"head": "value"}),
    "mixtral": (
        kit.call(kit.ppo, "token", [*kit.TOKEN_READS, kit.REPLAY], metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3)},
    ),
    "replayed experts": (
        kit.call(kit.ppo, "token", [*kit.TOKEN_READS, kit.REPLAY], metrics=True, reduce="token-mean"),
        {},
    ),
    "balanced experts": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3)},
    ),
    "experts balanced over the batch": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3, over="batch")},
    ),
    "adapters": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, save_merged=True)},
    ),
    "few adapters": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {"lora": LoraConfig(r=3, alpha=8, targets=("v_proj", "down_proj", "gate_proj"))},
    ),
    "critic with adapters": (kit.VALUE, {"head": "value", "lora": LoraConfig(r=4, alpha=8)}),
    "adapters with magnitudes": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, dora=True, save_merged=True)},
    ),
    "few magnitudes": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {"lora": LoraConfig(r=3, alpha=8, dora=True, targets=("v_proj", "o_proj", "gate_proj"))},
    ),
    "adapters of experts": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, targets=("all-linear", *EXPERT_TARGETS), save_merged=True)},
    ),
    "adapters of downs of mixtral": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {"lora": LoraConfig(r=3, alpha=8, targets=(EXPERT_TARGETS[1],))},
    ),
    "outer adapters": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, targets=OUTER, save_merged=True)},
    ),
    "critic with adapters of its embedding": (
        kit.VALUE,
        {"head": "value", "lora": LoraConfig(r=4, alpha=8, targets=("all-linear", "embed_tokens"))},
    ),
    "experts with adapters": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8)},
    ),
    "glm4_moe": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3, bias_rate=0.01)},
    ),
    "gemma3_text": (kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"), {}),
    "glm4": (kit.call(sft, "token", [], reduce="token-mean"), {}),
    "gpt_oss": (
        kit.call(kit.ppo, "token", [*kit.TOKEN_READS, kit.REPLAY], metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3)},
    ),
    "qwen2_moe": (
        kit.call(kit.ppo, "token", [*kit.TOKEN_READS, kit.REPLAY], metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3)},
    ),
    "adapters of deepseek_v3": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, save_merged=True)},
    ),
    "magnitudes of glm4": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {"lora": LoraConfig(r=4, alpha=8, dora=True)},
    ),
    "magnitudes of deepseek_v2": (
        kit.call(sft, "token", [], reduce="token-mean"),
        {
            "lora": LoraConfig(
                r=4, alpha=8, dora=True, targets=("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")
            )
        },
    ),
    "deepseek_v2": (kit.call(sft, "token", [], reduce="token-mean"), {}),
    "deepseek_v3": (
        kit.call(kit.ppo, "token", kit.TOKEN_READS, metrics=True, reduce="token-mean"),
        {"balance": BalanceConfig(coefficient=0.3)},
    ),
}
"""A call, and the settings of its model. PPO looks at the entropy; "ppo" makes four updates a step."""
EXPERTS = kit.ARCHITECTURE | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
"""The model of nodes with experts."""
UNTIED = kit.ARCHITECTURE | {"tie_word_embeddings": False}
"""The model of nodes with adapters of embedding and output matrix."""
MIXTRAL = kit.ARCHITECTURE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
"""The model of nodes of Mixtral."""

FAMILIES = ("glm4_moe", "deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen2_moe", "glm4")
"""Nodes with a model of their own family (`family_kit.py`)."""

BUCKET_PARAMETERS, BUCKET_ADAPTERS = 1000, 100
"""Small enough for several buckets of gradients and weights, and of adapters."""
SP, NO_SP = {"sequence_parallel": True}, {"sequence_parallel": False}
RECOMPUTED = {"activation_checkpointing": True}
BF16 = {"dtype": "bf16"}


@dataclass(frozen=True)
class Twin:
    """A node on a replica."""

    node: str
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    budget: int = 30
    """Tokens of a micro-batch."""
    context: int = 1
    expert: int = 1
    replicate: int = 1
    base_of: str = ""
    """The node of a model that is trained in turns with it, and whose frozen weights it uses."""

    @property
    def layout(self) -> Layout:
        return Layout(self.data, self.tensor, self.pipe, self.context, self.expert, self.replicate)

    @property
    def name(self) -> str:
        sizes = f"d{self.data}t{self.tensor}p{self.pipe}c{self.context}e{self.expert}r{self.replicate}"
        layout = f"{self.node} {sizes} of {self.budget} tokens"
        values = {key: getattr(value, "name", value) for key, value in self.settings.items()}
        base = [f"on the base of {self.base_of}"] if self.base_of else []
        return " ".join([layout, *(f"{key}={value}" for key, value in values.items()), *base])

    @property
    def dtype(self) -> str:
        return self.settings.get("dtype", "fp32")

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipe * self.context

    @property
    def heads(self) -> list[int]:
        """Tensor and context rank 0 of the last stage: d2t2p1 0 and 2, d1t2p2 2, d2t1p2 2 and 3."""
        first, stride = self.num_ranks // self.pipe * (self.pipe - 1), self.tensor * self.context
        return [first + d * stride for d in range(self.data)]


ROUNDS: list[dict[tuple[int, ...], Twin]] = [
    {
        FIRST: Twin("ppo", tensor=2, settings=SP),
        SECOND: Twin("ppo", pipe=2, budget=1),
    },
    {
        FIRST: Twin("ppo", data=2, settings={"offload": "all"}, budget=20),
        SECOND: Twin("critic", tensor=2, settings=SP),
    },
    {
        FIRST: Twin("sft", tensor=2, settings=NO_SP, budget=1000),
        SECOND: Twin("sft", pipe=2, settings=RECOMPUTED, budget=1000),
    },
    {
        FIRST: Twin("sft", data=2),
        SECOND: Twin("ppo", tensor=2, settings=SP | RECOMPUTED, budget=20),
    },
    {
        FIRST: Twin("ppo", tensor=2, settings=SP | BF16),
        SECOND: Twin("ppo", data=2, settings=BF16 | {"offload": "optimizer"}),
    },
    {ALL: Twin("kl-cov", data=2, tensor=2, settings=SP)},
    {ALL: Twin("ppo", tensor=2, pipe=2, settings=SP | RECOMPUTED, budget=20)},
    {ALL: Twin("clip-cov", data=2, pipe=2)},
    {ALL: Twin("critic", data=2, tensor=2, settings=SP)},
    {ALL: Twin("score", data=2, tensor=2, settings=SP)},
    {
        FIRST: Twin("clip-cov", context=2),
        SECOND: Twin("critic", context=2, settings=RECOMPUTED, budget=1),
    },
    {
        FIRST: Twin("observed", context=2),
        SECOND: Twin("observed", tensor=2, settings=SP),
    },
    {
        FIRST: Twin("ppo", context=2, settings=BF16),
        SECOND: Twin("score", context=2),
    },
    {ALL: Twin("ppo", context=4, budget=20)},
    {ALL: Twin("ppo", tensor=2, context=2, settings=SP)},
    {ALL: Twin("critic", pipe=2, context=2, settings=NO_SP)},
    {ALL: Twin("sft", data=2, context=2)},
    {ALL: Twin("ppo", tensor=4, settings=SP)},  # each of two key-value heads on two ranks
    {
        FIRST: Twin("experts", data=2, expert=2, settings={"offload": "all"}, budget=20),
        SECOND: Twin("experts", tensor=2),
    },
    {FIRST: Twin("experts", data=2, expert=2, settings=BF16), SECOND: Twin("experts", data=2)},
    {ALL: Twin("experts", data=2, tensor=2, expert=2)},
    {ALL: Twin("experts", data=2, pipe=2, expert=2, settings=RECOMPUTED)},
    {ALL: Twin("critic with experts", data=2, context=2, expert=2)},
    {
        FIRST: Twin("replayed experts", tensor=2, budget=20),
        SECOND: Twin("replayed experts", pipe=2, settings=RECOMPUTED, budget=20),
    },
    {ALL: Twin("replayed experts", data=2, tensor=2, expert=2)},
    {ALL: Twin("replayed experts", tensor=2, context=2, expert=2, settings=RECOMPUTED)},
    {
        FIRST: Twin("balanced experts", data=2, expert=2, budget=20),
        SECOND: Twin("experts balanced over the batch", tensor=2, settings=RECOMPUTED),
    },
    {ALL: Twin("balanced experts", tensor=2, context=2, expert=2, settings=RECOMPUTED)},
    {ALL: Twin("experts balanced over the batch", data=2, pipe=2, expert=2, budget=20)},
    {
        FIRST: Twin("mixtral", data=2, expert=2, budget=20),
        SECOND: Twin("mixtral", pipe=2, settings=RECOMPUTED),
    },
    {ALL: Twin("mixtral", data=2, tensor=2, expert=2)},
]
"""What the ranks compute, one round after the other."""
ADAPTER_ROUNDS: list[dict[tuple[int, ...], Twin]] = [
    {
        FIRST: Twin("adapters", tensor=2, settings=SP),
        SECOND: Twin("adapters", pipe=2, settings=RECOMPUTED, budget=1),
    },
    {
        FIRST: Twin("adapters", data=2, settings={"offload": "all"}, budget=20),
        SECOND: Twin("few adapters", tensor=2, settings=NO_SP, budget=1000),
    },
    {
        FIRST: Twin("critic with adapters", pipe=2),
        SECOND: Twin("few adapters", context=2, settings=RECOMPUTED),
    },
    {ALL: Twin("adapters", data=2, tensor=2, settings=SP | RECOMPUTED)},
    {ALL: Twin("few adapters", tensor=4, settings=SP)},  # each of two key-value heads on two ranks
    {ALL: Twin("adapters", tensor=4, settings=NO_SP)},
    {ALL: Twin("critic with adapters", tensor=2, pipe=2, settings=NO_SP)},
    {ALL: Twin("experts with adapters", data=2, tensor=2, expert=2)},
    {
        FIRST: Twin("adapters", tensor=2, settings=SP | BF16),
        SECOND: Twin("adapters", data=2, settings=BF16 | {"offload": "optimizer"}),
    },
    {
        FIRST: Twin("critic with adapters", data=2, settings={"offload": "all"}, base_of="few adapters"),
        SECOND: Twin("adapters", tensor=2, settings=SP, base_of="few adapters"),
    },
    {
        FIRST: Twin("few adapters", pipe=2, settings=RECOMPUTED, base_of="adapters"),
        SECOND: Twin("adapters", tensor=2, settings=SP | BF16, base_of="few adapters"),
    },
    {ALL: Twin("critic with adapters", tensor=4, settings=NO_SP, base_of="adapters")},
    {
        FIRST: Twin("adapters with magnitudes", data=2, budget=20),
        SECOND: Twin("adapters with magnitudes", tensor=2, settings=SP | RECOMPUTED),
    },
    {
        FIRST: Twin("few magnitudes", pipe=2, settings=RECOMPUTED),
        SECOND: Twin("few magnitudes", tensor=2, settings=NO_SP, base_of="adapters with magnitudes"),
    },
    {ALL: Twin("adapters with magnitudes", tensor=4, settings=SP)},  # copies of key-value heads
    {
        FIRST: Twin("adapters with magnitudes", tensor=2, settings=SP | BF16),
        SECOND: Twin("adapters with magnitudes", data=2, settings=BF16),
    },
    {ALL: Twin("experts with adapters", data=2, expert=2, tensor=2, base_of="experts with adapters")},
    {
        FIRST: Twin("adapters of experts", data=2, expert=2, settings={"offload": "all"}, budget=20),
        SECOND: Twin("adapters of experts", tensor=2, settings=RECOMPUTED),
    },
    {ALL: Twin("adapters of experts", data=2, tensor=2, expert=2)},
    {
        FIRST: Twin("adapters of downs of mixtral", data=2, expert=2),
        SECOND: Twin("adapters of downs of mixtral", pipe=2, settings=RECOMPUTED, budget=20),
    },
    {ALL: Twin("adapters of experts", tensor=2, context=2, expert=2, base_of="experts with adapters")},
    {
        FIRST: Twin("adapters of experts", data=2, expert=2, settings=BF16),
        SECOND: Twin("outer adapters", tensor=2, settings=SP | BF16),
    },
    {
        FIRST: Twin("outer adapters", data=2, settings={"offload": "all"}, budget=20),
        SECOND: Twin("outer adapters", pipe=2, settings=RECOMPUTED, budget=1),
    },
    {ALL: Twin("outer adapters", data=2, tensor=2, settings=SP | RECOMPUTED)},
    {ALL: Twin("outer adapters", tensor=2, context=2, settings=NO_SP)},
    {
        FIRST: Twin("critic with adapters of its embedding", tensor=2, settings=NO_SP),
        SECOND: Twin(
            "critic with adapters of its embedding", tensor=2, settings=SP, base_of="outer adapters"
        ),
    },
]
"""The same for models with adapters."""


def _family_rounds(node: str, expert: int) -> list[dict[tuple[int, ...], Twin]]:
    """Return the layouts in which a family trains. Experts are divided over `expert` ranks."""
    return [
        {FIRST: Twin(node, tensor=2, settings=SP), SECOND: Twin(node, pipe=2, settings=RECOMPUTED)},
        {FIRST: Twin(node, context=2)},
        {ALL: Twin(node, data=2, tensor=2, expert=expert, settings=SP | RECOMPUTED)},
    ]


_RANKS_OF_EXPERTS = {family: 1 if family in ("gemma3_text", "glm4") else 2 for family in FAMILIES}
_OFTEN = [Twin(family, data=2, expert=num, budget=20) for family, num in _RANKS_OF_EXPERTS.items()]
_OFTEN.append(Twin("adapters of deepseek_v3", tensor=2))
OFTEN_ROUNDS: list[dict[tuple[int, ...], Twin]] = [
    {FIRST: first, SECOND: second} for first, second in zip(_OFTEN[::2], _OFTEN[1::2], strict=True)
]
"""A layout of each family."""
FAMILY_ROUNDS = [
    *(row for family, num in _RANKS_OF_EXPERTS.items() for row in _family_rounds(family, num)),
    {FIRST: Twin("magnitudes of deepseek_v2", tensor=2), SECOND: Twin("adapters of deepseek_v3", pipe=2)},
    {ALL: Twin("adapters of deepseek_v3", data=2, tensor=2, expert=2, settings=RECOMPUTED)},
    {FIRST: Twin("magnitudes of glm4", tensor=2, settings=SP)},
]
"""Other layouts of families."""
OFTEN_TWINS = {twin.name: twin for turn in OFTEN_ROUNDS for twin in turn.values()}
FAMILY_TWINS = {twin.name: twin for turn in FAMILY_ROUNDS for twin in turn.values()}
ADAPTER_TWINS = {twin.name: twin for turn in ADAPTER_ROUNDS for twin in turn.values()}
TWINS = {twin.name: twin for turn in ROUNDS for twin in turn.values()}


@functools.cache
def batch() -> Batch:
    """Return samples whose groups share a prompt, which is computed once.

    For most tokens there are experts to replay, which are equal in most tokens of the prompts.
    """
    made = kit.make_batch(LENGTHS)
    ids, offsets = np.array(made.columns["input_ids"].values), made.offsets
    rng = np.random.default_rng(1)
    chosen = rng.permuted(np.tile(np.arange(4), (2 * len(ids), 1)), axis=1)[:, :2]
    experts = chosen.reshape(len(ids), 4).astype(np.uint8)
    experts[rng.random(len(ids)) < 0.1] = 255
    for leader in range(0, len(made), 2):
        shared = min(made.lengths[leader], made.lengths[leader + 1]) // 2
        start, other = offsets[leader], offsets[leader + 1]
        ids[other : other + shared] = ids[start : start + shared]
        experts[other : other + shared - 1] = experts[start : start + shared - 1]
    return made.with_columns(
        {"input_ids": Column(Unit.TOKEN, ids), "routed_experts": Column(Unit.TOKEN, experts)}
    )


def shards(data: int, d: int) -> list[TrainShard]:
    """Return the shards of the head of data index `d`."""
    if data == 1:
        return [TrainShard(tuple(batch().take(rows) for rows in MINIBATCHES))]
    return [TrainShard(tuple(batch().take(parts[d]) for parts in (HALVES if data == 2 else QUARTERS)))]


def settings(twin: Twin, checkpoint: Path) -> dict[str, Any]:
    """Return the changes of the twin's model to the kit's."""
    _, head = NODES[twin.node]
    source = {"path": str(_start(twin.node, checkpoint)), "architecture": None}
    return source | head | {"tokens_per_microbatch": twin.budget} | twin.settings


def _start(node: str, checkpoint: Path) -> Path:
    """Return the checkpoint that a node starts from: of its own, of its family, or of its kind."""
    kinds = {"mixtral": "mixtral", "experts": "experts", "outer": "untied", "embedding": "untied"}
    kind = next((kind for word, kind in kinds.items() if word in node), NODES[node][1].get("head", "lm"))
    names = (node, node.rsplit(maxsplit=1)[-1], kind)
    return next((own for own in map(checkpoint.joinpath, names) if own.is_dir()), checkpoint)


def initial_weights(node: str, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a node starts from."""
    return kit.weights(kit.model(path=str(_start(node, checkpoint)), architecture=None, **NODES[node][1]))


def save_families(path: Path) -> None:
    """Save the models of families that nodes start from. `batch` has experts of two layers to replay."""
    for family in FAMILIES:
        replays = kit.REPLAY in NODES[family][0].reads
        layers = {"num_hidden_layers": 2} if replays else {}
        made = kit.model(architecture=family_kit.architecture(family) | layers)
        family_kit.vary(made._model)
        made.save(str(path / family))()


def save_checkpoint(path: Path) -> None:
    """Save the models that nodes start from."""
    kit.with_biases(kit.model()).save(str(path))()
    kit.model(architecture=EXPERTS).save(str(path / "experts"))()
    kit.model(architecture=MIXTRAL).save(str(path / "mixtral"))()
    kit.model(architecture=UNTIED).save(str(path / "untied"))()


@dataclass(frozen=True)
class Trained:
    """Metrics of each step, and weights after the last one."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


@functools.cache
def expected(node: str, dtype: str, checkpoint: Path, optim: OptimConfig = kit.SETTINGS.optim) -> Trained:
    """Return the results of one process with all samples."""
    call, head = NODES[node]
    path = str(_start(node, checkpoint))
    backend = kit.model(path=path, architecture=None, dtype=dtype, optim=optim, **head)
    metrics = [comparable(backend.train(call, shards(1, 0), step)) for step in STEPS]
    return Trained(metrics, kit.weights(backend))


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without the tokens that pass through the model, which depend on how they are packed."""
    return {name: value for name, value in metrics.items() if name != "computed_tokens"}


# ------------------------------------------------------------------------------------ inference
def several(out: Any) -> tuple[torch.Tensor, ...]:
    return out.logprobs, out.entropy, out.logprobs_of(torch.arange(4).expand(len(out.logprobs), 4))


def in_tensordict(out: Any, entries: Any) -> Any:
    result = entries.select("behav_logprobs")
    result["weighted"] = entries["behav_logprobs"] * entries["advantages"].unsqueeze(-1)
    result["last"] = entries["advantages"] + 1
    return result


def likeliest(out: Any) -> tuple[torch.Tensor, ...]:
    return out.topk(3)


def returning(body: Any, **units: str) -> NodeCall:
    """Return a call whose results have these names and units, at temperature 0.7."""
    made = kit.call(body, "token", [], temperature=0.7)
    return dataclasses.replace(made, returns=tuple(units.items()))


CALLS: dict[str, dict[str, NodeCall]] = {
    "lm": {
        "several": returning(several, logprobs="token", entropy="token", of="token"),
        "topk": returning(likeliest, ids="token", likeliest="token"),
        "tensordict": dataclasses.replace(
            returning(in_tensordict, weighted="token", behav_logprobs="token", last="sequence"),
            reads=(
                kit.read("entries.behav_logprobs", Unit.TOKEN, "behav_logprobs"),
                kit.read("entries.advantages", Unit.SEQUENCE, "advantages"),
            ),
        ),
        "text": returning(lambda seqs: [f"{n}" for n in seqs.lengths.tolist()], length="text"),
    },
    "value": {
        "values": returning(lambda out: out.values, values="token"),
        "bootstrap": returning(lambda out: out.bootstrap, bootstrap="sequence"),
    },
    "score": {"scores": returning(lambda out: out.scores, scores="sequence")},
}
"""By head, the calls of an infer node."""


def fail(out: Any) -> torch.Tensor:
    return out.logprobs * (1 / 0)


FAILING = kit.call(fail, "token", [], reduce="token-mean")

INFER_ROUNDS: list[dict[tuple[int, ...], Twin]] = [
    {
        FIRST: Twin("sft", tensor=2, settings=SP, budget=20),
        SECOND: Twin("sft", pipe=2, budget=20),
    },
    {
        FIRST: Twin("sft", data=2, budget=20),
        SECOND: Twin("critic", tensor=2, settings=SP, budget=1),
    },
    {ALL: Twin("sft", data=2, tensor=2, settings=NO_SP, budget=1000)},
    {ALL: Twin("sft", tensor=2, pipe=2, settings=SP, budget=20)},
    {ALL: Twin("critic", data=2, pipe=2, budget=20)},
    {ALL: Twin("score", data=2, tensor=2, settings=SP)},
    {FIRST: Twin("sft", context=2, budget=20), SECOND: Twin("score", context=2, budget=1000)},
    {ALL: Twin("sft", tensor=2, context=2, settings=SP, budget=1000)},
    {ALL: Twin("critic", pipe=2, context=2)},
    {ALL: Twin("experts", data=2, tensor=2, expert=2, budget=20)},
]
INFER_TWINS = {twin.name: twin for turn in INFER_ROUNDS for twin in turn.values()}


def infer_shards(data: int, d: int) -> list[Batch]:
    """Return samples of data index `d`, out of order; the second of two has only three short ones."""
    rows = [[9, 0, 5, 2, 8, 1, 3, 4, 6], [11, 7, 10]]
    return [batch().take(rows[d] if data == 2 else [*rows[0], *rows[1]])]


@functools.cache
def inferred(node: str, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return the results of one process with all samples, by call and field."""
    path, head = _start(node, checkpoint), NODES[node][1].get("head", "lm")
    backend = kit.model(path=str(path), architecture=None, head=head, trainable=False)
    return {name: backend.infer(call, [batch()])[0] for name, call in CALLS[head].items()}


def train(rank: int, directory: str) -> None:
    """Run a rank that trains."""
    import megatron_twin_ranks

    megatron_twin_ranks.run(rank, Path(directory), megatron_twin_ranks.train)


def train_families(rank: int, directory: str) -> None:
    """Run a rank that trains models of other families."""
    import megatron_twin_ranks

    megatron_twin_ranks.run(rank, Path(directory), megatron_twin_ranks.train_families)


def train_families_often(rank: int, directory: str) -> None:
    """Run a rank that trains a model of each of them."""
    import megatron_twin_ranks

    megatron_twin_ranks.run(rank, Path(directory), megatron_twin_ranks.train_families_often)


def train_adapters(rank: int, directory: str) -> None:
    """Run a rank that trains adapters."""
    import megatron_twin_ranks

    megatron_twin_ranks.run(rank, Path(directory), megatron_twin_ranks.train_adapters)


def infer(rank: int, directory: str) -> None:
    """Run a rank that infers."""
    import megatron_twin_ranks

    megatron_twin_ranks.run(rank, Path(directory), megatron_twin_ranks.infer)


def assert_trains_as_torch(directory: Path, name: str, twin: Twin) -> None:
    """Assert that all ranks have the metrics of all steps, and weights after them, of torch in one process.

    Args:
        directory: it has the results of each rank, and the checkpoint from which all began.
        name: the twin's name in files.
        twin: the twin.
    """
    import pytest  # which ranks do not need

    wanted = expected(twin.node, twin.dtype, directory / "checkpoint")
    for rank in range(twin.num_ranks):
        metrics, weights = torch.load(directory / f"{name}.{rank}.pt", weights_only=False)
        if rank in twin.heads:
            for got, there in zip(metrics, wanted.metrics, strict=True):
                assert comparable(got) == pytest.approx(there, rel=2e-5, abs=1e-6)
        assert weights.keys() == wanted.weights.keys()
        for key, tensor in wanted.weights.items():
            torch.testing.assert_close(weights[key], tensor, atol=5e-6, rtol=1e-5)
