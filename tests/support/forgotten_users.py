"""A run that learned from answers of users who are forgotten, and all bytes of a bucket."""

from pathlib import Path

import msgspec
import numpy as np
import torch
from live_answers import NOW, answer, config_of, put_rows, report

from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire.ledger import CommitMetadata

BOB, CAROL = "b0" * 16, "ca" * 16


def tokens_of(number):
    """The bytes of the tokens of the ``number``-th answer."""
    return answer(number).tokens


def everything_in(bucket, *folders):
    """All keys and bytes of a bucket, and all bytes of files in folders."""
    data = [key.encode() + (bucket.get(key, limit=1 << 30) or b"") for key in bucket.list("")]
    for folder in folders:
        data += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return b"".join(data)


def learned(bucket, owners):
    """Two groups of four answers, which belong to ``owners`` by number; version 1 consumed the
    first, the second waits."""
    numbers = range(1, 9)
    put_rows(
        bucket, 0, [answer(n, user=owners.get(n)) for n in numbers],
        [report(n, user=owners.get(n), value=float(n % 3 == 0)) for n in numbers],
    )  # fmt: skip
    records = LiveRecords(bucket)
    records.poll()
    groups = LiveGroups(bucket, "live", GroupMaker(config_of(), records), first=0)
    assert groups.store("n0", NOW + 100)
    assert groups.store("n1", NOW + 100)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    step = CommitMetadata(step=1, consumed=[("live", 0)])
    publisher.publish(weights(1), metadata=step.to_dict())
    publisher.close()
    assert np.array_equal(answer(1).token_ids, np.frombuffer(tokens_of(1), "<i4"))


def train(bucket, *, to, signer=None):
    """Train the run on in this process until version ``to``; ``signer`` owns a signed run."""
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to)
    )
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    process = Process(bucket, "trainer", "trainer", supervised=False)
    Trainer(process, run, config, model, signer=signer).loop()
    process.events.flush()
