"""Builds what a worker hosts of the plan's replicas, by the launcher's factories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hflow.backends.base import SHARDS, ModelBackend, Seat
from hflow.data.tokenizer import TextTokenizer
from hflow.plan.ir import Replica
from hflow.workers.base import WorkerSetup
from hflow.workers.engine_driver import EngineDriver
from hflow.workers.world import World


def hosted_replicas(setup: WorkerSetup, hosted: Sequence[int]) -> list[Replica]:
    """The plan's replicas that have a rank among these workers, in the plan's order."""
    return [replica for replica in setup.plan.replicas if set(replica.workers) & set(hosted)]


def build_backends(
    setup: WorkerSetup, replicas: Sequence[Replica], world: World | None
) -> dict[str, ModelBackend]:
    """Training and inference replicas, with the optimizer's state where they go on; may be a collective."""
    backends: dict[str, ModelBackend] = {}
    for replica in replicas:
        if replica.role != "gen":
            settings, layout = setup.models[replica.model], replica.layout
            group = world.group(replica) if world else None
            seat = Seat(group, layout.data, layout.tensor, layout.pipe)
            backend = backends[replica.name] = setup.factories[replica.backend](settings, seat)
            if settings.resume:
                backend.load_shards(f"{settings.path}/{SHARDS}")
    return backends


def build_engines(
    setup: WorkerSetup,
    replicas: Sequence[Replica],
    backends: Mapping[str, ModelBackend],
    tokenizers: Mapping[str, TextTokenizer],
) -> tuple[dict[str, EngineDriver], frozenset[str]]:
    """Generation replicas, and which of them use the storage of the replica that trains here."""
    source = {route.dst: route.src for route in setup.plan.weights if route.how == "shared"}
    drivers: dict[str, EngineDriver] = {}
    sharing = set()
    for replica in replicas:
        if replica.role != "gen":
            continue
        module = backends[source[replica.name]].shared_module() if replica.name in source else None
        if module is not None:
            sharing.add(replica.name)
        engine = setup.factories[replica.backend](
            setup.models[replica.model],
            setup.engines[replica.name],
            module,
            tokenizers[replica.model].decode,
        )
        drivers[replica.name] = EngineDriver(engine)
    return drivers, frozenset(sharing)


def build_tokenizers(setup: WorkerSetup, verb: str) -> dict[str, TextTokenizer]:
    """Tokenizers of the models that nodes of a verb use. A thread needs instances of its own."""
    models = {
        model for program in setup.programs.values() if program.verb == verb for model in program.models
    }
    return {model: TextTokenizer(setup.tokenizers[model]) for model in sorted(models)}
