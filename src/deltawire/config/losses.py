"""Defines the sections of the loss, and registers its surrogates."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from deltawire.config.base import Positive, Section


class CorrectionConfig(Section, frozen=True, kw_only=True):
    """One off-policy correction by the ratio w = old / sampler
    (`deltawire.train.loss.correction_weights`).

    Example::

        [train.loss]
        ratio_base = "old"

        [[train.loss.corrections]]
        level = "token"
        high = 2.0
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "clip", "mask"] = "truncate"
    low: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    high: Positive = 2.0
    weigh: bool = True
    """Multiply by the weight; false only rejects weights outside the bounds (``mask``)."""


class SurrogateTraits(NamedTuple):
    """A registered surrogate: the place of its function, and facts that the configuration checks.

    ``clip`` holds the default bounds, None if it takes none; ``ratio`` says that it uses a ratio of
    probabilities; ``positive_low`` that 1 − clip_low must not be negative. ``good_or_bad`` says
    that it takes whole answers, each good or bad by the sign of what it was given, from any policy,
    and holds them against the reference.

    Example::

        SURROGATES["ppo"].clip  # (0.2, 0.28), low and high
    """

    function: str
    clip: tuple[float, float] | None = None
    ratio: bool = True
    dual_clip: bool = False
    positive_low: bool = False
    good_or_bad: bool = False


SURROGATES = {
    "ppo": SurrogateTraits(
        "deltawire.train.loss.ppo:ppo", (0.2, 0.28), dual_clip=True, positive_low=True
    ),
    "cispo": SurrogateTraits("deltawire.train.loss.cispo:cispo", (1.0, 4.0)),
    "gspo": SurrogateTraits("deltawire.train.loss.gspo:gspo", (3e-4, 4e-4), positive_low=True),
    "dppo": SurrogateTraits("deltawire.train.loss.dppo:dppo", (0.2, 0.28)),
    "importance_sampling": SurrogateTraits(
        "deltawire.train.loss.importance_sampling:importance_sampling"
    ),
    "reinforce": SurrogateTraits("deltawire.train.loss.reinforce:reinforce", ratio=False),
    "kto": SurrogateTraits("deltawire.train.loss.kto:kto", ratio=False, good_or_bad=True),
}
"""The surrogates that ``train.loss.surrogate`` may name: one line each, and one module each."""


OWN_BOUNDS = (0.2, 0.28)
"""The bounds that a custom surrogate is called with, unless the configuration sets others."""
_PLACE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
"""``module:function``."""


class LengthTerm(Section, frozen=True, kw_only=True):
    """A change of rewards by the number of tokens (`deltawire.train.loss.lengths`).

    Example::

        [[train.loss.lengths]]
        kind = "overlong"
        limit = 20480
        cushion = 4096
    """

    kind: Literal["overlong", "l1_exact", "l1_max", "group_share"]
    limit: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """``overlong``: tokens beyond which the whole penalty holds; 0 is rollout.max_tokens times
    rollout.max_turns."""
    cushion: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """``overlong``: tokens below the limit over which the penalty grows."""
    alpha: Positive = 3e-4
    """The weight of a token in ``l1_exact`` and ``l1_max``, and of the term in ``group_share``."""
    delta: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """``l1_max``: the factor of an answer that uses its budget exactly."""

    def contradiction(self, largest: int, *, budgets: bool) -> tuple[str, str] | None:
        """Finds settings that contradict each other: the reason and what to do, or None.

        ``largest`` is the most tokens of an episode; ``budgets`` says that the run has them.
        """
        if self.kind.startswith("l1_") and not budgets:
            return f"{self.kind} needs thinking budgets", "add [rollout.thinking]"
        if self.kind == "overlong" and not self.cushion:
            return "overlong has no cushion", "set cushion, for instance to a fifth of limit"
        if self.kind == "overlong" and self.cushion > (self.limit or largest):
            reason = f"a cushion of {self.cushion} exceeds the limit of {self.limit or largest}"
            return reason, "lower cushion"
        return None


class KtoConfig(Section, frozen=True, kw_only=True):
    """The settings of the surrogate ``kto`` (`deltawire.train.loss.kto`).

    With unequal numbers of good and bad answers, set the weights so that desirable_weight · good
    is 1 to 4/3 times undesirable_weight · bad (Ethayarajh et al. 2024, section 4.3).

    Example::

        [train.loss]
        surrogate = "kto"
        advantage = "given"
        aggregation = "seq_mean_token_mean"

        [train.loss.kto]
        beta = 0.1
        desirable_weight = 1.0
        undesirable_weight = 0.5
    """

    beta: Positive = 0.1
    """How fast the value of an answer saturates as it moves away from the reference, per nat."""
    desirable_weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """The weight of answers whose given value is above 0."""
    undesirable_weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """The weight of answers whose given value is below 0."""


PreferenceKind = Literal["none", "dpo", "dpo_norm", "ipo", "simpo", "supervised"]


class PreferenceConfig(Section, frozen=True, kw_only=True):
    """The loss of pairs of a served answer and a better one, such as a user's edit of it
    (`deltawire.train.loss.preference`). It is added to the policy's loss;
    ``policy_coefficient = 0`` trains on pairs only.

    Example::

        [train.loss.preference]
        kind = "dpo"
        beta = 0.1
    """

    kind: PreferenceKind = "none"
    coefficient: Positive = 1.0
    """The weight of this loss next to the policy's."""
    beta: Positive = 0.1
    """How fast a pair saturates, per nat (``dpo``) or per nat and token (``dpo_norm``, ``simpo``);
    ``ipo`` aims at a margin of 1 / (2 * beta). ``supervised`` has none."""
    margin: Annotated[float, Meta(ge=0, le=1e3)] = 0.5
    """``simpo``: the distance that the better answer should have (gamma)."""

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss compares both answers with the reference."""
        return self.kind in ("dpo", "dpo_norm", "ipo")

    def influence(self, better: int, answer: int) -> float:
        """Returns the largest sum of |d loss / d log-probability| over the tokens of a pair of that
        many tokens each. That of ``ipo`` has no bound, and is counted at a margin of 0, where
        training starts."""
        match self.kind:
            case "none":
                return 0.0
            case "dpo":
                sides = self.beta * (better + answer)
            case "dpo_norm" | "simpo":
                sides = 2 * self.beta
            case "ipo":
                sides = 2 / self.beta
            case _:
                sides = 1.0
        return self.coefficient * sides

    def contradiction(self) -> tuple[str, str] | None:
        """Finds settings without an effect: the reason and what to do, or None."""
        if self.kind == "none" and self != PreferenceConfig():
            reason = "[train.loss.preference] has no effect without its kind"
            return reason, 'set kind = "dpo", or leave the section out'
        if self.kind != "simpo" and self.margin != PreferenceConfig().margin:
            return f"preference.margin has no effect on {self.kind}", 'set kind = "simpo"'
        return None


class LossConfig(Section, frozen=True, kw_only=True):
    """The parts of the loss, each by name (`deltawire.train.loss`).

    Example::

        [train.loss]
        surrogate = "cispo"
        advantage = "leave_one_out"
    """

    advantage: Literal["group_mean", "group_std", "leave_one_out", "budget_relative", "given"] = (
        "group_std"
    )
    budget_discount: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """``budget_relative``: how much less each smaller budget before counts in the baseline."""
    ratio_base: Literal["old", "rollout"] = "rollout"
    """The denominator of the ratio: the policy before the step, or the sampler."""
    surrogate: Annotated[str, Meta(max_length=256)] = "ppo"
    """One of `SURROGATES`, or ``module:function`` of a module that the trainer's machine trusts."""
    clip_low: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Bounds of the surrogate; None for its defaults in `SURROGATES`."""
    clip_high: Positive | None = None
    dual_clip: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """The dual clip's c, above 1; 0 is off. ``ppo`` only, and `DUAL_CLIP` if left out: without it
    one forged log-probability of a bad answer outweighs a whole step."""
    kto: KtoConfig = KtoConfig()
    preference: PreferenceConfig = PreferenceConfig()
    corrections: list[CorrectionConfig] = []
    aggregation: Literal["token_mean", "seq_mean_token_mean", "dr_grpo"] = "token_mean"
    horizon: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """The constant length of ``dr_grpo``; 0 is rollout.max_tokens times rollout.max_turns."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """The penalty for the distance to the reference (``[reference]``), by default version 0."""
    kl_coefficient: Annotated[float, Meta(ge=0, le=1e9)] = 1e-3
    policy_coefficient: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Weight of the surrogate; 0 trains on the penalty only, as on-policy distillation does, or on
    ``preference`` only."""
    entropy_coefficient: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """An entropy bonus: this factor times the policy's mean entropy is subtracted from the loss."""
    lengths: Annotated[list[LengthTerm], Meta(max_length=16)] = []
    """Terms that change rewards by the number of tokens, in this order."""
    mask_overlong: bool = False
    """Leave episodes out of the loss that ended at max_tokens or with a full context. Their rewards
    still count in the group's baseline.
    """

    @property
    def traits(self) -> SurrogateTraits:
        """The facts about the surrogate."""
        return SURROGATES.get(self.surrogate, SurrogateTraits(self.surrogate, OWN_BOUNDS))

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss compares the policy with the reference."""
        return self.kl != "none" or self.traits.good_or_bad or self.preference.needs_reference

    @property
    def only_pairs(self) -> bool:
        """Returns whether answers without a better one add nothing to the loss."""
        return self.preference.kind != "none" and not self.policy_coefficient

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Return the surrogate's lower and upper bound, its defaults where none is set."""
        low, high = self.traits.clip or (0.0, 0.0)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def dual_clip_bound(self) -> float:
        """Return the dual clip's c, 0 if it is off."""
        if self.dual_clip is not None:
            return self.dual_clip
        return DUAL_CLIP if self.traits.dual_clip else 0.0

    def contradiction(self, largest_age: int) -> tuple[str, str] | None:
        """Finds settings that contradict each other, or that do not work with groups of that age.

        Returns the reason and what to do, None if there is no contradiction.
        """
        if self.surrogate not in SURROGATES and not _PLACE.match(self.surrogate):
            near = difflib.get_close_matches(self.surrogate, SURROGATES, n=1, cutoff=0.4)
            known = f"did you mean {near[0]}?" if near else f"one of {', '.join(SURROGATES)}"
            return f"there is no surrogate {self.surrogate[:64]!r}", known
        traits = self.traits
        weighing = [c for c in self.corrections if c.weigh]
        ratio = traits.ratio
        if found := self._good_or_bad_fault() or self.preference.contradiction():
            return found
        if self.ratio_base == "rollout" and weighing and ratio:
            reason = (
                "ratio_base = rollout already divides by the sampler's probability, and a "
                "correction that weighs would divide by it again"
            )
            return reason, 'set ratio_base = "old", or weigh = false to reject without weighing'
        if len(weighing) > 1:
            return (
                "two corrections have weigh = true, which corrects from sampler to trainer twice",
                "set weigh = false on all but one",
            )
        for number, correction in enumerate(self.corrections):
            where = f"corrections[{number}]"
            if correction.low >= correction.high:
                return f"{where}: low is not below high", "low is the smaller bound"
            if correction.low and correction.weigh and correction.action == "truncate":
                return f"{where}: truncate has no lower bound", 'set action = "clip", or low = 0'
            if not correction.weigh and correction.action != "mask":
                return f"{where}: without a weight there is nothing to {correction.action}", (
                    'set action = "mask"'
                )
        corrected = bool(self.corrections) or (self.ratio_base == "rollout" and ratio)
        # Pairs, and good or bad answers, may be those of any policy.
        pairs = self.only_pairs and self.kl == "none"
        corrected = corrected or traits.good_or_bad or pairs
        if largest_age > UNCORRECTED_STALENESS and not corrected:
            reason = f"groups up to {largest_age} versions old would be trained on uncorrected"
            ways = ['set ratio_base = "rollout"'] if ratio else []
            ways.append("add a [[train.loss.corrections]]")
            return reason, f"{', '.join(ways)}, or lower max_staleness to {UNCORRECTED_STALENESS}"
        if self.dual_clip and (self.dual_clip <= 1 or not traits.dual_clip):
            return "dual_clip is a bound above 1 on the surrogate ppo", "set dual_clip = 0"
        if traits.clip is None and (self.clip_low, self.clip_high) != (None, None):
            reason = f"the surrogate {self.surrogate} has no bounds"
            return reason, "leave out clip_low and clip_high"
        if traits.positive_low and self.clip_bounds[0] > 1:
            return "1 - clip_low would be a ratio below 0", "set clip_low within 0 and 1"
        return None

    def _good_or_bad_fault(self) -> tuple[str, str] | None:
        """Finds settings that contradict a loss of good and bad answers, or set one without it."""
        name = self.surrogate
        if not self.traits.good_or_bad:
            if self.kto != KtoConfig():
                return f"[train.loss.kto] has no effect on {name}", 'set surrogate = "kto"'
            return None
        if self.advantage != "given":
            reason = f"{name} tells good answers from bad ones by the sign of what they were given"
            return reason, 'set advantage = "given"'
        if self.aggregation != "seq_mean_token_mean":
            reason = f"{name} is a loss of whole answers, and {self.aggregation} weighs by length"
            return reason, 'set aggregation = "seq_mean_token_mean"'
        if any(correction.weigh for correction in self.corrections):
            reason = f"{name} takes answers of any policy, and a correction would weigh their parts"
            return reason, "set weigh = false to reject answers, or leave out corrections"
        if not self.kto.desirable_weight and not self.kto.undesirable_weight:
            return "both weights of train.loss.kto are 0: nothing is trained on", "raise one"
        return None


DUAL_CLIP = 3.0
"""The dual clip's c by default, as in Ye et al. 2020."""
UNCORRECTED_STALENESS = 1
"""Largest age of a group for a loss without a correction: with one step of lag the ratio stays
within PPO's bounds for almost every token; older groups need a correction."""
