"""Mid-training: next-token steps over documents, packed without attention across documents.

A position numbers a document: it says which stream the document comes from and which row of that
stream it is (`deltawire.data.order`). A step takes documents from its position on until its tokens
are used up, and the next step begins where it ended, so one number resumes the data exactly.

Documents go through the same forward pass as trajectories (`deltawire.train.policy`): each is one
row of the batch, so that it attends to itself only and its positions begin at 0, packed where the
model allows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire.chat.text import Text
from deltawire.config import MidtrainConfig, RunConfig
from deltawire.config.machine import machine_policy
from deltawire.config.tasks import DocumentStreamConfig, HeldoutStreamConfig
from deltawire.data import (
    Rows,
    heldout_rows,
    mixture_of,
    open_rows,
    permuted,
    require_columns,
    take,
)
from deltawire.errors import InputError
from deltawire.events import SourceLoss
from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import TrainedPolicy
from deltawire.train.step import deterministic
from deltawire.train.stopping import Stopping, abandon_if, never
from deltawire.wire.rollouts import Group, Trajectory


@dataclass(frozen=True)
class DocumentBatch:
    """The documents of a step, int32[L] each with 2 ≤ L ≤ ``sequence_length``, and the position
    after them."""

    documents: list[NDArray[np.int32]]
    position: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.documents))


class DocumentStream:
    """The documents of a configuration, by position.

    Raises `InputError` for data that cannot be read, a column that is missing, or a value that is
    not text.

    Example::

        stream = DocumentStream(config.midtrain, text, seed=0)
        batch = stream.batch(0)
        following = stream.batch(batch.position)
    """

    def __init__(self, config: MidtrainConfig, text: Text, *, seed: int) -> None:
        self._config = config
        self._text = text
        self._seed = seed
        self._weights = [stream.weight for stream in config.streams]
        self._rows: list[Rows] = []
        self._kept: list[NDArray[np.int64] | None] = []
        """The rows of each stream that are trained on; None for all."""
        for stream in config.streams:
            rows = _open(stream)
            self._rows.append(rows)
            held = _heldout_of(stream, rows)
            self._kept.append(np.setdiff1d(np.arange(len(rows)), held) if len(held) else None)
        mixture_of(0, self._weights, seed=seed)

    def pieces(self, position: int) -> list[NDArray[np.int32]]:
        """Returns the document at a position as token ids, cut to ``sequence_length`` where it is
        longer; empty if it has no two tokens.
        """
        number, place = mixture_of(position, self._weights, seed=self._seed)
        stream, kept = self._config.streams[number], self._kept[number]
        count = len(self._rows[number]) if kept is None else len(kept)
        _, row = take(place, count, seed=self._seed + number, shuffle=stream.shuffle)
        row = row if kept is None else int(kept[row])
        return _pieces(self._rows[number], row, stream, self._text, self._config.sequence_length)

    def batch(self, position: int) -> DocumentBatch:
        """Returns the documents of the step that begins at a position: as many as fit into
        ``tokens_per_step``, and at least one.

        Raises `InputError` if a whole epoch has no document of two tokens.
        """
        documents: list[NDArray[np.int32]] = []
        total, empty = 0, 0
        while True:
            pieces = self.pieces(position)
            size = sum(map(len, pieces))
            if documents and total + size > self._config.tokens_per_step:
                return DocumentBatch(documents, position)
            documents += pieces
            total += size
            position += 1
            empty = 0 if pieces else empty + 1
            if empty > _MOST_EMPTY:
                raise InputError(
                    f"{empty} documents in a row have fewer than two tokens",
                    hint="check midtrain.streams",
                )
            if total >= self._config.tokens_per_step:
                return DocumentBatch(documents, position)


_MOST_EMPTY = 10_000


def _open(stream: DocumentStreamConfig | HeldoutStreamConfig) -> Rows:
    path = machine_policy().require_data(stream.path, "midtrain.streams.path")
    rows = open_rows(path, split=stream.split)
    require_columns(rows, [stream.column], source=stream.path)
    return rows


def _heldout_of(stream: DocumentStreamConfig, rows: Rows) -> NDArray[np.int64]:
    """Returns the rows of a stream that are not trained on, int64[H], in the order of the
    sample.
    """
    if not stream.heldout_share:
        return np.zeros(0, np.int64)
    return heldout_rows(len(rows), stream.heldout_share)


def _pieces(
    rows: Rows,
    row: int,
    stream: DocumentStreamConfig | HeldoutStreamConfig,
    text: Text,
    length: int,
) -> list[NDArray[np.int32]]:
    """Returns a document's token ids in pieces of at most ``length``, each int32[L] with L ≥ 2."""
    content = rows[row].get(stream.column)
    if not isinstance(content, str):
        raise InputError(f"row {row} of {stream.path} has no text in column {stream.column!r}")
    tokens = text.begin(content)
    if text.end is not None:
        tokens.append(text.end)
    cut = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [np.array(piece, np.int32) for piece in cut if len(piece) > 1]


class HeldoutDocuments:
    """The documents of each held-out source of a configuration, by its name.

    Of a source with more than ``midtrain.heldout.tokens`` tokens it takes the first documents of a
    fixed random order, and at least one. Nothing is read before `losses` is called for the first
    time. Raises as `DocumentStream` does.

    Example::

        heldout = HeldoutDocuments(config, text)
        if heldout.due(version):
            total, sources = heldout.losses(masters)
    """

    def __init__(self, config: RunConfig, text: Text) -> None:
        assert config.midtrain is not None
        self._config, self._midtrain, self._text = config, config.midtrain, text
        self._documents: dict[str, list[NDArray[np.int32]]] = {}
        shared = [stream for stream in self._midtrain.streams if stream.heldout_share]
        self._sources: list[DocumentStreamConfig | HeldoutStreamConfig]
        self._sources = [*shared, *self._midtrain.heldout.streams]
        for stream in self._sources:
            _open(stream)

    def due(self, version: int) -> bool:
        """Returns whether the loss of this version is to be measured."""
        every = self._midtrain.heldout.every
        if not every or not self._sources:
            return False
        return version % every == 0 or version == self._config.train.versions

    def losses(self, masters: MasterWeights) -> tuple[SourceLoss, dict[str, SourceLoss]]:
        """Measures the loss over the tokens of all sources, and of each. All ranks call this
        together, and get the same numbers.
        """
        if not self._documents:
            self._documents = dict(map(self._sample, self._sources))
        documents = [one for source in self._documents.values() for one in source]
        sums = iter(document_losses(masters, documents, self._config))
        sources = {
            name: SourceLoss.of(
                sum(next(sums) for _ in source),
                tokens=sum(len(one) - 1 for one in source),
                documents=len(source),
            )
            for name, source in self._documents.items()
        }
        return _together(sources), sources

    def _sample(
        self, stream: DocumentStreamConfig | HeldoutStreamConfig
    ) -> tuple[str, list[NDArray[np.int32]]]:
        """Returns the name of a source, and the documents that are measured on."""
        rows = _open(stream)
        if isinstance(stream, DocumentStreamConfig):
            name, order = stream.source, _heldout_of(stream, rows)
        else:
            name, order = stream.name, permuted(len(rows), 0, 0)
        found: list[NDArray[np.int32]] = []
        total = 0
        for row in order.tolist():
            pieces = _pieces(rows, row, stream, self._text, self._midtrain.sequence_length)
            total += sum(map(len, pieces))
            if found and total > self._midtrain.heldout.tokens:
                break
            found += pieces
        if not found:
            raise InputError(
                f"no held-out document of {stream.path} has two tokens",
                hint="check midtrain.heldout, or hold more out",
            )
        return name, found


def _together(sources: dict[str, SourceLoss]) -> SourceLoss:
    tokens = sum(one.tokens for one in sources.values())
    known = [one.loss * one.tokens for one in sources.values() if one.loss is not None]
    return SourceLoss.of(
        sum(known) if len(known) == len(sources) else math.nan,
        tokens=tokens,
        documents=sum(one.documents for one in sources.values()),
    )


def document_losses(
    masters: MasterWeights, documents: Sequence[NDArray[np.int32]], config: RunConfig
) -> list[float]:
    """Returns the cross-entropy of each document's tokens after its first, summed, in nats.

    Computed as a step computes it, without dropout and without a gradient; neither weights nor
    random numbers change. All ranks call this together: each computes its share and gets all.
    """
    model, mesh = masters.model, masters.mesh
    policy = TrainedPolicy.of(model, config.train)
    groups = [_as_group(document) for document in documents]
    budget = config.train.max_tokens_per_batch
    divided = divide(groups, budget=budget, ranks=mesh.data_ranks, packed=policy.packs)
    sums = torch.zeros(len(documents), dtype=torch.float64)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with deterministic(), torch.no_grad():
            for members in divided[mesh.data_rank]:
                # Ranks gather weights together, so one without documents makes a pass too.
                batch = collate(groups, members or [(0, 0)]).to(mesh.device)
                with policy.terms(batch) as terms:
                    found = -(terms.logprobs * batch.loss_mask_NC).double().sum(1).cpu()
                if members:
                    sums[[number for number, _ in batch.members_N]] = found
    finally:
        for module in training:
            module.training = True
    total: list[float] = mesh.sum_data(sums).tolist()
    return total


@dataclass(frozen=True)
class MidtrainResult:
    """Measurements of one step: the mean cross-entropy (nats a token), the gradient's norm before
    clipping, the tokens that were predicted, and the policy's mean entropy."""

    loss: float
    grad_norm: float
    tokens: int
    entropy: float


def midtrain_step(
    masters: MasterWeights,
    documents: Sequence[NDArray[np.int32]],
    config: RunConfig,
    *,
    stopping: Stopping = never,
) -> MidtrainResult:
    """Takes one optimizer step on the mean cross-entropy of every token after a document's first.

    The same inputs, threads and ranks give the same bits. Every rank gets all documents and
    computes its share. Raises `StepAbandonedError` if the process is ``stopping`` before the
    optimizer step.
    """
    policy = TrainedPolicy.of(masters.model, config.train)
    mesh = masters.mesh
    groups = [_as_group(document) for document in documents]
    budget = config.train.max_tokens_per_batch
    divided = divide(groups, budget=budget, ranks=mesh.data_ranks, packed=policy.packs)
    some = next(members for rank in divided for members in rank if members)[:1]
    tokens = sum(len(document) - 1 for document in documents)
    loss, entropy = 0.0, 0.0
    with deterministic():
        for members in divided[mesh.data_rank]:
            abandon_if(stopping, mesh)
            # Ranks gather weights together, so a rank without documents makes a pass with weight 0.
            counts = bool(members)
            batch = collate(groups, members or some).to(mesh.device)
            with policy.terms(batch) as terms:
                part = -(terms.logprobs * batch.loss_mask_NC).sum() / tokens * counts
                part.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach())
                entropies = (terms.entropies.detach() * batch.loss_mask_NC).sum() * counts
                entropy += float(entropies) / tokens
        norm = masters.step()
    loss, entropy = mesh.sum_data([loss, entropy]).tolist()
    return MidtrainResult(loss, norm, tokens, entropy)


def _as_group(document: NDArray[np.int32]) -> Group:
    """Returns a document as the forward pass takes it: its first token is the prompt of the
    rest.
    """
    count = len(document) - 1
    rest = Trajectory(
        document[1:],
        np.zeros(count, np.float32),
        np.zeros(count, np.int32),
        np.ones(count, np.uint8),
        0.0,
        "stop",
    )
    return Group("midtrain", "", "", 1.0, document[:1], [rest])


def seed_document_step(config: RunConfig, position: int, *, rank: int = 0) -> None:
    """Seeds torch's random numbers for the step that begins at a position, for dropout, on a rank
    that computes separate micro-batches.
    """
    torch.manual_seed((config.seed << 32) + position + (rank << 48))
