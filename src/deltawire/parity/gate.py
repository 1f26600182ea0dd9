"""Checks every batch against the parity limits before it is trained on.

A token that an older version drew differs for two reasons: the policy has changed, and the
arithmetic differs. Only the second is parity, so the two are measured separately: ``numeric`` over
tokens that the trained version itself drew after a prefix that it drew too, ``drift`` over all.
(A sequence in flight during a swap continues over keys and values of the older version, so its
later tokens mix both reasons; they count as drift.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from deltawire.config import ParityConfig, ParityLimits
from deltawire.errors import StoppedError
from deltawire.parity.divergence import (
    NO_DIVERGENCE,
    Divergence,
    SequenceSums,
    joined,
    sequence_sums,
)

NO_VERSION = -1
"""The version of a trainer whose samplers compute with other weights, such as quantized ones: no
token is drawn by the weights that it trains, and all differences are drift."""

_NUMERIC = ("k3", "k3_swapped", "mean_gap", "largest_gap", "extreme_share")
_DRIFT = ("k3", "largest_gap", "extreme_share", "effective_share")
_LOWER_IS_WORSE = frozenset({"effective_share"})
_HOLD_OF_ONE_TOKEN = frozenset({"largest_gap"})
_NONE = ParityLimits()


@dataclass(frozen=True)
class Crossing:
    """A named limit and the value that crossed it, which may be infinite or NaN.

    Example::

        str(Crossing("k3", 0.02, 0.01))  # "k3 0.02 against 0.01"
    """

    name: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} against {self.limit:g}"


@dataclass(frozen=True)
class BatchParity:
    """The figures of one batch. ``flipped_L`` is, for each expert layer, the share of the sampler's
    choices that the trainer's own router did not make; empty if none were recorded. ``masked``
    lists the rows of sequences that were taken out of the loss. ``numeric`` is of the version
    before the step, or of the older ``numeric_version`` with the weights of that version.

    Example::

        parity = meter.result()
        parity.raise_if_stopped()
        print(parity.numeric.k3, parity.drift.k3, len(parity.masked))
    """

    numeric: Divergence
    drift: Divergence
    flipped_L: tuple[float, ...] = ()
    warnings: tuple[Crossing, ...] = ()
    masked: tuple[int, ...] = ()
    stopped: tuple[Crossing, ...] = ()
    numeric_version: int | None = None

    def with_numeric(self, numeric: Divergence, version: int, config: ParityConfig) -> BatchParity:
        """The batch with ``numeric`` of another version than the trained one, and the limits that
        this crosses."""
        least, none = config.min_tokens, NO_DIVERGENCE
        return replace(
            self,
            numeric=numeric,
            numeric_version=version,
            warnings=(*self.warnings, *crossings(config.warn, numeric, none, min_tokens=least)),
            stopped=(*self.stopped, *crossings(config.stop, numeric, none, min_tokens=least)),
        )

    def raise_if_stopped(self, *, run: str = "", version: int | None = None) -> None:
        """Raises `StoppedError` if the batch crosses a limit of ``parity.stop``."""
        if self.stopped:
            raise StoppedError(
                f"sampler and trainer disagree: {', '.join(map(str, self.stopped))}",
                hint="compare the two with deltawire parity, or raise the limit in [parity.stop]",
                run=run,
                version=version,
            )


def numeric_mask(versions_NC: Tensor, mask_NC: Tensor, *, version: int) -> Tensor:
    """Returns the drawn tokens that, with all before them, ``version`` drew: bool[N, C]."""
    drawn = mask_NC.bool()
    foreign = (versions_NC != version) & drawn
    return drawn & (foreign.cumsum(1) == 0)


def crossings(
    limits: ParityLimits,
    numeric: Divergence,
    drift: Divergence,
    flipped_L: Sequence[float] = (),
    *,
    min_tokens: int = 1,
) -> list[Crossing]:
    """Returns the limits that a batch, or one sequence, crosses. NaN crosses every limit."""
    found = []
    for prefix, names, measured in (("", _NUMERIC, numeric), ("drift_", _DRIFT, drift)):
        for name in names:
            limit: float = getattr(limits, prefix + name)
            least = 1 if name in _HOLD_OF_ONE_TOKEN else min_tokens
            if limit == getattr(_NONE, prefix + name) or measured.tokens < least:
                continue
            value: float = getattr(measured, name)
            within = value >= limit if name in _LOWER_IS_WORSE else value <= limit
            if not within:
                found.append(Crossing(prefix + name, value, limit))
    if flipped_L and max(flipped_L) > limits.flipped_share:
        found.append(Crossing("flipped_share", max(flipped_L), limits.flipped_share))
    return found


class _MeterState(msgspec.Struct, kw_only=True):
    """A rank's measurements, as other ranks get them."""

    numeric: list[list[list[float]]]
    drift: list[list[list[float]]]
    masked: list[int]
    rows: int
    flips: list[tuple[list[int], list[int]]]
    damaged: int


@dataclass
class ParityMeter:
    """Measures one batch, micro-batch by micro-batch, and checks it against the limits.

    ``version`` is the one being trained, before the step. Only sums are kept.

    Example::

        meter = ParityMeter(config.parity, version)
        for batch in micro_batches:
            keep_N = meter.measure(trainer_NC, batch.sampler_NC, batch.mask_NC, batch.versions_NC)
        meter.result().raise_if_stopped()
    """

    config: ParityConfig
    version: int
    _numeric: list[SequenceSums] = field(default_factory=list)
    _drift: list[SequenceSums] = field(default_factory=list)
    _masked: list[int] = field(default_factory=list)
    _rows: int = 0
    _flips: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _damaged: int = 0

    def measure(
        self,
        trainer_NC: Tensor,
        sampler_NC: Tensor,
        mask_NC: Tensor,
        versions_NC: Tensor,
        *,
        episodes_N: Tensor | None = None,
    ) -> Tensor:
        """Measures a micro-batch: 1 for each sequence that stays in the loss, 0 for each that
        ``parity.mask`` takes out, float32[N].

        Shapes are those of `sequence_sums`; ``versions_NC`` int[N, C] drew the tokens. Rows of
        one episode (``episodes_N``) leave together, since they share one advantage; without it,
        each row is an episode.
        """
        extreme = self.config.extreme_ratio
        device = mask_NC.device
        # A batch's figures are few, and float64 is missing on some devices.
        trainer_NC, sampler_NC = trainer_NC.detach().cpu(), sampler_NC.cpu()
        mask_NC, versions_NC = mask_NC.cpu(), versions_NC.cpu()
        numeric = numeric_mask(versions_NC, mask_NC, version=self.version)
        near = sequence_sums(trainer_NC, sampler_NC, numeric, extreme=extreme)
        far = sequence_sums(trainer_NC, sampler_NC, mask_NC, extreme=extreme)
        self._numeric.append(near)
        self._drift.append(far)
        keep = torch.ones(len(mask_NC))
        if self.config.mask != _NONE:
            pairs = zip(near.each(), far.each(), strict=True)
            episodes = range(len(mask_NC)) if episodes_N is None else episodes_N.tolist()
            crossed = {
                episode
                for episode, (one, whole) in zip(episodes, pairs, strict=True)
                if crossings(self.config.mask, one, whole)
            }
            for row, episode in enumerate(episodes):
                if episode in crossed:
                    keep[row] = 0
                    self._masked.append(self._rows + row)
        self._rows += len(mask_NC)
        return keep.to(device)

    def add_flips(self, flipped_L: Tensor, choices_L: Tensor, *, damaged: int = 0) -> None:
        """Adds counts of flipped and of compared expert choices, and of sequences whose choices
        could not be read, which is a warning regardless of the limits."""
        self._flips.append((flipped_L, choices_L))
        self._damaged += damaged

    def joined(self, gather: Callable[[bytes], list[bytes]]) -> ParityMeter:
        """Returns the meter of a batch whose micro-batches were measured on several ranks, in order
        of ranks; ``gather`` gives every rank the bytes of all."""
        state = _MeterState(
            numeric=[part.rows() for part in self._numeric],
            drift=[part.rows() for part in self._drift],
            masked=self._masked,
            rows=self._rows,
            flips=[(flipped.tolist(), choices.tolist()) for flipped, choices in self._flips],
            damaged=self._damaged,
        )
        whole = ParityMeter(self.config, self.version)
        for data in gather(msgspec.msgpack.encode(state)):
            part = msgspec.msgpack.decode(data, type=_MeterState)
            whole._numeric += map(SequenceSums.of_rows, part.numeric)
            whole._drift += map(SequenceSums.of_rows, part.drift)
            whole._masked += [whole._rows + row for row in part.masked]
            whole._rows += part.rows
            whole._flips += [(torch.tensor(a), torch.tensor(b)) for a, b in part.flips]
            whole._damaged += part.damaged
        return whole

    def result(self) -> BatchParity:
        """Returns the figures of the whole batch."""
        numeric, drift = joined(self._numeric).total(), joined(self._drift).total()
        flipped: tuple[float, ...] = ()
        if self._flips:
            counts, choices = (torch.stack(part).sum(0) for part in zip(*self._flips, strict=True))
            flipped = tuple((counts / choices.clamp(min=1)).tolist())
        least = self.config.min_tokens
        warnings = crossings(self.config.warn, numeric, drift, flipped, min_tokens=least)
        if self._damaged:
            warnings.append(Crossing("damaged_routes", self._damaged, 0))
        return BatchParity(
            numeric,
            drift,
            flipped,
            tuple(warnings),
            tuple(self._masked),
            tuple(crossings(self.config.stop, numeric, drift, flipped, min_tokens=least)),
        )
