"""Runs an honest worker with a changed way to the bucket: what the scripts of odd workers share."""

import argparse

from deltawire.launch.role_keys import read_signer
from deltawire.rl.rollout.worker import run_worker
from deltawire.runtime.process import Process
from deltawire.runtime.trusted import ANY, ReaderTrust, trusted
from deltawire.store import open_bucket
from deltawire.wire.roles import Pin, worker_role


def run_odd(change=lambda bucket, seconds: bucket):
    """``SCRIPT BUCKET NAME [SECONDS] [--public-key PIN --key FILE]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket")
    parser.add_argument("name")
    parser.add_argument("seconds", nargs="?", type=float, default=0.0)
    parser.add_argument("--public-key", default="")
    parser.add_argument("--key", default="")
    given = parser.parse_args()
    trust = ReaderTrust(Pin.parse(given.public_key)) if given.public_key else ANY
    changed = change(open_bucket(given.bucket), given.seconds)
    signer = read_signer(given.key)
    bucket = trusted(changed, trust, signer=signer, role=worker_role(given.name))
    changed.opened = True
    process = Process(bucket, given.name, "worker", supervised=True)
    with process.running():
        run_worker(process, patience_s=60.0, report=print)
