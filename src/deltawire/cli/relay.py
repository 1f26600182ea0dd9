"""``deltawire relay``: a run's weights in a second bucket, each delta carried over once."""

from __future__ import annotations

import argparse

import msgspec

from deltawire.cli.transfer import bars, signer_of, size, strides_of
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync.maintain.relay import Relay, Relayed


def relay(arguments: argparse.Namespace) -> int:
    """Carry over what there is, or, with ``--follow``, what comes as well."""
    with bars(arguments) as bar:
        source = MeteredBucket(open_bucket(arguments.source), lambda read, _: bar.more(read))
        destination = open_bucket(arguments.destination, create=True)
        bar.begin("carried over")
        carrier = Relay(
            source,
            destination,
            public_key=arguments.public_key,
            start=arguments.start,
            strides=strides_of(arguments.fold_strides),
            signer=signer_of(arguments.key),
            threads=arguments.threads,
            retain=not arguments.keep_all,
            grace_s=arguments.grace * 3600,
        )

        def tell(done: Relayed) -> None:
            if arguments.json:
                print(msgspec.json.encode(done).decode(), flush=True)  # noqa: T201
                return
            line = f"version {done.version}: {size(done.crossed)} crossed"
            line += f", anchor of {size(done.anchor_made)} made here" if done.anchor_made else ""
            line += f", {size(done.anchor_copied)} of anchor copied" if done.anchor_copied else ""
            line += ", pruned" if done.pruned else ""
            bar.say(f"{line} ({size(done.crossed / max(done.seconds, 1e-9))}/s)")

        try:
            if arguments.follow:
                for done in carrier.follow():
                    tell(done)
            else:
                carrier.advance(tell)
                if not arguments.json:
                    bar.say(f"{size(carrier.crossed)} crossed in all")
        finally:
            carrier.close()
    return 0
