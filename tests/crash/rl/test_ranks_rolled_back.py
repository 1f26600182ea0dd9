"""All ranks of a trainer follow a rollback together."""

import pytest
from rank_runs import begin, digests, metadata_of

from benchmarks.training.rank_runs import Start, run_starts
from benchmarks.training.resumed import kill
from deltawire.rl.evaluate.audit import audit_fates
from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_manifest, read_run
from deltawire.wire.decisions import Decision, RestoreRecord, ServedVersion


@pytest.mark.drills
@pytest.mark.long
def test_two_ranks_restore_the_masters_of_an_earlier_version(tmp_path):
    bucket = begin(tmp_path, versions=7)
    run_starts(bucket, [kill(0, "committed", 4)])
    run, log = read_run(bucket), DecisionLog(bucket, read_run(bucket).id)
    served = {n: ServedVersion(n, read_manifest(bucket, run, n).digest) for n in (2, 4)}
    for verdict, candidate in (("serve", None), ("rollback", served[4])):
        assert log.append(
            Decision(
                number=log.next_number, run=run.id, verdict=verdict, serving=served[2],
                candidate=candidate, at=1.0, by="ann",
            )
        )  # fmt: skip
    run_starts(bucket, [Start()])
    found = digests(bucket)
    assert len(found) == 8
    metadata = read_manifest(bucket, run, 5).metadata
    record = RestoreRecord.of(metadata, run=bucket.url, version=5)
    assert (record.restored, record.first, record.last) == (served[2], 3, 4)
    assert record.state == "exact"
    assert found[5] == found[2]
    assert len(set(found)) == 7, "training goes on from there"
    assert {one.ranks for one in metadata_of(bucket)} == {2}
    assert not audit_fates(bucket, max_staleness=1000).twice
