"""The section of how completions are allocated to prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from deltawire.config.base import Count, Fraction, Positive, Section

AllocationPolicy = Literal["fixed", "refill", "pilot", "knapsack"]


class BandConfig(Section, frozen=True, kw_only=True):
    """Tasks up to an estimated pass rate, and the share of them that is drawn.

    Example::

        [rollout]
        group_size = 8

        [rollout.allocation]
        policy = "pilot"

        [[rollout.allocation.bands]]
        up_to = 0.25
        weight = 0.2
    """

    up_to: Fraction
    weight: Fraction


class AllocationConfig(Section, frozen=True, kw_only=True):
    """Decides how many completions each prompt gets (`deltawire.rl.allocation`).

    Example::

        [rollout]
        group_size = 8

        [rollout.allocation]
        policy = "pilot"
        pilot = 4
        largest = 32
    """

    policy: AllocationPolicy = "fixed"
    """``fixed`` gives every prompt ``rollout.group_size``. ``refill`` does too, and replaces groups
    whose rewards are all equal. ``pilot`` samples ``pilot`` completions, then skips, defers or
    fills. ``knapsack`` divides a budget over the pilots by predicted value."""
    pilot: Annotated[int, Meta(ge=2, le=4096)] = 4
    """Completions by which a prompt is judged."""
    largest: Annotated[int, Meta(ge=2, le=4096)] = 32
    """The most completions of one prompt, its pilot included."""
    stage: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Completions that a prompt is filled by at a time; 0 fills it at once. After each stage, the
    prompt is judged again."""
    enough: Annotated[int, Meta(ge=0, le=4096)] = 0
    """End a prompt early, once this many completions succeeded and as many failed; 0 never does."""
    skip_above: Fraction = 0.75
    """``pilot``: skip a prompt if a larger share of its pilot succeeded."""
    defer_below: Fraction = 0.125
    """``pilot``: try a prompt again later if a smaller share of its pilot succeeded."""
    defer_for: Count = 8
    """Versions until a deferred prompt is tried again."""
    max_defers: Annotated[int, Meta(ge=0, le=1024)] = 2
    """How often a prompt is deferred before it is skipped."""
    success_at: Positive = 1.0
    """The reward from which a completion counts as a success."""
    bands: Annotated[list[BandConfig], Meta(max_length=64)] = []
    """Bands of difficulty, by rising pass rate: each task is drawn as often as its band's weight
    says. Without bands, and for tasks never seen, all tasks are drawn."""
    discount: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """The factor by which what is known of a task loses weight with each version."""

    def contradiction(self, group_size: int) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None."""
        where = "rollout.allocation"
        bounds = [band.up_to for band in self.bands]
        if bounds != sorted(set(bounds)):
            return f"{where}.bands: up_to does not rise", "sort the bands by up_to"
        if self.bands and not any(band.weight for band in self.bands):
            return f"{where}.bands: every weight is 0", "give one band a weight above 0"
        if self.policy == "fixed":
            if self.bands:
                reason = f"{where}.bands need a policy that observes pass rates"
                return reason, 'set policy = "refill", "pilot" or "knapsack"'
            return None
        if self.policy == "refill":
            return None
        if self.pilot > self.largest:
            reason = f"{where}: pilot = {self.pilot} exceeds largest = {self.largest}"
            return reason, "lower pilot, or raise largest"
        if self.skip_above <= self.defer_below:
            reason = (
                f"{where}: skip_above = {self.skip_above:g} is not above "
                f"defer_below = {self.defer_below:g}, so no prompt would be filled"
            )
            return reason, "raise skip_above, or lower defer_below"
        if self.policy == "knapsack" and group_size <= self.pilot:
            reason = (
                f"{where}: a pilot of {self.pilot} leaves nothing of "
                f"rollout.group_size = {group_size} to allocate"
            )
            return reason, "lower pilot, or raise rollout.group_size"
        return None

    def first(self, group_size: int) -> int:
        """Returns how many completions a prompt gets before it is judged."""
        return group_size if self.policy in ("fixed", "refill") else self.pilot

    def most(self, group_size: int) -> int:
        """Returns the most completions that a prompt can get."""
        return group_size if self.policy in ("fixed", "refill") else self.largest
