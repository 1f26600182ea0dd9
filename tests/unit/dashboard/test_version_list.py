"""``deltawire log`` lists what has the name of a version, and no numbers in between."""

from deltawire.dashboard.versions import list_versions
from deltawire.store import open_bucket
from deltawire.sync import create_run, read_run
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec


def test_only_objects_that_exist_are_listed():
    bucket = open_bucket("memory://")
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket, Run(id="ab" * 16, name="r", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    for number in (0, 3, 9_999_999_999):
        bucket.put(keys.manifest(number), b"junk")
    rows = list_versions(bucket, read_run(bucket), 50)
    assert [(row["version"], row["kind"]) for row in rows] == [
        (9_999_999_999, "damaged"),
        (3, "damaged"),
        (0, "damaged"),
    ]
    assert [row["version"] for row in list_versions(bucket, read_run(bucket), 1)] == [9_999_999_999]
