"""Mid-training: next-token steps over documents, packed without attention across documents.

A position numbers a document: it says which stream the document comes from and which row of that
stream it is (`deltawire.data.order`). A step takes documents from its position on until its tokens
are used up, and the next step begins where it ended, so one number resumes the data exactly.

Documents go through the same forward pass as trajectories (`deltawire.train.policy`): each is one
row of the batch, so that it attends to itself only and its positions begin at 0, packed where the
model allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire.chat.text import Text
from deltawire.config import MidtrainConfig, RunConfig
from deltawire.data import Rows, mixture_of, open_rows, require_columns, take
from deltawire.errors import InputError
from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import TrainedPolicy
from deltawire.train.step import deterministic
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
        for stream in config.streams:
            rows = open_rows(Path(stream.path), split=stream.split)
            require_columns(rows, [stream.column], source=stream.path)
            self._rows.append(rows)
        mixture_of(0, self._weights, seed=seed)

    def pieces(self, position: int) -> list[NDArray[np.int32]]:
        """Returns the document at a position as token ids, cut to ``sequence_length`` where it is
        longer; empty if it has no two tokens.
        """
        number, place = mixture_of(position, self._weights, seed=self._seed)
        stream, rows = self._config.streams[number], self._rows[number]
        _, row = take(place, len(rows), seed=self._seed + number, shuffle=stream.shuffle)
        content = rows[row].get(stream.column)
        if not isinstance(content, str):
            raise InputError(f"row {row} of {stream.path} has no text in column {stream.column!r}")
        tokens = self._text.begin(content)
        if self._text.end is not None:
            tokens.append(self._text.end)
        length = self._config.sequence_length
        cut = [tokens[start : start + length] for start in range(0, len(tokens), length)]
        return [np.array(piece, np.int32) for piece in cut if len(piece) > 1]

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


@dataclass(frozen=True)
class MidtrainResult:
    """Measurements of one step: the mean cross-entropy (nats a token), the gradient's norm before
    clipping, the tokens that were predicted, and the policy's mean entropy."""

    loss: float
    grad_norm: float
    tokens: int
    entropy: float


def midtrain_step(
    masters: MasterWeights, documents: Sequence[NDArray[np.int32]], config: RunConfig
) -> MidtrainResult:
    """Takes one optimizer step on the mean cross-entropy of every token after a document's first.

    The same inputs, threads and ranks give the same bits. Every rank gets all documents and
    computes its share.
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
