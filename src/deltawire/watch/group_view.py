"""One group as its page shows it: answers as messages, and figures of each token."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.errors import CorruptError, InputError
from deltawire.events import Parity
from deltawire.parity.routes import RouteShape, unpack_routes
from deltawire.rl.control.rollout_reader import read_group
from deltawire.store import Bucket
from deltawire.watch.conversation import MessageView, messages_of
from deltawire.watch.group_index import GroupIndex, GroupRow
from deltawire.watch.group_indexer import describe_group
from deltawire.watch.tokens import TokenTexts
from deltawire.watch.trainer_scores import TrainerScores, TrainerTokens
from deltawire.wire import keys
from deltawire.wire.reference_scores import MAX_SCORES_BYTES, arrays_of, decode_scores
from deltawire.wire.rollouts import Group, Trajectory
from deltawire.wire.run import Run

MAX_TOKENS = 4000
"""Tokens of one answer."""
MAX_DECODED = 60_000
"""Tokens of one trajectory that are turned into messages, its prompt included."""
MAX_ANSWERS = 64


class AnswerView(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory. ``drawn`` tokens are the model's; ``sampled`` are the oldest and the newest
    version that drew one, ``logprob`` the mean of their log-probabilities in nats. ``masked`` says
    that the parity gate left it out of the step, ``left_out`` tokens are not in ``messages``."""

    index: int
    episode: int
    reward: float
    finish: str
    cause: str
    turns: int
    tokens: int
    drawn: int
    reused: int
    """The first tokens, which answer number ``reused_from`` drew."""
    reused_from: int | None
    prompt_tokens: int
    logprob: float | None
    sampled: tuple[int, int] | None
    probes: dict[str, float]
    masked: bool
    scored: bool
    experts: bool
    messages: list[MessageView]
    left_out: int


class StepParity(msgspec.Struct, frozen=True, kw_only=True):
    """The parity gate's findings for the step that consumed the group."""

    k3: float
    mean_gap: float
    largest_gap: float
    tokens: int
    same_version: bool
    flipped: list[float]
    warnings: list[str]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group, and its answers from number ``first`` on; ``answers_total`` are in the group."""

    row: GroupRow
    temperature: float
    first: int
    answers_total: int
    answers: list[AnswerView]
    parity: StepParity | None
    reference: str
    without_text: str


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """Columns over the tokens ``first`` to ``first + len(texts)`` of an answer, of ``total``.

    ``logprobs`` (nats) and ``versions`` are None where ``drawn`` is 0: the environment or a forced
    continuation wrote that token. ``reference`` has the log-probabilities of the reference model,
    None where they were not computed. ``forced`` is 1 where thinking was closed by force; a token
    that is neither drawn nor forced is the environment's. Tokens that another answer drew count as
    drawn; the answer's ``reused`` says how many those are.
    """

    first: int
    total: int
    ids: list[int]
    texts: list[str]
    drawn: list[int]
    forced: list[int]
    logprobs: list[float | None]
    versions: list[int | None]
    reference: list[float] | None
    experts: bool


class TokenExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts that the sampler chose for one token, by expert layer; ``experts`` a layer."""

    experts: int
    layers: list[list[int]]


class GroupReader:
    """Reads groups of one run; an ``index`` adds when a group was stored, and who trained on it.

    Example::

        GroupReader(bucket, run).group("worker-0", 12).answers[0].messages
    """

    def __init__(self, bucket: Bucket, run: Run, index: GroupIndex | None = None) -> None:
        self._bucket = bucket
        self._run = run
        self._index = index
        self._texts = TokenTexts(bucket, run)

    def group(
        self,
        worker: str,
        sequence: int,
        *,
        first: int = 0,
        batch_of: Callable[[int], Parity | None] = lambda _: None,
    ) -> GroupView:
        """Returns a group with at most `MAX_ANSWERS` answers from ``first`` on; raises `InputError`
        if there is none, `CorruptError` if it is damaged. ``batch_of`` returns what was measured of
        the step that made a version."""
        group = self._read(worker, sequence)
        row = self._index.get(worker, sequence) if self._index else None
        known = describe_group(
            group, sequence, at=row.at if row else 0.0, trained=row.trained if row else None
        )
        if row is not None:
            known = msgspec.structs.replace(known, dropped=row.dropped)
        batch = batch_of(known.trained) if known.trained is not None else None
        masked = frozenset(batch.masked if batch else ())
        scores, model = self._scores(worker, sequence, group)
        episodes = group.episodes
        answers = []
        for index in range(first, min(len(group.trajectories), first + MAX_ANSWERS)):
            trajectory = group.trajectories[index]
            messages, left_out = self._messages(group, group.whole(index))
            reuse = trajectory.reuse
            if reuse is not None and reuse.source == index:
                reuse = None  # Its own thought, which others reuse.
            drawn_T = trajectory.mask_T == 1
            count = int(drawn_T.sum())
            versions = trajectory.versions_T[drawn_T]
            answers.append(
                AnswerView(
                    index=index,
                    episode=episodes[index],
                    reward=trajectory.reward,
                    finish=trajectory.finish,
                    cause=trajectory.cause,
                    turns=trajectory.turns,
                    tokens=len(trajectory.tokens_T),
                    drawn=count,
                    reused=0 if reuse is None else reuse.count,
                    reused_from=None if reuse is None else reuse.source,
                    prompt_tokens=len(group.prompt_of(trajectory)),
                    logprob=float(trajectory.logprobs_T[drawn_T].mean()) if count else None,
                    sampled=(int(versions.min()), int(versions.max())) if count else None,
                    probes=dict(trajectory.probes),
                    masked=f"{worker}/{sequence}#{index}" in masked,
                    scored=_scored(scores, index, trajectory) is not None,
                    experts=bool(trajectory.routes),
                    messages=messages,
                    left_out=left_out,
                )
            )
        return GroupView(
            row=known,
            temperature=group.temperature,
            first=first,
            answers_total=len(group.trajectories),
            answers=answers,
            parity=_parity(batch),
            reference=model,
            without_text=self._texts.missing,
        )

    def tokens(self, worker: str, sequence: int, answer: int, *, first: int) -> TokenView:
        """Returns at most `MAX_TOKENS` tokens of an answer, from ``first`` on."""
        group = self._read(worker, sequence)
        _answer(group, answer)
        trajectory = group.whole(answer)
        last = first + MAX_TOKENS
        ids = trajectory.tokens_T[first:last].tolist()
        drawn = trajectory.mask_T[first:last].tolist()
        logprobs = trajectory.logprobs_T[first:last].tolist()
        versions = trajectory.versions_T[first:last].tolist()
        scores, _ = self._scores(worker, sequence, group)
        scored = _scored(scores, answer, trajectory)
        return TokenView(
            first=first,
            total=len(trajectory.tokens_T),
            ids=ids,
            texts=[piece.text for piece in self._texts.pieces(ids)],
            drawn=drawn,
            forced=(trajectory.turn_mask - trajectory.mask_T)[first:last].tolist(),
            logprobs=[value if on else None for value, on in zip(logprobs, drawn, strict=True)],
            versions=[value if on else None for value, on in zip(versions, drawn, strict=True)],
            reference=None if scored is None else scored[first:last].tolist(),
            experts=bool(trajectory.routes),
        )

    def trainer(
        self, scores: TrainerScores, worker: str, sequence: int, answer: int, *, first: int
    ) -> TrainerTokens:
        """Returns the trainer's log-probabilities of the tokens that `tokens` returns."""
        group = self._read(worker, sequence)
        _answer(group, answer)
        return scores.of(group, answer, first=first, limit=MAX_TOKENS)

    def experts(self, worker: str, sequence: int, answer: int, token: int) -> TokenExperts:
        """Returns the experts that drew token number ``token`` of an answer; raises `InputError`
        where none were recorded."""
        group = self._read(worker, sequence)
        trajectory = _answer(group, answer)
        shape = RouteShape.of(trajectory.routes) if trajectory.routes else None
        if shape is None or not 0 <= token < len(trajectory.tokens_T):
            raise InputError("no expert choices were recorded for this token")
        prompt = len(group.prompt_of(trajectory))
        positions = prompt + len(trajectory.tokens_T) - 1
        routes = unpack_routes(trajectory.routes, shape, positions=positions)
        # The position before a token is the one whose output it was drawn from.
        return TokenExperts(experts=shape.experts, layers=routes[prompt + token - 1].tolist())

    def _read(self, worker: str, sequence: int) -> Group:
        row = self._index.get(worker, sequence) if self._index else None
        found = read_group(self._bucket, worker, sequence)
        if found is None:
            gone = row is not None
            raise InputError(
                f"group {worker}/{sequence} is not in the bucket",
                hint="retention deleted it" if gone else "check the worker's name and the number",
                run=self._bucket.url,
            )
        return found[0]

    def _messages(self, group: Group, trajectory: Trajectory) -> tuple[list[MessageView], int]:
        prompt = group.prompt_of(trajectory).tolist()
        tokens = trajectory.tokens_T.tolist()
        room = max(0, MAX_DECODED - len(prompt))
        pieces = self._texts.pieces([*prompt, *tokens[:room]])
        mask = trajectory.mask_T[:room].tolist()
        return messages_of(pieces, mask, len(prompt)), max(0, len(tokens) - room)

    def _scores(
        self, worker: str, sequence: int, group: Group
    ) -> tuple[list[NDArray[np.float32]], str]:
        """The reference's log-probabilities of each trajectory, and its model's digest."""
        key = keys.reference(worker, sequence)
        try:
            data = self._bucket.get(key, limit=MAX_SCORES_BYTES)
            if data is None:
                return [], ""
            scores = decode_scores(data, run=self._bucket.url, key=key)
        except CorruptError:
            return [], ""
        place = (scores.run, scores.worker, scores.sequence, len(scores.logprobs))
        if place != (self._run.id, worker, sequence, len(group.trajectories)):
            return [], ""
        return arrays_of(scores), scores.model


def _answer(group: Group, number: int) -> Trajectory:
    if not 0 <= number < len(group.trajectories):
        raise InputError(f"the group has {len(group.trajectories)} answers, none is #{number}")
    return group.trajectories[number]


def _scored(
    scores: list[NDArray[np.float32]], index: int, trajectory: Trajectory
) -> NDArray[np.float32] | None:
    found = scores[index] if index < len(scores) else None
    return found if found is not None and len(found) == len(trajectory.tokens_T) else None


def _parity(batch: Parity | None) -> StepParity | None:
    if batch is None:
        return None
    same = batch.numeric.tokens > 0
    gaps = batch.numeric if same else batch.drift
    return StepParity(
        k3=gaps.k3,
        mean_gap=gaps.mean_gap,
        largest_gap=gaps.largest_gap,
        tokens=gaps.tokens,
        same_version=same,
        flipped=batch.flipped,
        warnings=[*batch.stopped, *batch.warnings],
    )
