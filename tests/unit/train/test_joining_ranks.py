"""The error of a rank when the others are missing, or its launcher contradicts itself."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from benchmarks.ports import free_port
from deltawire.errors import InputError, ResyncError, RetryError
from deltawire.train.parallel import ranks
from deltawire.train.parallel.ranks import LostRankError, join_ranks, lost_ranks, world_of


@pytest.fixture
def launched(monkeypatch):
    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    launch(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return launch


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rendezvous_that_nobody_else_comes_to_is_one_error(launched, rank, monkeypatch):
    # Another test of this process may have left a group of one open.
    monkeypatch.setattr(ranks, "dist", SimpleNamespace(is_initialized=lambda: False))
    launched(RANK=rank)
    with pytest.raises(RetryError, match=rf"rank {rank} of 2 cannot join the others at 127\.0\.0"):
        join_ranks(timeout=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("rank", "of", "said"),
    [
        ("2", "2", "RANK is 2 and WORLD_SIZE 2"),
        ("x", "2", "not numbers"),
        ("-1", "1", "RANK is -1"),
    ],
)
def test_a_launcher_that_contradicts_itself_is_refused(launched, rank, of, said):
    launched(RANK=rank, WORLD_SIZE=of)
    with pytest.raises(InputError, match=said):
        world_of()


def test_only_what_a_lost_rank_causes_is_told_so():
    with pytest.raises(LostRankError, match="another rank ended"), lost_ranks():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert issubclass(LostRankError, ResyncError)
    with pytest.raises(RuntimeError, match="shapes"), lost_ranks():
        raise RuntimeError("shapes do not fit")
