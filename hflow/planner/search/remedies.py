"""Advice for a request that does not fit into memory: the fewest changes with which it fits.

`pins_of` lists the settings of the user that a search keeps, each with the request without it. Where no plan
fits, these are tried one after the other, so that the error names those that are the cause.

`no_fit` and `nearest_fit` search for the changes. More and more is left open until something fits: settings
that change no result, then layouts, the placement, backends, the precision, and last more devices. From the
plan that is found, everything is taken back that is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any, Literal

from hflow.base.errors import PlanError
from hflow.base.text import format_gib, format_ranges, format_setting
from hflow.graph.ir import Graph
from hflow.planner.make.placement_setting import placed_devices
from hflow.planner.make.replicas import GEN_SUFFIX, replica_roles
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.traits import ENGINES, first_with, traits
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.explore import explore, too_large
from hflow.planner.search.layouts import MAX_TENSOR_RANKS
from hflow.planner.search.problem import PLACEMENT, SearchProblem
from hflow.planner.search.result import placement_of, settings_of, with_settings, without_places
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import DTYPE_BYTES, num_parameters

MEMORY_SETTINGS = (
    "zero_stage",
    "offload",
    "gen.max_running",
    "activation_checkpointing",
    "tokens_per_microbatch",
)
"""Settings of a model that change what it needs of memory, and no result. The first ones cost least."""


@dataclass(frozen=True)
class Pin:
    """One thing that the user has set."""

    kind: Literal["placement", "layout", "setting"]
    key: str
    """The key of the configuration."""
    text: str
    """The setting as the user has written it, such as `models.actor.layout=d8`."""
    release: Callable[[PlanRequest], PlanRequest]
    """Returns a request in which the search chooses it."""


def pins_of(graph: Graph, request: PlanRequest) -> tuple[PlanRequest, tuple[Pin, ...]]:
    """Return the pins of a request whose placement is free: devices first, then layouts, then settings.

    The request is returned with an item of its own for each name in its placement, from which any pin can be
    removed.
    """
    places: list[Pin] = []
    if request.placement is not None:
        names = [model + GEN_SUFFIX * (role == "gen") for model, role in replica_roles(graph)]
        items, devices = placed_devices(request, names)
        texts = {
            name: f"{name}={format_ranges(devices[name])}" + (f":{item.layout}" if item.layout else "")
            for name, item in items.items()
        }
        for item in dict.fromkeys(items.values()):
            text = f"{item.text} in placement"
            places.append(Pin("placement", "placement", text, partial(_without_items, names=item.names)))
            if item.layout is not None:
                release = partial(_without_layouts, names=item.names)
                places.append(Pin("placement", "placement", text, release))
        request = replace(request, placement=" ".join(texts.values()))
    places += _groups(request)
    return request, (*places, *_layouts(request), *_settings(graph, request))


def value_of(request: PlanRequest, key: str) -> Any:
    """Return the value of a key such as `models.actor.gen.layout`."""
    model, _, name = key.removeprefix("models.").partition(".")
    config: Any = request.model(model)
    for part in name.split("."):
        config = getattr(config, part)
    return config


def layout_keys(request: PlanRequest) -> tuple[str, ...]:
    """Return the keys of the layouts that models have."""
    return tuple(_set_keys(request, "layout"))


def _groups(request: PlanRequest) -> Iterator[Pin]:
    for key in _set_keys(request, "group"):
        text = f"{key}={value_of(request, key)}"
        yield Pin("placement", key, text, partial(_without_group, key=key))
    if request.groups:
        texts = (f"groups.{name}=[{format_ranges(devices)}]" for name, devices in request.groups.items())
        yield Pin("placement", "groups", " ".join(texts), lambda request: replace(request, groups={}))


def _layouts(request: PlanRequest) -> Iterator[Pin]:
    for key in layout_keys(request):
        text = f"{key}={value_of(request, key)}"
        yield Pin("layout", key, text, partial(with_settings, settings={key: None}))


def _settings(graph: Graph, request: PlanRequest) -> Iterator[Pin]:
    keys = [
        f"models.{model}.{name}"
        for name in MEMORY_SETTINGS
        for model in dict.fromkeys(model for model, _ in replica_roles(graph))
    ]
    for key in keys:
        if key not in request.free:
            value = value_of(request, key)
            yield Pin("setting", key, format_setting(key, value), partial(_with_free, key=key))


def _set_keys(request: PlanRequest, name: str) -> Iterator[str]:
    """Yield the keys of a setting, such as `group`, that models and their engines have."""
    for model, config in request.models.items():
        if getattr(config, name) is not None:
            yield f"models.{model}.{name}"
        if getattr(config.gen, name) is not None:
            yield f"models.{model}.gen.{name}"


def _without_items(request: PlanRequest, names: Container[str]) -> PlanRequest:
    kept = [item for item in (request.placement or "").split() if item.partition("=")[0] not in names]
    return replace(request, placement=" ".join(kept) or None)


def _without_layouts(request: PlanRequest, names: Container[str]) -> PlanRequest:
    items = (request.placement or "").split()
    kept = [item.partition(":")[0] if item.partition("=")[0] in names else item for item in items]
    return replace(request, placement=" ".join(kept) or None)


def _without_group(request: PlanRequest, key: str) -> PlanRequest:
    """Return the request with a model in no group, and without devices of groups that are empty then."""
    request = with_settings(request, {key: None})
    named = {value_of(request, key) for key in _set_keys(request, "group")}
    groups = {name: devices for name, devices in request.groups.items() if name in named}
    return replace(request, groups=groups)


def _with_free(request: PlanRequest, key: str) -> PlanRequest:
    return replace(request, free=request.free | {key})


MAX_DEVICES = 1024
"""Largest cluster to suggest."""
NOTHING_FITS = f"Nothing fits on up to {MAX_DEVICES} devices of this kind"
REMEDY_BUDGET = 100
"""Candidates of one attempt."""


Found = tuple[Evaluator, Choice]
"""The best plan of an attempt, and what costed it."""


@dataclass(frozen=True)
class Attempt:
    """A request with fewer pins."""

    request: PlanRequest
    changes: tuple[tuple[str, Any], ...] = ()
    """Settings that were changed on purpose, such as `models.actor.dtype=bf16`."""
    opened: tuple[str, ...] = ()
    """Layouts that the user has set and that may change now, by their keys."""


@dataclass(frozen=True)
class NoFit:
    """The reason why nothing fits, and what to change."""

    text: str
    """It continues "no placement fits into memory"."""
    is_too_large: bool
    """Whether the recipe needs more or larger devices, whatever else is changed."""


def no_fit(graph: Graph, request: PlanRequest) -> NoFit:
    """Return an error for a search that has found no plan, with the fix.

    Of what the user has set, only what makes a plan impossible is named: with the rest, something fits. The
    placement of the request is free.
    """
    request, pins = pins_of(graph, request)
    attempts = _anywhere_attempts(graph, _released(request, pins))
    if not pins:
        next(attempts)  # nothing fits there
    fitting = _first_fit(graph, attempts)
    if fitting is None:
        return NoFit(f". {_nothing_fits(graph, _released(request, pins))}", is_too_large=True)
    attempt, found = _fewest_changes(graph, request, *fitting)
    causes = list(pins)
    changed = replace(with_settings(request, dict(attempt.changes)), cluster=attempt.request.cluster)
    for pin in pins:
        others = [other for other in causes if other is not pin]
        if (kept := _search(graph, _released(changed, others))) is not None:
            causes, found = others, kept
    names, needed = " and ".join(dict.fromkeys(pin.text for pin in causes)), format_gib(_needed(found[1]))
    changes = list(starmap(format_setting, _named(request, attempt.changes).items()))
    is_too_large = attempt.request.cluster != request.cluster
    if is_too_large:
        changes.insert(0, f"cluster={attempt.request.cluster.name}")
    if changes:
        removed = f" and remove {names}" if names else ""
        text = f". Set {' '.join(changes)}{removed} ({needed})."
        return NoFit(text, is_too_large)
    them = "it" if len(causes) == 1 else "them"
    text = f" with {names}. Without {them}, {_replacement(causes, *found)} fits ({needed})."
    return NoFit(text, is_too_large=False)


def nearest_fit(graph: Graph, request: PlanRequest, asked: PlanRequest, *, may_grow: bool = True) -> str:
    """Return changes with which a request fits and leaves the margin free, as sentences.

    The request has groups and layouts; the user has made it as `asked`. `may_grow` tries larger clusters too,
    which takes longest.
    """
    attempts = _attempts(graph, request)
    if not may_grow:
        attempts = (attempt for attempt in attempts if attempt.request.cluster == request.cluster)
    fitting = _first_fit(graph, attempts)
    if fitting is None:
        return _nothing_fits(graph, _anywhere(request)) if may_grow else "Use more or larger devices."
    attempt, found = _fewest_changes(graph, request, *fitting)
    attempt, found = _fewest_opened(graph, request, attempt, found)
    return _sentence(request, asked, attempt, *found)


def _nothing_fits(graph: Graph, request: PlanRequest) -> str:
    """Return the error for a free request that no number of devices fits, and a kind of them that does."""
    text = NOTHING_FITS
    *_, largest = _anywhere_attempts(graph, request)
    if cause := _cause(graph, largest.request):
        text += f": {cause}"
    for device in request.larger_devices:
        name = f"{device.name}-{request.cluster.num_nodes}x{request.cluster.devices_per_node}"
        other = replace(
            request,
            cluster=replace(request.cluster, name=name, memory_bytes=device.memory_bytes),
            hardware=replace(request.hardware, device=device),
        )
        fitting = _first_fit(graph, _anywhere_attempts(graph, other))
        if fitting is not None:
            attempt, (_, choice) = _fewest_changes(graph, other, *fitting)
            settings = " ".join(starmap(format_setting, _named(request, attempt.changes).items()))
            there = f"cluster={attempt.request.cluster.name} {settings}".rstrip()
            needed = format_gib(_needed(choice))
            return f"{text}. Set {there} ({needed})."
    return f"{text}. Use larger devices or a smaller model."


def _cause(graph: Graph, request: PlanRequest) -> str | None:
    """Return the replica that does not even fit alone, with the reason."""
    try:
        evaluator = Evaluator(SearchProblem(graph, request))
    except PlanError:
        return None
    name, problem = too_large(evaluator), evaluator.problem
    shape = None if name is None else request.shapes.get(problem.replica(name).model)
    if name is None or shape is None:
        return None
    if problem.replica(name).role != "gen":
        return f"{name} does not fit on any number of devices, even alone"
    dtype = problem.config(name).compute_dtype
    is_divided = problem.traits(name).is_model_parallel
    num = min(MAX_TENSOR_RANKS, request.cluster.devices_per_node) if is_divided else 1
    room = num * (problem.memory_limit(0) - round(request.hardware.device.overhead_gib * GIB))
    where = f"within a machine, where {num} devices have" if num > 1 else "on one device, which has"
    weights = DTYPE_BYTES[dtype] * num_parameters(shape)
    return (
        f"an engine of {name} is {where} {format_gib(room)} for {format_gib(weights)} of weights in {dtype}"
    )


def _first_fit(graph: Graph, attempts: Iterable[Attempt]) -> tuple[Attempt, Found] | None:
    """Return the first attempt that fits, with its best plan."""
    for attempt in attempts:
        if (found := _search(graph, attempt.request)) is not None:
            return attempt, found
    return None


def _attempts(graph: Graph, request: PlanRequest) -> Iterator[Attempt]:
    models = [model for model, _ in replica_roles(graph)]
    settings = frozenset(f"models.{model}.{name}" for model in models for name in MEMORY_SETTINGS)
    same_place = Attempt(replace(request, free=(request.free | settings)))
    yield same_place
    yield _opened(same_place, layout_keys(request))
    yield from _anywhere_attempts(graph, _anywhere(same_place.request))


def _anywhere_attempts(graph: Graph, request: PlanRequest) -> Iterator[Attempt]:
    """Yield a request whose placement is free, then others with more changes."""
    anywhere = Attempt(request)
    yield anywhere
    backends = tuple(other_backends(graph, request))
    dtypes = tuple(_narrower_dtypes(request, [model for model, _ in replica_roles(graph)]))
    for changes in dict.fromkeys((backends, dtypes, (*backends, *dtypes))):
        if changes:
            yield _changed(anywhere, changes)
    for cluster in _larger(request.cluster):
        larger = Attempt(replace(request, cluster=cluster))
        yield larger
        if backends:
            yield _changed(larger, backends)


def _search(graph: Graph, request: PlanRequest) -> Found | None:
    """Return a plan of a request that fits: the first candidate, or the best of some; None if none fits."""
    try:
        evaluator = Evaluator(SearchProblem(graph, request))
        ranked = explore(evaluator, 1).ranked() or explore(evaluator, REMEDY_BUDGET).ranked()
    except PlanError:
        return None
    return (evaluator, ranked[0]) if ranked else None


def _fewest_changes(
    graph: Graph, request: PlanRequest, attempt: Attempt, found: Found
) -> tuple[Attempt, Found]:
    """Take back those changes without which a plan fits as well."""
    for key, _ in attempt.changes:
        other = replace(
            attempt,
            request=with_settings(attempt.request, {key: value_of(request, key)}),
            changes=tuple(change for change in attempt.changes if change[0] != key),
        )
        if (kept := _search(graph, other.request)) is not None:
            attempt, found = other, kept
    return attempt, found


def _fewest_opened(
    graph: Graph, request: PlanRequest, attempt: Attempt, found: Found
) -> tuple[Attempt, Found]:
    """Take back opened layouts and free settings that are not needed."""
    for key in attempt.opened:
        other = replace(
            attempt,
            request=with_settings(attempt.request, {key: value_of(request, key)}),
            opened=tuple(name for name in attempt.opened if name != key),
        )
        if (kept := _search(graph, other.request)) is not None:
            attempt, found = other, kept
    settings = sorted(attempt.request.free - request.free - {PLACEMENT})
    one_by_one = [{key} for name in MEMORY_SETTINGS for key in settings if key.endswith(name)]
    for keys in ([set(settings)] if settings else []) + (
        one_by_one if PLACEMENT not in attempt.request.free else []
    ):
        other = replace(attempt, request=replace(attempt.request, free=attempt.request.free - keys))
        if other.request != attempt.request and (kept := _search(graph, other.request)) is not None:
            attempt, found = other, kept
    return attempt, found


def _sentence(
    request: PlanRequest, asked: PlanRequest, attempt: Attempt, evaluator: Evaluator, choice: Choice
) -> str:
    """Return the changes of an attempt, with the memory that is needed then."""
    chosen = settings_of(evaluator, choice)
    settings = {
        **dict(attempt.changes),
        **{key: value for key, value in chosen.items() if key not in request.free},
    }
    for option in choice.options:
        key = f"models.{option.replica.model}.{'gen.' if option.replica.role == 'gen' else ''}layout"
        before = evaluator.problem.layouts.get(option.name)
        is_opened = before is None and key in attempt.opened
        if is_opened and option.layout != Layout.parse(value_of(request, key)):
            settings[key] = str(option.layout)
    texts, removed = list(starmap(format_setting, settings.items())), ""
    if PLACEMENT in attempt.request.free - request.free:
        cleared = [f"{key}=null" for key in (*layout_keys(asked), *_set_keys(asked, "group"))]
        texts[:0] = [f"placement='{placement_of(choice)}'", *cleared]
        removed = "".join(f" and remove groups.{name}" for name in asked.groups)
    if attempt.request.cluster != request.cluster:
        texts.insert(0, f"cluster={attempt.request.cluster.name}")
    needed = format_gib(_needed(choice))
    return f"Set {' '.join(texts)}{removed} ({needed})."


def _named(request: PlanRequest, changes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return changes without backends that the planner would choose by itself."""
    kept = dict(changes)
    for key in request.free & kept.keys():
        if kept[key] not in request.backend_problems:
            del kept[key]
    return kept


def _released(request: PlanRequest, pins: Sequence[Pin]) -> PlanRequest:
    for pin in pins:
        request = pin.release(request)
    return request


def _replacement(pins: Sequence[Pin], evaluator: Evaluator, choice: Choice) -> str:
    """Return a choice's values in the place of pins."""
    if any(pin.kind == "placement" for pin in pins):
        return f"placement='{placement_of(choice)}'"
    chosen = settings_of(evaluator, choice)
    for option in choice.options:
        chosen[f"models.{option.replica.model}.{'gen.' * (option.replica.role == 'gen')}layout"] = (
            option.layout
        )
    opened = {pin.key: chosen[pin.key] for pin in pins if pin.key in chosen}
    return " ".join(starmap(format_setting, opened.items()))


def _needed(choice: Choice) -> int:
    """Return the bytes that the fullest device of a choice needs."""
    return max(group.fit.total for group in choice.groups)


def _opened(attempt: Attempt, keys: tuple[str, ...]) -> Attempt:
    """Return the attempt with layouts left open that the user has set."""
    request = with_settings(attempt.request, dict.fromkeys(keys))
    return replace(attempt, request=request, opened=keys)


def _changed(attempt: Attempt, changes: tuple[tuple[str, Any], ...]) -> Attempt:
    """Return the attempt with some settings changed."""
    request = with_settings(attempt.request, dict(changes))
    return replace(attempt, request=request, changes=(*attempt.changes, *changes))


def _anywhere(request: PlanRequest) -> PlanRequest:
    """Return the request without devices and layouts."""
    request = without_places(request)
    return replace(request, placement=None, free=request.free | {PLACEMENT})


def other_backends(graph: Graph, request: PlanRequest) -> Iterator[tuple[str, Any]]:
    """Yield backends and engines with a tensor axis for replicas whose backend has none."""
    for model, role in replica_roles(graph):
        config = request.model(model)
        if role == "gen":
            engine = next((name for name in ENGINES if traits(name).is_model_parallel), None)
            usable = request.cluster.device in engine_kind(engine).preferred_on if engine else False
            if engine is not None and usable and config.gen.engine != engine:
                yield f"models.{model}.gen.engine", engine
        elif not traits(config.backend).is_model_parallel:
            yield f"models.{model}.backend", first_with("is_model_parallel")


def _narrower_dtypes(request: PlanRequest, models: list[str]) -> Iterator[tuple[str, Any]]:
    for model in dict.fromkeys(models):
        if request.model(model).compute_dtype == "fp32":
            yield f"models.{model}.dtype", "bf16"


def _larger(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield clusters of two, four ... times the devices: larger machines up to eight devices, then more."""
    device = cluster.name.rpartition("-")[0]
    machines, per_machine = cluster.num_nodes, cluster.devices_per_node
    while machines * per_machine * 2 <= MAX_DEVICES:
        machines, per_machine = (
            (machines, per_machine * 2) if per_machine < 8 else (machines * 2, per_machine)
        )
        yield replace(
            cluster,
            name=f"{device}-{machines}x{per_machine}",
            num_nodes=machines,
            devices_per_node=per_machine,
            cores=(),
        )
