"""Divides a step's trajectories into micro-batches of at most so many tokens, for every rank.

The division is a pure function of lengths, prompts, budget and number of ranks, so that a step is
computed again in the same order. Every rank gets equally many micro-batches, since ranks make their
passes together. All segments of an episode stay in one micro-batch; a group stays together, so that
its prompt is computed once, unless it exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deltawire.train.packing import cost_of, shares_prompt, tokens_of
from deltawire.wire.rollouts import Group, Trajectory

Member = tuple[int, int]
"""Index of a group in the step, and index of a trajectory in its group."""


@dataclass(frozen=True)
class MicroBatchPart:
    """Trajectories that stay together; ``cost`` is in tokens (`deltawire.train.packing`)."""

    members: tuple[Member, ...]
    tokens: int
    cost: float
    rows: int
    longest: int

    def size(self, *, packed: bool) -> int:
        """Returns the tokens that count towards the budget."""
        return self.tokens if packed else self.rows * self.longest


@dataclass
class _Slot:
    parts: list[MicroBatchPart] = field(default_factory=list)

    def fits(self, part: MicroBatchPart, budget: int, *, packed: bool) -> bool:
        parts = [*self.parts, part]
        if len(parts) == 1:
            return True
        if packed:
            return sum(one.tokens for one in parts) <= budget
        return sum(one.rows for one in parts) * max(one.longest for one in parts) <= budget


def divide(
    groups: Sequence[Group],
    *,
    budget: int,
    ranks: int = 1,
    packed: bool = True,
    chosen: Sequence[int] | None = None,
) -> list[list[list[Member]]]:
    """Returns the members of each rank's micro-batches: [rank][micro-batch].

    ``packed`` counts tokens as a packed row has them, else as padded rows have. ``chosen`` are the
    indices of the groups to divide, all without it. With more ranks than parts, some micro-batches
    are empty: those ranks take part in the pass without a token of the loss.

    Example::

        for members in divide(groups, budget=16_384)[0]:
            batch = collate(groups, members)
    """
    numbers = range(len(groups)) if chosen is None else chosen
    parts = [part for n in numbers for part in _parts(n, groups[n], budget, packed=packed)]
    slots = _balanced(parts, budget, ranks) if packed else _in_order(parts, budget, ranks)
    found: list[list[list[Member]]] = [[] for _ in range(ranks)]
    for number, slot in enumerate(slots):
        found[number % ranks].append(sorted(m for part in slot.parts for m in part.members))
    # In the groups' order, where there is one; empty ones come last.
    return [sorted(batches, key=lambda members: (not members, members)) for batches in found]


def divide_sequences(
    lengths: Sequence[int], *, budget: int, ranks: int = 1, packed: bool = True
) -> list[list[list[int]]]:
    """Returns the indices of each rank's sequences, pass by pass: [rank][pass].

    Every rank gets equally many passes; without a sequence, it takes part in one whose result does
    not count.

    Example::

        for indices in divide_sequences(lengths, budget=16_384, ranks=2)[rank]:
            ...
    """
    parts = [
        MicroBatchPart(((n, 0),), size, cost_of(0, [size + 1], shared=False), 1, size)
        for n, size in enumerate(lengths)
    ]
    slots = _balanced(parts, budget, ranks) if packed else _in_order(parts, budget, ranks)
    found: list[list[list[int]]] = [[] for _ in range(ranks)]
    for number, slot in enumerate(slots):
        found[number % ranks].append(sorted(part.members[0][0] for part in slot.parts))
    return [sorted(passes, key=lambda indices: (not indices, indices)) for passes in found]


def _parts(number: int, group: Group, budget: int, *, packed: bool) -> list[MicroBatchPart]:
    """Returns the group as one part, or as several of whole episodes if it exceeds the budget."""
    episodes: dict[int, list[tuple[int, Trajectory]]] = {}
    for place, episode, trajectory in group.trained():
        episodes.setdefault(episode, []).append((place, trajectory))
    whole = _part(number, group, [row for rows in episodes.values() for row in rows])
    # Most groups fit; adding episode by episode takes time in the square of their number.
    if not whole.rows or whole.size(packed=packed) <= budget:
        return [whole] if whole.rows else []
    found: list[MicroBatchPart] = []
    kept: list[tuple[int, Trajectory]] = []
    for rows in episodes.values():
        part = _part(number, group, [*kept, *rows])
        if kept and part.size(packed=packed) > budget:
            found.append(_part(number, group, kept))
            kept = []
        kept.extend(rows)
    if kept:
        found.append(_part(number, group, kept))
    return found


def _part(number: int, group: Group, rows: Sequence[tuple[int, Trajectory]]) -> MicroBatchPart:
    by_prompt: dict[bytes, list[int]] = {}
    longest = 0
    for _, trajectory in rows:
        prompt = group.prompt_of(trajectory)
        by_prompt.setdefault(prompt.astype(np.int32).tobytes(), []).append(len(trajectory.tokens_T))
        longest = max(longest, len(prompt) + len(trajectory.tokens_T) - 1)
    sizes = [(len(prompt) // 4, counts) for prompt, counts in by_prompt.items()]
    return MicroBatchPart(
        tuple((number, place) for place, _ in rows),
        sum(tokens_of(prompt, counts) for prompt, counts in sizes),
        sum(
            cost_of(prompt, counts, shared=shares_prompt(prompt, counts))
            for prompt, counts in sizes
        ),
        len(rows),
        longest,
    )


def _balanced(parts: Sequence[MicroBatchPart], budget: int, ranks: int) -> list[_Slot]:
    """Returns the most expensive part first, each into the cheapest slot that has room.

    Slots are as few as that allows, a multiple of the ranks.
    """
    order = sorted(parts, key=lambda part: (-part.cost, part.members))
    needed = -(-sum(part.tokens for part in parts) // (budget * ranks))
    # A part that exceeds the budget needs more than its slot can count for.
    rounds = max(1, min(needed, -(-len(parts) // ranks)))
    while True:
        slots = [_Slot() for _ in range(rounds * ranks)]
        costs = [0.0] * len(slots)
        for part in order:
            for number in sorted(range(len(slots)), key=lambda n: (costs[n], n)):
                if slots[number].fits(part, budget, packed=True):
                    slots[number].parts.append(part)
                    costs[number] += part.cost
                    break
            else:
                break
        else:
            return slots
        rounds += 1


def _in_order(parts: Sequence[MicroBatchPart], budget: int, ranks: int) -> list[_Slot]:
    """Parts of similar lengths together, longest first, since rows are padded to the longest."""
    slots: list[_Slot] = []
    for part in sorted(parts, key=lambda part: (-part.longest, part.members)):
        if not slots or not slots[-1].fits(part, budget, packed=False):
            slots.append(_Slot())
        slots[-1].parts.append(part)
    while not slots or len(slots) % ranks:
        slots.append(_Slot())
    return slots
