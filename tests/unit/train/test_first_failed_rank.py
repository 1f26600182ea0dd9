"""The error of several ranks is the error of the rank that failed first."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from deltawire.runtime.memory import kernel_kills
from deltawire.train.rank_agent import _first_error


def failure(rank, signal_number, timestamp):
    failed = ProcessFailure(rank, pid=0, exitcode=-signal_number, error_file="")
    failed.timestamp = timestamp
    return failed


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("later_s", [0, 30])
def test_a_rank_that_the_agent_had_to_kill_is_not_the_cause(first, later_s):
    other = 1 - first
    failures = {
        first: failure(first, signal.SIGKILL, 100),
        other: failure(other, signal.SIGKILL, 100 + later_s),
    }
    assert f"rank {first} was ended by signal 9" in str(_first_error(failures, kernel_kills()))


def test_a_rank_that_the_agent_stopped_is_not_the_cause():
    failures = {0: failure(0, signal.SIGTERM, 99), 1: failure(1, signal.SIGKILL, 100)}
    assert "rank 1 was ended by signal 9" in str(_first_error(failures, kernel_kills()))


def test_a_rank_that_the_kernel_ended_ran_out_of_memory():
    fewer = tuple(count - 1 for count in kernel_kills())
    told = _first_error({0: failure(0, signal.SIGKILL, 99)}, fewer)
    assert told.exit_code == 10
    assert "the kernel ended rank 0 of the trainer because memory ran out" in str(told)
    assert _first_error({0: failure(0, signal.SIGTERM, 99)}, fewer).exit_code == 1
