"""Reads a run's events and forecasts it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltawire.dashboard.pictures import check_suffix
from deltawire.errors import InputError
from deltawire.rl.forecast.forecast import (
    Curve,
    Forecast,
    Measure,
    Unit,
    forecast_of,
    prior_of,
    read_curve,
)
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.needs import config_of
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.sync import read_run


def forecast_run(
    location: str,
    *,
    measure: Measure = "accuracy",
    unit: Unit = "tokens",
    first: int = 0,
    plot: str = "",
    trust: ReaderTrust = ANY,
    like: Sequence[str] = (),
) -> Forecast:
    """Forecasts the run at ``location`` from its events, from version ``first`` on, and draws the
    curve with its band to ``plot``. ``like`` are the locations of earlier runs of the same kind,
    whose curves are a prior; any key may have signed them.

    Raises `InputError`, naming the run, if it or an earlier one has too few measurements.
    """
    if plot:
        check_suffix(Path(plot))
    earlier: list[Curve] = []
    for place in like:
        curve, url = _curve_at(place, ANY, measure=measure, unit=unit, first=first)[:2]
        with _named(url):
            curve.fit()
        earlier.append(curve)
    curve, url, name = _curve_at(location, trust, measure=measure, unit=unit, first=first)
    with _named(url):
        found = forecast_of(curve, prior_of(earlier))
    if plot:
        from deltawire.dashboard.forecast_view import plot_forecast

        plot_forecast(found, name, Path(plot))
    return found


def _curve_at(
    location: str, trust: ReaderTrust, *, measure: Measure, unit: Unit, first: int
) -> tuple[Curve, str, str]:
    """The curve of a run, its URL and its name."""
    bucket = open_trusted(location, trust)
    config = config_of(read_run(bucket), url=bucket.url)
    events = EventTail(bucket, processes=("trainer", "evaluator")).read(everything=True)
    with _named(bucket.url):
        curve = read_curve(events, config, measure=measure, unit=unit, first=first)
    return curve, bucket.url, config.name


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Names the run in an error about it."""
    try:
        yield
    except InputError as error:
        raise InputError(error.message, hint=error.hint, run=url) from error
