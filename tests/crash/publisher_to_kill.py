"""Publishes the tiny run into a folder, version after version, until it is killed."""

import sys
from itertools import count

from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, weights


def main(folder: str) -> None:
    publisher = start_publisher(open_bucket(folder), anchor_every=3)
    for version in count(publisher.version + 1):
        publisher.publish(weights(version))
        if version == publisher.version + 1:
            sys.stdout.write("publishing\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
