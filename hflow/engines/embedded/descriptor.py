"""The descriptor of the embedded engine, which imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hflow.engines.embedded import memory
from hflow.engines.embedded.families import THROUGH_MODULES, own_forward_objection
from hflow.planner.forecast.memory.cache_size import too_small_cache
from hflow.planner.models.descriptors import EngineKind, ServedModel, Variation
from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.architectures import DENSE_FAMILIES
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.sampling_mask import SAMPLING_MASK

if TYPE_CHECKING:
    from hflow.engines.embedded.replay import Draws
    from hflow.engines.interface import EngineSetup


def _make_engine(setup: EngineSetup) -> Any:
    from hflow.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(*_arguments(setup))


def _make_recording_engine(draws: Draws, setup: EngineSetup) -> Any:
    from hflow.engines.embedded.replay import RecordingEngine

    return RecordingEngine(draws, *_arguments(setup))


def _make_replaying_engine(draws: Draws, setup: EngineSetup) -> Any:
    from hflow.engines.embedded.replay import ReplayingEngine

    return ReplayingEngine(draws, *_arguments(setup))


def _arguments(setup: EngineSetup) -> tuple[Any, ...]:
    """Return the arguments of `EmbeddedEngine`."""
    decode = None if setup.tokenizer is None else setup.tokenizer.decode_answer
    return setup.settings, setup.options, setup.module, decode, setup.base


def _check(served: ServedModel) -> Iterator[str]:
    """Yield a reason where the size of the cache is set but has no effect, or is too small."""
    if served.config.gen.cache_gib is not None and served.cluster.device == "cpu":
        model = served.replica.model
        yield (
            f"models.{model}.gen.cache_gib is set, but on a CPU the cache of the embedded engine has a slot "
            f"for each of max_running sequences. Set models.{model}.gen.max_running instead, and "
            "cache_gib=null."
        )
    elif served.shape is not None:
        yield from too_small_cache(served, served.shape, memory.smallest_cache)


def _remark(served: ServedModel) -> str | None:
    """Return the reason why a model runs through transformers' modules, if its family or adapters are it."""
    if served.family is None:
        return None
    objection = own_forward_objection({"model_type": served.family}, served.config.lora is not None)
    return None if objection is None else f"{THROUGH_MODULES}: {objection}"


def _find_variation(device: str) -> Variation | None:
    if device == "cpu":
        return None
    return Variation(
        "kernels of a GPU round by the sequences that are decoded together, which depends on timing",
        "gen.engine=vllm",
    )


ENGINE = EngineKind(
    name="embedded",
    traits=BackendTraits(
        sharded_over_data="nothing",
        captured_families=DENSE_FAMILIES,
        logit_passes=2,  # the product writes them, and `decode_kernels` reads them
        records=(ROUTED_EXPERTS, SAMPLING_MASK),
        shares_base=True,
    ),
    factory=_make_engine,
    recording_factory=_make_recording_engine,
    replaying_factory=_make_replaying_engine,
    memory=memory,
    check=_check,
    remark=_remark,
    find_variation=_find_variation,
    packages=("torch", "transformers"),
    install="make env",
    purpose="generation without further packages",
    is_required=True,
)
