"""The section of thinking budgets."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.config.base import Count, Positive, Section

Mark = (
    Annotated[str, Meta(max_length=256)]
    | Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=64)]
)
"""A mark as text, or as token ids."""
Budgets = Annotated[list[Count], Meta(min_length=1, max_length=64)]


class ThinkingStage(Section, frozen=True, kw_only=True):
    """The budgets from a version on: one, or several that are drawn by ``weights``.

    Example::

        [rollout]
        max_tokens = 4096
        context = 8192

        [rollout.thinking]
        budgets = [512]

        [[rollout.thinking.schedule]]
        from_version = 100
        budgets = [1024]
    """

    from_version: Annotated[int, Meta(ge=0, le=1_000_000_000)]
    budgets: Budgets
    weights: list[Positive] = []


class ThinkingConfig(Section, frozen=True, kw_only=True):
    """Bounds the tokens that a model thinks in each turn (`deltawire.chat.thinking`).

    Once the budget is spent, ``closing`` and the end mark are inserted and the model answers.
    Inserted tokens are stored as such and are never part of the loss.

    Example::

        [rollout]
        max_tokens = 4096
        context = 8192

        [rollout.thinking]
        budgets = [512, 2048]
    """

    start: Mark = ""
    """The mark that opens thinking. Empty, together with ``end``: the marks that the model's
    tokenizer has. Empty with an ``end``: every turn begins with thinking."""
    end: Mark = ""
    budgets: Budgets = msgspec.field(default_factory=lambda: [1024])
    """Tokens of thinking in a turn, both marks excluded: one number, or several that are drawn."""
    weights: list[Positive] = []
    """How often each of ``budgets`` is drawn; equally often if left out."""
    per: Literal["group", "episode", "prefix"] = "group"
    """All episodes of a group have one budget, or each has one of its own; or one thinks with the
    largest, and others answer after its first tokens, with each smaller budget. ``weights`` then
    say how much the accuracy with each budget counts in the area."""
    answers: Count = 1
    """``per = "prefix"``: answers with each budget."""
    schedule: Annotated[list[ThinkingStage], Meta(max_length=1000)] = []
    """Other budgets from later versions on."""
    answer_tokens: Count = 256
    """Tokens of the answer. Thinking never takes them."""
    closing: Annotated[str, Meta(max_length=4096)] = ""
    """A sentence before an end mark that is inserted."""
    tell: Annotated[str, Meta(max_length=4096)] = ""
    """A sentence that tells the model its budget, with ``{budget}`` for the number; empty tells
    nothing."""
    tell_as: Literal["message", "tokens"] = "message"
    """Tell it at the end of the last message, or as control tokens at the start of the turn."""

    def stage_at(self, version: int) -> ThinkingStage:
        """Returns the budgets that hold at a version."""
        first = ThinkingStage(from_version=0, budgets=self.budgets, weights=self.weights)
        return [first, *(one for one in self.schedule if one.from_version <= version)][-1]

    @property
    def largest(self) -> int:
        """The largest budget of all stages."""
        return max(b for b in (*self.budgets, *(b for s in self.schedule for b in s.budgets)))

    @property
    def allowed(self) -> frozenset[int]:
        """Every budget that an episode may have."""
        return frozenset((*self.budgets, *(b for s in self.schedule for b in s.budgets)))

    @property
    def answers_a_thought(self) -> int:
        """Episodes that share one thought: ``answers`` with each budget, 1 unless per prefix."""
        return len(self.budgets) * self.answers if self.per == "prefix" else 1

    def prefix_contradiction(
        self, group_size: int, *, turns: int, varies: bool
    ) -> tuple[str, str] | None:
        """Finds settings that contradict ``per = "prefix"``: the reason and what to do, or None.

        ``turns`` is the most turns of an episode; ``varies`` says that groups differ in size.
        """
        where = 'rollout.thinking.per = "prefix"'
        if self.per != "prefix":
            if self.answers == 1:
                return None
            return "rollout.thinking.answers has no effect", f"set {where}"
        if len(set(self.budgets)) < len(self.budgets) or len(self.budgets) < 2:
            return f"{where} needs two or more different budgets", "set rollout.thinking.budgets"
        if self.schedule:
            return f"{where} has one set of budgets", "leave out rollout.thinking.schedule"
        if self.tell:
            reason = f"{where}: prefixes of one thought cannot be told different budgets"
            return reason, "leave out rollout.thinking.tell"
        if turns > 1:
            reason = f"{where} is for episodes of one turn, and this run has up to {turns}"
            return reason, 'set rollout.max_turns = 1 and rollout.scaffold = "plain"'
        if varies:
            reason = f"{where} needs groups of one size"
            return reason, 'set rollout.allocation.policy = "fixed" or "refill"'
        answers = self.answers_a_thought
        if group_size % answers or group_size < 2 * answers:
            reason = f"{where}: {answers} episodes share a thought, rollout.group_size = "
            hint = f"set rollout.group_size to {2 * answers} or another multiple of {answers}"
            return f"{reason}{group_size} is not two or more thoughts", hint
        return None

    def contradiction(self, max_tokens: int, context: int) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        where = "rollout.thinking"
        for stage in (self.stage_at(-1), *self.schedule):
            if stage.weights and len(stage.weights) != len(stage.budgets):
                return f"{where}: weights and budgets differ in number", "give one weight a budget"
        starts = [stage.from_version for stage in self.schedule]
        if starts != sorted(set(starts)):
            return f"{where}.schedule: versions do not rise", "sort the stages by from_version"
        if self.start and not self.end:
            return f"{where}.start has no end", "set both marks, or leave out both"
        for mark in (self.start, self.end):
            if isinstance(mark, str) and mark and mark in self.closing:
                return f"{where}.closing contains the mark {mark!r}", "the mark is added to it"
        if self.tell and "{budget}" not in self.tell:
            return f"{where}.tell does not say the budget", "write {budget} where the number goes"
        if self.largest + self.answer_tokens > max_tokens:
            needed = self.largest + self.answer_tokens
            reason = f"{where}: budget and answer take {needed} tokens, rollout.max_tokens = "
            hint = f"raise rollout.max_tokens to {needed}, and rollout.context with it"
            return f"{reason}{max_tokens}", hint
        if self.largest >= context:
            return f"{where}: a budget of {self.largest} exceeds rollout.context = {context}", ""
        return None
