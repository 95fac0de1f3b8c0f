"""Fields that hflow itself reads of samples, beside those that bodies read.

**The source of `prox_logprobs`**, which only `@train(prox=...)` decides. With `recompute` and `metrics` an
infer node (`actor_inf`) on the trained model computes them, with `loglinear` the train node itself; with
`none` the train node reads `behav_logprobs` instead.

**Replayed records**: an option of a generate node adds what its engine records beside tokens to its stream,
as a field (`RecordedKind`). Train and infer nodes on the stream read what they replay, without their bodies:
for the layers of the generating model, those that run it; for outputs, those that run a language model.

**The cut of episodes**: where an episode returns a list of trajectories, its sample has their tokens one
after the other. Every train and infer node of the stream reads the trajectory of each token, to compute each
by itself.

**Images**: every train and infer node of a stream whose model sees reads them.

**Flags**: the options `mask` and `observed` of a train node name fields of flags.

**Groups**: a train or infer body that uses the groups of its `Sequences` reads `group`, by which
micro-batches keep groups whole. The language adds this read (`dsl/recipe.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hflow.graph.errors import recipe_error
from hflow.graph.field_table import sees
from hflow.graph.ir import Graph, Node, NodeSpec, Parameter, RecipeSpec
from hflow.graph.streams import StreamAssignment
from hflow.types import Unit
from hflow.types.recorded import requested_kinds
from hflow.types.sampling_mask import SAMPLING_REPLAY, truncates
from hflow.types.trajectory import PIXELS, TRAJECTORY

PROX = "prox_logprobs"
COMPARED = "@behav_logprobs"
"""The parameter for log-probs of samples that a train node compares with the trainer's."""
FLAG_OPTIONS = ("mask", "observed")
"""Options of train and infer nodes that name a bool field."""
_INTERPOLATING = ("loglinear", "metrics")


def resolve_prox(spec: RecipeSpec, assignment: StreamAssignment) -> RecipeSpec:
    """Drop implicit nodes where an `actor_inf` is listed; let `prox="none"` read `behav_logprobs`."""
    listed = {
        assignment.stream_of[node.name] for node in spec.nodes if _returns_prox(node) and not node.implicit
    }
    kept = [node for node in spec.nodes if not (node.implicit and assignment.stream_of[node.name] in listed)]
    return replace(spec, nodes=tuple(_resolve(node) for node in kept))


def computes_own_prox(node: NodeSpec, parameter: Parameter) -> bool:
    """Return whether the train node itself computes the field of this parameter."""
    return parameter.field == PROX and node.verb == "train" and node.option("prox") == "loglinear"


def framework_parameters(node: NodeSpec, trains_own_samples: bool) -> tuple[Parameter, ...]:
    """Return the parameters of a train or infer node that hflow reads and the body does not receive.

    Args:
        node: any node.
        trains_own_samples: whether its model generated its samples. If it reads their log-probs, these are
            compared with the trainer's (`training/loop/loss.py`).
    """
    unit = Unit.TOKEN if node.verb == "train" else Unit.SEQUENCE
    parameters = [
        Parameter(f"@{option}", node.option(option), unit, "tensor")
        for option in FLAG_OPTIONS
        if node.option(option) is not None
    ]
    if node.verb != "train":
        return tuple(parameters)
    is_compared = trains_own_samples and any(p.field == "behav_logprobs" for p in node.parameters)
    if is_compared or node.option("prox") in _INTERPOLATING:
        parameters += [
            Parameter(name, name.removeprefix("@"), Unit.TOKEN, "tensor") for name in (COMPARED, "@versions")
        ]
    return tuple(parameters)


def check_flags(graph: Graph) -> None:
    """Check that nodes can use the flags of `mask=` and `observed=`.

    An infer node with `mask=` computes each sample by itself. A train node with `observed=` computes
    log-probs, and has a loss with entries for tokens.

    Raises:
        RecipeError: if not.
    """
    for node in graph.nodes:
        if node.spec.verb == "infer" and node.spec.option("mask") is not None:
            units = {returned.unit for returned in node.spec.returns}
            if not units <= {Unit.TOKEN, Unit.SEQUENCE} or any(read.field == "group" for read in node.reads):
                problem = "mask chooses samples, but the body needs whole groups, or returns objects"
                raise recipe_error(node.spec.where, node.name, f"{problem}. Remove mask=")
        if node.spec.option("observed") is None:
            continue
        model = graph.model(node.spec.models[0])
        if model.head != "lm":
            problem = f"observed needs log-probs, but model {model.name!r} has head={model.head!r}"
        elif node.spec.returns[0].unit is not Unit.TOKEN:
            problem = f"observed needs a loss PerToken, not one per {node.spec.returns[0].unit}"
        else:
            continue
        raise recipe_error(node.spec.where, node.name, f"{problem}. Remove observed=")


def unread_prox(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the infer nodes that return only prox_logprobs, if no node reads them."""
    for node in nodes:
        only_prox = node.spec.verb == "infer" and [r.field for r in node.spec.returns] == [PROX]
        if only_prox and not any(read.producer == node.name for other in nodes for read in other.reads):
            yield node


def check_prox(spec: RecipeSpec, assignment: StreamAssignment) -> None:
    """Check that the nodes of a stream agree with `prox=` of its train node.

    Raises:
        RecipeError: if a train node does not read prox_logprobs but sets `prox=`, a node other than infer
            returns them, an infer node computes them with another model, or a node reads them though `prox=`
            makes none.
    """
    for train in spec.nodes:
        _check_used(train)
        if train.verb == "train" and any(parameter.name == PROX for parameter in train.parameters):
            same = [n for n in spec.nodes if assignment.stream_of[n.name] == assignment.stream_of[train.name]]
            for node in same:
                _check_producer(node, train)
                _check_reader(node, train)


def _check_used(node: NodeSpec) -> None:
    if node.verb != "train" or node.option("prox") in (None, "none"):
        return
    if all(parameter.name.rpartition(".")[2] != PROX for parameter in node.parameters):
        raise recipe_error(
            node.where,
            node.name,
            f"prox={node.option('prox')!r} has no effect: its body does not read {PROX}. Remove prox=",
        )


def _resolve(node: NodeSpec) -> NodeSpec:
    if node.verb != "train" or node.option("prox") != "none":
        return node
    bound = (replace(p, field="behav_logprobs") if p.field == PROX else p for p in node.parameters)
    return replace(node, parameters=tuple(bound))


def _returns_prox(node: NodeSpec) -> bool:
    return any(result.field == PROX for result in node.returns)


def _check_producer(node: NodeSpec, train: NodeSpec) -> None:
    if not _returns_prox(node):
        return
    mode = train.option("prox")
    if node.verb != "infer":
        raise recipe_error(
            node.where,
            node.name,
            f"it returns {PROX}, but only prox={mode!r} of {train.name} decides where they come from. "
            f"Rename the field with returns=",
        )
    if node.models != train.models:
        raise recipe_error(
            node.where,
            node.name,
            f"it computes {PROX} with model {node.models[0]!r}, but {train.name} on the same stream trains "
            f"{train.models[0]!r}. Use {train.models[0]!r} here, or rename the field with returns=",
        )


def _check_reader(node: NodeSpec, train: NodeSpec) -> None:
    mode = train.option("prox")
    if node.verb == "train" or mode not in ("none", "loglinear"):
        return
    for parameter in node.parameters:
        if parameter.field == PROX:
            raise recipe_error(
                node.where,
                node.name,
                f"{PROX} do not exist, because {train.name} has prox={mode!r}. "
                f"Set prox='recompute' there, or read 'behav_logprobs' here",
                parameter.name,
            )


def replayed_parameters(
    node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment
) -> tuple[Parameter, ...]:
    """Return the parameters with which a train or infer node reads the records that it replays."""
    source = assignment.stream(assignment.stream_of[node.name]).source
    generates = next(other for other in spec.nodes if other.name == source)
    if node.verb not in ("train", "infer"):
        return ()
    speaks = any(model.name in node.models and model.head == "lm" for model in spec.models)
    replays = {"layers": bool({*node.models} & {*generates.models}), "outputs": speaks, "": False}
    kinds = requested_kinds(dict(generates.options))
    return tuple(
        Parameter(f"@{kind.name}", kind.name, kind.unit, "tensor")
        for kind in kinds
        if replays[kind.replayed_in]
    )


def resolve_sampling_replay(spec: RecipeSpec, assignment: StreamAssignment) -> RecipeSpec:
    """Set `sampling_replay` of generate nodes that leave it open, where it is needed and possible."""
    readers: dict[str, list[NodeSpec]] = {}
    for node in spec.nodes:
        if node.option("prox") in _INTERPOLATING or any(p.field == "behav_logprobs" for p in node.parameters):
            readers.setdefault(assignment.stream_of[node.name], []).append(node)

    def resolved(node: NodeSpec) -> NodeSpec:
        options = dict(node.options)
        is_open = node.verb == "generate" and options.get(SAMPLING_REPLAY) is None
        if not is_open or len(node.models) != 1 or not truncates(options):
            return node
        if not any(readers.get(stream) for stream in node.streams):
            return node
        return replace(node, options=tuple({**options, SAMPLING_REPLAY: True}.items()))

    return replace(spec, nodes=tuple(map(resolved, spec.nodes)))


def cut_parameters(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment) -> tuple[Parameter, ...]:
    """Return the parameter with which a train or infer node reads the trajectory of each token."""
    source = assignment.stream(assignment.stream_of[node.name]).source
    is_cut = any(other.name == source and other.returns_list for other in spec.nodes)
    if node.verb not in ("train", "infer") or not is_cut:
        return ()
    return (Parameter(f"@{TRAJECTORY}", TRAJECTORY, Unit.TOKEN, "tensor"),)


def image_parameters(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment) -> tuple[Parameter, ...]:
    """Return the parameter with which a train or infer node reads the images of its stream.

    Raises:
        RecipeError: if its model only reads text.
    """
    source = assignment.stream(assignment.stream_of[node.name]).source
    made_by = next(other for other in spec.nodes if other.name == source)
    if node.verb not in ("train", "infer") or not sees(spec.models, made_by):
        return ()
    for model in spec.models:
        if model.name in node.models and not model.vision:
            raise recipe_error(
                node.where,
                node.name,
                f"the samples of {made_by.name} have images, but model {model.name!r} only reads text. "
                f"Declare Model({model.name!r}, vision=True, ...), or encode samples without images for it",
            )
    return (Parameter(f"@{PIXELS}", PIXELS, Unit.PIXELS, "tensor"),)


def check_readers_of_images(graph: Graph) -> None:
    """Check that a node which prompts a model with images has one that sees.

    Raises:
        RecipeError: if it has not.
    """
    for node in graph.nodes:
        read = next((read for read in node.reads if read.unit in (Unit.IMAGE, Unit.IMAGES)), None)
        if read is not None and node.spec.opens_stream and not sees(graph.models, node.spec):
            model = node.spec.models[0]
            raise recipe_error(
                node.spec.where,
                node.name,
                f"it prompts with images, but model {model!r} only reads text. Declare Model({model!r}, "
                "vision=True, ...)",
                read.parameter,
            )


def check_lists(graph: Graph) -> None:
    """Check that what reads the samples of episodes that return a list of trajectories can divide them.

    Raises:
        RecipeError: if the list derives from another stream, records a whole sequence, or a node computes
            something that a sample has only once.
    """
    for node in graph.nodes:
        source = graph.node(graph.stream(node.stream).source)
        if source.spec.returns_list and (problem := _list_problem(graph, node, is_source=node is source)):
            raise recipe_error(
                node.spec.where, node.name, f"{problem}; {source.name} returns a list of trajectories"
            )


def _list_problem(graph: Graph, node: Node, *, is_source: bool) -> str | None:
    """Return the reason why a node cannot work on samples of several trajectories, with the fix."""
    spec = node.spec
    if is_source:
        if graph.stream(node.stream).parent is not None:
            return "a stream that derives from another has one trajectory per sample. Return a Trajectory"
        wholes = [kind for kind in requested_kinds(dict(spec.options)) if kind.unit is not Unit.TOKEN]
        return f"{wholes[0].option} is for single trajectories. Remove it" if wholes else None
    if spec.verb not in ("train", "infer"):
        return None
    head = graph.model(spec.models[0]).head
    units = {returned.unit for returned in spec.returns}
    if head != "lm":
        return f"a model with head={head!r} has no values or scores of episodes yet. Remove this node"
    if spec.verb == "infer" and units != {Unit.TOKEN}:
        return "an infer node can only return PerToken there. Reduce it in a compute node"
    if Unit.GROUP in units:
        return "a loss per group compares sequences, not episodes. Return a loss PerToken or PerSequence"
    if any(read.field == "group" for read in node.reads):
        return (
            "it combines a group's sequences (group, group_sum), so an episode would count once for each "
            "trajectory. Do that in a compute node with per='batch', and read its result"
        )
    return "a first pass is for single trajectories. Use another train node" if spec.has_first_pass else None


def check_recorded_kinds(graph: Graph) -> None:
    """Check that each generate node that records something has one model, and that a node reads the record.

    Raises:
        RecipeError: if not.
    """
    read = {(read.producer, read.field) for node in graph.nodes for read in node.reads}
    for node in graph.nodes:
        for kind in requested_kinds(dict(node.spec.options)):
            first, *others = node.spec.models
            if others:
                problem = (
                    f"{kind.option} is for episodes of one model, but it has {first}, {', '.join(others)}"
                )
            elif (node.name, kind.name) not in read:
                replays = f"no node trains {first!r} or infers with it on its samples"
                reason = replays if kind.replayed_in else f"no node reads {kind.name}"
                problem = f"{kind.option} has no effect, as {reason}"
            else:
                continue
            raise recipe_error(node.spec.where, node.name, f"{problem}. Remove {kind.option}")
