"""Rewards that a run may name as its own, good and bad."""

import os
import time
import zlib


def exact(completion: str, row: dict) -> float:
    return float(completion.strip() == str(row["answer"]))


def raises(completion: str, row: dict) -> float:
    raise KeyError("no such column")


def slow(completion: str, row: dict) -> float:
    time.sleep(30)
    return 1.0


def not_a_number(completion: str, row: dict) -> float:
    return float("nan")


def dies(completion: str, row: dict) -> float:
    os._exit(3)


def sees_credentials(completion: str, row: dict) -> float:
    return float("AWS_SECRET_ACCESS_KEY" in os.environ)


def mixed(completion: str, row: dict) -> float:
    """Any completion succeeds as often as not, so that groups have a gradient."""
    return float(zlib.crc32(completion.encode(errors="replace")) & 1)
