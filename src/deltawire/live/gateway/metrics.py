"""Metrics of a gateway in Prometheus' format: requests, first tokens and answers, by arm.

``GET /metrics`` needs the admin token: a client that sees rates by arm can guess its own. The
exporter of `deltawire metrics` has the figures of the run; these are one gateway's. Arms are those
of the receipts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAUGES = frozenset({"spooled_bytes"})
"""Counts of a gateway's state that also fall."""


class GatewayMetrics:
    """The metrics of one gateway. ``counts`` returns the counters of its state, and ``replicas``
    which of its replicas take requests.

    Example::

        metrics = GatewayMetrics(lambda: recorder.state().counts, lambda: {"a:8001": True})
        metrics.text()
    """

    def __init__(
        self,
        counts: Callable[[], Mapping[str, float]],
        replicas: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "deltawire_gateway_requests",
            "Requests by route, arm, status and how they ended",
            ["route", "arm", "status", "ended"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "deltawire_gateway_in_flight",
            "Requests that are being answered",
            ["arm"],
            registry=registry,
        )
        self._first, self._whole = (
            Histogram(
                f"deltawire_gateway_{name}_seconds",
                f"Seconds from a request to {what}",
                ["arm"],
                buckets=SECONDS,
                registry=registry,
            )
            for name, what in (
                ("first_token", "the first token of its answer"),
                ("answer", "the end of its answer"),
            )
        )
        registry.register(_StateCollector(counts, replicas))

    def began(self, arm: str) -> None:
        """Counts a request that goes to a replica."""
        self._in_flight.labels(arm).inc()

    def ended(self, arm: str) -> None:
        """Counts the end of a request that `began`."""
        self._in_flight.labels(arm).dec()

    def answered(
        self, route: str, arm: str, status: int, *, ended: str, first_s: float, whole_s: float
    ) -> None:
        """Counts a request; ``ended`` is ``whole``, or how an answer ended early. ``first_s`` is 0
        for an answer without a token."""
        self._requests.labels(route, arm, str(status), ended).inc()
        if arm:
            if first_s:
                self._first.labels(arm).observe(first_s)
            self._whole.labels(arm).observe(whole_s)

    def text(self) -> bytes:
        """Returns all metrics."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(
        self,
        counts: Callable[[], Mapping[str, float]],
        replicas: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._counts = counts
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        """Returns nothing: the counters are not read when they are registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the gateway's counters and its replicas."""
        events = CounterMetricFamily(
            "deltawire_gateway_events",
            "Counters of GET /live/state: answers, captures, feedback, losses",
            labels=["event"],
        )
        for name, count in sorted(self._counts().items()):
            if name in GAUGES:
                yield GaugeMetricFamily(
                    f"deltawire_gateway_{name}", "Bytes that wait for the bucket", value=count
                )
            else:
                events.add_metric([name], count)
        yield events
        ready = GaugeMetricFamily(
            "deltawire_gateway_replica_takes_requests",
            "1 if the replica takes requests",
            labels=["replica"],
        )
        for name, takes in sorted(self._replicas().items()):
            ready.add_metric([name], float(takes))
        yield ready
