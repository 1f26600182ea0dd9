"""Decision: what the next tokens of a run are best spent on, as a pure function of evaluations.

Each evaluation measures the same held-out problems with every thinking budget and scaffold. A
version costs, in tokens, with k completions a step of t tokens and e seconds of environment each::

    sampled       k · t
    trained       k · t,  or 4/3 of it with several optimizer steps: one pass forward more
    published     bytes of its delta · budget.byte_tokens
    environment   k · e · budget.second_tokens

**Going on** (``train``) gains the slope of accuracy at the present setting over the tokens spent,
by least squares through the newest `WINDOW` evaluations, for each problem by itself; the mean over
problems has their standard error.

**Another way to answer**, a longer or shorter thinking budget or another scaffold, gains now the
difference of its accuracy, paired by problem and averaged over evaluations with weights that fall
by `DISCOUNT` from one to the one before. Until the next evaluation it costs x tokens more, which
would have gained x · slope in further steps (nothing, if the slope is negative and x above 0). It
is better if the gain less that is above ``budget.confidence`` standard errors. So thinking grows
where it gains more than further steps, and shrinks where further steps gain more than it loses.

**Another way to train**, more or fewer completions of a prompt or optimizer steps of a version,
cannot be seen in an answer: it has to be tried. Each interval between two evaluations is a pull of
an arm, its reward the paired gain in accuracy per token. The arm with the largest upper bound, of
``budget.confidence`` standard errors, is pulled; rewards lose weight by `DISCOUNT` with each
evaluation (discounted UCB, Garivier and Moulines 2008, arXiv 0805.3415). An arm that was never
pulled comes first, once the present one has been. The interval after a move counts for no arm: its
groups were made with both settings.

One axis moves at a time, by one place, and rests until `SETTLE` further evaluations were made.
Ways to answer come before ways to train, and a scaffold before both while accuracy is below
``budget.threshold``; above it, scaffolds come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, inf, sqrt

from deltawire.config import RunConfig
from deltawire.estimates import BudgetSetting, SettingScore, UseGain
from deltawire.events import Controlled, Evaluated
from deltawire.rl.budget.limits import BudgetLimits, Place
from deltawire.rl.budget.statistics import DISCOUNT, Gain, accuracy_of, paired, slope

WINDOW = 4
"""Evaluations from which gains are measured."""
SETTLE = 2
"""Evaluations from one move to the next."""
ONE_STEP, SEVERAL_STEPS = 1.0, 4.0 / 3.0
"""Tokens trained for a token sampled: a pass forward is a third of one forward and backward."""


@dataclass(frozen=True)
class Measurement:
    """One evaluation: the setting that held before it, the tokens ``spent`` until then, the score
    of each thinking budget and scaffold, and the mean bytes of a version."""

    version: int
    setting: BudgetSetting
    spent: float
    scores: Mapping[Place, SettingScore]
    published: float


@dataclass(frozen=True)
class Pull:
    """An interval between two evaluations with one setting, ended by the ``number``-th: accuracy
    gained per token, and its standard error."""

    number: int
    setting: BudgetSetting
    gain: float
    error: float


@dataclass(frozen=True)
class NextSetting:
    """A setting that could be next; ``benefit`` is what it gains over going on, in standard
    errors."""

    setting: BudgetSetting
    use: UseGain
    benefit: float
    reason: str


class BudgetHistory:
    """The measurements and decisions of a run so far.

    The same evaluations always give the same decisions, so a run's moves can be replayed.

    Example::

        history = BudgetHistory(config)
        history.observe(evaluated)   # a Controlled event, or None
        history.setting
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits = BudgetLimits.of(config)
        self.setting = self.limits.first
        """The setting that holds now."""
        self._seen: list[Measurement] = []
        self._pulls: list[Pull] = []
        self._rested = SETTLE

    def observe(self, event: Evaluated) -> Controlled | None:
        """Decides by an evaluation; None if it is no later than the last one, or lacks a score."""
        scores = {(one.thinking, one.scaffold): one for one in event.settings}
        counts = {len(one.correct) for one in scores.values()}
        last = self._seen[-1] if self._seen else None
        if last is not None:
            counts |= {len(one.correct) for one in last.scores.values()}
        late = last is not None and event.version <= last.version
        if late or len(counts) != 1 or any(one not in scores for one in self.limits.places):
            return None
        spent = 0.0
        if last is not None:
            tokens = sum(self._price(self.setting, scores, event.published).values())
            spent = last.spent + (event.version - last.version) * tokens
        now = Measurement(event.version, self.setting, spent, scores, event.published)
        if last is not None:
            self._pull(last, now)
        self._seen.append(now)
        self._rested += 1
        return self._decide(event)

    def _price(
        self, setting: BudgetSetting, scores: Mapping[Place, SettingScore], published: float
    ) -> dict[str, float]:
        """The price of one version with a setting, in tokens."""
        score, budget = scores[_place(setting)], self._config.budget
        answers = self._config.train.groups_per_step * setting.completions
        sampled = answers * score.tokens
        return {
            "sampled": sampled,
            "trained": sampled * (ONE_STEP if setting.steps == 1 else SEVERAL_STEPS),
            "published": published * budget.byte_tokens,
            "environment": answers * score.seconds * budget.second_tokens,
        }

    def _interval(self, setting: BudgetSetting) -> float:
        """The price of a setting until the next evaluation, in tokens."""
        now = self._seen[-1]
        tokens = sum(self._price(setting, now.scores, now.published).values())
        return tokens * max(1, self._config.evaluate.every)

    def _pull(self, last: Measurement, now: Measurement) -> None:
        """Notes what the interval gained, unless it began with a move or cost nothing."""
        tokens = now.spent - last.spent
        if last.setting != now.setting or tokens < 1:
            return
        place = _place(now.setting)
        gain, error = paired([last.scores[place]], [now.scores[place]])
        self._pulls.append(Pull(len(self._seen), now.setting, gain / tokens, error / tokens))

    def _decide(self, event: Evaluated) -> Controlled:
        now, before, recent = self._seen[-1], self.setting, self._seen[-WINDOW:]
        place = _place(before)
        train = slope([one.scores[place] for one in recent], [one.spent for one in recent])
        tokens = self._interval(before)
        uses = []
        if train is not None:
            gain, error = train[0] * tokens, train[1] * tokens
            uses.append(UseGain(use="train", gain=gain, error=error, tokens=tokens))
        answers = [
            self._answer(name, setting, train or (0.0, 0.0))
            for name, setting in self.limits.answers(before).items()
        ]
        trained = self._trained()
        accuracy = accuracy_of(now.scores[place])
        if train is None:
            reason = "too few evaluations"
        elif self._rested <= SETTLE:
            reason = "it was moved a short time ago"
        else:
            self.setting, reason = self._choose(answers, trained, accuracy)
        if self.setting != before:
            self._rested = 0
        return Controlled(
            process=event.process,
            at=event.at,
            version=now.version,
            before=before,
            after=self.setting,
            reason=reason,
            accuracy=accuracy,
            price=self._price(before, now.scores, now.published),
            uses=[*uses, *(one.use for one in (*answers, *trained))],
        )

    def _choose(
        self, answers: Sequence[NextSetting], trained: Sequence[NextSetting], accuracy: float
    ) -> tuple[BudgetSetting, str]:
        """The next setting, and why."""
        confidence = self._config.budget.confidence
        better = [one for one in answers if one.benefit > confidence]
        scaffolds = [one for one in better if one.setting.scaffold != self.setting.scaffold]
        thinking = [one for one in better if one not in scaffolds]
        promising = [one for one in trained if one.benefit > 0]
        order = (thinking, promising, scaffolds)
        if accuracy < self._config.budget.threshold:
            order = (scaffolds, thinking, promising)
        for candidates in order:
            if candidates:
                best = max(candidates, key=lambda one: one.benefit)
                return best.setting, best.reason
        return self.setting, "no other use of tokens is better with confidence"

    def _answer(self, name: str, setting: BudgetSetting, train: Gain) -> NextSetting:
        """Compares another way to answer with going on."""
        recent, place, other = self._seen[-WINDOW:], _place(self.setting), _place(setting)
        gain, error = paired(
            [one.scores[place] for one in recent], [one.scores[other] for one in recent]
        )
        tokens = self._interval(setting) - self._interval(self.setting)
        rate = max(0.0, train[0]) if tokens > 0 else train[0]
        benefit = (gain - rate * tokens) / hypot(error, train[1] * tokens)
        use = UseGain(use=name, gain=gain, error=error, tokens=tokens)
        words = "gains more than further steps would"
        if gain <= 0:
            words = "leaves tokens to further steps, which gain more than it loses"
        figures = f"{gain:+.3f} ± {error:.3f} for {tokens:+,.0f} tokens"
        return NextSetting(setting, use, benefit, f"{name} {words}: {figures}")

    def _trained(self) -> list[NextSetting]:
        """Compares other ways to train by their upper bounds; none before the present one was
        pulled."""
        present = self._arm(self.setting)
        if present is None:
            return []
        confidence, found = self._config.budget.confidence, []
        for name, setting in self.limits.training(self.setting).items():
            arm, tokens = self._arm(setting), self._interval(setting)
            if arm is None:
                use = UseGain(use=name, gain=None, error=None, tokens=tokens)
                found.append(NextSetting(setting, use, inf, f"{name} were not tried yet"))
                continue
            use = UseGain(use=name, gain=arm[0] * tokens, error=arm[1] * tokens, tokens=tokens)
            bound = arm[0] - present[0] + confidence * (arm[1] - present[1])
            reason = f"{name} may gain more per token, by the upper bound of what was measured"
            found.append(NextSetting(setting, use, bound / hypot(arm[1], present[1]), reason))
        return found

    def _arm(self, setting: BudgetSetting) -> Gain | None:
        """The discounted gain per token of intervals with these completions and steps."""
        arm = setting.completions, setting.steps
        rows = [
            (one.gain, one.error**-2 * DISCOUNT ** (len(self._seen) - 1 - one.number))
            for one in self._pulls
            if (one.setting.completions, one.setting.steps) == arm
        ]
        if not rows:
            return None
        total = sum(weight for _, weight in rows)
        return sum(gain * weight for gain, weight in rows) / total, sqrt(1.0 / total)


def replay(events: Iterable[Evaluated], config: RunConfig) -> list[Controlled]:
    """Returns every decision of a run from its evaluations, in the order of their versions."""
    history = BudgetHistory(config)
    ordered = sorted(events, key=lambda event: (event.version, event.at))
    return [found for event in ordered if (found := history.observe(event)) is not None]


def _place(setting: BudgetSetting) -> Place:
    return setting.thinking, setting.scaffold
