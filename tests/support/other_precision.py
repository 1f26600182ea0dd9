"""A worker that samples in bfloat16 where the run says float32: ``other_precision.py BUCKET NAME``.

It stands for another engine: the same weights with other arithmetic.
"""

import sys

import msgspec

from deltawire.rl.rollout import worker
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket


def other_run(*arguments, **named):
    run, config = open_run(*arguments, **named)
    rollout = msgspec.structs.replace(config.rollout, precision="bfloat16")
    return run, msgspec.structs.replace(config, rollout=rollout)


def main():
    worker.open_run = other_run
    bucket = open_bucket(sys.argv[1])
    process = Process(bucket, sys.argv[2], "worker", supervised=True)
    process.handle_signals()
    with process.registered():
        worker.run_worker(process, patience_s=60.0, report=print)


if __name__ == "__main__":
    main()
