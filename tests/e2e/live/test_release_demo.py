"""The demonstration of live releases, as `make live` runs it: an evaluation gate stops one planted
version, a canary rolls back another that only users dislike, and honest ones are promoted."""

import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from deltawire.config import load_config
from deltawire.errors import DeltawireError
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.decisions import MAX_DECISION_BYTES, RESTORES, Decision
from deltawire.wire.objects import decode_json

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[3]
PATIENCE_S = 1200.0


def decisions(bucket):
    found = []
    for key in bucket.list(keys.LIVE_DECISIONS):
        data = bucket.get(key, limit=MAX_DECISION_BYTES)
        found.append(decode_json(data, Decision, run=bucket.url, key=key))
    return found


def outcomes(bucket, planted):
    """Counts planted versions that the gate stopped, those that users rolled back, and versions
    that were promoted though they restore none."""
    made = decisions(bucket)
    found = {"promoted": 0, "gate": 0, "users": 0}
    for one in made:
        found["promoted"] += one.verdict == "promote" and RESTORES not in one.evidence
        for kind, words in (("gate", "evaluation gate"), ("users", "worse than version")):
            if one.verdict == "rollback" and one.reason.startswith(words):
                found[kind] += one.serving.version < planted[kind] <= one.candidate.version
    return found


def test_bad_versions_are_stopped_and_good_ones_are_promoted(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "deltawire", "simulate", str(ROOT / "examples" / "live.toml"),
        "--out", str(out), "--seconds", str(PATIENCE_S),
    ]  # fmt: skip
    planted = load_config(ROOT / "examples" / "live.toml").live.planted
    log = tmp_path / "log"
    with log.open("wb") as stream:
        demo = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
    try:
        deadline, found = time.monotonic() + PATIENCE_S, {}
        while not (found and all(found.values())):
            assert demo.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, (found, log.read_text()[-2000:])
            time.sleep(1.0)
            try:
                found = outcomes(open_bucket(str(out / "bucket")), planted)
            except DeltawireError:
                continue  # There is no bucket yet.
        demo.send_signal(signal.SIGINT)
        demo.wait(300)
    finally:
        demo.kill()
        demo.wait()
    made = decisions(open_bucket(str(out / "bucket")))
    # Each rollback gave the serving version back, and the trainer published it again.
    for before, after in pairwise(made):
        if before.verdict == "rollback":
            assert (after.verdict, after.evidence.get(RESTORES)) == (
                "promote", float(before.serving.version),
            )  # fmt: skip
            assert after.serving.digest == before.serving.digest
    numbers = [one.number for one in made]
    assert numbers == list(range(len(made)))
