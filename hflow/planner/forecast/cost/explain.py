"""What the seconds of a node consist of: for each part where it is spent, and the figures that decide it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from hflow.base.errors import PlanError, nearest
from hflow.planner.forecast.cost.generation import DecodePhase, DecodeStep, engine_batch
from hflow.planner.forecast.cost.nodes import Costs
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.training import compute_seconds, num_microbatches, train_passes
from hflow.planner.plan.calibration import Calibration
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan

Where = Literal["device", "host", "network", "PCIe", "disk", "recipe"]
"""Where time is spent. `host` computes, schedules and waits; `recipe` states its seconds itself."""

Origin = tuple[Where, tuple[str, ...]]

_NETWORK: Origin = "network", ("intra.share", "inter.share", "overlap_cost")
_STREAM: Origin = "device", ("memory.stream",)
_PCIE: Origin = "PCIe", ("host_copy.share",)
PARTS: Mapping[str, Origin] = {
    "forward": ("device", ()),
    "forward and backward": ("device", ()),
    "prefill": ("device", ()),
    "decode": ("device", ()),
    "tail": ("device", ()),
    "pipeline bubble": ("device", ()),
    "host": ("host", ("trainer.layer_us",)),
    "experts' host": (
        "host",
        tuple(f"host.{{host}}.{name}_us" for name in ("expert", "exchange", "expert_launch", "expert_loop")),
    ),
    "ranks": ("host", ("host.{host}.step_us",)),
    "messages": ("host", ("node_us", "process_us")),
    "episodes": ("host", ("sample_us",)),
    "tensors": ("host", ("transfers.tensor_us",)),
    "tokens to experts": ("network", ("intra.share", "inter.share")),
    "redistribution": ("network", ("intra.share", "inter.share")),
    "weights": ("network", ("intra.share", "inter.share")),
    "updates of matrices": ("device", ("matmul.{dtype}.share",)),
    "checksums": ("device", ("transfers.checksum_gb_per_s",)),
    "object store": ("host", ("transfers.store_gb_per_s",)),
    "disk": ("disk", ("transfers.disk_gb_per_s",)),
    "optimizer on the host": ("host", ()),
    "body": ("recipe", ()),
    **dict.fromkeys(
        (
            "tensor all-reduce",
            "between stages",
            "keys and values",
            "all-gather",
            "reduce-scatter",
            "gradient all-reduce",
            "gradient norm",
            "shared gradients",
            "parts of matrices",
            "prefill collectives",
            "decode collectives",
            "tail collectives",
        ),
        _NETWORK,
    ),
    **dict.fromkeys(
        ("optimizer", "copies of shards", "copy", "comparison", "merge", "quantisation"), _STREAM
    ),
    **dict.fromkeys(("PCIe", "offloading", "sleep", "layer inputs"), _PCIE),
    "update": _STREAM,
}
"""Name of a part -> where it is spent, and the calibration's figures that decide it besides data sheets."""


@dataclass(frozen=True)
class Figure:
    """A figure of the calibration."""

    name: str
    """The place in the file, such as `host.vllm.step_us`."""
    value: float


@dataclass(frozen=True)
class Term:
    """Some of a node's seconds."""

    name: str
    seconds: float
    where: Where
    figures: tuple[Figure, ...]
    terms: tuple[Term, ...] = ()
    """What it consists of. The host works beside the device where they add up to more."""


@dataclass(frozen=True)
class Explanation:
    """The seconds of a node, unfolded."""

    node: str
    seconds: float
    calibration: Calibration
    facts: tuple[tuple[str, str], ...]
    """Numbers that the seconds follow from, such as sequences and steps."""
    terms: tuple[Term, ...]


def explain_node(plan: Plan, costs: Costs, name: str) -> Explanation:
    """Unfold the seconds of a node, of an engine's new weights (`actor@gen`), or of publishing them.

    Raises:
        PlanError: if no node has this name, or the planner does not know the sizes of its model.
    """
    routes = {route.dst: route for route in plan.weights}
    nodes = {node.name: node for node in plan.schedule.nodes}
    facts: list[tuple[str, str]] = []
    replica: ReplicaCosts | None = None
    unfolded: dict[str, tuple[Term, ...]] = {}
    if name == plan.schedule.streams[0].source:
        parts = costs.source()
        engines = costs.engines() or {}
        for engine, engine_costs in engines.items():
            replica = engine_costs
            found, of_parts = _generation(costs, engine_costs)
            mark = f"{engine} " if len(engines) > 1 else ""
            facts += [(f"{mark}{label}", value) for label, value in found]
            unfolded |= {f"{mark}{part}": kinds for part, kinds in of_parts.items()}
    elif name in nodes:
        parts = costs.node(nodes[name])
        operands = costs.operands(nodes[name])
        if operands is not None:
            replica, work, num_updates, trains = operands
            facts += _training_facts(replica, work.tokens, num_microbatches(replica, work), num_updates)
            passes = train_passes(replica, work)[0] if trains else 1
            facts.append(("passes of a layer", str(passes)))
            seconds = compute_seconds(replica, work, trains=trains)
            launching = num_microbatches(replica, work) * passes * replica.host_seconds
            name_of_passes = "forward and backward" if trains else "forward"
            unfolded[name_of_passes] = tuple(_kernels(replica, seconds, launching, num_updates))
    elif name in routes:
        parts, replica = costs.weights(routes[name]), costs.replica(name)
    elif name.removeprefix(PUBLISH_PREFIX) in routes and name.startswith(PUBLISH_PREFIX):
        route = routes[name.removeprefix(PUBLISH_PREFIX)]
        parts, replica = costs.publish_weights(route), costs.replica(route.src)
    else:
        known = (plan.schedule.streams[0].source, *nodes, *routes)
        raise PlanError(
            f"no node or engine is called {name!r}{nearest(name, known)} (known: {', '.join(known)})"
        )
    if parts is None:
        raise PlanError(
            f"{name} cannot be explained, as the planner does not know the sizes of its model; "
            "`not estimated` in hflow plan says why"
        )
    has_machines = plan.cluster.num_nodes > 1
    is_update = name not in nodes and name != plan.schedule.streams[0].source
    calibration, terms = costs.calibration, list[Term]()
    for part in parts:
        if not part.seconds:
            continue
        where, figures = PARTS[part.name if part.name in PARTS else part.name.partition(" ")[2]]
        if is_update and calibration.updates is not None:
            figures = tuple(figure.replace("inter.", "updates.") for figure in figures)
        between = ("inter.", "updates.", "exchange.")
        figures = tuple(figure for figure in figures if has_machines or not figure.startswith(between))
        of_part = tuple(_figures(figures, replica, calibration))
        terms.append(Term(part.name, part.seconds, where, of_part, unfolded.get(part.name, ())))
    return Explanation(name, sum(part.seconds for part in parts), calibration, tuple(facts), tuple(terms))


def _figures(
    names: Iterable[str], replica: ReplicaCosts | None, calibration: Calibration
) -> Iterator[Figure]:
    """Yield figures that are set and count, by their places in the file."""
    labels = {"host": "", "dtype": ""}
    if replica is not None:
        labels = {"host": replica.host_name, "dtype": replica.dtype}
    for name in names:
        place = name.format(**labels)
        value: Any = calibration
        for key in place.split("."):
            value = getattr(value, key, None) if is_dataclass(value) else (value or {}).get(key)
            if value is None:
                break
        if value:
            yield Figure(place, float(value))


def _training_facts(
    replica: ReplicaCosts, tokens: float, num: int, num_updates: int
) -> Iterator[tuple[str, str]]:
    yield "layout", str(replica.layout)
    yield "tokens of a rank", f"{tokens:,.0f} in each of {num_updates} minibatches"
    yield "micro-batches", f"{num} a minibatch"
    yield "layers of a rank", f"{replica.shape.num_layers / replica.layout.pipe:g}"
    if replica.attention_kernel:
        yield "attention kernel", replica.attention_kernel


def _kernels(replica: ReplicaCosts, seconds: Sequence[float], launching: float, num: int) -> Iterator[Term]:
    """Yield the kernels of passes, and the time in which the host launches them."""
    calibration = replica.hardware.calibration
    of_trainer = ("trainer.factor", "expert_wait") if replica.expert_wait > 1 else ("trainer.factor",)
    kernel = calibration.measured_kernel(replica.attention_kernel)
    attention = "attention" if kernel is None else f"attention_of.{kernel}"
    matmul = "matmul.{dtype}.share", "matmul.{dtype}.half_size", "matmul.{dtype}.kernel_us", *of_trainer
    passes = "memory.passes" if replica.host.passes is None else "host.{host}.passes"
    names = {
        "products of layers": matmul,
        "products of the output matrix": matmul,
        "attention": (attention,),
        "other kernels": ("memory.stream", passes, *of_trainer),
        "tower": matmul,
    }
    for (name, figures), one in zip(names.items(), seconds, strict=True):
        if one:
            yield Term(name, num * one, "device", tuple(_figures(figures, replica, calibration)))
    if launching:
        of_host = tuple(_figures(("host.{host}.layer_us",), replica, calibration))
        yield Term("launching kernels", num * launching, "host", of_host)


def _generation(
    costs: Costs, replica: ReplicaCosts
) -> tuple[list[tuple[str, str]], dict[str, tuple[Term, ...]]]:
    """Return the numbers of a generated batch, and the kernels and host times of its decode steps."""
    workload, rollout = costs.workload, costs.rollout
    batch = engine_batch(replica, workload, rollout)
    engines, slots = rollout.slots(replica)
    steps = [sum(phase.num_steps for phase in phases) for phases in (batch.full, batch.tail)]
    facts = [
        ("layout", str(replica.layout)),
        ("engines", f"{engines}, with at most {slots:,} sequences at once"),
        ("prompt tokens", f"{batch.prompts.rows:,.0f} an engine"),
        ("decode steps", f"{steps[0]:,.0f} with {_mean(batch.full):,.0f} sequences on average"),
        ("tail", f"{steps[1]:,.0f} steps with {_mean(batch.tail):,.0f} sequences, fewer than half"),
    ]
    if replica.host.layer_us:
        facts.append(("launches decode steps", "a CUDA graph" if replica.captures_decode else "the host"))
    facts.append(("the host schedules a step ahead", "yes" if replica.schedules_ahead else "no"))
    decoding = tuple(_decoding(replica, batch.full)), tuple(_decoding(replica, batch.tail))
    return facts, {"decode": decoding[0], "tail": decoding[1]}


def _mean(phases: Sequence[DecodePhase]) -> float:
    """Return the mean sequences of a step."""
    num = sum(phase.num_steps for phase in phases)
    return sum(phase.num_steps * phase.sequences for phase in phases) / num if num else 0.0


def _decoding(replica: ReplicaCosts, phases: Sequence[DecodePhase]) -> Iterator[Term]:
    """Yield the kernels and host times of decode steps."""
    step_of, calibration = DecodeStep(replica), replica.hardware.calibration
    steps = [(phase.num_steps, step_of.seconds(phase.sequences, phase.context)) for phase in phases]
    products = "matmul.{dtype}.share", "memory.decode", "memory.sharpness"
    scheduling = "host.{host}.step_us", "host.{host}.sequence_us"
    experts = "host.{host}.expert_us", "host.{host}.expert_launch_us"
    rows: tuple[tuple[str, Where, tuple[str, ...], Iterable[float]], ...] = (
        ("products", "device", products, (num * step.products.seconds for num, step in steps)),
        (
            "attention and reading the cache",
            "device",
            ("attention", "memory.decode"),
            (num * step.attention.seconds for num, step in steps),
        ),
        (
            "other kernels",
            "device",
            ("memory.stream", "host.{host}.passes"),
            (num * step.others for num, step in steps),
        ),
        ("gaps between kernels", "device", ("host.{host}.gap_us",), (num * step.gaps for num, step in steps)),
        (
            "launching kernels",
            "host",
            ("host.{host}.layer_us",),
            (num * step.launching for num, step in steps),
        ),
        ("scheduling", "host", scheduling, (num * step.scheduling for num, step in steps)),
        ("experts' host", "host", experts, (num * step.experts for num, step in steps)),
    )
    for name, where, figures, seconds in rows:
        if whole := sum(seconds):
            yield Term(name, whole, where, tuple(_figures(figures, replica, calibration)))
