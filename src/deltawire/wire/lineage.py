"""Lineage: which answers a group was made of, and the records of erasures."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index
from deltawire.wire.receipts import Pseudonym
from deltawire.wire.run import Identity

MAX_LINEAGE_BYTES = 8 << 20
MAX_FORGOTTEN_BYTES = 8 << 20
MAX_ANSWERS = 4096
"""Answers of one group, at most: the limit of a group's trajectories."""

_Finite = Annotated[float, Meta(ge=-1e9, le=1e9)]


class LearnedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One answer of a group: its reward before any baseline, the advantage that was trained on,
    the cap's ``weight`` from 0 to 1, the seconds from serving to grouping, and whether it was
    trained on as silence. ``edit`` names the report whose text is its better answer: the first 16
    bytes of the BLAKE3 of source and id with a zero byte between them, in hexadecimal digits."""

    answer: Identity
    user: Pseudonym
    reward: _Finite
    advantage: _Finite
    weight: Annotated[float, Meta(ge=0, le=1)]
    age_s: Annotated[float, Meta(ge=0, le=1e12)]
    silent: bool = False
    edit: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""


class Correction(msgspec.Struct, frozen=True, array_like=True):
    """An answer of an earlier lineage of the same worker whose ``reward`` became another one by a
    report that came after it was trained on; ``at`` is when the learner saw that."""

    answer: Identity
    reward: _Finite
    at: float


class Lineage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/lineage/<worker>/<sequence>``, created before the group of that number.

    The group's trajectories are the ``answers``, in order. A lineage whose group does not exist
    claims its answers nonetheless: the worker stores the group when it starts again. ``rules`` is
    the BLAKE3 of the reward's configuration. ``corrections`` are those since the last lineage.
    """

    worker: Annotated[str, Meta(max_length=64)]
    sequence: Index
    at: float
    rules: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    answers: Annotated[list[LearnedAnswer], Meta(min_length=1, max_length=MAX_ANSWERS)]
    corrections: Annotated[list[Correction], Meta(max_length=MAX_ANSWERS)] = []


def without_users(lineage: Lineage, users: Container[str]) -> Lineage:
    """Returns the lineage without the pseudonyms of these users and the names of their edits;
    their rewards stay."""
    answers = [
        msgspec.structs.replace(one, user="", edit="") if one.user and one.user in users else one
        for one in lineage.answers
    ]
    return msgspec.structs.replace(lineage, answers=answers)


class Forgotten(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/forgotten/<pseudonym>.json``: what was deleted of a user.

    No capture and no feedback of this user is stored or read again, also from a spool that was not
    reachable. ``versions`` were trained on the user's answers; ``answers`` and ``feedback`` count
    the deleted rows, and ``groups`` names the deleted groups as (worker, sequence).
    """

    run: Identity
    user: Pseudonym
    at: float
    answers: Index = 0
    feedback: Index = 0
    groups: Annotated[list[tuple[str, Index]], Meta(max_length=1 << 18)] = []
    versions: Annotated[list[Index], Meta(max_length=1 << 18)] = []
