"""Made-up lineages and groups of a learner in a bucket, settled by a version and a checkpoint."""

from live_answers import NOW

from deltawire.live.compaction import compactor
from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.lineage_rows import LineageRows, settled_below
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.train.checkpoint_commit import Commit
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata, Ledger
from deltawire.wire.lineage import LearnedAnswer, Lineage
from deltawire.wire.objects import encode_json


def lineage_of(sequence, users, *, worker="live", at=NOW, **changes):
    """The lineage of a group with an answer of each of these users."""
    answers = [
        LearnedAnswer(f"{256 * sequence + n:032x}", user, 0.5, 1.0, 1.0, 60.0)
        for n, user in enumerate(users)
    ]
    facts = {"worker": worker, "sequence": sequence, "at": at, "answers": answers}
    return Lineage(**facts | changes)


def put_lineage(bucket, one, *, group=True):
    """Stores a lineage, and what stands for its group, reference and salt: its users' names."""
    bucket.put(keys.live_lineage(one.worker, one.sequence), encode_json(one))
    if group:
        for place in (keys.rollout, keys.reference, keys.proof_salt):
            bucket.put(place(one.worker, one.sequence), group_bytes(one))


def group_bytes(one):
    """Bytes that stand for a group of these users."""
    return b"group of " + " ".join(answer.user for answer in one.answers).encode()


def put_checkpoint(bucket, version, below):
    """Stores a checkpoint that says which groups are settled, by worker."""
    commit = Commit(version=version, digest="", ledger=Ledger(below=below))
    bucket.put(keys.checkpoint_commit(version), commit.encode())


def start_settled(bucket, lineages, *, below=None):
    """Starts a run whose version 1 consumed the groups of these lineages; a checkpoint says so of
    those ``below`` a number."""
    run = start_run(bucket)
    for one in lineages:
        put_lineage(bucket, one)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    consumed = [(one.worker, one.sequence) for one in lineages]
    step = CommitMetadata(step=1, consumed=consumed)
    publisher.publish(weights(1), metadata=step.to_dict())
    publisher.close()
    put_checkpoint(bucket, 1, {"live": len(lineages) if below is None else below})
    return run


def compact_lineages(bucket, worker="live", **options):
    """Compacts the lineages of a learner, as it does; returns how many objects were made."""
    one = StreamCompactor(
        bucket, LineageRows(), worker, below=lambda: settled_below(bucket, worker), **options
    )
    made = one.compact()
    assert not one.alarm, one.alarm
    return made


def merge_early(monkeypatch, *, fan_in=2, kept=1):
    """Lets so few objects make one."""
    monkeypatch.setattr(compactor, "FAN_IN", fan_in)
    monkeypatch.setattr(compactor, "KEPT", kept)
