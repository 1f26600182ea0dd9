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


def test_a_write_that_is_refused_begins_the_wait_again():
    """Reads pass while writes are refused: the rank that is waited for cannot write either."""
    now, refused_at, refusing, attempts = [0.0], [-1e9], [True], []

    def attempt():
        attempts.append(now[0])
        now[0] += 30.0
        if refusing[0]:
            refused_at[0] = now[0] - 20.0

    patience = Patience(
        "s3://bucket/run",
        100.0,
        attempt,
        clock=lambda: now[0],
        refused_s=lambda _: now[0] - refused_at[0],
    )

    def waits():
        began = now[0]
        while not patience.over:
            now[0] += 10.0
            if now[0] - began > 5000.0:
                return True
        return False

    assert waits()
    assert len(attempts) > 20, "about one write in each time"
    refusing[0] = False
    assert not waits()
    assert attempts[-1] + 30.0 == now[0], "a write that passes is the last"
