"""A worker whose link is slower than the publisher contributes within the staleness bound."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import save_model
from deltawire.rl.control.credits import CreditIssuer
from deltawire.rl.control.rollout_buffer import RolloutBuffer
from deltawire.rl.rollout.group_numbers import allowed_lag
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.runtime.fleet import Fleet
from deltawire.store import open_bucket
from deltawire.sync import Publisher, load_mirror
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.ledger import CommitMetadata, Ledger, ranges_of

SCRIPT = Path(__file__).parents[2] / "support/slow_worker.py"
REQUEST_S = 0.02
REQUESTS_A_VERSION = 6
STALENESS = 4
WANTED = 5
LIMIT_S = 170.0
END_S = 100.0


def test_a_worker_slower_than_the_publisher_contributes(tmp_path) -> None:
    """A version comes with every sixth request of the worker, which needs more for a group.

    Time is counted in requests, so the worker is as late on a busy machine as on an idle one.
    """
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    raw = {
        "name": "slow",
        "model": {"path": str(tmp_path / "model")},
        "rollout": {"group_size": 2, "max_tokens": 4, "slots": 8, "context": 64},
        "train": {"groups_per_step": 1, "max_staleness": STALENESS, "anchor_every": 10},
    }
    config = parse_config(raw, source="test")
    run = start_run(bucket, config, tmp_path / "model")
    head = load_mirror(bucket, run)
    publisher = Publisher(bucket, run, head, epoch=1, anchor_every=10)
    bits = {spec.name: head.tensors[spec.name].reshape(spec.shape).copy() for spec in run.tensors}
    ledger = Ledger()
    issuer = CreditIssuer(bucket, config, ledger.copy(), epoch=1, granted={})
    issuer.digest = head.digest.hex()
    fleet = Fleet(bucket, silence_s=30.0)
    buffer = RolloutBuffer(bucket, ledger, limit=issuer.staleness.limit)
    consumed, ages, drops = 0, Counter(), Counter()
    command = [sys.executable, str(SCRIPT), bucket.url, "slow", str(REQUEST_S)]
    with (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "LINK_LOG": str(tmp_path / "link")}
        worker = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        rng, version, due = np.random.default_rng(0), 0, 0
        deadline = time.monotonic() + LIMIT_S
        while consumed < WANTED and time.monotonic() < deadline:
            assert worker.poll() is None, (tmp_path / "log").read_text()
            if requests_in(tmp_path / "link") < due:
                time.sleep(REQUEST_S / 4)
                continue
            due = requests_in(tmp_path / "link") + REQUESTS_A_VERSION
            fleet.poll(every_s=0.5)
            buffer.poll(fleet.known_workers, issuer.granted())
            metadata = CommitMetadata(step=version + 1)
            batch = buffer.next_batch(issuer.staleness, version=version)
            if batch is not None:
                names = [(one.group.worker, one.sequence) for one in batch.taken]
                metadata = CommitMetadata(
                    step=version + 1, consumed=names, dropped=ranges_of(batch.dropped)
                )
                consumed += len(names)
                ages.update(batch.staleness)
                drops.update(drop.cause for drop in batch.drops)
            for name, _ in (*metadata.consumed, *metadata.dropped_groups()):
                assert name == "slow"
            for array in bits.values():
                array.reshape(-1)[rng.integers(0, array.size, 1 + array.size // 50)] ^= 1
            issuer.observe(buffer, fleet.workers)
            issuer.expect(version + 1, metadata)
            version = publisher.publish(bits, metadata=metadata.to_dict())
            publisher.flush()
            for group in metadata.settled_groups():
                ledger.settle(*group)
            issuer.observe(buffer, fleet.workers)
            issuer.committed(version, publisher.digest.hex())
            issuer.write("training")
    finally:
        worker.terminate()
        worker.wait(END_S)
        publisher.close()
    found = f"version {version}: {consumed} consumed, ages {dict(ages)}, drops {dict(drops)}"
    assert consumed >= WANTED, f"{found}\n{(tmp_path / 'log').read_text()}"
    assert max(ages) <= STALENESS
    assert version > consumed, f"it is not slower than the publisher: {found}"


def requests_in(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def test_a_strict_bound_allows_no_lag() -> None:
    assert [allowed_lag(bound) for bound in (0, 1, 2, 4)] == [0, 0, 1, 2]
