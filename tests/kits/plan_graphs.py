"""Hand-made graphs for the planner's tests, wired without the recipe language."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import (
    TRAJECTORY_FIELDS,
    BodyRef,
    DatasetSpec,
    Edge,
    EdgeKind,
    Graph,
    Knob,
    Level,
    Node,
    NodeSpec,
    Read,
    Returned,
    SourceLocation,
    Stream,
)
from hflow.graph.model import Model
from hflow.launch.planning.request import device_calibration, known_devices
from hflow.planner.plan.cluster import ClusterSpec, parse_cluster
from hflow.planner.plan.hardware import Device, Hardware, Link
from hflow.planner.plan.request import PlanRequest
from hflow.types import Unit

COLUMNS = {"prompt": Unit.TEXT, "answer": Unit.TEXT}
OUTPUT = (("out", "output"),)
DEVICES = known_devices(__file__)


def spec(name: str, verb: str, level: Level = Level.BATCH, **changes: object) -> NodeSpec:
    body = BodyRef("recipe", name, f"digest of {name}")
    return NodeSpec(name, verb, level, body, SourceLocation("/home/someone/recipe.py", 7), **changes)  # type: ignore[arg-type]


def generate(name: str, model: str, group: int = 1, **options: object) -> NodeSpec:
    return spec(
        name,
        "generate",
        Level.SAMPLE,
        models=(model,),
        reads_weights=(model,),
        opens_stream=True,
        group=group,
        options=tuple(options.items()),
    )


def infer(name: str, model: str, field: str, level: Level = Level.BATCH) -> NodeSpec:
    returns = (Returned(field, Unit.SEQUENCE if level is Level.GROUP else Unit.TOKEN),)
    return spec(
        name, "infer", level, models=(model,), reads_weights=(model,), provided=OUTPUT, returns=returns
    )


def train(name: str, model: str, knobs: dict[str, float] | None = None, **options: object) -> NodeSpec:
    return spec(
        name,
        "train",
        models=(model,),
        reads_weights=(model,),
        writes_weights=(model,),
        provided=OUTPUT,
        options=tuple(options.items()),
        knobs=tuple(Knob(k, "float", v) for k, v in (knobs or {}).items()),
    )


def compute(name: str, field: str, level: Level, unit: Unit = Unit.SEQUENCE) -> NodeSpec:
    options = (("min_group", 2 if level is Level.GROUP else 1),)
    scalar = "tensor" if level is Level.BATCH else "bool" if field == "keep" else "float"
    return spec(name, "compute", level, returns=(Returned(field, unit, scalar),), options=options)


def wire(
    name: str,
    nodes: list[tuple[NodeSpec, str, tuple[str, ...]]],
    streams: list[Stream],
    models: list[Model],
) -> Graph:
    """Bind `(spec, stream, fields)` rows: data edges by field, weight and overwrite edges by model."""
    source_of = {stream.name: stream.source for stream in streams}
    made: dict[str, tuple[str, str, Unit]] = {}
    bound, edges = [], []
    for node, stream, fields in nodes:
        for returned in node.returns:
            made[returned.field] = (node.name, stream, returned.unit)
        reads = tuple(_read(field, stream, source_of, made) for field in fields)
        bound.append(Node(node, stream, reads))
        producers = dict.fromkeys(read.producer for read in reads if read.producer != node.name)
        if not node.opens_stream:
            producers.setdefault(source_of[stream])
        edges += [Edge(EdgeKind.DATA, producer, node.name) for producer in producers]
    edges += _weight_edges([node for node, _, _ in nodes])
    datasets = (DatasetSpec("data", tuple(COLUMNS.items())),)
    return Graph(name, "data", tuple(bound), tuple(edges), tuple(streams), tuple(models), datasets)


def _read(field: str, stream: str, source_of: dict[str, str], made: dict[str, tuple[str, str, Unit]]) -> Read:
    known = {**COLUMNS, **TRAJECTORY_FIELDS}
    producer, at, unit = made[field] if field in made else (source_of[stream], stream, known[field])
    return Read(field, field, at, producer, unit, unit, "tensor")


def _weight_edges(nodes: list[NodeSpec]) -> list[Edge]:
    edges = []
    for writer in nodes:
        for model in writer.writes_weights:
            for reader in (node for node in nodes if model in node.reads_weights):
                at_most = reader.opens_stream
                edges.append(
                    Edge(EdgeKind.WEIGHTS, writer.name, reader.name, 1, model=model, at_most=at_most)
                )
                if reader is not writer and not at_most:
                    edges.append(Edge(EdgeKind.OVERWRITE, reader.name, writer.name, model=model))
    return edges


def grpo(group: int = 4, **options: object) -> Graph:
    """Generation, a per-sample reward, reference log-probs, group advantages, training, evaluation."""
    stream, heldout = "actor_gen", "eval_gen"
    nodes = [
        (generate("actor_gen", "actor", group), stream, ("prompt",)),
        (generate("eval_gen", "actor"), heldout, ("prompt",)),
        (compute("score", "reward", Level.SAMPLE), stream, ("completion", "answer")),
        (compute("eval_score", "eval_reward", Level.SAMPLE), heldout, ("completion", "answer")),
        (infer("ref_inf", "ref", "ref_logprobs"), stream, ()),
        (compute("group_advantage", "advantages", Level.BATCH), stream, ("reward", "group")),
        (
            train("actor_train", "actor", {"clip": 0.2}, reduce="token-mean", **options),
            stream,
            ("behav_logprobs", "ref_logprobs", "advantages"),
        ),
    ]
    streams = [
        Stream(stream, "actor_gen", "data", None, group, trained=True),
        Stream(heldout, "eval_gen", "heldout", None, 1, every=10),
    ]
    return wire("grpo", nodes, streams, [Model("actor", trainable=True), Model("ref")])


def agent() -> Graph:
    """A derived stream, a reward model per group, a per-sample total after it, a `keep`."""
    nodes = [
        (generate("agent", "actor", 8), "agent", ("prompt",)),
        (
            spec("rm_view", "encode", Level.SAMPLE, models=("rm",), opens_stream=True),
            "rm_view",
            (),
        ),
        (infer("rew_inf", "rm", "rm_score", Level.GROUP), "rm_view", ()),
        (compute("total", "reward", Level.SAMPLE), "agent", ("rm_score",)),
        (compute("has_spread", "keep", Level.GROUP), "agent", ("reward",)),
        (compute("group_advantage", "advantages", Level.BATCH), "agent", ("reward", "group")),
        (train("actor_train", "actor", reduce="token-mean"), "agent", ("behav_logprobs", "advantages")),
    ]
    streams = [
        Stream("agent", "agent", "data", None, 8, trained=True),
        Stream("rm_view", "rm_view", None, "agent", 8),
    ]
    graph = wire("agent", nodes, streams, [Model("actor", trainable=True), Model("rm", head="score")])
    views = Edge(EdgeKind.DATA, "agent", "rm_view")
    return replace(graph, edges=(*graph.edges, views))


def sft() -> Graph:
    """An encode node opens the stream; nothing generates."""
    nodes = [
        (
            spec("sft_view", "encode", Level.SAMPLE, models=("actor",), opens_stream=True),
            "sft_view",
            ("prompt", "answer"),
        ),
        (train("sft_train", "actor", reduce="token-mean"), "sft_view", ()),
    ]
    streams = [Stream("sft_view", "sft_view", "data", None, 1, trained=True)]
    return wire("sft", nodes, streams, [Model("actor", trainable=True)])


def cluster_of(name: str) -> ClusterSpec:
    """A cluster of the devices that hflow knows."""
    return parse_cluster(name, DEVICES)


SHIPPED = device_calibration(Device("gpu", "cuda", 80.0, {"fp32": 1.0, "bf16": 1.0}, 1.0, "a", "b"), __file__)
"""Figures for GPUs without a file of their own."""


def hardware_of(cluster: ClusterSpec, overhead_gib: float = 0.0) -> Hardware:
    """H100s for a CUDA cluster, workers else; memory is the cluster's, less what a runtime takes."""
    memory_gib = cluster.memory_bytes / 2**30
    if cluster.device == "cuda":
        return Hardware(
            Device(
                "h100",
                "cuda",
                memory_gib,
                {"fp32": 67, "bf16": 989},
                3350,
                "nvlink4",
                "ib-ndr",
                overhead_gib=overhead_gib,
            ),
            Link("nvlink4", 450, 2),
            Link("ib-ndr", 50, 5),
            Link("pcie-5", 64, 5),
            SHIPPED,
        )
    return Hardware(
        Device(
            "cpu",
            "cpu",
            memory_gib,
            {"fp32": 0.2, "bf16": 0.1},
            20,
            "shared-memory",
            "ethernet",
            overhead_gib=overhead_gib,
        ),
        Link("shared-memory", 5, 20),
        Link("ethernet", 1.25, 50),
        Link("shared-memory", 5, 20),
        SHIPPED,
    )


def request(cluster: str = "cpu-1x2", **changes: object) -> PlanRequest:
    """A request with these fields, and these fields of its schedule's settings."""
    schedule = {
        field.name: changes.pop(field.name)
        for field in dataclasses.fields(ScheduleConfig)
        if field.name in changes
    }
    numbers: dict[str, object] = {
        "batch": 8,
        "num_steps": 10,
        "schedule": ScheduleConfig(**schedule),  # type: ignore[arg-type]
        "engine_problems": {"vllm": "vllm is not installed"},
    }
    where = cluster_of(cluster)
    return PlanRequest(where, **({"hardware": hardware_of(where)} | numbers | changes))  # type: ignore[arg-type]


def ppo(**options: object) -> Graph:
    """Two trained models with batch readers, a batch compute with `Sequences`."""
    stream = "actor_gen"
    nodes = [
        (generate("actor_gen", "actor"), stream, ("prompt",)),
        (compute("score", "reward", Level.SAMPLE), stream, ("completion", "answer")),
        (infer("actor_inf", "actor", "prox_logprobs"), stream, ()),
        (infer("ref_inf", "ref", "ref_logprobs"), stream, ()),
        (infer("critic_inf", "critic", "values"), stream, ()),
        (
            spec("gae", "compute", provided=(("seqs", "sequences"),), returns=GAE),
            stream,
            ("reward", "values", "ref_logprobs"),
        ),
        (
            train("critic_train", "critic", reduce="token-mean", **options),
            stream,
            ("values", "value_targets"),
        ),
        (
            train("actor_train", "actor", reduce="token-mean", **options),
            stream,
            ("behav_logprobs", "prox_logprobs", "advantages"),
        ),
    ]
    models = [
        Model("actor", trainable=True),
        Model("critic", head="value", trainable=True),
        Model("ref"),
    ]
    return wire("ppo", nodes, [Stream(stream, "actor_gen", "data", None, 1, trained=True)], models)


GAE = (Returned("advantages", Unit.TOKEN), Returned("value_targets", Unit.TOKEN))


def ema() -> Graph:
    """SFT with an exponential moving average that evaluation generates with."""
    update = spec("ema", "update", models=("ref",), reads_weights=("ref", "actor"), writes_weights=("ref",))
    nodes = [
        (
            spec("sft_view", "encode", Level.SAMPLE, models=("actor",), opens_stream=True),
            "sft_view",
            ("prompt", "answer"),
        ),
        (train("sft_train", "actor", reduce="token-mean"), "sft_view", ()),
        (update, "sft_view", ()),
        (generate("eval_gen", "ref"), "eval_gen", ("prompt",)),
    ]
    streams = [
        Stream("sft_view", "sft_view", "data", None, 1, trained=True),
        Stream("eval_gen", "eval_gen", "heldout", None, 1, every=5, after=2),
    ]
    return wire("ema", nodes, streams, [Model("actor", trainable=True), Model("ref", trainable=True)])


def changed(graph: Graph, node: str, **changes: object) -> Graph:
    """The same graph with another spec for one node."""
    nodes = tuple(
        replace(n, spec=replace(n.spec, **changes)) if n.name == node else n  # type: ignore[arg-type]
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def without(graph: Graph, node: str) -> Graph:
    """The same graph without one node, its edges and the reads of what it returns."""
    return replace(
        graph,
        nodes=tuple(
            replace(n, reads=tuple(read for read in n.reads if read.producer != node))
            for n in graph.nodes
            if n.name != node
        ),
        edges=tuple(e for e in graph.edges if node not in (e.src, e.dst)),
    )
