"""Functions that test_scoring_process.py calls in a child process; quick to import."""

import os
import sys


def double(value):
    sys.stdout.write("noise that is no answer\n")
    return 2 * value


def fail(value):
    raise ValueError(f"no {value}")


def hang(_):
    while True:
        pass


def power(_):
    return len(str(9**9**9))  # never comes back from C


def vanish(_):
    os._exit(3)


def devour(_):
    return len(b"x" * (8 << 30))


def secret(_):
    return float("AWS_SECRET_ACCESS_KEY" in os.environ)


def word(_):
    return "many"
