"""Copies a run's weights to a second bucket, each delta once."""

from __future__ import annotations

from dataclasses import dataclass

from deltawire.dashboard.wording import byte_size
from deltawire.display import safe_json
from deltawire.launch.progress import Bars, bars
from deltawire.runtime.reader_report import ReaderReporter
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync.maintain.relay import Relay, Relayed
from deltawire.wire.seal import Signer


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """Options of a relay: copy from ``start`` (default: the newest anchor), prune as the source."""

    start: int | None = None
    trust: ReaderTrust = ANY
    signer: Signer | None = None
    strides: tuple[int, ...] = ()
    threads: int | None = None
    prune: bool = True
    grace_s: float = 86400.0


def relay_run(
    source: str,
    destination: str,
    options: RelayOptions,
    *,
    follow: bool,
    as_json: bool,
    report_to: str = "",
) -> None:
    """Copies the versions that exist; with ``follow``, also new ones, until interrupted. Meanwhile
    it reports to the run at ``report_to``, or at the destination if it may not write there (empty:
    does not report).
    """
    with bars(hidden=as_json) as bar:
        opened = open_trusted(source, options.trust)
        metered = MeteredBucket(opened, lambda read, _: bar.advance(read))
        target = open_bucket(destination, create=True)
        bar.begin("copied")
        relay = Relay(
            metered,
            target,
            public_key="" if opened.pin is None else str(opened.pin),
            start=options.start,
            strides=options.strides,
            signer=options.signer,
            threads=options.threads,
            retain=options.prune,
            grace_s=options.grace_s,
        )
        try:
            if follow:
                places = [open_bucket(report_to), target] if report_to else []
                reporter = ReaderReporter(opened, "relay", places=places)
                reporter.holds(relay.version)
                with reporter.running():
                    for done in relay.follow():
                        _report(done, bar, as_json=as_json)
                        reporter.holds(relay.version)
                        reporter.waits(done.alarm)
            else:
                relay.advance(lambda done: _report(done, bar, as_json=as_json))
                if not as_json:
                    bar.log(f"{byte_size(relay.crossed)} copied in all")
        finally:
            relay.close()


def _report(done: Relayed, bar: Bars, *, as_json: bool) -> None:
    if as_json:
        print(safe_json(done), flush=True)  # noqa: T201
        return
    if done.kind == "alarm":
        bar.log(f"warning: the relay waits: {done.alarm}")
        return
    line = f"version {done.version}: {byte_size(done.crossed)} copied"
    line += f", anchor of {byte_size(done.anchor_made)} made here" if done.anchor_made else ""
    line += f", {byte_size(done.anchor_copied)} of them an anchor" if done.anchor_copied else ""
    line += ", pruned" if done.pruned else ""
    bar.log(f"{line} ({byte_size(done.crossed / max(done.seconds, 1e-9))}/s)")
    if done.alarm:
        bar.log(f"warning: passed over a manifest at the source: {done.alarm}")
    if done.compaction_error:
        bar.log(f"warning: a compacted delta could not be made: {done.compaction_error}")
