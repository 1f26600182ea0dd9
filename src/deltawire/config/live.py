"""Section of learning from live users."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from deltawire.config.base import Count, Fraction, Positive, Section
from deltawire.config.ranges import range_fault
from deltawire.config.release import ReleaseConfig

_Weight = Annotated[float, Meta(ge=-1e4, le=1e4)]
DEFAULT_REWARDS = {"accept": 0.75, "reject": -0.25, "thumbs": 1.0}
"""An answer that is accepted with a probability above 25 % is worth showing."""
LEAST_CAP = 0.05
"""The smallest cap on a user that is derived."""
_Range = Annotated[list[float], Meta(min_length=2, max_length=2)]
_NAME = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z"


class LiveConfig(Section, frozen=True, kw_only=True):
    """The rules by which ``deltawire learner`` makes groups of served answers
    (`deltawire.live.learning`)."""

    start_bar: Fraction = 0.0
    """Learn only once the newest evaluated version has this held-out accuracy; 0 begins at once."""
    rewards: dict[str, _Weight] = {}
    """The reward's weight of each kind of feedback, and of facts such as answer_broken_calls; empty
    for `DEFAULT_REWARDS`."""
    ranges: dict[str, _Range] = {}
    """The worst and the best value of each kind of feedback that canaries compare; needed for kinds
    without natural bounds, such as ``score = [1, 10]`` or ``event_refund = [1, 0]``."""
    silent: _Weight | None = None
    """The reward of an answer without any report, once none is likely to come; if it is left out,
    such answers are not trained on."""
    reward_function: Annotated[str, Meta(pattern=_NAME)] = ""
    """``module:function`` of a module that this machine trusts, instead of weights."""
    baseline: Literal["batch", "value_tracker", "learned", "sign"] = "batch"
    """The baseline: subtracted from a reward before the batch is normalized. ``sign`` subtracts
    none: it gives 1 for a reward above 0 and -1 below, for ``train.loss.surrogate = "kto"``."""
    window_s: Positive = 86_400.0
    """Wait this long for feedback about an answer."""
    settle_s: Positive = 60.0
    """After a report, wait this long for another one."""
    still_likely: Fraction = 0.05
    """Silence is silence once the fitted delays give a report less than this probability."""
    max_age_s: Positive = 604_800.0
    """Older answers are not trained on; they are counted."""
    half_life_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """An answer's weight halves with each such time since it was served; 0 keeps it."""
    user_cap: Fraction = 0.0
    """Largest share of one user in the influence of a group (weight, advantage and tokens); 0
    derives twice an equal share, `largest_share`."""
    user_ratio: Annotated[float, Meta(ge=0, le=1e6)] = 1.5
    """Most answers of one user over those of the median user, in the last 32 groups; 0 is no
    limit."""
    stop_effective_share: Fraction = 0.1
    """The trainer stops once the effective sample size of the importance ratios is below this share
    of the tokens in three of 32 steps; 0 never stops. For runs with ``train.loss.advantage =
    "given"``."""
    planted: dict[Literal["gate", "users"], Count] = {}
    """Versions that the trainer spoils before it publishes them, to show that releases stop them:
    ``gate`` one that held-out suites see, ``users`` one that only users see. Simulated users only
    (`deltawire.rl.trainer.planted`)."""
    release: ReleaseConfig = ReleaseConfig()
    """How a new version comes to serve users."""

    def largest_share(self, group_size: int) -> float:
        """Returns the largest share of one user in a group: ``user_cap``, or by default twice an
        equal share, and at least `LEAST_CAP`."""
        return self.user_cap or min(1.0, max(LEAST_CAP, 2 / group_size))

    def contradiction(self, group_size: int) -> tuple[str, str] | None:
        """Finds ranges that contradict their kinds, and caps that no group of this size satisfies:
        the reason and what to do, or None.

        More users than 1 / ``user_cap`` must fit into a group. With just as many, all would have to
        weigh the same to the last bit.
        """
        if fault := range_fault(self.ranges):
            return fault
        cap = self.largest_share(group_size)
        if cap >= 1 or cap * (group_size - 1) >= 1 - 1e-9:
            return None
        users = math.floor(1 / cap + 1e-9) + 1
        reason = f"live.user_cap {cap:g} needs answers of {users} users in a group, and "
        reason += f"rollout.group_size is {group_size}: nothing would be learned"
        least = math.ceil(1000 / (group_size - 1)) / 1000
        hint = f"set rollout.group_size to {users} or more, or live.user_cap to {least:g} or more"
        return reason, f"{hint}, or leave user_cap out"
