"""Checks of a graph, one function each. The first problem is raised; what is seldom intended is warned of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from hflow.base.errors import RecipeError
from hflow.graph.edges import nodes_after_batch, same_step_order
from hflow.graph.errors import format_problem, recipe_error
from hflow.graph.field_table import UNIT_NAMES
from hflow.graph.ir import EPISODE_FIELDS, EdgeKind, Graph, Level, Node, NodeSpec, RecipeSpec
from hflow.graph.tensordicts import is_produced_for
from hflow.types import Unit
from hflow.types.engine import find_sampling_problem
from hflow.types.sampling_mask import SAMPLING_REPLAY, truncates

REDUCTIONS: Mapping[Unit, tuple[str, ...]] = {
    Unit.TOKEN: ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum/N"),
    Unit.SEQUENCE: ("seq-mean",),
    Unit.GROUP: ("group-mean",),
}
"""Unit of a loss -> its reductions. N is a whole number."""


def check_graph(graph: Graph) -> None:
    """Check a graph.

    Raises:
        RecipeError: for the first problem.
    """
    for node in graph.nodes:
        check_kind(node)
    check_writers(graph)
    check_losses(graph)
    check_cycles(graph)
    for node in graph.nodes:
        check_group(graph, node)
        check_keep(graph, node)
        check_arrival(node)
        check_cadence(graph, node)
        check_source(graph, node)
        check_sampling(node)
        check_calls(node)


def check_kind(node: Node) -> None:
    """Check that a node type of the recipe declares nothing that its way of running cannot do."""
    spec = node.spec
    if not spec.kind:
        return
    if spec.verb == "compute" and (fix := _better_base(spec)):
        raise _error(node, f"{spec.kind!r} runs like compute, which {fix}")
    if spec.verb == "encode" and spec.cost:
        raise _error(
            node,
            f"{spec.kind!r} states a cost, but encoded samples are made ahead. Remove cost from its class",
        )
    levels, num_models = _KINDS[spec.verb]
    if spec.level not in levels:
        raise _error(
            node, f"{spec.kind!r} runs like {spec.verb}, which cannot be per {spec.level}. Remove its level"
        )
    if num_models is not None and len(spec.models) != num_models:
        raise _error(
            node,
            f"{spec.kind!r} runs like {spec.verb}, which uses {num_models} model(s), not {len(spec.models)}. "
            "Write one node for each model",
        )
    writes = spec.models[:1] if spec.verb in ("train", "update") else ()
    reads = () if spec.verb in ("encode", "compute") else spec.models
    for name, stated, actual in (
        ("reads_weights", spec.reads_weights, reads),
        ("writes_weights", spec.writes_weights, writes),
        ("opens_stream", spec.opens_stream, spec.verb in ("encode", "generate")),
    ):
        if stated != actual:
            raise _error(
                node,
                f"{spec.kind!r} sets {name} to {stated!r}, but it runs like {spec.verb}, for which that is "
                f"{actual!r}. Remove {name}",
            )


_KINDS: Mapping[str, tuple[tuple[Level, ...], int | None]] = {
    "encode": ((Level.SAMPLE,), 1),
    "generate": ((Level.SAMPLE,), None),
    "compute": (tuple(Level), 0),
    "infer": (tuple(Level), 1),
    "train": ((Level.BATCH,), 1),
    "update": ((Level.BATCH,), 2),
}
"""Verb -> the levels of its nodes, and the number of their models; None: at least one."""


def _better_base(spec: NodeSpec) -> str:
    """Return the reason why a kind that runs like compute cannot do what it declares, and the fix."""
    if spec.opens_stream:
        return "cannot open a stream. Derive its class from generate or encode"
    if spec.writes_weights:
        return f"cannot train model {spec.writes_weights[0]!r}. Derive its class from train"
    for name, provided in spec.provided:
        bases = {"output": "infer or train", "engine": "generate", "tokenizer": "encode or generate"}
        if provided.partition(":")[0] in bases:
            base = bases[provided.partition(":")[0]]
            return f"has no {provided.capitalize()} for parameter {name!r}. Derive its class from {base}"
    if spec.models:
        return f"cannot use model {spec.models[0]!r}. Derive its class from infer, train or generate"
    return ""


def check_writers(graph: Graph) -> None:
    """Check that every model has at most one writer, and only if it is trainable."""
    writers: dict[str, Node] = {}
    for node in graph.nodes:
        for name in node.spec.writes_weights:
            model = graph.model(name)
            if not model.trainable:
                raise _error(
                    node,
                    f"it writes model {name!r}, which is frozen. Declare Model({name!r}, trainable=True) at "
                    f"{model.where}",
                )
            other = writers.setdefault(name, node)
            if other is not node:
                raise _error(
                    node,
                    f"{other.name} at {other.spec.where} also writes model {name!r}. Only one node of a "
                    "recipe may write a model",
                )


def check_losses(graph: Graph) -> None:
    """Check that every loss has a reduction for its unit, and works on batches that make steps."""
    for node in graph.nodes:
        if node.spec.verb != "train":
            continue
        unit, reduce = node.spec.returns[0].unit, node.spec.option("reduce")
        choices = REDUCTIONS[unit]
        is_token_sum = unit is Unit.TOKEN and re.fullmatch(r"token-sum/[1-9]\d*", reduce or "")
        if not is_token_sum and (reduce not in choices or reduce == "token-sum/N"):
            problem = "reduce= is not set" if reduce is None else f"reduce={reduce!r} does not fit"
            hint = ", with a whole number N" if unit is Unit.TOKEN else ""
            raise _error(
                node, f"{problem}. For a {UNIT_NAMES[unit]} loss, set it to {', '.join(choices)}{hint}"
            )
        if not graph.stream(node.stream).trained:
            raise _error(
                node,
                f"it trains on stream {node.stream!r}, which the recipe's dataset {graph.dataset!r} does not "
                "feed, so that there are no steps. Set on= to another stream",
            )


def check_cycles(graph: Graph) -> None:
    """Check that no node waits for itself within a step."""
    for node in graph.nodes:
        own_fields = [r.field for r in node.reads if r.producer == node.name and r.field in _returned(node)]
        if own_fields:
            raise _error(
                node,
                f"a cycle within a step: it reads {own_fields[0]!r}, which it returns itself. Rename the "
                "result with returns=, or read another field",
            )
    cycle = same_step_order(graph.edges).find_cycle()
    if not cycle:
        return
    path = [*cycle, cycle[0]]
    reasons = ", ".join(_arc_reason(graph, src, dst) for src, dst in pairwise(path))
    shown = " -> ".join(path)
    raise _error(graph.node(cycle[0]), f"a cycle within a step: {shown} ({reasons}). Remove one of these")


def check_group(graph: Graph, node: Node) -> None:
    """Check that a node which needs several samples of a prompt works on a stream that has them."""
    min_group = node.spec.option("min_group", 1)
    group = graph.stream(node.stream).group
    if group < min_group:
        source = graph.stream(node.stream).source
        is_library = node.spec.body.module.startswith("hflow.")
        other_fix = "" if is_library else f", or min_group={group} here"
        raise _error(
            node,
            f"it needs at least {min_group} samples per prompt, but {source} has group={group}. "
            f"Set group={max(min_group, 2)} there{other_fix}",
        )


def check_keep(graph: Graph, node: Node) -> None:
    """Check that `keep` is a bool per sample or group that is known before a batch is complete."""
    result = next((r for r in node.spec.returns if r.field == "keep"), None)
    if result is None:
        return
    if node.spec.level is Level.BATCH:
        raise _error(node, "'keep' decides about one sample or group. Set per='sample' or per='group'")
    if result.scalar != "bool":
        raise _error(node, f"'keep' must be bool, not {result.scalar}")
    after_batch = nodes_after_batch(graph)
    if node.name in after_batch:
        data = [e for e in graph.edges if e.dst == node.name and e.kind is EdgeKind.DATA]
        producers = [e.src for e in data if e.src in after_batch]
        reason, fix = (
            (f"depends on {producers[0]}", "Use fields that samples have before the batch is formed")
            if producers
            else ("has every= or after=", "Remove them")
        )
        raise _error(
            node,
            f"'keep' {reason} and runs after the batch is complete, when no sample can be left out. {fix}",
        )


def check_arrival(node: Node) -> None:
    """Check that inference on single samples as they arrive reads nothing about groups."""
    if node.spec.verb != "infer" or node.spec.level is not Level.SAMPLE:
        return
    units = {read.unit for read in node.reads} | {returned.unit for returned in node.spec.returns}
    sees_groups = any(kind == "sequences" for _, kind in node.spec.provided) or any(
        read.field == "group" for read in node.reads
    )
    if sees_groups or Unit.GROUP in units:
        raise _error(node, "it reads groups, but runs on single samples. Set per='group'")


def check_cadence(graph: Graph, node: Node) -> None:
    """Check that every field is produced in every step that reads it, and the steps have no cadence."""
    spec = node.spec
    is_fed = spec.opens_stream and graph.stream(node.stream).dataset == graph.dataset
    if is_fed and (spec.every, spec.after) != (1, 0):
        raise _error(
            node,
            "the recipe's dataset feeds this stream in every step. Remove every= and after=; they are for "
            "evaluation with data=",
        )
    for read in node.reads:
        producer = graph.node(read.producer).spec
        if producer.name != spec.name and not is_produced_for(producer, spec):
            raise recipe_error(
                spec.where,
                spec.name,
                f"{producer.name} produces {read.field!r} {_cadence(producer)}, but it is read "
                f"{_cadence(spec)}. Set the same every= and after= on both",
                read.parameter,
            )


def check_source(graph: Graph, node: Node) -> None:
    """Check that models which generate have the head `lm`, and samples for training are drawn at random."""
    if node.spec.verb != "generate":
        return
    for name in node.spec.models:
        if graph.model(name).head != "lm":
            raise _error(
                node,
                f"model {name!r} has head={graph.model(name).head!r}, but generation needs head='lm'. "
                "Generate with another model",
            )
    learners = [n for n in graph.nodes if n.spec.verb == "train" and n.stream in node.spec.streams]
    if learners and node.spec.option("temperature") == 0:
        raise _error(node, f"{learners[0].name} trains on its samples, so temperature must be above 0")


def check_sampling(node: Node) -> None:
    """Check that sampling can draw tokens, and that no option of it is ignored."""
    spec = node.spec
    if spec.verb != "generate":
        return
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    limits = {name: spec.option(name, value) for name, value in neutral.items()}
    temperature = spec.option("temperature", 1.0)
    if (found := find_sampling_problem(temperature, **limits)) is not None:
        raise _error(node, found[1])
    set_limits = [name for name, value in limits.items() if value != neutral[name]]
    if spec.option(SAMPLING_REPLAY) and not set_limits:
        raise _error(node, f"{SAMPLING_REPLAY} has no effect, as tokens are drawn from all. Remove it")
    if temperature == 0 and set_limits:
        name = set_limits[0]
        raise _error(
            node,
            f"{name} has no effect with temperature=0, which takes the most likely token. Remove {name}, or "
            "set temperature above 0",
        )
    if "" in spec.option("stop", ()):
        raise _error(node, "stop has an empty text, which would end every completion at once. Remove it")


_IGNORED_CALLS: Mapping[tuple[str, Level], tuple[str, tuple[tuple[str, Any], ...]]] = {
    ("compute", Level.BATCH): (
        "its body runs once on the whole batch, without limits and further attempts",
        (("timeout", None), ("retries", None), ("backoff", 1.0), ("concurrency", None)),
    ),
    ("encode", Level.SAMPLE): (
        "encode bodies run one after another on a thread",
        (("timeout", None), ("concurrency", None)),
    ),
}
"""Verb and level -> why some options of calls have no effect, and these with their defaults."""


def check_calls(node: Node) -> None:
    """Check that no option about the calls of a body is ignored."""
    spec = node.spec
    reason, options = _IGNORED_CALLS.get((spec.verb, spec.level), ("", ()))
    for name, default in options:
        if spec.option(name, default) != default:
            raise _error(node, f"{name} has no effect, as {reason}. Remove {name}")
    if spec.verb == "compute" and spec.option("retries") == 0 and spec.option("backoff", 1.0) != 1.0:
        raise _error(node, "backoff has no effect with retries=0. Remove one of them")


def _returned(node: Node) -> list[str]:
    return [result.field for result in node.spec.returns]


def _arc_reason(graph: Graph, src: str, dst: str) -> str:
    edge = next(e for e in graph.edges if (e.src, e.dst) == (src, dst) and e.lag == 0)
    if edge.kind is EdgeKind.DATA:
        return f"{dst} reads {', '.join(map(repr, edge.fields))}"
    return f"{dst} overwrites {edge.model!r} that {src} reads"


def _cadence(spec: NodeSpec) -> str:
    return f"every {spec.every} step(s) after step {spec.after}"


def _error(node: Node, problem: str) -> RecipeError:
    return recipe_error(node.spec.where, node.name, problem)


_REWARD = re.compile(r"(^|_)(reward|score)(_|$)")


def warnings_of(graph: Graph, spec: RecipeSpec) -> Iterator[str]:
    """Yield the lines to print after a successful check."""
    for name, where in spec.unlisted:
        yield format_problem(where, name, "no recipe in this file lists the node")
    for node in graph.nodes:
        yield from _unused(graph, node)
        yield from _widened(node)
        yield from _truncated(graph, node)


def _unused(graph: Graph, node: Node) -> Iterator[str]:
    """Warn of fields that no node reads. One number per sample or group is logged, which counts as read."""
    if node.spec.verb == "train":
        return
    for result in node.spec.returns:
        is_logged = node.spec.level is not Level.BATCH and result.unit in (Unit.SEQUENCE, Unit.GROUP)
        is_read = any(
            r.producer == node.name and r.field == result.field for n in graph.nodes for r in n.reads
        )
        is_own = not node.spec.returns_list or result not in EPISODE_FIELDS
        if is_own and not is_logged and not is_read:
            yield format_problem(node.spec.where, node.name, f"no node reads {result.field!r}")


def _widened(node: Node) -> Iterator[str]:
    """Warn of a reward per sequence that is read per token, so that every token receives all of it."""
    for read in node.reads:
        repeated = read.source_unit is not Unit.TOKEN and read.unit is Unit.TOKEN
        if repeated and _REWARD.search(read.field):
            fix = f"To reward the last token only, use seqs.at_end({read.field})"
            problem = f"{read.field!r} is repeated on every token. {fix}"
            yield format_problem(node.spec.where, node.name, problem, read.parameter)


def _truncated(graph: Graph, node: Node) -> Iterator[str]:
    """Warn of behav_logprobs from a truncated distribution, which differ from the model's."""
    if not any(read.field == "behav_logprobs" for read in node.reads):
        return
    source = graph.node(graph.stream(node.stream).source).spec
    if truncates(dict(source.options)) and not source.option(SAMPLING_REPLAY):
        problem = (
            f"{source.name} samples with top_p, top_k or min_p: behav_logprobs are not comparable with those "
            "of the model"
        )
        yield format_problem(node.spec.where, node.name, problem, "behav_logprobs")
