"""Checks of the samples before a forward pass, and of the tensors in a checkpoint.

A micro-batch on the device: token ids, the layout of its sequences, and the mask of learned tokens.

Axes: S sequences, T packed tokens, U computed tokens (T without repeated prompt prefixes), N learned tokens,
P groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hflow.base.errors import BackendError, RunError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import FRAMEWORK_READ, get_column, sequences_of, to_tensor
from hflow.data.batches.shared_prefix import PrefixSharing, share_prefixes
from hflow.data.batches.trajectory_rows import cut_trajectories
from hflow.models.expert_balance import BalancedTokens
from hflow.models.expert_replay import ReplayedExperts, replayed_experts
from hflow.models.hf_config import max_length
from hflow.models.packed_attention import PackedLayout
from hflow.training.interface import NodeCall
from hflow.training.loop.kept_sets import KeptSets
from hflow.types import Sequences, Unit
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.sampling_mask import SAMPLING_MASK
from hflow.types.trajectory import TRAJECTORY
from hflow.vision.batches import SEEN, SequencesWithImages
from hflow.vision.embedding import RowsOfImages


def check_sequences(call: NodeCall, model: str, config: PreTrainedConfig, batches: Iterable[Batch]) -> None:
    """Check that a model has positions and embeddings for every sequence that a node computes.

    Raises:
        BackendError: if a sequence is too long or has a token outside the vocabulary.
    """
    longest, name = max_length(config), f"model {model!r}"
    for batch in (batch for batch in batches if len(batch)):
        num_tokens = int(cut(call, batch).lengths.max())  # host: numpy
        if longest is not None and num_tokens > longest:
            raise BackendError(
                f"a sequence has {num_tokens} tokens, but {name} has positions for {longest} "
                "(max_position_embeddings); remove or shorten such rows"
            )
        token = int(np.max(get_column(batch, "input_ids").values))
        if token >= config.vocab_size:
            raise BackendError(
                f"a sequence holds token {token}, but {name} has a vocabulary of {config.vocab_size}; "
                "encode with the model's own tokenizer"
            )


def check_temperature(call: NodeCall) -> None:
    """Check that the policy samples: at temperature 0 log-probs are undefined.

    Raises:
        RunError: if the temperature is 0.
    """
    if call.temperature <= 0:
        raise RunError(
            f"node {call.node!r}: log-probs are undefined at temperature {call.temperature:g}; set a "
            "temperature above 0 on the generate node of its stream"
        )


LEARNED = "is_learned"
"""Column that `prepare_batch` adds: which sequences count in means over sequences."""
NUM_SEQUENCES, NUM_LEARNED = "num_sequences", "num_learned"
"""Columns that `prepare_batch` adds: the sequences that count, and learned tokens, of each row's sample."""
COUNT = "@count"
"""Column that `prepare_batch` adds for a mask of whole numbers: how often each sequence counts."""
OBSERVED = "@observed"
"""Column that `prepare_batch` adds for `observed=`: unlearned tokens whose log-probs a loss reads."""


@dataclass(frozen=True)
class PackedTokens:
    """T tokens of S sequences, as a model's layers need them."""

    input_ids: Tensor
    """int64 `[T]`."""
    computed_ids: Tensor
    """int64 `[U]`: `input_ids` of the tokens that are computed. U is T where no prefix is shared."""
    position_ids: Tensor
    """int64 `[U]`, from 0 in each sequence; `[A, U]` of a model that sees, whose positions have A axes."""
    layout: PackedLayout
    sharing: PrefixSharing | None
    """Which tokens are computed once, on the host. `layout.shared` is the same on the device."""
    replayed: ReplayedExperts | None
    """The experts that routers are to choose; None: they choose themselves."""
    images: RowsOfImages | None
    """The images among the computed tokens."""
    balanced: BalancedTokens | None = field(default=None, kw_only=True)
    """What routers count and balance; None: nothing."""

    def computed_rows(self, positions: Tensor) -> Tensor:
        """Return the computed rows (indices below U) of tokens at these positions (indices below T)."""
        shared = self.layout.shared
        return positions if shared is None else shared.row_of_token[positions]

    def expand(self, x: Tensor) -> Tensor:
        """Repeat the rows of shared prefixes: `[U, ...]` -> `[T, ...]`."""
        shared = self.layout.shared
        return x if shared is None else x.index_select(0, shared.row_of_token)


@dataclass(frozen=True)
class PackedBatch(PackedTokens):
    """A micro-batch as a forward pass and its body need it."""

    batch: Batch
    seqs: Sequences
    targets: Tensor
    """int64 `[N]`: positions of learned and observed tokens. Each is predicted from the token before it."""
    observed: Tensor | None
    """bool `[T]`: the observed tokens; None: the node has no `observed=`."""
    last_tokens: Tensor
    """int64 `[S]`: position of each sequence's last token."""
    valid: dict[Unit, Tensor]
    """Which entries of each unit count: bool `[T]`, `[S]`, `[P]`."""
    num_valid: dict[Unit, int]
    """Number of entries of each unit that count."""
    kept: KeptSets | None
    """The tokens that the learned ones were drawn from; None: all."""


def body_sequences(call: NodeCall, packed: PackedBatch) -> Sequences:
    """Return the layout that the body of a node receives with a micro-batch."""
    return packed.seqs if call.keeps_groups_whole else packed.seqs.without_groups()


def cut(call: NodeCall, batch: Batch) -> Batch:
    """Return the batch with the sequences that a node computes: its samples, or their trajectories."""
    is_cut = any(read.parameter == FRAMEWORK_READ + TRAJECTORY for read in call.reads)
    return cut_trajectories(batch) if is_cut else batch


def prepare_batch(
    batch: Batch, head: str, mask_field: str | None = None, observed_field: str | None = None
) -> Batch:
    """Return the batch with its final `loss_mask`, and columns that say which sequences count.

    The first token of a sequence has no prediction, so it is never learned or observed. A sequence counts if
    any of its tokens is learned; for a `score` head it counts unless the mask excludes it.

    Args:
        mask_field: bool column, per token or per sequence, that excludes more entries. Whole numbers per
            sequence say how often a sequence counts.
        observed_field: bool column of the tokens that are observed, unless they are learned.
    """
    mask = np.array(get_column(batch, "loss_mask").values, dtype=bool)
    if observed_field is not None:
        batch = batch.with_columns({OBSERVED: _observed(get_column(batch, observed_field), mask, batch)})
    mask[batch.offsets[:-1]] = False
    kept = np.ones(len(batch), dtype=bool)
    if mask_field is not None:
        extra = get_column(batch, mask_field)
        if extra.unit is not Unit.TOKEN and np.issubdtype(np.asarray(extra.values).dtype, np.integer):
            batch = batch.with_columns({COUNT: Column(Unit.SEQUENCE, extra.values)})
        flags = np.asarray(extra.values, dtype=bool)
        mask &= flags if extra.unit is Unit.TOKEN else np.repeat(flags, batch.lengths)
        kept = _any_by_sequence(flags, batch) if extra.unit is Unit.TOKEN else flags
    learned = kept if head == "score" else _any_by_sequence(mask, batch)
    _, sample = np.unique(batch.samples, return_inverse=True)
    num_sequences = np.bincount(sample, weights=learned)[sample].astype(np.int64)
    num_learned = np.bincount(np.repeat(sample, batch.lengths), weights=mask)[sample].astype(np.int64)
    return batch.with_columns(
        {
            "loss_mask": Column(Unit.TOKEN, mask),
            LEARNED: Column(Unit.SEQUENCE, learned),
            NUM_SEQUENCES: Column(Unit.SEQUENCE, num_sequences),
            NUM_LEARNED: Column(Unit.SEQUENCE, num_learned),
        }
    )


def sequence_shares(batch: Batch, totals: Mapping[Unit, int]) -> npt.NDArray[np.float64]:
    """Return the share `[S]` of each sequence in means over the sequences of samples (`seq-mean`).

    `totals` are the samples that count in the whole minibatch, over all ranks.
    """
    columns = batch.columns
    learned, num = (np.asarray(columns[name].values) for name in (LEARNED, NUM_SEQUENCES))
    shares: npt.NDArray[np.float64] = learned / np.maximum(num, 1) / max(totals[Unit.SEQUENCE], 1)
    return shares


def count_valid(batch: Batch) -> dict[Unit, int]:
    """Count the tokens, samples and groups of a prepared batch that are learned, each as often as it counts.

    A loss per sequence is averaged over samples, however many sequences they have.
    """
    learned = np.asarray(batch.columns[LEARNED].values)
    times = np.asarray(batch.columns[COUNT].values) if COUNT in batch.columns else np.ones(len(batch), int)
    _, first = np.unique(batch.samples[learned], return_index=True)
    return {
        Unit.TOKEN: int(np.repeat(times, batch.lengths)[np.asarray(batch.columns["loss_mask"].values)].sum()),
        Unit.SEQUENCE: int(times[learned][first].sum()),
        Unit.GROUP: len(np.unique(batch.groups[learned])),
    }


def target_positions(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the positions of a prepared batch's learned and observed tokens."""
    learned = np.asarray(get_column(batch, "loss_mask").values)
    observed = batch.columns.get(OBSERVED)
    return np.flatnonzero(learned if observed is None else learned | np.asarray(observed.values))


def count_observed(batch: Batch) -> int:
    """Count the observed tokens of a prepared batch."""
    observed = batch.columns.get(OBSERVED)
    return 0 if observed is None else int(np.count_nonzero(observed.values))


def _observed(field: Column, learned: npt.NDArray[np.bool_], batch: Batch) -> Column:
    flags = np.asarray(field.values, dtype=bool)
    observed = (flags if field.unit is Unit.TOKEN else np.repeat(flags, batch.lengths)) & ~learned
    observed[batch.offsets[:-1]] = False
    return Column(Unit.TOKEN, observed)


def _positions(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the position `[T]` of each token in its sequence."""
    return np.arange(batch.num_tokens) - np.repeat(batch.offsets[:-1], batch.lengths)


def pack_tokens(
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype,
    replays: bool = False,
    vision: SequencesWithImages | None = None,
) -> PackedTokens:
    """Move a batch's tokens and their layout to the device. All index tables are made on the host.

    The batch has `input_ids`, and `routed_experts` if it `replays` the engine's experts. The attention kernel
    depends on the dtype of the forward pass. `vision` reads images; None: the model only reads text.
    """
    images = None if vision is None else vision.rows_of(batch)
    positions = _positions(batch) if vision is None else vision.positions(batch)
    compared = (*_compared_columns(replays), *([] if images is None else [SEEN]))
    if images is not None:
        batch = batch.with_columns({SEEN: Column(Unit.TOKEN, images.identities(batch.num_tokens))})
    sharing = share_prefixes(batch, compared)
    if sharing is not None and images is not None:
        images = images.computed(sharing)
    layout = PackedLayout.of(batch.lengths, device, dtype, sharing)
    shared = layout.shared
    input_ids = to_tensor(get_column(batch, "input_ids").values, device)
    position_ids = to_tensor(positions, device)
    return PackedTokens(
        input_ids=input_ids,
        computed_ids=input_ids if shared is None else input_ids[shared.token_of_row],
        position_ids=position_ids if shared is None else position_ids[..., shared.token_of_row],
        layout=layout,
        sharing=sharing,
        replayed=replayed_experts(batch, sharing, device) if replays else None,
        images=images,
    )


def pack_batch(
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype,
    replays: bool = False,
    vision: SequencesWithImages | None = None,
) -> PackedBatch:
    """Move a prepared batch to the device, as `pack_tokens` does, with what the body needs."""
    seqs = sequences_of(batch, device)
    targets = target_positions(batch)
    learns = np.asarray(batch.columns[LEARNED].values)
    learned = to_tensor(learns, device)
    return PackedBatch(
        **vars(pack_tokens(batch, device, dtype, replays, vision)),
        batch=batch,
        seqs=seqs,
        targets=to_tensor(targets, device),
        observed=None if OBSERVED not in batch.columns else to_tensor(batch.columns[OBSERVED].values, device),
        last_tokens=to_tensor(batch.offsets[1:] - 1, device),
        valid={
            Unit.TOKEN: seqs.loss_mask,
            Unit.SEQUENCE: learned,
            Unit.GROUP: seqs.group_sum(learned.long()) > 0,
        },
        num_valid={
            Unit.TOKEN: int(np.count_nonzero(batch.columns["loss_mask"].values)),
            Unit.SEQUENCE: int(learns.sum()),
            Unit.GROUP: len(np.unique(batch.groups[learns])),
        },
        kept=KeptSets.of_batch(batch, targets, device) if SAMPLING_MASK in batch.columns else None,
    )


def scored_tokens(packed: PackedBatch, padding_id: int | None) -> Tensor:
    """Return the position `[S]` of each sequence's last token that is not the padding token.

    transformers scores a sequence there, also where its last own tokens are the padding token, as with an
    end-of-text token that is used for padding. A sequence of nothing else is scored at its first token.
    """
    batch = packed.batch
    if padding_id is None or len(batch) == 0:
        return packed.last_tokens
    ids = np.asarray(get_column(batch, "input_ids").values)
    starts = batch.offsets[:-1]
    last = np.maximum.reduceat(np.where(ids != padding_id, np.arange(len(ids)), -1), starts)
    return to_tensor(np.maximum(last, starts), packed.last_tokens.device)


def placeholder_batch() -> Batch:
    """Return a prepared batch of one unlearned token, for a rank that must join a forward without samples."""
    one = np.ones(1, dtype=np.int64)
    columns = {
        "input_ids": Column(Unit.TOKEN, np.zeros(1, dtype=np.int64)),
        "loss_mask": Column(Unit.TOKEN, np.zeros(1, dtype=bool)),
    }
    return prepare_batch(Batch(-one, -one, one, columns), head="lm")


def _any_by_sequence(mask: npt.NDArray[np.bool_], batch: Batch) -> npt.NDArray[np.bool_]:
    """Return whether any token of each sequence is true. Sequences have at least one token."""
    if len(batch) == 0:
        return np.zeros(0, dtype=bool)
    return np.logical_or.reduceat(mask, batch.offsets[:-1])


def compared_columns(call: NodeCall) -> tuple[str, ...]:
    """Return the columns on which the hidden states of a token depend, where there are no images."""
    return _compared_columns(replays_experts(call))


def _compared_columns(replays: bool) -> tuple[str, ...]:
    return ("input_ids", ROUTED_EXPERTS) if replays else ("input_ids",)


def replays_experts(call: NodeCall) -> bool:
    """Return whether a node computes with the engine's experts."""
    return any(read.parameter == FRAMEWORK_READ + ROUTED_EXPERTS for read in call.reads)
