"""How long a rank waits for the others while the store refuses requests."""

from deltawire.sync.publish.patience import Patience


def test_time_in_which_the_store_refuses_does_not_count():
    now, refused = [0.0], [float("inf")]
    patience = Patience(
        "s3://bucket/run", 100.0, clock=lambda: now[0], refused_s=lambda _: refused[0]
    )
    for _ in range(9):
        now[0] += 10.0
        assert not patience.over
    refused[0] = 3.0  # Within the last interval.
    for _ in range(1000):
        now[0] += 10.0
        assert not patience.over
    refused[0] = 11.0
    now[0] += 10.0
    assert not patience.over
    now[0] += 0.1
    assert patience.over
