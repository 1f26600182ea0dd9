"""Relays from one folder to another until it is killed."""

import sys

from deltawire.store import open_bucket
from deltawire.sync import Relay


def main(source: str, destination: str) -> None:
    relay = Relay(open_bucket(source), open_bucket(destination, create=True), start=0)
    sys.stdout.write("relaying\n")
    sys.stdout.flush()
    for _ in relay.follow():
        pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
