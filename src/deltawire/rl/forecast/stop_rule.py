"""Stop rule: finishes a run once more compute is forecast to buy too little.

The trainer asks after each step. Measurements come from the evaluator with a delay, so the rule
sees a run as it was some versions ago and can only stop late. It stops nothing at a start: a run
that is continued makes at least one step before the rule is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.events import Evaluated, Event, Forecasted, Step
from deltawire.rl.forecast.forecast import Forecast, forecast_of, read_curve
from deltawire.runtime.event_tail import EventTail
from deltawire.store import Bucket

REWARD_EVERY = 10
"""Steps from one forecast of the reward to the next."""


class StopRule:
    """Decides whether a run is finished, by ``budget.stop_when``.

    Example::

        rule = StopRule(bucket, config, process.events.record)
        rule.stepped(version)
        rule.reached   # True once the trainer should finish
    """

    def __init__(self, bucket: Bucket, config: RunConfig, record: Callable[[Event], None]) -> None:
        self.reached = False
        self._config = config
        self._record = record
        self._tail = EventTail(bucket, processes=("trainer", "evaluator"))
        self._steps: dict[int, Step] = {}
        self._evaluated: dict[int, Evaluated] = {}
        self._due_at = 0
        self._judged = -1

    def stepped(self, version: int) -> None:
        """Forecasts the run if there are new measurements; the trainer made ``version``."""
        budget, evaluate = self._config.budget, self._config.evaluate
        if not budget.stop_when or version < self._due_at:
            return
        every = REWARD_EVERY if budget.measure == "reward" else max(1, evaluate.every)
        self._due_at = version + every
        for event in self._tail.read():
            if isinstance(event, Step):
                self._steps[event.version] = event
            elif isinstance(event, Evaluated):
                self._evaluated[event.version] = event
        found = self._forecast()
        if found is None or found.version <= self._judged:
            return
        self._judged = found.version
        self.reached = found.gain.high < budget.stop_when
        plateau, gain = found.plateau, found.gain
        self._record(
            Forecasted(
                process="trainer",
                at=time.time(),
                version=found.version,
                measure=found.measure,
                value=found.value,
                plateau=(plateau.median, plateau.low, plateau.high),
                gain=(gain.median, gain.low, gain.high),
                limit=budget.stop_when,
                stops=self.reached,
            )
        )

    def _forecast(self) -> Forecast | None:
        """The forecast of what was measured so far; None while there is too little."""
        events: list[Event] = [*self._steps.values(), *self._evaluated.values()]
        try:
            curve = read_curve(
                events, self._config, measure=self._config.budget.measure, unit="tokens"
            )
            return forecast_of(curve)
        except InputError:
            return None
