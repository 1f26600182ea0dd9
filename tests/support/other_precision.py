"""A worker that samples in bfloat16 where the run says float32: ``other_precision.py BUCKET NAME``.

It stands for another engine: the same weights with other arithmetic.
"""

import msgspec
from odd_workers import run_odd

from deltawire.runtime import process
from deltawire.runtime.process import open_run


def other_run(*arguments, **named):
    run, config = open_run(*arguments, **named)
    rollout = msgspec.structs.replace(config.rollout, precision="bfloat16")
    return run, msgspec.structs.replace(config, rollout=rollout)


if __name__ == "__main__":
    process.open_run = other_run
    run_odd()
