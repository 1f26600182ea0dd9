"""Made-up answers and reports in a bucket, as gateways store them."""

import numpy as np

from deltawire.config import parse_config
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment

NOW = 1_000_000.0
LIVE = {
    "name": "live",
    "rollout": {"group_size": 4, "max_tokens": 16},
    "train": {"loss": {"advantage": "given"}},
    "trust": {"rescore_share": 0.0},
    "live": {"user_cap": 0.5, "settle_s": 10.0, "window_s": 600.0},
}


def config_of(**live):
    """A learner's configuration with these values in its section."""
    return parse_config({**LIVE, "live": {**LIVE["live"], **live}}, source="test")


def answer(number, *, user=None, at=NOW, tokens=4, **changes):
    """The ``number``-th answer, of a separate user unless one is named."""
    rng = np.random.default_rng(number)
    facts = {
        "answer": f"{number:032x}", "conversation": "c" * 32, "turn": 0, "arm": "serving",
        "user": f"{number:032x}" if user is None else user, "propensity": 1.0, "at": at,
        "receipt": "r", "finish": "stop",
        "prompt": rng.integers(0, 256, 3).astype("<i4").tobytes(),
        "tokens": rng.integers(0, 256, tokens).astype("<i4").tobytes(),
        "logprobs": np.full(tokens, -5.0, "<f4").tobytes(), "spans": [(0, tokens)],
    }  # fmt: skip
    return Capture(**facts | changes)


def report(number, kind="accept", value=1.0, *, after_s=1.0, at=NOW, user=None, **changes):
    """A report about the ``number``-th answer."""
    facts = {
        "id": f"{kind}-{number}-{after_s}", "answer": f"{number:032x}", "conversation": "c" * 32,
        "user": f"{number:032x}" if user is None else user, "arm": "serving", "kind": kind,
        "value": value, "at": at + after_s, "received": at + after_s, "served_at": at,
    }  # fmt: skip
    return Feedback(**facts | changes)


def put_rows(bucket, number, answers=(), reports=(), *, gateway="g0"):
    """Store a gateway's ``number``-th segments."""
    for place, rows in ((keys.live_captures, answers), (keys.live_feedback, reports)):
        if rows:
            data = encode_segment(gateway, number, [encode_row(row) for row in rows])
            bucket.put(place(gateway, number), data)
