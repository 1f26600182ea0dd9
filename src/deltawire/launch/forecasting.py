"""Reads a run's events and forecasts it."""

from __future__ import annotations

from pathlib import Path

from deltawire.config import run_config
from deltawire.dashboard.pictures import check_suffix
from deltawire.errors import InputError
from deltawire.rl.forecast.forecast import Forecast, Measure, Unit, forecast_of, read_curve
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.sync import require_run


def forecast_run(
    location: str,
    *,
    measure: Measure = "accuracy",
    unit: Unit = "tokens",
    first: int = 0,
    plot: str = "",
    trust: ReaderTrust = ANY,
) -> Forecast:
    """Forecasts the run at ``location`` from its events, from version ``first`` on, and draws the
    curve with its band to ``plot``.

    Raises `InputError`, naming the run, if it has too few measurements.
    """
    if plot:
        check_suffix(Path(plot))
    bucket = open_trusted(location, trust)
    config = run_config(require_run(bucket).config, url=bucket.url)
    tail = EventTail(bucket, processes=("trainer", "evaluator"))
    events = tail.read(everything=True)
    try:
        found = forecast_of(read_curve(events, config, measure=measure, unit=unit, first=first))
    except InputError as error:
        raise InputError(error.message, hint=error.hint, run=bucket.url) from error
    if plot:
        from deltawire.dashboard.forecast_view import plot_forecast

        plot_forecast(found, config.name, Path(plot))
    return found
